"""The policy in force: reloads, bad files, other files of the same name."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from adapter_factory import write_adapter

from lora_spec.checkpoint import content_hash
from lora_spec.errors import EngineError, ParamsError
from lora_spec.files import atomic_write_json
from lora_spec.serving import policy_source
from lora_spec.serving.policy_source import AdapterHashes, PolicyEntry, PolicySource


class Request(NamedTuple):
    """What is read of vLLM's LoRARequest."""

    lora_name: str
    lora_path: str


def write(path: Path, depth: int, **changes: Any) -> None:
    entry = {
        "content_hash": content_hash(path.parent / "adapter"),
        "action": "abstain",
        "depth": depth,
        "drafter_adapter": "d",
        "reasons": [{"code": "made_up", "sentence": "Made up."}],
    }
    policy = {
        "schema": "lora-spec-policy/1",
        "base_model": "made/up",
        "default": {"depth": 7, "drafter_adapter": "e"},
        "base": {"depth": 5},
        "adapters": {"one": entry},
    }
    atomic_write_json(path, policy | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter")
    write(tmp_path / "policy.json", 2)
    return tmp_path / "policy.json"


@pytest.fixture
def one(path: Path) -> Request:
    return Request("one", str(path.parent / "adapter"))


@pytest.fixture
def source(path: Path) -> PolicySource:
    return PolicySource(path, poll_s=0.0)


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Errors logged meanwhile; vLLM's logger, where it is imported, does not pass them on to pytest's."""
    told: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: told.append(record.getMessage())
    policy_source.logger.addHandler(handler)
    yield told
    policy_source.logger.removeHandler(handler)


def test_what_holds_for_whom(source, one) -> None:
    assert source.decide(one) == PolicyEntry(2, "d")
    assert source.decide(one._replace(lora_name="two")) == PolicyEntry(7, "e")
    assert source.decide() == PolicyEntry(5, None)


def test_a_changed_file_is_taken_over(source, path, one, errors) -> None:
    first = source.version
    write(path, 3)
    assert source.decide(one).depth == 3 and source.version != first
    assert not errors


def test_between_two_looks_nothing_is_read(path, one, monkeypatch) -> None:
    source = PolicySource(path, poll_s=3600.0)
    write(path, 3)
    monkeypatch.setattr(policy_source, "_file_signature", None)
    assert source.decide(one).depth == 2
    monkeypatch.undo()
    assert source.reload() and source.decide(one).depth == 3
    assert not source.reload()


@pytest.mark.parametrize("bad", ["{", "{}", None, "depth"])
def test_a_bad_file_keeps_the_old_policy_and_is_logged_once(source, path, one, errors, bad) -> None:
    version = source.version
    if bad is None:
        path.unlink()
    elif bad == "depth":
        write(path, -1)
    else:
        path.write_text(bad)
    for _ in range(5):
        assert source.decide(one).depth == 2
    assert len(errors) == 1 and "the older one stays" in errors[0]
    assert str(path) in errors[0] and source.version == version
    path.write_text("{ worse")
    assert source.decide(one).depth == 2
    assert len(errors) == 2
    write(path, 4)
    assert source.decide(one).depth == 4 and len(errors) == 2


def test_the_first_policy_must_be_good(tmp_path, path) -> None:
    with pytest.raises(ParamsError, match="cannot read"):
        PolicySource(tmp_path / "none.json")
    with pytest.raises(EngineError, match="no such drafter"):
        PolicySource(path, refuse)


def refuse(policy: Any) -> None:
    raise EngineError("no such drafter adapter")


def test_a_policy_that_the_validator_refuses_is_not_taken_over(path, one, errors) -> None:
    known = {"d"}

    def check(policy: Any) -> None:
        if unknown := set(policy.drafter_adapters.values()) - known:
            raise EngineError(f"no drafter adapter {unknown.pop()!r}")

    source = PolicySource(path, check, poll_s=0.0)
    text = path.read_text()
    path.write_text(text.replace('"d"', '"x"'))
    assert source.decide(one) == PolicyEntry(2, "d") and source.decide(one).depth == 2
    assert len(errors) == 1 and "no drafter adapter 'x'" in errors[0]
    known.add("x")
    assert source.decide(one).drafter_adapter == "d"  # the file did not change
    assert source.reload() and source.decide(one).drafter_adapter == "x"


def test_a_refused_policy_is_read_again_on_request(path, one, errors) -> None:
    known = {"d"}

    def check(policy: Any) -> None:
        if set(policy.drafter_adapters.values()) - known:
            raise EngineError("unknown")

    source = PolicySource(path, check, poll_s=0.0)
    path.write_text(path.read_text().replace('"d"', '"x"'))
    assert source.decide(one).drafter_adapter == "d"
    source.look_again()
    assert source.decide(one).drafter_adapter == "d" and len(errors) == 2
    known.add("x")
    source.look_again()
    assert source.decide(one).drafter_adapter == "x"


@pytest.mark.parametrize("readable", [True, False])
def test_an_entry_holds_for_the_files_that_were_judged_only(source, path, one, errors, readable) -> None:
    other = one._replace(lora_path=str(path.parent / "other"))
    if readable:
        write_adapter(path.parent / "other", lora_alpha=99)
    for _ in range(3):
        assert source.decide(other) == PolicyEntry(7, "e")
    says = f"{content_hash(other.lora_path)[:12]} is served" if readable else "cannot be read"
    assert len(errors) == 1 and says in errors[0] and "adapter one" in errors[0]
    assert source.decide(one) == PolicyEntry(2, "d")
    write(path, 3)  # said again of another policy
    assert source.decide(other) == PolicyEntry(7, "e") and len(errors) == 2


def test_adapters_that_no_entry_names_are_not_read(source, one, monkeypatch) -> None:
    monkeypatch.setattr(policy_source, "content_hash", None)
    assert source.decide(one._replace(lora_name="two")) == PolicyEntry(7, "e")


def test_many_threads_see_whole_policies_only(source, path, one, errors) -> None:
    wrong, done, two = [], threading.Event(), one._replace(lora_name="two")

    def ask() -> None:
        while not done.is_set():
            entry, other = source.decide(one), source.decide(two)
            if entry.depth not in range(50) or other.depth != 7:
                wrong.append((entry, other))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for depth in range(50):
        write(path, depth)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and not errors
    assert source.decide(one).depth == 49


def test_hashes_are_computed_once_for_each_state_of_a_folder(tmp_path, monkeypatch) -> None:
    calls = []

    def counted(path: Any) -> str:
        calls.append(path)
        return content_hash(path)

    monkeypatch.setattr(policy_source, "content_hash", counted)
    folder, other = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", lora_alpha=99)
    hashes = AdapterHashes(poll_s=0.0)
    assert hashes.of(folder) == hashes.of(str(folder)) == content_hash(folder)
    assert hashes.of(other) == content_hash(other) != hashes.of(folder)
    assert len(calls) == 2
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99}))
    assert hashes.of(folder) == content_hash(other) and len(calls) == 3


def test_hashes_between_two_looks_and_of_no_adapter(tmp_path) -> None:
    folder = write_adapter(tmp_path / "a")
    hashes = AdapterHashes(poll_s=3600.0)
    first = hashes.of(folder)
    (folder / "adapter_config.json").unlink()
    assert hashes.of(folder) == first is not None
    hashes = AdapterHashes(poll_s=0.0)
    assert hashes.of(folder) is None and hashes.of(tmp_path / "none") is None
    assert hashes.of("org/name-of-a-hub") is None
    write_adapter(tmp_path / "later")
    assert hashes.of(tmp_path / "later") is not None
