"""The policy file: what may stand in it, how diagnoses become one, and the command that writes it."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from adapter_factory import write_adapter
from hypothesis import given
from hypothesis import strategies as st

from lora_spec.checkpoint import content_hash
from lora_spec.diagnose import Diagnosis, diagnose
from lora_spec.errors import ParamsError
from lora_spec.files import canonical_json, sha256_file
from lora_spec.gate import Action
from lora_spec.paths import examples_dir, params_dir
from lora_spec.policy import (
    DRAFTER_BY_HAND,
    SET_BY_HAND,
    BasePolicy,
    Serve,
    build_policy,
    load_policy,
    parse_policy,
    write_policy,
)
from lora_spec.predictor.paths import predictor_path

GERMAN = examples_dir() / "german-r8-qv-s80"
PYTHON = examples_dir() / "python-r8-qv-s12"


def entry(**changes: Any) -> dict[str, Any]:
    made = {
        "content_hash": "a" * 64,
        "action": "green",
        "depth": 4,
        "drafter_adapter": None,
        "reasons": [{"code": "default_depth_best", "sentence": "It is."}],
    }
    return made | changes


def raw(**changes: Any) -> dict[str, Any]:
    made = {
        "schema": "lora-spec-policy/1",
        "base_model": "made/up",
        "default": {"depth": None, "drafter_adapter": None},
        "adapters": {"one": entry()},
    }
    return made | changes


def parse(data: dict[str, Any] | bytes):
    return parse_policy(data if isinstance(data, bytes) else canonical_json(data), "p.json")


# --- the form ---


def test_a_policy_written_by_hand_needs_no_provenance() -> None:
    policy = parse(raw())
    assert policy.adapters["one"].action is Action.GREEN and policy.adapters["one"].depth == 4
    assert policy.base.depth is None and policy.default.depth is None and policy.evidence_class is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"surprise": 1}, "unknown parameter surprise"),
        ({"adapters": {"one": entry(extra=1)}}, r"unknown parameter adapters\.one\.extra"),
        ({"default": {"deep": 1}}, r"unknown parameter default\.deep"),
        ({"base": {"drafter_adapter": "d"}}, r"unknown parameter base\.drafter_adapter"),
        ({"default": {"depth": -1}}, r"default\.depth"),
        ({"base": {"depth": 1001}}, r"base\.depth"),
        ({"default": {"depth": "4"}}, r"default\.depth"),
        ({"default": {"depth": True}}, r"default\.depth"),
        ({"adapters": {"one": entry(depth=2.5)}}, r"adapters\.one\.depth"),
        ({"adapters": {"one": entry(content_hash="abc")}}, r"adapters\.one\.content_hash"),
        ({"adapters": {"one": entry(content_hash=None)}}, r"adapters\.one\.content_hash"),
        ({"adapters": {"one": entry(action="blue")}}, r"adapters\.one\.action"),
        ({"adapters": {"one": entry(reasons=[])}}, r"adapters\.one\.reasons"),
        ({"adapters": {"": entry()}}, "adapters"),
        ({"adapters": {"a\nb": entry()}}, "adapters"),
        ({"adapters": [entry()]}, "adapters"),
        ({"created_utc": "2026-01-01T00:00:00"}, "created_utc"),
        ({"schema": "lora-spec-policy/2"}, "its schema is 'lora-spec-policy/2'"),
        ({"schema": None}, "its schema is 'None'"),
    ],
)
def test_what_is_wrong_is_named(changes, match) -> None:
    with pytest.raises(ParamsError, match=match) as error:
        parse(raw(**changes))
    assert error.value.code == "policy" and error.value.where == "p.json" and "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["schema", "base_model", "default", "adapters"])
def test_what_is_missing_is_named(missing) -> None:
    data = raw()
    del data[missing]
    with pytest.raises(ParamsError, match=missing):
        parse(data)


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({"action": "red", "depth": 0}, True),
        ({"action": "red", "depth": 2}, False),
        ({"action": "red", "depth": None}, False),
        ({"action": "red", "depth": 2, "drafter_adapter": "none"}, False),
        ({"action": "red", "depth": 2, "drafter_adapter": "d"}, True),
        ({"action": "red", "depth": None, "drafter_adapter": "d"}, True),
        ({"action": "amber", "depth": 1}, True),
        ({"action": "amber", "depth": 0}, False),
        ({"action": "amber", "depth": None}, False),
        ({"action": "green", "depth": 0}, False),
        ({"action": "green", "depth": None}, True),
        ({"action": "abstain", "depth": 0}, True),
        ({"action": "abstain", "depth": 3}, True),
    ],
)
def test_action_and_depth_agree(changes, valid) -> None:
    data = raw(adapters={"one": entry(**changes)})
    if valid:
        assert parse(data).adapters["one"].depth == changes["depth"]
        return
    with pytest.raises(ParamsError, match="depth"):
        parse(data)


def test_an_adapter_given_twice_is_refused() -> None:
    text = json.dumps(raw()).replace('"adapters": {', f'"adapters": {{"one": {json.dumps(entry())}, ')
    with pytest.raises(ParamsError, match="'one' given twice"):
        parse(text.encode())


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "expected a mapping"),
        (b"null", "expected a mapping"),
        (b'{"schema": "lora-spec-policy/1", "load": NaN}', "NaN"),
        (b" " * (16 << 20) + b"{}", "more than 16 MiB"),
    ],
)
def test_what_is_no_policy_is_refused(data, match) -> None:
    with pytest.raises(ParamsError, match=match):
        parse(data)


def test_too_many_adapters_are_refused() -> None:
    many = {f"a{i}": entry() for i in range(10_001)}
    with pytest.raises(ParamsError, match="adapters"):
        parse(raw(adapters=many))


@given(st.data())
def test_no_damage_is_anything_but_a_policy_error(data) -> None:
    whole = bytearray(canonical_json(raw()))
    start = data.draw(st.integers(0, len(whole) - 1))
    whole[start : start + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    try:
        parse(bytes(whole))
    except ParamsError as error:
        assert error.code == "policy"


def test_a_written_policy_reads_back_equal(tmp_path) -> None:
    policy = parse(raw(adapters={"b": entry(drafter_adapter="d"), "a": entry(action="abstain", depth=0)}))
    write_policy(tmp_path / "deep" / "p.json", policy)
    assert load_policy(tmp_path / "deep" / "p.json") == policy
    assert policy.drafter_adapters == {"b": "d"}
    write_policy(tmp_path / "deep" / "p.json", policy.model_copy(update={"load": 3}))
    assert load_policy(tmp_path / "deep" / "p.json").load == 3
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.json"]


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"schema": "lora-spec-record/1"}'])
def test_another_file_is_not_overwritten(tmp_path, content) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ParamsError, match="something else"):
        write_policy(path, parse(raw()))
    assert path.read_bytes() == content
    with pytest.raises(ParamsError, match="something else"):
        write_policy(tmp_path, parse(raw()))


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ParamsError, match="cannot read the policy file") as error:
            load_policy(path)
        assert error.value.where == str(path)
    with pytest.raises(ParamsError, match="cannot read the policy file"):
        load_policy("a\0b")


def test_nobody_waits_for_the_other_end_of_a_pipe(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ParamsError, match="no regular file"):
        load_policy(tmp_path / "pipe")
    with pytest.raises(ParamsError, match="something else"):
        write_policy(tmp_path / "pipe", parse(raw()))


# --- from diagnoses ---


@pytest.fixture(scope="module")
def green() -> Diagnosis:
    made = diagnose(GERMAN, predictor_path(), "h100-8b")
    assert made.decision.action is Action.GREEN
    return made


@pytest.fixture(scope="module")
def red() -> Diagnosis:
    made = diagnose(GERMAN, predictor_path(), "pocket-cpu")
    assert made.decision.action is Action.RED and made.decision.depth == 0
    return made


def test_every_decision_is_written_down(green) -> None:
    amber = green.decision.model_copy(update={"action": Action.AMBER, "depth": 2})
    abstain = green.decision.model_copy(update={"action": Action.ABSTAIN, "depth": 0})
    policy = build_policy(
        {
            "g": green,
            "a": green.model_copy(update={"decision": amber}),
            "x": green.model_copy(update={"decision": abstain}),
        },
        default=Serve(depth=1),
        base=BasePolicy(depth=3),
    )
    assert {name: (e.action, e.depth) for name, e in policy.adapters.items()} == {
        "g": ("green", green.decision.default_depth),
        "a": ("amber", 2),
        "x": ("abstain", 0),
    }
    assert policy.adapters["g"].content_hash == content_hash(GERMAN)
    assert [item.code for item in policy.adapters["g"].reasons] == [r.code for r in green.decision.reasons]
    assert policy.predictor.sha256 == sha256_file(predictor_path())
    assert policy.cost_profile.name == "h100-8b"
    assert policy.cost_profile.sha256 == sha256_file(params_dir() / "cost_profiles" / "h100-8b.yaml")
    assert policy.load == green.decision.load and policy.evidence_class == green.evidence_class
    assert policy.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert policy.created_utc.utcoffset().total_seconds() == 0
    assert (policy.default.depth, policy.base.depth) == (1, 3)


def test_a_drafter_adapter_lifts_red(red, green) -> None:
    stopped = build_policy({"g": red}).adapters["g"]
    assert (stopped.action, stopped.depth, stopped.drafter_adapter) == ("red", 0, None)
    lifted = build_policy({"g": red}, drafter_adapters={"g": "d"}).adapters["g"]
    assert (lifted.action, lifted.depth) == ("red", red.decision.default_depth)
    assert lifted.drafter_adapter == "d" and lifted.reasons[0].code == DRAFTER_BY_HAND
    base = build_policy({"g": red}, drafter_adapters={"g": "none"}).adapters[
        "g"
    ]  # the drafter that red is about
    assert (base.action, base.depth) == ("red", 0)
    kept = build_policy({"g": green}, drafter_adapters={"g": "d"}).adapters["g"]
    assert (kept.action, kept.depth, kept.drafter_adapter) == ("green", green.decision.depth, "d")


@pytest.mark.parametrize(("depth", "action"), [(0, "red"), (2, "amber"), (4, "green"), (9, "green")])
def test_a_depth_set_by_hand_beats_the_gate_and_says_so(red, depth, action) -> None:
    made = build_policy({"g": red}, depths={"g": depth}).adapters["g"]
    assert (made.action, made.depth) == (action, depth)
    assert made.reasons[0].code == SET_BY_HAND and "the gate said red, depth 0" in made.reasons[0].sentence
    assert [item.code for item in made.reasons[1:]] == [item.code for item in red.decision.reasons]


def test_one_policy_is_for_one_base(green) -> None:
    other = green.model_copy(update={"adapter": green.adapter.model_copy(update={"base": "other/model"})})
    none = green.model_copy(update={"adapter": green.adapter.model_copy(update={"base": None})})
    with pytest.raises(ParamsError, match="different bases"):
        build_policy({"a": green, "b": other})
    with pytest.raises(ParamsError, match="no base"):
        build_policy({"b": none})
    assert build_policy({"a": green, "b": none}).base_model == green.adapter.base
    assert build_policy({"a": green, "b": other}, base_model="this").base_model == "this"


def test_overrides_of_unknown_adapters_and_mixed_diagnoses_are_refused(green, red) -> None:
    for name, value in (("drafter_adapters", "d"), ("depths", 1)):
        with pytest.raises(ParamsError, match="not given") as error:
            build_policy({"a": green}, **{name: {"b": value}})
        assert error.value.where == "b"
    with pytest.raises(ParamsError, match="no adapter"):
        build_policy({})
    with pytest.raises(ValueError, match="different"):
        build_policy({"a": green, "b": red})


# --- the command ---


def test_the_command_writes_and_checks(cli, tmp_path) -> None:
    path = tmp_path / "policy.json"
    done = cli("policy", GERMAN, f"py={PYTHON}", "-o", path, "--load", 8, "--set", "py=2")
    assert done.returncode == 0, done.stderr
    policy = load_policy(path)
    assert list(policy.adapters) == ["german-r8-qv-s80", "py"] and policy.load == 8
    assert policy.adapters["py"].depth == 2 and policy.adapters["py"].action == "amber"
    assert policy.adapters["py"].content_hash == content_hash(PYTHON)
    lines = done.stdout.splitlines()
    assert lines[0].split("\t") == ["adapter", "action", "depth", "drafter adapter", "why"]
    assert any(line.startswith("py\tamber\t2\t-\tset_by_hand") for line in lines)
    assert "decided under h100-8b at load 8; evidence: modelled" in lines
    before = path.read_bytes()
    checked = cli("policy", "--check", path)
    assert checked.returncode == 0 and checked.stdout.splitlines() == lines[:-1]
    assert path.read_bytes() == before


def test_the_command_takes_drafter_adapters_and_other_depths(cli, tmp_path) -> None:
    path = tmp_path / "policy.json"
    options = ("--cost-profile", "pocket-cpu", "--default-depth", 0, "--base-depth", 1)
    done = cli("policy", GERMAN, PYTHON, "-o", path, "--drafter-adapter", f"{GERMAN.name}=d-de", *options)
    assert done.returncode == 0, done.stderr
    policy = load_policy(path)
    assert policy.adapters[GERMAN.name].drafter_adapter == "d-de" and policy.adapters[GERMAN.name].depth > 0
    assert policy.adapters[PYTHON.name].drafter_adapter is None and policy.adapters[PYTHON.name].depth == 0
    assert (policy.default.depth, policy.base.depth) == (0, 1)


def test_a_folder_whose_name_holds_an_equals_sign(cli, tmp_path) -> None:
    folder = write_adapter(tmp_path / "a=b")
    done = cli("policy", folder, "-o", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    assert load_policy(tmp_path / "p.json").adapters["a=b"].action == "abstain"
    done = cli("policy", folder, "-o", tmp_path / "p.json", "--set", "a=b=3")
    assert load_policy(tmp_path / "p.json").adapters["a=b"].depth == 3, done.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["{german}"], "give adapters and --output, or --check"),
        (["-o", "{out}"], "give adapters and --output, or --check"),
        (["{german}", "--check", "{out}"], "--check takes neither"),
        (["--set", "x=1", "--check", "{out}"], "--check takes neither"),
        (["{german}", "-o", "{out}", "--default-depth", "1001"], "less than or equal to 1000"),
        (["{german}", "-o", "{out}", "--base-depth", "1001"], "less than or equal to 1000"),
        (["{german}", "-o", "{out}", "--set", "german-r8-qv-s80=" + "9" * 5000], "whole number"),
        (["{german}", "x={german}", "{german}", "-o", "{out}"], "given twice"),
        (["{german}", "-o", "{out}", "--set", "other=1"], "not given (other)"),
        (["{german}", "-o", "{out}", "--set", "german-r8-qv-s80"], "takes NAME=VALUE"),
        (["{german}", "-o", "{out}", "--set", "german-r8-qv-s80=-1"], "whole number"),
        (["{german}", "-o", "{out}", "--set", "german-r8-qv-s80=1001"], "less than or equal to 1000"),
        (["{german}", "-o", "{out}", "--set", "g=1", "--set", "g=2"], "given twice"),
        (["{german}", "-o", "{out}", "--drafter-adapter", "other=d"], "not given (other)"),
        (["{german}", "none", "-o", "{out}"], "not found"),
        (["{german}", "-o", "{out}", "--load", "5000"], "outside what profile"),
        (["{german}", "-o", "{out}", "--cost-profile", "none"], "unknown cost profile"),
        (["{german}", "-o", "{out}/below"], "{out}"),
        (["--check", "none.json"], "cannot read the policy file"),
        (["--check", "{out}"], "no lora-spec-policy/1"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(cli, tmp_path, monkeypatch, arguments, match) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.json"
    if arguments[-1] in ("{out}/below", "{out}") and arguments[0] != "-o":
        out.write_text("{}")
    names = {"german": str(GERMAN), "out": str(out)}
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = cli("policy", *(argument.format(**names) for argument in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("lora-spec: error: ") and done.stderr.count("\n") == 1
    assert match.format(**names) in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_policy_that_is_there_survives_a_failed_run(cli, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    write_policy(path, parse(raw()))
    before = path.read_bytes()
    assert cli("policy", GERMAN, "none", "-o", path).returncode == 2
    assert path.read_bytes() == before


def test_strange_names_in_a_checked_file_stay_on_their_line(cli, tmp_path) -> None:
    data = copy.deepcopy(raw())
    data["base_model"] = "x\u009b31m"
    data["adapters"]["one"]["drafter_adapter"] = "d\u202e"
    path = tmp_path / "p.json"
    path.write_bytes(canonical_json(data))
    done = cli("policy", "--check", path)
    assert done.returncode == 0 and "\u202e" not in done.stdout and "d?" in done.stdout
