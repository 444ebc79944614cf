"""Designs, plans and the checks that disqualify numbers; no engine is started here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.acceptance import censor_last_step
from lora_spec.errors import EngineError, LoraSpecError, ParamsError
from lora_spec.measure import inputs as inputs_module
from lora_spec.measure import units as units_module
from lora_spec.measure.collector import Collector, unit_config
from lora_spec.measure.controls import refuse_base, refuse_self_draft
from lora_spec.measure.design import (
    FP32,
    SELF_DRAFT,
    Design,
    Precision,
    UnitKind,
    design_units,
    load_design,
)
from lora_spec.measure.engine import Completion, EngineSpec, lora_slot_rank
from lora_spec.measure.inputs import AdapterInput, Inputs
from lora_spec.measure.lossless import first_divergences, losslessness
from lora_spec.measure.precision import EarlyStop
from lora_spec.measure.rows import request_rows, token_sha256, unique_ratio
from lora_spec.measure.scorer import attempted_positions
from lora_spec.measure.session import Call, SessionResult, serve
from lora_spec.measure.units import ArmRunner, refuse_lossy, refuse_unapplied
from lora_spec.params import validate
from lora_spec.pool import load_pool
from lora_spec.provenance import new_record


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


def design_of(name: str = "phase2_screen.yaml", **changes: object) -> Design:
    """A committed design with some values replaced; a mapping changes only the keys it names."""
    config = load_design(name).config() | {"adapters": ["german-r16-all-s40", "sql-r64-attention-s24"]}
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) and config[key] else value
    return validate(Design, config, where="test")


NO_OVERLAP = {
    "method": "dflash",
    "overlap_temperature": None,
    "controls": {"self_draft_tolerance": None, "self_draft_prompts": None, "overlap_tolerance": None},
}


def unit_configs(design: Design) -> dict[str, dict]:
    """Config of every record of a design."""
    units = design_units(design, {name: f"domain_of_{name}" for name in design.adapters})
    return {unit.name: unit_config(design, unit, "acceptance") for unit in units}


def test_the_screen_measures_the_whole_pool() -> None:
    assert load_design("phase2_screen.yaml").adapters == list(load_pool())


def test_a_grown_pool_changes_no_record_of_the_others() -> None:
    before = unit_configs(design_of())
    after = unit_configs(design_of(adapters=["german-r16-all-s40", "sql-r64-attention-s24", "new-one"]))
    assert set(after) - set(before) == {"new-one", "base--domain_of_new-one"}
    assert all(after[name] == config for name, config in before.items())


def test_a_stopping_rule_changes_adapter_records_only() -> None:
    before = unit_configs(design_of())
    after = unit_configs(design_of(precision={"se": 0.01, "chunk": 32, "minimum": 64}))
    adapters = {"german-r16-all-s40", "sql-r64-attention-s24"}
    assert {name for name in before if before[name] != after[name]} == adapters


def test_scores_do_not_depend_on_how_requests_are_served() -> None:
    domains = {"german-r16-all-s40": "german", "sql-r64-attention-s24": "sql"}
    other = {
        "depths": [2],
        "max_tokens": 8,
        "precision": {"se": 0.01, "chunk": 32, "minimum": 64},
        "general": {"start": 3, "count": 9},
    }

    def configs(design: Design) -> list[dict]:
        return [unit_config(design, unit, "overlap") for unit in design_units(design, domains)[2:]]

    assert configs(design_of()) == configs(design_of(**other))
    assert configs(design_of()) != configs(design_of(overlap_temperature=1.0))
    assert configs(design_of()) != configs(design_of(own={"count": 95}))


def test_the_plan_counts_the_requests_that_are_served(tmp_path: Path) -> None:
    path = tmp_path / "design.yaml"
    path.write_text(yaml.safe_dump(design_of(depths=[2]).config()))
    counted = {row.unit.name: row.requests for row in Collector(str(path), "acceptance").plan()}
    assert counted == {
        SELF_DRAFT: 32 * 3,  # greedy; T = 0.8 with drafts of both kinds
        FP32: 8 * 3,
        "base--german": 2 * (96 + 32),
        "base--sql": 2 * (96 + 32),
        "base--general": 2 * 32,
        "german-r16-all-s40": 2 * (96 + 32 + 32),
        "sql-r64-attention-s24": 2 * (96 + 32 + 32),
    }


def test_dflash_designs_skip_only_the_controls_that_score_the_drafter() -> None:
    domains = {"german-r16-all-s40": "german", "sql-r64-attention-s24": "sql"}
    units = [unit.name for unit in design_units(design_of(), domains)]
    assert [unit.name for unit in design_units(design_of(**NO_OVERLAP), domains)] == [
        name for name in units if name != SELF_DRAFT
    ]
    with pytest.raises(ParamsError, match="self_draft_tolerance means nothing for method dflash"):
        design_of(**NO_OVERLAP | {"controls": {}})
    with pytest.raises(ParamsError, match="overlap_tolerance is needed for method draft_model"):
        design_of(controls={"overlap_tolerance": None})


def test_overlap_scoring_refuses_a_dflash_design(tmp_path: Path) -> None:
    path = tmp_path / "design.yaml"
    path.write_text(yaml.safe_dump(design_of(**NO_OVERLAP).config()))
    with pytest.raises(LoraSpecError, match="no next-token distribution") as caught:
        Collector(str(path), "overlap")
    assert caught.value.code == "no_overlap"


def test_prompts_of_a_decoding_lead_the_range_in_both_arms() -> None:
    design = design_of(
        own={"start": 5, "count": 9},
        general={"start": 2, "count": 4},
        decodings={"greedy": {"temperature": 0.0, "own": 3, "general": 0}},
    )
    assert design.indices("german") == design.indices("german", "t08") == range(5, 14)
    assert design.indices("german", "greedy") == range(5, 8)
    assert design.indices("general", "greedy") == range(2, 2)
    assert design.requests("general") == 4 and design.requests("german") == 12


def test_a_prompt_set_without_requests_has_no_base_arm() -> None:
    changes = {"decodings": {"t08": {"temperature": 0.8, "general": 0}}}
    units = design_units(
        design_of(**changes), {"german-r16-all-s40": "german", "sql-r64-attention-s24": "sql"}
    )
    assert "base--general" not in [unit.name for unit in units]
    assert [unit.prompt_sets for unit in units[-2:]] == [("german",), ("sql",)]


def test_depths_are_measured_after_the_primary_one() -> None:
    assert design_of().all_depths == [4]
    deep = design_of(depths=[6, 2, 4])
    assert deep.all_depths == [4, 2, 6]
    assert deep.requests("general") == 3 * design_of().requests("general")
    assert [deep.at_depth("german", k) for k in deep.all_depths] == ["german", "german/k2", "german/k6"]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=8, max_size=40),
    st.floats(0.001, 0.5),
    st.integers(2, 12),
    st.integers(1, 5),
)
def test_serving_stops_at_the_first_chunk_whose_standard_error_suffices(
    counts: list[tuple[int, int]], se: float, minimum: int, chunk: int
) -> None:
    """Against an oracle that computes the error of every whole number of chunks by the textbook formula."""
    steps = [[4] * (a // 4) + [a % 4] + [0] * b for a, b in counts]
    adapted = [completion(list(range(1 + sum(each) + len(each))), each) for each in steps]
    indices = range(7, 7 + len(counts))
    rows = request_rows(adapted, arm="", adapter="", prompt_set="", prompt_indices=indices, decoding="", k=4)
    base = rows.iloc[::-1].assign(prompt_index=list(indices))  # other counts on the same prompts
    stop = EarlyStop(Precision(se=se, chunk=chunk, minimum=minimum), base, indices, 4)

    def error(n: int) -> float:
        ends = []
        for table in (base, rows):
            a = table["accepted_emitted"].to_numpy(float)[:n]
            m = a + table["rejections"].to_numpy(float)[:n]
            ends.append((a - a.sum() / m.sum() * m) / m.mean())
        return float((ends[1] - ends[0]).std(ddof=1) / math.sqrt(n))

    sizes = [*range(chunk, len(counts), chunk), len(counts)]
    expected = next((n for n in sizes if n >= minimum and error(n) <= se), len(counts))

    class Server:
        def generate(self, requests: list[Completion], **_: object) -> list[Completion]:
            return requests

    done = serve(Server(), Call(adapted, 0.8, 48, stop=stop))
    assert len(done) == expected
    report = stop.report(done)
    assert report["prompts"] == expected and report["se"] == pytest.approx(error(expected))
    assert (report["stopped"] == "precision reached") == (expected >= minimum and error(expected) <= se)


def test_looping_output_is_told_by_its_distinct_tokens() -> None:
    assert unique_ratio([7, 8] * 10) == pytest.approx(0.1)
    assert unique_ratio(range(20)) == 1.0


def test_phase1_measures_prompts_that_phase2_does_not() -> None:
    first, second = load_design("phase1_measurement.yaml"), load_design("phase2_screen.yaml")
    for a, b in ((first.own, second.own), (first.general, second.general)):
        assert a.start >= b.start + b.count


def test_an_adapter_is_known_by_recipe_elsewhere_and_by_content_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_module, "adapter_dir", lambda name: tmp_path / name)
    inputs = Inputs(design_of())
    unit = next(u for u in inputs.units if u.adapter is not None)
    made = AdapterInput(unit.adapter, tmp_path, "0" * 64, 8, 1.0)
    monkeypatch.setattr(inputs, "adapter", lambda name: made)
    record = new_record(
        experiment="test",
        tier="pocket",
        phase="phase2",
        evidence_class="measured",
        config={},
        seed=0,
        revisions=inputs.revisions(unit),
    )
    other = dataclasses.replace(made, content_hash="1" * 64)
    monkeypatch.setattr(inputs, "adapter", lambda name: other)
    assert inputs.matches(unit, record)  # not trained here: nothing to compare with
    (tmp_path / unit.adapter).mkdir()
    assert not inputs.matches(unit, record)
    record.runtime["cpu_flags"] = ["avx2"]
    assert inputs.matches(unit, record)  # another machine's weights may differ
    record.revisions["adapter"]["recipe_sha256"] = "2" * 64
    assert not inputs.matches(unit, record)


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
        ({"depths": [4, 0]}, "depths"),
        ({"decodings": {"t08": {"temperature": 0.8}}}, "exactly one greedy"),
        ({"decodings": {"greedy": {"temperature": 0.0, "own": 97}}}, "more own prompts"),
        ({"precision": {"se": 0.01, "chunk": 48, "minimum": 64}}, "multiple of max_num_seqs"),
        ({"schema": "lora-spec-design/1"}, "schema"),
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
    # Log-probabilities are float32: two logits a quarter apart come out at .25 and some 1e-6.
    rounded = losslessness([completion([1, 2], gap=0.2500019)], [completion([1, 3])], near_tie=0.25)
    beyond = losslessness([completion([1, 2], gap=0.2501)], [completion([1, 3])], near_tie=0.25)
    assert rounded["lossless"] and not beyond["lossless"]
    wrong = losslessness(plain, [completion([1, 9, 3, 4]), plain[1]], near_tie=0.25)
    assert not wrong["lossless"]
    assert wrong["max_gap_nats"] == pytest.approx(5.0)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_larger_gap_is_settled_in_float32(monkeypatch: pytest.MonkeyPatch, lossy: bool) -> None:
    runner = ArmRunner(Inputs(load_design("phase2_screen.yaml")))
    served: list[tuple[str | None, int, int]] = []

    def answer(spec: EngineSpec, calls: list[Call]) -> SessionResult:
        served.append((spec.dtype, spec.num_speculative_tokens, len(calls[0].requests)))
        tokens = [1, 9] if lossy and spec.drafter else [1, 2]
        return SessionResult([[completion(tokens) for _ in calls[0].requests]], {})

    monkeypatch.setattr(units_module, "run_session", answer)
    plain = [completion([1, 2], gap=0.1), completion([1, 2], gap=0.4), completion([1, 2])]
    tie = losslessness(plain, [completion([1, 3]), plain[1], plain[2]], near_tie=0.25)
    assert runner.settled(None, "german", 4, tie) == tie and not served
    larger = losslessness(plain, [completion([1, 3]), completion([1, 3]), plain[2]], near_tie=0.25)
    check = runner.settled(None, "german", 2, larger)
    assert served == [("float32", 0, 1), ("float32", 2, 1)]
    assert check["float32"]["asked"] == [1] and check["identical"] == 1
    assert check["lossless"] is not lossy


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
        (lambda: refuse_unapplied("u", 0.0, [False, True]), "null_adapter_applied"),
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
