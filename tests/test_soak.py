"""The soak: its judge finds what it must find, and a short one of a tiny pair passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_spec.measure.mixups import References, Tally, Verdict, common_length, excess_probability
from lora_spec.measure.soak_checks import Seen, SoakParams, judge, memory_growth
from lora_spec.measure.soak_load import Findings
from lora_spec.measure.soak_world import World

TEXTS = {"base": ["aaaa", "xyz"], "one": ["aabb", "xyz"], "two": ["bbbb", "q"]}


def test_an_output_of_another_adapter_is_a_suspect() -> None:
    references = References(TEXTS)
    assert references.judge("base", 0, "aaaa") == Verdict(1.0, False, None)
    assert references.judge("base", 0, "aabb") == Verdict(0.5, True, "one")
    assert references.judge("base", 0, "bbbc") == Verdict(0.0, True, None)
    assert references.judge("base", 0, "aaac") == Verdict(0.75, False, None), "numerics may leave late"
    assert references.judge("one", 1, "xyz").copied is None, "what two adapters say alike proves nothing"


def test_telling_prompts_are_those_where_all_differ_early() -> None:
    assert References(TEXTS).telling_prompts(3) == [0]
    assert References(TEXTS).telling_prompts(2) == []


@given(texts=st.lists(st.text("ab", max_size=8), min_size=3, max_size=3), output=st.text("ab", max_size=8))
def test_own_reference_is_never_a_suspect(texts: list[str], output: str) -> None:
    references = References({str(i): [text] for i, text in enumerate(texts)})
    assert not references.judge("0", 0, texts[0]).suspect
    verdict = references.judge("0", 0, output)
    assert verdict.suspect == any(
        common_length(output, text) > common_length(output, texts[0]) for text in texts
    )


def test_many_suspects_are_no_chance() -> None:
    assert excess_probability(0, 100, 0, 100) == 1
    assert excess_probability(3, 100, 3, 100) > 0.5
    assert excess_probability(20, 1000, 0, 400) < 0.005
    # One suspect of one run in four: p = 1/2 when half of all outputs are that run's.
    assert excess_probability(1, 2, 0, 2) == pytest.approx(0.5)


def test_memory_growth() -> None:
    flat = [(float(t), 1000) for t in range(0, 100)]
    assert memory_growth(flat) == (0.0, 0.0)
    leak = [(float(t), 1000 + 10 * t) for t in range(0, 100)]
    growth, slope = memory_growth(leak)
    assert growth > 0.3
    assert slope == pytest.approx(600 / 2**20)
    warm = [(float(t), 500 if t < 20 else 1000) for t in range(0, 100)]
    assert memory_growth(warm) == (0.0, 0.0)


def seen(**changes: object) -> Seen:
    """What a faultless soak sees."""
    alone = Tally.of([("base", Verdict(1.0, False, None)), ("one", Verdict(0.9, False, None))] * 200)
    findings = Findings(
        requests=Counter(completion=400, aborted=10),
        verdicts=[("base", Verdict(1.0, False, None)), ("one", Verdict(0.9, False, None))] * 200,
        latencies=[1.0] * 400,
        drafted=4000,
        accepted=1000,
    )
    memory = [(float(t), 2**30) for t in range(100)]
    counted = {"requests": 408, "drafted_tokens": 4050}
    return replace(Seen(alone, Findings(), findings, memory, True, counted, []), **changes)


def failed(one: Seen) -> set[str]:
    checks, _ = judge(one, SoakParams(), most_drafts_of_an_abort=128)
    return {check.name for check in checks if not check.passed}


def test_a_faultless_soak_passes() -> None:
    assert failed(seen()) == set()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"alive": False}, "server alive at the end"),
        ({"log_errors": ["Traceback"]}, "unexpected lines in its log"),
        ({"memory": [(float(t), 2**30 + t * 2**20) for t in range(100)]}, "growth of memory"),
        ({"counted": {"requests": 380, "drafted_tokens": 4050}}, "requests not counted"),
        ({"counted": {"requests": 408, "drafted_tokens": 3990}}, "drafts counted beyond the responses'"),
        ({"setup": Findings(problems=Counter(refused=1))}, "unexpected answers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_fault_is_found(changes: dict, name: str) -> None:
    assert failed(seen(**changes)) == {name}


def test_a_wrong_adapter_is_found() -> None:
    good = seen()
    some = good.findings.verdicts[:-20] + [("one", Verdict(0.1, True, None))] * 20
    assert failed(replace(good, findings=replace_verdicts(good.findings, some))) == {
        "chance of so many suspects"
    }
    one = [*good.findings.verdicts[:-1], ("one", Verdict(0.1, True, "base"))]
    assert failed(replace(good, findings=replace_verdicts(good.findings, one))) == {
        "outputs that are another adapter's"
    }
    fallen = [(arm, Verdict(0.3 if arm == "base" else 0.9, False, None)) for arm, _ in good.findings.verdicts]
    assert failed(replace(good, findings=replace_verdicts(good.findings, fallen))) == {
        "largest fall of agreement"
    }


def replace_verdicts(findings: Findings, verdicts: list[tuple[str, Verdict]]) -> Findings:
    return replace(findings, verdicts=verdicts)


@pytest.mark.vllm
def test_a_short_soak_of_a_tiny_pair(tmp_path: Path) -> None:
    from serving_server_models import make_pair

    from lora_spec.measure.soak import run_soak
    from lora_spec.measure.tiny_models import prompts

    pair = make_pair(tmp_path)
    world = World(
        target=Path(pair["target"]),
        drafter=Path(pair["drafter"]),
        targets={name: Path(path) for name, path in pair["target_adapters"].items()},
        drafters={f"t{i}": Path(pair["drafter_adapters"][f"d{i}"]) for i in range(3)},
        prompts=prompts(12, 10),
        max_rank=8,
        arguments=("--dtype", "float32"),
    )
    params = SoakParams(minutes=0.25, clients=8, repeats=1, pause_s=1.0, max_growth=0.1)
    log = tmp_path / "server.log"
    result = run_soak(world, params, log, tmp_path / "soak", print)
    wrong = [check for check in result.checks if not check.passed]
    assert not wrong, (wrong, result.numbers["examples"], result.numbers["log_errors"])
    asked = result.numbers["requests"]
    assert asked["completion"] > 20 and asked["malformed"] > 0
    assert min(asked[kind] for kind in ("policy_changed", "load_drafter_in_place", "unload_target")) >= 1
    assert result.numbers["telling_prompts"] >= 6
    assert result.numbers["wrong_adapter_detected"] > 0.95
