"""Phase 0: enumeration, verdicts on made-up answers, overlay and advice; no engine is started here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.errors import EvidenceError, LoraSpecError, ParamsError
from lora_spec.files import sha256_file
from lora_spec.measure.composability import runner as runner_module
from lora_spec.measure.composability.cells import (
    AXES,
    COLUMNS,
    DRAFTER_METHODS,
    MAX_CELLS,
    Cell,
    Phase0Params,
    full_matrix,
    load_phase0,
)
from lora_spec.measure.composability.compare import first_difference, two_share_z, worst_variation
from lora_spec.measure.composability.engine import Answer, Outcome, describe, scrub
from lora_spec.measure.composability.fallback import AS_IT_IS, MEANINGS, NOTHING, USE_PLUGIN, advise
from lora_spec.measure.composability.runner import Runner
from lora_spec.measure.composability.units import Kind, all_units
from lora_spec.measure.composability.verdict import Status, judge
from lora_spec.measure.composability.workload import BASE, Arm, arms, calls, reference_pairs
from lora_spec.params import validate
from lora_spec.paths import results_dir
from lora_spec.phases import cell_matrix, composability
from lora_spec.phases.parameters import ComposabilityParameters
from lora_spec.provenance import load_record, write_record

PARAMS = load_phase0()
CELLS = PARAMS.cells()
WORK, LIMITS = PARAMS.workload, PARAMS.limits
FACTS = {"compilation": "NONE", "prefix_caching": True, "max_loras": 2}
cells = st.sampled_from([cell for cell in full_matrix() if cell.meaningful])


# --- which cells ---


def test_the_measured_cells_are_few_meaningful_and_cover_every_value() -> None:
    assert len(CELLS) == len(set(CELLS)) <= MAX_CELLS
    assert all(cell.meaningful for cell in CELLS)
    for axis, values in AXES.items():
        assert {getattr(cell, axis) for cell in CELLS} == set(values)


def test_the_plain_plane_is_measured_whole() -> None:
    plain = {"prefix_cache": "off", "execution": "eager", "slots": "warm"}
    plane = {c for c in full_matrix() if c.meaningful and plain.items() <= c.values().items()}
    assert plane <= set(CELLS) and len(plane) == 72


def test_names_tell_all_cells_apart() -> None:
    matrix = full_matrix()
    assert len({cell.name for cell in matrix}) == len(matrix) == 864


@given(cells)
def test_an_adapter_has_a_drafter_and_slots_have_contenders(cell: Cell) -> None:
    assert cell.drafter_lora == "none" or cell.method in DRAFTER_METHODS
    assert cell.slots == "warm" or len(arms(cell)) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [{"why": "all", **{axis: list(values) for axis, values in AXES.items()}}]}, "432 cells"),
        ({"blocks": [{"why": "none left", "method": ["ngram"], "drafter_lora": ["merged"]}]}, "0 cells"),
        ({"blocks": [{"why": "typo", "method": ["eagle"]}]}, "eagle"),
        ({"vllm_version": "1"}, "unknown parameter vllm_version"),
    ],
)
def test_a_wrong_parameter_is_named(change: dict, message: str) -> None:
    raw = PARAMS.model_dump(mode="json", by_alias=True) | change
    with pytest.raises(ParamsError, match=message):
        validate(Phase0Params, raw, where="test")


def test_measuring_more_cells_keeps_the_records_of_the_others() -> None:
    fewer = PARAMS.model_copy(update={"blocks": PARAMS.blocks[:1]})
    configs = {unit.name + unit.column: unit.config(PARAMS) for unit in all_units(PARAMS)}
    assert all(configs[u.name + u.column] == u.config(fewer) for u in all_units(fewer))


def test_one_cell_brings_its_references_and_nothing_else() -> None:
    chosen = Runner().select(["draft_model-one-merged-greedy"], "plugin")
    assert [(u.kind, u.name) for u in chosen] == [
        (Kind.REFERENCE, "draft_model-t1-d1"),
        (Kind.CELL, "draft_model-one-merged-greedy"),
    ]
    with pytest.raises(LoraSpecError, match="no cell draft_model"):
        Runner().select(["draft_model"])


def test_records_of_another_cpu_stay_and_what_is_left_gets_references_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(results_dir("pocket", "phase0"), tmp_path / "results" / "pocket" / "phase0")
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    runner = Runner()
    runner.inputs.root.mkdir(parents=True)  # models with other bytes than those of the records
    (runner.inputs.root / "prompts.json").write_text("[]")
    digest = sha256_file(runner.inputs.root / "prompts.json")
    (runner.inputs.root / "manifest.json").write_text(json.dumps({"prompts.json": digest}))
    units = runner.select(["draft_model-one-merged-greedy"], "plugin")
    reference, cell = units
    recorded = load_record(cell.path(PARAMS)).runtime["cpu_flags"]

    monkeypatch.setattr(runner_module, "cpu_flags", lambda: (*recorded, "amx_bf16"))
    assert runner.to_do(runner.units) == []
    cell.path(PARAMS).unlink()
    assert runner.to_do(units) == [reference, cell]
    monkeypatch.setattr(runner_module, "cpu_flags", lambda: tuple(recorded))
    assert runner.state(reference) == "stale"


# --- what a cell is asked ---


@given(cells)
def test_prompts_meet_other_arms_and_then_their_own_again(cell: Cell) -> None:
    every = arms(cell)
    called = calls(replace(cell, sampling="greedy"), WORK)
    for call in called:
        assert {request.arm for request in call} == set(every)
    assert called[0] == called[2]
    if len(every) > 1:
        moved = [a.prompt == b.prompt and a.arm != b.arm for a, b in zip(called[0], called[1], strict=True)]
        assert all(moved)


@given(cells)
def test_every_target_arm_is_sampled_alike(cell: Cell) -> None:
    (call,) = calls(replace(cell, sampling="sampled"), WORK)
    targets = [request.arm.target for request in call]
    assert {targets.count(t) for t in set(targets)} == {WORK.samples}


def test_dynamic_requests_use_the_map_the_field_and_neither() -> None:
    fields = {arm.name: arm.draft_field for arm in arms(Cell("dflash", "mixed", "dynamic"))}
    assert fields["t1/d1"] is None and fields["t2/d2"] is None
    assert fields["t1/d2"] == "d2" and fields["base/d1"] == "d1"
    assert fields["t1/base"] == fields["base/base"] == "none"


def test_there_is_a_reference_for_every_arm_whose_acceptance_can_be_compared() -> None:
    pairs = {(p.method, p.arm) for p in reference_pairs(CELLS)}
    for cell in CELLS:
        supported = cell.method != "eagle3" or cell.drafter_lora != "dynamic"
        if cell.method not in ("none", "suffix") and supported:
            assert {(cell.method, arm) for arm in arms(cell)} <= pairs


# --- verdicts on made-up answers ---


class Truth:
    """Answers that depend on prompt and arm, as the merged models' would."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.tokens = {
            t: self.rng.integers(0, 16, (WORK.prompts, WORK.max_tokens)) for t in (BASE, "t1", "t2")
        }
        self.gaps = np.full((WORK.prompts, WORK.max_tokens), 1.0)
        self.joints = {t: self.rng.dirichlet(np.full(16**2, 0.2)).reshape(16, 16) for t in self.tokens}

    def greedy(self, variant: str) -> tuple[list[list[int]], np.ndarray]:
        return self.tokens[variant].tolist(), self.gaps

    def joint(self, variant: str) -> np.ndarray:
        return self.joints[variant]

    def greedy_accepted(self, method: str, arm: Arm) -> list[list[int]] | None:
        if method in ("none", "suffix"):
            return None
        first = {BASE: 1, "d1": 2, "d2": 3}[arm.drafter]
        return [[first, prompt % 3, 1] for prompt in range(WORK.prompts)]

    def sampled_first(self, method: str, arm: Arm) -> tuple[int, int] | None:
        return None if method in ("none", "suffix") else (300, 600)


TRUTH = Truth()


def right_outcome(cell: Cell) -> Outcome:
    """What an engine without any fault would answer."""
    rng = np.random.default_rng(1)
    answers = []
    for call in calls(cell, WORK):
        given_ = []
        for number, request in enumerate(call):
            accepted = []
            if cell.method != "none":
                accepted = (TRUTH.greedy_accepted(cell.method, request.arm) or [[3]] * WORK.prompts)[
                    request.prompt
                ]
            if cell.sampling == "sampled":
                flat = rng.choice(256, p=TRUTH.joint(request.arm.target).ravel())
                tokens = [int(flat // 16), int(flat % 16)]
                accepted = [] if cell.method == "none" else [number // 9 % 2]
            else:
                tokens = TRUTH.greedy(request.arm.target)[0][request.prompt]
            given_.append(Answer(list(tokens), list(accepted), 32))
        answers.append(given_)
    facts = FACTS | {"compilation": "DYNAMO_TRACE_ONCE" if cell.execution == "compiled" else "NONE"}
    return Outcome("done", answers, facts=facts)


def verdict(cell: Cell, outcome: Outcome):
    return judge(cell, calls(cell, WORK), outcome, TRUTH, LIMITS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_right_answers_work(cell: Cell) -> None:
    found = verdict(cell, right_outcome(cell))
    assert (found.status, found.how) == (Status.WORKS, [])


def test_one_wrong_token_of_one_base_request_is_seen() -> None:
    cell = Cell("draft_model", "mixed")
    outcome = right_outcome(cell)
    at = next(i for i, r in enumerate(calls(cell, WORK)[1]) if r.arm.target == BASE)
    outcome.answers[1][at].tokens[-1] += 1
    found = verdict(cell, outcome)
    assert found.status is Status.WRONG and found.silent
    assert found.how == ["1 of 27 outputs of base requests differ"]


def test_a_difference_at_a_near_tie_is_none() -> None:
    cell = Cell("none")
    outcome = right_outcome(cell)
    outcome.answers[0][0].tokens[5] += 1
    assert verdict(cell, outcome).status is Status.WRONG
    truth = Truth()
    truth.gaps[0, 5] = LIMITS.near_tie_nats / 2
    assert judge(cell, calls(cell, WORK), outcome, truth, LIMITS).status is Status.WORKS


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_right_tokens_with_another_drafters_acceptance_are_wrong(method: str) -> None:
    cell = Cell(method, drafter_lora="dynamic")
    outcome = right_outcome(cell)
    for request, answer in zip(calls(cell, WORK)[0], outcome.answers[0], strict=True):
        if request.arm.drafter == "d2":
            answer.accepted[0] = 1  # the base drafter's
    found = verdict(cell, outcome)
    assert found.status is Status.WRONG
    assert found.how == ["accepted drafts of 9 of 27 requests of base/d2 differ from the merged models'"]


def test_drafters_that_accept_alike_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("dflash", drafter_lora="dynamic")
    monkeypatch.setattr(TRUTH, "greedy_accepted", lambda method, arm: [[3, 1]] * WORK.prompts)
    found = verdict(cell, right_outcome(cell))
    assert found.status is Status.NOT_EXERCISED and "accept alike" in found.how[0]


def test_warnings_that_speak_of_it_end_the_silence() -> None:
    cell = Cell("none", "mixed")
    outcome = right_outcome(cell)
    outcome.answers[0][0].tokens.clear()
    outcome.warnings = ["Using scheduler lora_spec.serving.scheduler.ServingScheduler"]
    assert verdict(cell, outcome).silent is True
    outcome.warnings += ["LoRA rows of index -1 are not supported"]
    assert verdict(cell, outcome).silent is False


def edit(cell: Cell, change: Callable[[Outcome], None]):
    outcome = right_outcome(cell)
    change(outcome)
    return verdict(cell, outcome)


def reject_all(outcome: Outcome) -> None:
    outcome.answers = [[replace(a, accepted=[]) for a in given_] for given_ in outcome.answers]


def cache_nothing(outcome: Outcome) -> None:
    outcome.answers = [[replace(a, cached=0) for a in given_] for given_ in outcome.answers]


def test_right_answers_that_prove_nothing_do_not_work() -> None:
    assert edit(Cell("suffix"), reject_all).status is Status.NOT_EXERCISED
    assert edit(Cell("none", prefix_cache="on"), cache_nothing).status is Status.NOT_EXERCISED
    eager = edit(Cell("none", execution="compiled"), lambda o: o.facts.update(compilation="NONE"))
    assert eager.status is Status.UNSUPPORTED and "eagerly" in eager.how[0]
    off = edit(Cell("none", prefix_cache="on"), lambda o: o.facts.update(prefix_caching=False))
    assert off.status is Status.UNSUPPORTED


def test_wrong_answers_stay_wrong_where_something_was_refused_too() -> None:
    cell = Cell("none", execution="compiled")
    outcome = right_outcome(cell)
    outcome.facts["compilation"] = "NONE"
    outcome.answers[0][0].tokens[0] += 1
    assert verdict(cell, outcome).status is Status.WRONG


def test_samples_of_another_distribution_are_seen_in_the_arm_they_belong_to() -> None:
    cell = Cell("none", "mixed", sampling="sampled")
    outcome = right_outcome(cell)
    for i, request in enumerate(calls(cell, WORK)[0]):
        if request.arm.target == BASE:  # base rows drawn as if t2's
            flat = np.random.default_rng(i).choice(256, p=TRUTH.joint("t2").ravel())
            outcome.answers[0][i] = Answer([int(flat // 16), int(flat % 16)], [], 0)
    found = verdict(cell, outcome)
    assert found.status is Status.WRONG and len(found.how) == 1 and "base requests" in found.how[0]


def test_first_drafts_accepted_at_another_rate_are_seen() -> None:
    cell = Cell("dflash", sampling="sampled")
    outcome = right_outcome(cell)
    outcome.answers[0] = [replace(a, accepted=[int(i % 5 == 0)]) for i, a in enumerate(outcome.answers[0])]
    found = verdict(cell, outcome)
    assert found.status is Status.WRONG and "first drafts" in found.how[0]


@pytest.mark.parametrize(
    ("stage", "kind", "message", "where", "status"),
    [
        ("start", "ImportError", "needs a package", "vllm/config/speculative.py:1 in f", Status.UNSUPPORTED),
        ("start", "ValueError", "dflash is not supported with LoRA", "vllm/x.py:1 in f", Status.UNSUPPORTED),
        (
            "start",
            "EngineError",
            "no such method",
            "lora_spec/serving/validate.py:1 in f",
            Status.UNSUPPORTED,
        ),
        ("start", "RuntimeError", "einsum(): size 8 is not supported", "vllm/lora/x.py:1 in f", Status.ERROR),
        ("start", "ValueError", "cannot broadcast", "vllm/x.py:1 in f", Status.ERROR),
        ("generate", "NotImplementedError", "later", "vllm/x.py:1 in f", Status.ERROR),
        ("start", "TimeoutError", "no answer within 300 s", "", Status.ERROR),
    ],
)
def test_refusals_are_told_from_failures(
    stage: str, kind: str, message: str, where: str, status: Status
) -> None:
    error = {"type": kind, "message": message, "where": where}
    found = verdict(Cell("none"), Outcome(stage, error=error))
    assert found.status is status and message in found.how[0] and where in found.how[0]


def test_an_error_is_described_by_its_cause_without_paths() -> None:
    try:
        try:
            raise KeyError("inner /secret/models/target is missing")
        except KeyError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as error:
        found = describe(error, ("/secret/models",))
    assert found["type"] == "KeyError" and "…/target" in found["message"]
    assert found["where"].startswith("test_composability.py:")
    assert len(scrub("x" * 5000)) == 600
    quoted = "Unexpected key [type=x, input_value={'d1': '/secr...'}, input_type=dict] For more"
    assert scrub(quoted) == "Unexpected key [type=x, input_value=…, input_type=dict] For more"


# --- comparisons ---


def test_a_missing_token_is_a_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 9], [1, 2, 3]) == 1


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_the_right_distribution_stays_below_its_limit_and_another_does_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    joint, other = (rng.dirichlet(np.full(64, 0.5)).reshape(8, 8) for _ in range(2))
    for source, fits in ((joint, True), (other, False)):
        flat = rng.choice(64, size=600, p=source.ravel())
        tv, limit, _ = worst_variation(np.stack([flat // 8, flat % 8], axis=1), joint, LIMITS.deviations)
        assert (tv <= limit) == fits


def test_shares_are_compared_on_their_own_scale() -> None:
    assert two_share_z(300, 600, 300, 600) == 0
    assert abs(two_share_z(310, 600, 290, 600)) < 2
    assert abs(two_share_z(100, 600, 300, 600)) > 5
    assert two_share_z(0, 0, 1, 2) == float("inf")


# --- the overlay and its advice ---


def test_advice_follows_the_smallest_change() -> None:
    dynamic = Cell("dflash", "mixed", "dynamic")
    known = {(dynamic, "plugin"), (Cell("dflash", "mixed", "merged"), "stock"), (Cell("none"), "stock")}
    both = lambda cell, column: (cell, column) in known  # noqa: E731
    assert advise(Cell("none"), both, COLUMNS) == AS_IT_IS
    assert advise(dynamic, both, COLUMNS) == USE_PLUGIN
    assert advise(dynamic, both, ["stock"]) == "merge drafter LoRA"
    assert advise(Cell("suffix"), both, ["stock"]) == "no speculation"
    assert advise(Cell("none", sampling="sampled"), both, COLUMNS) == NOTHING


def test_splitting_the_traffic_needs_both_halves() -> None:
    mixed, one, none = (Cell("ngram", t) for t in ("mixed", "one", "none"))
    split = "split traffic"
    assert advise(mixed, lambda c, _: c in (one, none), COLUMNS) == split
    assert split not in advise(mixed, lambda c, _: c == one, COLUMNS)


@given(cells, st.sets(cells, max_size=40))
def test_advice_never_speaks_of_what_does_not_work(cell: Cell, working: set[Cell]) -> None:
    asked: list[Cell] = []

    def works(other: Cell, column: str) -> bool:
        asked.append(other)
        return other in working

    advice = advise(cell, works, ["stock"])
    assert all(other.meaningful for other in asked), "advice leads to a cell that cannot exist"
    assert (advice == AS_IT_IS) == (cell in working)
    assert all(other.sampling == cell.sampling for other in asked)  # clients choose that, not operators
    assert set(advice.split(" + ")) <= set(MEANINGS)
    if not working:
        assert advice == NOTHING


def parameters() -> ComposabilityParameters:
    return ComposabilityParameters(tier="pocket", evidence_class="measured")


def test_without_observations_the_matrix_is_a_contract(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    matrix = cell_matrix.load_matrix(parameters())
    assert matrix.stamp.evidence_class == "contract"
    assert (matrix.table["stock"] == "planned").sum() == len(CELLS)
    assert not {s.value for s in Status} & set(matrix.table["stock"])
    assert "nothing is claimed" in composability.takeaway(matrix)
    assert (matrix.table["fallback"] == "").all()


@pytest.fixture
def smoke(smoke_results, monkeypatch) -> ComposabilityParameters:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(smoke_results))
    return ComposabilityParameters(tier="smoke", evidence_class="smoke")


def test_records_lie_over_their_cells_and_nowhere_else(smoke) -> None:
    matrix = cell_matrix.load_matrix(smoke)
    assert matrix.stamp.evidence_class == "smoke" and len(matrix.table) == 864
    statuses = matrix.table.set_index("cell")["plugin"]
    for cell in CELLS:
        assert statuses[cell.name] == matrix.records[f"plugin/{cell.name}"].results["status"]
    others = statuses.drop([cell.name for cell in CELLS])
    assert set(others) == {"not run", "not applicable"}
    assert (others == "not applicable").sum() == sum(not cell.meaningful for cell in full_matrix())
    counted = composability.status_table(matrix).set_index("column").sum(axis=1)
    assert (counted == len(CELLS)).all()


def test_records_of_another_class_or_of_other_parameters_are_refused(smoke, tmp_path, monkeypatch) -> None:
    unit = next(u for u in all_units(PARAMS) if u.kind is Kind.CELL)
    source = load_record(results_dir("smoke", "phase0") / "stock" / f"{unit.name}.json", allow={"smoke"})
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    path = tmp_path / "smoke" / "phase0" / "stock" / f"{unit.name}.json"
    write_record(path, source)
    cell_matrix.load_matrix(smoke)
    (tmp_path / "pocket").symlink_to(tmp_path / "smoke")
    with pytest.raises(EvidenceError, match="evidence class smoke"):
        cell_matrix.load_matrix(parameters())
    from lora_spec.files import canonical_sha256

    config = {**source.config, "params": {**source.config["params"], "seed": 1}}
    write_record(
        path, source.model_copy(update={"config": config, "config_sha256": canonical_sha256(config)})
    )
    with pytest.raises(EvidenceError, match="other parameters"):
        cell_matrix.load_matrix(smoke)
