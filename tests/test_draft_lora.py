"""Drafter adapters in real vLLM engines, in fp32: each request drafts as its merged full drafter would.

Every engine here has the plugin configured as an operator would configure it, and nothing else; the oracles
are engines without the plugin, one for each merged drafter (and merged target).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_lora_cases import (
    METHODS,
    PROMPTS,
    TARGETS,
    Answers,
    Cases,
    accepted,
    ask,
    cases,
    drafters,
    steps,
    tokens,
)

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

# Field of the request, its target adapter, and what follows from the map {one: a} and the default b.
ROWS: tuple[tuple[str | None, str | None, str], ...] = (
    ("none", None, "base"),
    ("a", None, "a"),
    (None, None, "b"),
    (None, "one", "a"),
    ("none", "one", "base"),
    ("b", None, "b"),
)
CONFIG: dict[str, Any] = {"map": {"one": "a"}, "default": "b"}
MANY = 1500


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return cases(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def row(index: int, shift: int) -> tuple[str | None, str | None, str]:
    return ROWS[(index + shift) % len(ROWS)]


def mixed(made: Cases, shift: int = 0) -> list[dict[str, Any]]:
    """Every prompt with another row, base and both adapters and a target adapter in one batch."""
    requests = []
    for i, prompt in enumerate(PROMPTS):
        field, lora, _ = row(i, shift)
        requests.append(ask(prompt, field, lora=made.lora(lora) if lora else None))
    return requests


def oracles(made: Cases, method: str, shift: int = 0) -> Answers:
    """The answers of the full drafters, row by row of `mixed`."""
    found = []
    for i in range(len(PROMPTS)):
        _, lora, drafter = row(i, shift)
        target = f"target-{lora}" if lora else "target"
        found.append(made.oracle(method, drafter, target)["greedy"][i])
    return found


# --- one engine of each method, and everything that requests can ask of it ---


@pytest.fixture(scope="module")
def plain(made: Cases) -> dict[str, Answers]:
    """Without speculation: the tokens, and samples at two temperatures."""
    calls = {
        "mixed": mixed(made),
        "shifted": mixed(made, 1),
        "samples": samples(0),
        "more samples": samples(1),
        "hotter": samples(2, temperature=1.0),
    }
    operations = [{"op": "call", "requests": call} for call in calls.values()]
    engine = {"enable_lora": True, "max_loras": len(TARGETS), "max_lora_rank": 8, "max_num_seqs": 256}
    done = made.run("plain", operations, **engine)
    return dict(zip(calls, done["answers"], strict=True))


def samples(
    block: int, fields: tuple[str, ...] = ("none",), temperature: float = 0.8
) -> list[dict[str, Any]]:
    """Many short requests with one prompt and seeds of their own."""
    return [
        ask(PROMPTS[0], fields[i % len(fields)], tokens=4, seed=block * MANY + i, temperature=temperature)
        for i in range(MANY)
    ]


def loaded_late(made: Cases, method: str) -> int:
    """A prompt that drafts differently under either adapter, and is never asked with the first before."""
    a, b = (made.oracle(method, name)["greedy"] for name in "ab")
    return next(i for i in range(2, len(PROMPTS), 3) if a[i]["accepted"] != b[i]["accepted"])


@pytest.fixture(scope="module")
def served(made: Cases, method: str) -> dict[str, Any]:
    """Answers of the operations by name."""
    late = loaded_late(made, method)
    fields = drafters("ab")
    reserved = ask(PROMPTS[0])
    reserved["params"]["extra_args"] = {"lora_spec": {"draft_adapter": None, "depth": 0}}
    other = "draft_model" if method == "dflash" else "dflash"
    named = {
        "mixed": {"op": "call", "requests": mixed(made)},
        "shifted": {"op": "call", "requests": mixed(made, 1)},
        "again": {"op": "call", "requests": mixed(made)},
        "sampled": {
            "op": "call",
            "requests": [ask(p, f, seed=i) for i, (p, f) in enumerate(zip(PROMPTS, fields, strict=True))],
        },
        "shared": {"op": "shared", "request": ask(PROMPTS[0], "b"), "prompts": PROMPTS[:6]},
        "samples": {"op": "call", "requests": samples(3, ("none", "a", "b"))},
        # adapters come and go while requests run
        "start": {"op": "start", "requests": [ask(PROMPTS[0], "a"), ask(PROMPTS[1], "none")], "steps": 4},
        "load": {"op": "load", "name": "late", "path": made.adapter(method, "b")},
        "as b": {
            "op": "start",
            "requests": [ask(PROMPTS[late], "late"), ask(PROMPTS[0], "late")],
            "steps": 3,
        },
        "load other": {"op": "load", "name": "late", "path": made.adapter(method, "a")},
        "replace": {"op": "load", "name": "late", "path": made.adapter(method, "a"), "replace": True},
        "as a": {
            "op": "start",
            "requests": [ask(PROMPTS[late], "late"), ask(PROMPTS[1], "late")],
            "steps": 2,
        },
        "unload": {"op": "unload", "name": "late"},
        "unload used": {"op": "unload", "name": "a"},
        "unload unknown": {"op": "unload", "name": "late"},
        "gone": {"op": "submit", "requests": [ask(PROMPTS[3], "late")]},
        "unknown": {"op": "submit", "requests": [ask(PROMPTS[3], "nobody")]},
        "no name": {"op": "submit", "requests": [ask(PROMPTS[3], 7)]},
        "reserved": {"op": "submit", "requests": [reserved]},
        "misfit": {"op": "load", "name": "misfit", "path": made.adapter(other, "a")},
        "finish": {"op": "finish"},
        "after": {"op": "call", "requests": mixed(made)},
    }
    done = made.run(
        f"served-{method}",
        list(named.values()),
        method=method,
        draft_lora=dict(CONFIG),
        enable_lora=True,
        max_loras=len(TARGETS),
        max_lora_rank=8,
        max_num_seqs=256,
        enable_prefix_caching=True,
    )
    return dict(zip(named, done["answers"], strict=True)) | {"status": done["status"]}


def test_each_request_of_a_mixed_batch_drafts_as_its_merged_drafter(made, method, served):
    want, base = oracles(made, method), made.oracle(method)["greedy"]
    assert steps(served["mixed"]) == steps(want)
    for name in ("base", "a", "b"):
        assert accepted([a for i, a in enumerate(want) if row(i, 0)[2] == name]) >= 20, name
    assert accepted(want) >= 50
    # either adapter changes what is accepted
    for name in ("a", "b"):
        adapted = [i for i in range(len(PROMPTS)) if row(i, 0)[1:] == (None, name)]
        assert sum(want[i]["accepted"] != base[i]["accepted"] for i in adapted) >= 2, name
    assert served["status"] == dict.fromkeys(served["status"], "applied")


def test_each_sampled_request_drafts_and_says_as_with_its_merged_drafter(made, method, served):
    by_drafter = {name: made.oracle(method, name)["sampled"] for name in ("base", "a", "b")}
    kinds = [name.replace("none", "base") for name in drafters("ab")]
    want = [by_drafter[name][i] for i, name in enumerate(kinds)]
    assert steps(served["sampled"]) == steps(want)
    assert tokens(served["sampled"]) == tokens(want)
    assert accepted(want) >= 50
    other = [i for i, a in enumerate(want) if a["accepted"] != by_drafter["base"][i]["accepted"]]
    assert len(other) > len(PROMPTS) / 2


def test_one_object_of_parameters_serves_many_requests(made, method, served):
    want = steps(made.oracle(method, "b")["greedy"][:6])
    assert [steps(answers) for answers in served["shared"]] == [want, want]


def test_greedy_tokens_are_those_without_speculation(plain, served):
    for name, want in (("mixed", "mixed"), ("shifted", "shifted"), ("again", "mixed"), ("after", "mixed")):
        assert accepted(served[name]) >= 50
        assert tokens(served[name]) == tokens(plain[want]), name
    assert tokens(plain["mixed"]) != tokens(plain["shifted"])  # the target adapter does something


def test_drafter_keys_and_values_are_reused_by_the_same_adapter_only(made, method, served):
    assert [a["cached"] for a in served["shifted"]] == [0] * len(PROMPTS)
    assert all(a["cached"] > 0 for a in served["again"])
    assert steps(served["shifted"]) == steps(oracles(made, method, 1))
    assert steps(served["again"]) == steps(oracles(made, method))


def test_adapters_come_and_go_while_requests_run(made, method, served):
    late = loaded_late(made, method)
    order = (("a", 0), ("base", 1), ("b", late), ("b", 0), ("a", late), ("a", 1))
    want = [made.oracle(method, drafter)["greedy"][i] for drafter, i in order]
    assert steps(served["finish"]) == steps(want)
    assert tokens(served["finish"]) == tokens(want)
    assert accepted(want) >= 50
    # the second "late" of a prompt is other content, and the first one's blocks are not for it
    assert served["finish"][4]["cached"] == 0
    assert want[2]["accepted"] != want[4]["accepted"]
    assert served["load"] is served["replace"] is served["unload"] is None


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("gone", "ValueError", "unknown drafter adapter 'late'"),
        ("unknown", "ValueError", "unknown drafter adapter 'nobody'"),
        ("no name", "ValueError", "must be a name"),
        ("reserved", "ValueError", "written by the server"),
        ("load other", "LoraSpecError", "other content"),
        ("unload used", "LoraSpecError", "the map, the policy or the default"),
        ("unload unknown", "LoraSpecError", "no such drafter adapter"),
        ("misfit", "LoraSpecError", "misfit"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_rest_goes_on(made, method, served, name, kind, says):
    refusal = served[name]
    assert kind in refusal["kinds"] and says in refusal["error"]
    assert steps(served["after"]) == steps(oracles(made, method))


def tv_and_limit(one: np.ndarray, two: np.ndarray) -> tuple[float, float]:
    """Total variation of two samples, and what samples of one distribution stay below: mean + 5 sd."""
    pooled, generator = np.concatenate([one, two]), np.random.default_rng(0)
    size = int(pooled.max()) + 1

    def tv(a: np.ndarray, b: np.ndarray) -> float:
        counts = [np.bincount(x, minlength=size) / len(x) for x in (a, b)]
        return 0.5 * float(np.abs(counts[0] - counts[1]).sum())

    floor = []
    for _ in range(300):
        generator.shuffle(pooled)
        floor.append(tv(pooled[: len(one)], pooled[len(one) :]))
    return tv(one, two), float(np.mean(floor) + 5 * np.std(floor))


def ngrams(answers: Answers) -> dict[str, np.ndarray]:
    """Numbers that stand for the second token and for pairs of neighbours, one for each request."""
    said = np.array(tokens(answers))
    pairs = {f"tokens {i + 1} and {i + 2}": said[:, i] * 100 + said[:, i + 1] for i in range(3)}
    return {"token 2": said[:, 1], "token 4": said[:, 3], **pairs}


def test_sampling_follows_the_target_whatever_the_drafters(plain, served):
    assert accepted(served["samples"]) >= 50
    reference = ngrams(plain["samples"])
    for name, sample in ngrams(served["samples"]).items():
        tv, limit = tv_and_limit(sample, reference[name])
        assert tv < limit, f"{name}: {tv:.3f}, limit {limit:.3f}"
        # the limit holds for the target against itself, and sees another temperature
        tv, limit = tv_and_limit(ngrams(plain["more samples"])[name], reference[name])
        assert tv < limit, f"{name}: plain {tv:.3f}, limit {limit:.3f}"
        tv, limit = tv_and_limit(ngrams(plain["hotter"])[name], reference[name])
        assert tv > limit, f"{name}: hotter {tv:.3f}, limit {limit:.3f}"
