"""Atomic writes, records and their hashes, strict parameter files."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lora_spec.errors import EvidenceError, ParamsError
from lora_spec.evidence import collect_evidence
from lora_spec.files import (
    atomic_dir,
    atomic_path,
    atomic_write_json,
    canonical_json,
    canonical_sha256,
    sha256_file,
)
from lora_spec.params import StrictModel, load_params
from lora_spec.provenance import (
    EvidenceClass,
    Record,
    load_record,
    load_records,
    load_table,
    new_record,
    table_path,
    write_record,
)
from lora_spec.screen import load_screen


def record(evidence_class: str = "measured", **changes: object) -> Record:
    values = {
        "experiment": "test",
        "tier": "pocket",
        "phase": "phase2",
        "evidence_class": evidence_class,
        "config": {"k": 4, "names": ["a", "b"]},
        "seed": 1,
        "revisions": {"target": "0" * 64},
        "covers": {"adapters": ["x"], "domains": ["german"], "prompts": ["german/0", "german/1"]},
        "results": {"alpha": 0.5},
    }
    return new_record(**(values | changes))


FRAME = pd.DataFrame({"steps": [np.array([1, 2], dtype=np.int8), np.array([], dtype=np.int8)], "n": [1, 2]})


def test_equal_objects_have_equal_bytes() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "ü"]}) == canonical_json({"a": [1.5, "ü"], "b": 1})
    assert canonical_sha256({"a": 1}) != canonical_sha256({"a": 2})
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    atomic_write_json(target, {"a": 1})
    before = target.read_bytes()
    with pytest.raises(OSError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_dir(target) as temporary:
        (temporary / "a").write_text("1")
    with pytest.raises(RuntimeError), atomic_dir(target) as temporary:
        (temporary / "a").write_text("2")
        raise RuntimeError
    assert (target / "a").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_kill_in_the_middle_of_a_write_leaves_no_half_file(tmp_path: Path) -> None:
    code = """
        import sys, time
        from lora_spec.files import atomic_path
        with atomic_path(sys.argv[1]) as temporary:
            temporary.write_text("half")
            print("writing", flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "x.json")], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "x.json").exists()


def test_a_record_and_its_table_survive_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "unit.json"
    written = write_record(path, record(), {"requests": FRAME})
    read = load_record(path)
    assert read == written
    pd.testing.assert_frame_equal(load_table(path, "requests"), FRAME)
    assert {"python", "platform", "packages"} <= set(read.runtime)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda d: d["results"].update(alpha=0.9), "own hash"),
        (lambda d: d["config"].update(k=8), "hash"),
        (lambda d: d.update(extra=1), "record: extra"),
        (lambda d: d.pop("seed"), "record: seed"),
        (lambda d: d["files"].update({"../other.parquet": "0"}), "leaves the record"),
    ],
)
def test_a_changed_record_is_refused(tmp_path: Path, tamper: object, message: str) -> None:
    path = tmp_path / "unit.json"
    write_record(path, record(), {"requests": FRAME})
    data = json.loads(path.read_text())
    tamper(data)
    path.write_text(json.dumps(data))
    with pytest.raises(EvidenceError, match=message):
        load_record(path)


def test_a_changed_missing_or_swapped_table_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "unit.json", tmp_path / "other.json"
    write_record(path, record(), {"requests": FRAME})
    write_record(other, record(seed=2), {"requests": FRAME})
    table = table_path(path, "requests")
    data = table.read_bytes()
    table.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(EvidenceError, match="does not match its hash"):
        load_record(path)
    table.write_bytes(table_path(other, "requests").read_bytes())
    with pytest.raises(EvidenceError, match="does not match its hash"):
        load_record(path)
    table.unlink()
    with pytest.raises(EvidenceError, match="is missing"):
        load_record(path)


def test_classes_never_mix_unless_asked_by_name(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", record(), {"requests": FRAME})
    write_record(tmp_path / "b.json", record("smoke"), {"requests": FRAME})
    with pytest.raises(EvidenceError, match="smoke") as caught:
        load_records(tmp_path)
    assert caught.value.code == "evidence_class"
    assert len(load_records(tmp_path, allow={"measured", "smoke"})) == 2
    with pytest.raises(EvidenceError, match="smoke"):
        load_screen(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"schema": "other/1"}'])
def test_what_is_no_record_gives_one_clear_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(EvidenceError) as caught:
        load_record(path)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="no records"):
        load_records(tmp_path)


def test_evidence_counts_distinct_things_and_reports_damage(tmp_path: Path) -> None:
    folder = tmp_path / "pocket" / "phase2" / "screen"
    write_record(folder / "a.json", record(), {"requests": FRAME})
    write_record(folder / "b.json", record(covers={"adapters": ["x", "y"], "prompts": ["german/1"]}))
    predictor = folder / "predictor.json"
    predictor.write_text('{"schema": "lora-spec-predictor/1"}')
    assert [text for _, text in collect_evidence(tmp_path).problems] == ["no record claims this file"]
    claim = {"predictor": predictor.name, "predictor_sha256": sha256_file(predictor)}
    write_record(folder / "a.json", record(results=claim), {"requests": FRAME})
    report = collect_evidence(tmp_path)
    assert report.hashes_ok
    assert report.groups == [
        {
            "tier": "pocket",
            "phase": "phase2",
            "class": EvidenceClass.MEASURED.value,
            "records": 2,
            "adapters": 2,
            "domains": 1,
            "prompts": 2,
            "cells": 0,
        }
    ]
    (folder / "b.json").write_text("{")
    (folder / "stray.parquet").write_bytes(b"x")
    predictor.write_text('{"schema": "lora-spec-predictor/1", "intercept": 9}')
    report = collect_evidence(tmp_path)
    assert not report.hashes_ok
    assert {name for name, _ in report.problems} == {"b.json", "stray.parquet", predictor.name}
    assert report.payload()["hashes_ok"] is False
    with pytest.raises(EvidenceError, match="no folder"):
        collect_evidence(tmp_path / "misspelt")


def test_damage_of_any_kind_is_listed_and_never_read_as_markup(tmp_path: Path, monkeypatch, cli) -> None:
    write_record(tmp_path / "a.json", record(), {"requests": FRAME})
    data = json.loads((tmp_path / "a.json").read_text())
    table = table_path(tmp_path / "a.json", "requests")
    table.write_bytes(b"no Parquet")
    data["files"] = {table.name: sha256_file(table)}
    (tmp_path / "a.json").write_text(json.dumps(data))
    for name, change in {
        "surrogate": {"experiment": "\ud800"},
        "infinite": {"results": {"alpha": float("inf")}},
        "[red]": {"tier": "[/]"},
        "escape\x1b[31m": {"x[/]": 1},
    }.items():
        text = json.dumps(data | {"files": {}} | change).replace("Infinity", "1e999")
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "twice.json").write_text('{"schema": 1, "schema": 2}')
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    done = cli("evidence")
    assert done.returncode == 2 and "7 problems:" in done.stdout and done.stderr == ""
    for line in (
        "a.json: table a.requests.parquet is not Parquet",
        "surrogate.json: the record holds text or numbers that cannot be hashed",
        "[red].json: the record does not match its own hash",
        "escape?[31m.json: not a",
        "deep.json: cannot read the record",
    ):
        assert line in done.stdout


class Example(StrictModel):
    k: int
    name: str = "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k: 4\nkk: 5\n", "unknown parameter kk"),
        ("k: four\n", "parameter k: .*'four'"),
        ("name: y\n", "parameter k"),
        ("k: 4\nk: 5\n", "given twice"),
        ("k: [\n", "not valid YAML"),
        ("- 1\n", "expected a mapping"),
        ("", "expected a mapping"),
        ("k: '4'\n", "valid integer.*'4'"),
        ("k: true\n", "valid integer"),
        ("k: 2000-01-01\n", "no number, word"),
        ("k: &a [*a]\n", "contains itself"),
        ("? [k]\n: 4\n", "not valid YAML: a key"),
        ("[" * 2000, "nested too deeply"),
        ("k: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_a_wrong_parameter_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ParamsError, match=message) as caught:
        load_params(Example, path)
    assert "p.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_parameter_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="not found"):
        load_params(Example, tmp_path / "none.yaml")
