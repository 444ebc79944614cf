"""Designs, plans and the checks that disqualify numbers; no engine is started here."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_spec.acceptance import censor_last_step
from lora_spec.errors import EngineError, ParamsError
from lora_spec.measure.controls import refuse_base, refuse_self_draft
from lora_spec.measure.design import FP32, SELF_DRAFT, Design, UnitKind, design_units, load_design
from lora_spec.measure.engine import Completion, lora_slot_rank
from lora_spec.measure.inputs import Inputs
from lora_spec.measure.lossless import first_divergences, losslessness
from lora_spec.measure.rows import request_rows, token_sha256
from lora_spec.measure.scorer import attempted_positions
from lora_spec.measure.units import refuse_lossy, refuse_unapplied
from lora_spec.params import validate


def completion(tokens: list[int], steps: list[int] = (), gap: float = 5.0) -> Completion:
    return Completion(
        tokens=list(tokens),
        finish_reason="length",
        steps_accepted=list(steps),
        steps_drafted=[4] * len(steps),
        top2=[(-0.1, -0.1 - gap)] * len(tokens),
        latency_s=0.5,
    )


def test_committed_designs_are_valid_and_ordered() -> None:
    for name in ("phase1_measurement.yaml", "phase2_screen.yaml"):
        design = load_design(name)
        units = design_units(design, {adapter: "german" for adapter in design.adapters})
        order = [list(UnitKind).index(unit.kind) for unit in units]
        assert order == sorted(order)
        assert [u.name for u in units[:2]] == [SELF_DRAFT, FP32]
        assert len({u.name for u in units}) == len(units)


def test_phase1_measures_prompts_that_phase2_does_not() -> None:
    first, second = load_design("phase1_measurement.yaml"), load_design("phase2_screen.yaml")
    for a, b in ((first.own, second.own), (first.general, second.general)):
        assert a.start >= b.start + b.count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_token": 48}, "unknown parameter max_token"),
        ({"num_speculative_tokens": "four"}, "num_speculative_tokens"),
        ({"adapters": []}, "adapters"),
        ({"method": "eagle"}, "method"),
        ({"output": "../../elsewhere"}, "output"),
        ({"phase": "nine"}, "phase"),
        ({"overlap_temperature": math.inf}, "overlap_temperature"),
    ],
)
def test_a_wrong_parameter_is_named(change: dict, message: str) -> None:
    raw = load_design("phase2_screen.yaml").config() | change
    with pytest.raises(ParamsError, match=message):
        validate(Design, raw, where="test")


def test_a_model_without_pinned_weights_is_refused_by_name() -> None:
    config = load_design("phase2_screen.yaml").config() | {"drafter": "llama-3.2-1b-instruct"}
    with pytest.raises(ParamsError, match="no pinned weights"):
        Inputs(validate(Design, config, where="test"))


def test_a_divergence_counts_only_beyond_a_near_tie() -> None:
    plain = [completion([1, 2, 3, 4]), completion([1, 2, 3, 4], gap=0.1)]
    same = losslessness(plain, plain, near_tie=0.25)
    assert same["lossless"] and same["identical"] == 2
    tie = losslessness(plain, [plain[0], completion([1, 2, 9, 4])], near_tie=0.25)
    assert tie["lossless"] and tie["identical"] == 1
    wrong = losslessness(plain, [completion([1, 9, 3, 4]), plain[1]], near_tie=0.25)
    assert not wrong["lossless"]
    assert wrong["max_gap_nats"] == pytest.approx(5.0)


def test_a_shorter_output_is_a_divergence() -> None:
    found = first_divergences([completion([1, 2, 3])], [completion([1, 2])])
    assert [(d.request, d.position) for d in found] == [(0, 2)]


@st.composite
def served(draw: st.DrawFn) -> tuple[list[int], int]:
    """Accepted counts of one request's draft steps, and how many tokens were output of them."""
    steps = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    before = 1 + sum(a + 1 for a in steps[:-1])
    return steps, before + draw(st.integers(1, steps[-1] + 1))


@given(served())
def test_judged_positions_are_the_trials_of_alpha(case: tuple[list[int], int]) -> None:
    """The contexts scored teacher-forced are exactly the trials that the counts hold."""
    steps, output = case
    positions = attempted_positions(steps, 4, output)
    counts = censor_last_step(steps, output, 4)
    assert len(positions) == counts.accepted_emitted + counts.rejections
    assert len(set(positions)) == len(positions)
    assert all(1 <= p < output for p in positions)


def test_rows_hold_counts_and_hashes() -> None:
    rows = request_rows(
        [completion(list(range(8)), [4, 2])],
        arm="base",
        adapter="",
        prompt_set="german",
        prompt_indices=[3],
        decoding="greedy",
        k=4,
    )
    row = rows.iloc[0]
    # 1 prefill token + 5 + 2 of the last step; its third was cut, so both drafts count and no verdict does
    assert (row["accepted_emitted"], row["rejections"], row["drafted"]) == (6, 0, 8)
    assert row["al_vllm"] == pytest.approx(4.0)
    assert row["al_emitted"] == pytest.approx(3.5)
    assert row["output_sha256"] == token_sha256(range(8))
    assert not math.isnan(row["latency_s"])


def test_token_hash_is_of_little_endian_int32() -> None:
    assert token_sha256([1, 2]) == token_sha256(np.asarray([1, 2], dtype=np.int64))
    assert token_sha256([1, 2]) != token_sha256([2, 1])


@pytest.mark.parametrize(
    ("refuse", "code"),
    [
        (lambda: refuse_unapplied("u", 1.0, [False, False]), "adapter_not_applied"),
        (lambda: refuse_lossy("u", {"lossless": False, "max_gap_nats": 1.0}), "not_lossless"),
        (
            lambda: refuse_self_draft({"t08/probabilistic": {"alpha": 0.4, "expected": 1.0}}, 0.03),
            "self_draft",
        ),
        (lambda: refuse_self_draft({"t08/greedy": {"alpha": math.nan, "expected": 0.4}}, 0.03), "self_draft"),
        (lambda: refuse_base("u", {"greedy": {"alpha": 0.1, "floor": 0.25}}), "base_floor"),
        (
            lambda: refuse_base(
                "u", {"t08": {"alpha": 0.4, "floor": 0.25, "overlap_same_tokens": 0.6, "tolerance": 0.05}}
            ),
            "overlap_mismatch",
        ),
    ],
)
def test_disqualified_numbers_are_refused_by_name(refuse: Callable[[], None], code: str) -> None:
    with pytest.raises(EngineError) as caught:
        refuse()
    assert caught.value.code == code


def test_weak_adapters_and_good_bases_pass() -> None:
    refuse_unapplied("u", 1.0, [False, True])
    refuse_unapplied("never trained", 0.0, [False, False])
    refuse_self_draft({"greedy/probabilistic": {"alpha": 0.99, "expected": 1.0}}, 0.03)
    refuse_base("u", {"t08": {"alpha": 0.5, "floor": 0.25, "overlap_same_tokens": 0.53, "tolerance": 0.05}})


def test_rank_slots() -> None:
    assert [lora_slot_rank(r) for r in (1, 8, 9, 64)] == [8, 8, 16, 64]
