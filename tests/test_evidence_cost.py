"""What evidence costs: counting without coins, what the record must hold, and what is said of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.acceptance import attempt_weights, censor_last_step
from lora_spec.errors import EvidenceError, LoraSpecError, ParamsError
from lora_spec.measure.evidence_cost import EvidenceCost, load_evidence_cost
from lora_spec.phases import cost_estimates, evidence_cost
from lora_spec.phases.parameters import CostParameters
from lora_spec.plots import evidence_cost_figure
from lora_spec.pool import load_pool

SMOKE = CostParameters(tier="smoke", evidence_class="smoke")


def walk(verdicts: tuple[bool, ...], k: int) -> list[int]:
    """Judged positions of an output whose position t would be accepted if ``verdicts[t]``."""
    judged, t = [], 0
    while t < len(verdicts):
        for _ in range(k):
            if t == len(verdicts):
                return judged
            judged.append(t)
            t += 1
            if not verdicts[t - 1]:
                break
        else:
            t += 1  # the target's own token after k accepted ones
    return judged


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8), st.integers(1, 5))
def test_the_weights_are_the_judged_positions_over_all_coins(accept: list[float], k: int) -> None:
    want = np.zeros(len(accept))
    for verdicts in itertools.product((False, True), repeat=len(accept)):
        chance = np.prod([a if v else 1 - a for a, v in zip(accept, verdicts, strict=True)])
        want[walk(verdicts, k)] += chance
    np.testing.assert_allclose(attempt_weights(np.array(accept), k), want, atol=1e-12)


def test_scoring_sampled_text_has_the_expectation_of_counting() -> None:
    """Speculative sampling of a Markov chain against plain samples of it, with a tenth of the noise."""
    rng, size, length, k, n = np.random.default_rng(0), 5, 12, 3, 1500
    p, q = (rng.dirichlet(np.full(size, 0.5), size) for _ in range(2))
    both = np.minimum(p, q).sum(1)  # by the token before

    def draw(weights: np.ndarray) -> int:
        return int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right"))

    counted, scored = [], []
    for _ in range(n):
        text, steps = [draw(p[0])], []
        while len(text) < length:
            accepted, last = 0, text[-1]
            for _ in range(k):
                token = draw(q[last])
                if rng.random() >= min(1.0, p[last, token] / q[last, token]):
                    text.append(draw(np.maximum(p[last] - q[last], 0)))
                    break
                text.append(token)
                accepted, last = accepted + 1, token
            else:
                text.append(draw(p[last]))
            steps.append(accepted)
        censored = censor_last_step(steps, length, k)
        counted.append((censored.accepted_emitted, censored.accepted_emitted + censored.rejections))
        plain = [draw(p[0])]
        while len(plain) < length:
            plain.append(draw(p[plain[-1]]))
        before, after = np.array(plain[:-1]), np.array(plain[1:])
        weights = attempt_weights(np.minimum(1.0, q[before, after] / p[before, after]), k)
        scored.append((weights @ both[before], weights.sum()))
    ratios, errors = [], []
    for rows in (np.array(counted, dtype=float), np.array(scored)):
        ratio = rows[:, 0].sum() / rows[:, 1].sum()
        units = (rows[:, 0] - ratio * rows[:, 1]) / rows[:, 1].mean()
        ratios.append(ratio), errors.append(units.std(ddof=1) / np.sqrt(n))
    assert abs(ratios[0] - ratios[1]) < 4 * np.hypot(*errors)
    assert errors[1] < 0.75 * errors[0]


# ---------------------------------------------------------------- the analysis


def made(
    *,
    noise: dict[str, float] | None = None,
    bias: float = 0.0,
    cpu: dict[str, float] | None = None,
    n: int = 64,
) -> cost_estimates.CostEvidence:
    """Evidence with planted noise, bias of the text estimator, and compute."""
    params = load_evidence_cost()
    noise = (
        {"counted": 0.12, "rescored": 0.06, "sampled": 0.06, "sampled_uniform": 0.06, "lockstep": 0.05}
        | {"text": 0.02}
        | (noise or {})
    )
    seconds = {
        "counted": 1.0,
        "plain": 0.5,
        "sampled": 0.5,
        "rescored": 0.5,
        "lockstep": 0.5,
        "text": 0.2,
    } | (cpu or {})
    values, timings = [], []
    for number, adapter in enumerate(params.adapters):
        for name, sd in noise.items():
            for arm in ("base", "adapted"):
                rng = np.random.default_rng([number, len(name), len(arm)])
                level = 0.5 if arm == "base" else 0.4 + bias * (name == "text")
                frame = {"adapter": adapter, "estimator": name, "arm": arm, "prompt_index": np.arange(n)}
                share = level + rng.normal(0, sd / np.sqrt(2), n)
                values.append(pd.DataFrame(frame | {"numerator": 40 * share, "denominator": 40.0}))
        timings += [
            {"adapter": adapter, "part": part, "arm": arm, "cpu_s": s * n / 2, "prompts": n}
            for part, s in seconds.items()
            for arm in ("base", "adapted")
        ]
        timings.append(
            {"adapter": adapter, "part": "counted start", "arm": "base", "cpu_s": 30.0, "prompts": 0}
        )

    records: dict[str, Any] = dict.fromkeys(params.adapters, SimpleNamespace(results={"prompts": n}))
    return cost_estimates.CostEvidence(
        params, records, pd.concat(values, ignore_index=True), pd.DataFrame(timings)
    )


def tables(cost: cost_estimates.CostEvidence) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    estimates = evidence_cost.estimate_table(cost)
    return estimates, evidence_cost.cost_table(cost, estimates), evidence_cost.bias_table(cost)


def row(table: pd.DataFrame, estimator: str) -> pd.Series:
    return table[table["estimator"] == evidence_cost.LABELS[estimator]].iloc[0]


def test_prompts_and_compute_follow_from_noise_and_seconds() -> None:
    cost = made()
    estimates, costs, _ = tables(cost)
    counted = row(costs, "counted")
    assert counted["ratio"] == 1.0 and counted["cpu_per_prompt"] == pytest.approx(1.0)
    assert counted["prompts"] == pytest.approx((0.12 / 0.01) ** 2, rel=0.4)
    # a quarter of the variance at half the price, and no way below the declared minimum of prompts
    assert row(costs, "lockstep")["ratio"] == pytest.approx((0.12 / 0.05) ** 2 / 0.5, rel=0.4)
    assert row(costs, "text")["prompts"] == cost.params.minimum
    own = estimates[estimates["estimator"] == "rescored"]
    assert (own["cpu_per_prompt"] - 1.5).abs().max() < 1e-9, "counting is paid for too"
    for _, one in costs.iterrows():
        assert one["low"] <= one["ratio"] <= one["high"]
    # what is paid once counts apart
    assert counted["ratio_whole"] == 1.0 and row(costs, "text")["ratio_whole"] > row(costs, "text")["ratio"]


def test_half_the_compute_is_twice_the_ratio() -> None:
    once, twice = (row(tables(made(cpu={"lockstep": s}))[1], "lockstep") for s in (0.5, 0.25))
    assert twice["ratio"] == pytest.approx(2 * once["ratio"])


def test_a_planted_bias_is_seen_and_none_is_not() -> None:
    biased, free = (row(tables(made(bias=b))[2], "text") for b in (0.05, 0.0))
    assert biased["low"] > 0 and biased["low"] < 0.05 < biased["high"]
    assert free["low"] < 0 < free["high"] and free["rms"] < 0.03
    assert biased["rms"] == pytest.approx(0.05, abs=0.02)


def test_the_takeaway_says_whether_the_goal_is_met() -> None:
    cost = made(bias=0.05)
    _, costs, bias = tables(cost)
    said = evidence_cost.takeaway(cost, costs, bias)
    assert "the goal of 5 times is met" in said and "held-out text" in said and "biased" in said
    slow = dict.fromkeys(("lockstep", "text", "plain", "sampled"), 60.0)
    _, costs, bias = tables(made(cpu=slow))
    assert "the goal of 5 times is missed" in evidence_cost.takeaway(cost, costs, bias)


def test_the_curve_meets_the_target_where_the_table_says() -> None:
    cost = made()
    estimates, _, _ = tables(cost)
    curves = evidence_cost.curve_table(cost, estimates)
    for name, own in curves.groupby("estimator"):
        assert (np.diff(own["se"]) < 0).all() and (np.diff(own["cpu_s"]) > 0).all()
        assert own["se"].min() <= cost.params.target_se * (1 + 1e-9), name
        assert own[~own["measured"]]["prompts"].gt(64).all()
    figure = evidence_cost_figure(
        curves, evidence_cost.bias_table(cost), evidence_cost.LABELS, 0.01, 0.95, SMOKE.stamp
    )
    assert "SMOKE" in [text.get_text() for text in figure.texts]


def test_arms_of_different_prompts_are_refused() -> None:
    cost = made()
    gone = cost.values.drop(cost.values.index[0])
    with pytest.raises(EvidenceError, match="different prompts"):
        evidence_cost.estimate_table(
            cost_estimates.CostEvidence(cost.params, cost.records, gone, cost.timings)
        )


# ---------------------------------------------------------------- records


@pytest.fixture
def smoke(smoke_results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(smoke_results))
    return smoke_results


def test_the_smoke_records_go_through_the_whole_analysis(smoke: Path) -> None:
    cost = evidence_cost.load_cost(SMOKE)
    assert cost is not None and list(cost.records) == sorted(cost.params.adapters)
    assert evidence_cost.controls_table(cost)["passed"].all()
    _, costs, bias = tables(cost)
    assert set(costs["estimator"]) == set(evidence_cost.LABELS.values())
    assert "goal" in evidence_cost.takeaway(cost, costs, bias)
    assert evidence_cost.measured_sentence(cost).startswith("6 of the 6")


def test_a_failed_control_shows(smoke: Path) -> None:
    cost = evidence_cost.load_cost(SMOKE)
    first = next(iter(cost.records.values()))
    first.results["controls"]["adapted"] = first.results["controls"]["adapted"] | {"alpha": 0.9}
    table = evidence_cost.controls_table(cost)
    assert table.loc[table["where"].str.startswith("adapted"), "passed"].tolist() == [False]


def test_other_classes_and_foreign_adapters_are_refused(smoke: Path, tmp_path: Path, monkeypatch) -> None:
    import shutil

    shutil.copytree(smoke / "smoke/phase2/cost", tmp_path / "pocket/phase2/cost")
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    with pytest.raises(EvidenceError, match="evidence class smoke"):
        evidence_cost.load_cost(CostParameters(tier="pocket", evidence_class="measured"))
    with pytest.raises(EvidenceError, match="tier smoke among those of tier pocket"):
        evidence_cost.load_cost(SMOKE.model_copy(update={"tier": "pocket"}))
    (tmp_path / "smoke/phase2").mkdir(parents=True)
    shutil.copytree(smoke / "smoke/phase2/cost", tmp_path / "smoke/phase2/cost")
    for path in (tmp_path / "smoke/phase2/cost").glob("german-*"):
        path.rename(path.with_name(path.name.replace("german-r16-all-s40", "german-r8-qv-s80")))
    with pytest.raises(EvidenceError):
        evidence_cost.load_cost(SMOKE)


def test_nothing_measured_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    assert evidence_cost.load_cost(SMOKE) is None
    assert "Nothing of this has been measured yet" in evidence_cost.measured_sentence(None)


# ---------------------------------------------------------------- the declaration


def test_the_adapters_are_named_beforehand_and_spread_over_families() -> None:
    params, pool = load_evidence_cost(), load_pool()
    assert len({pool[name].family for name in params.adapters}) == 5
    assert len({pool[name].domain for name in params.adapters}) == len(params.adapters) == 6
    plan = EvidenceCost()
    assert plan.design.indices("german") == range(0, 96)
    for name in params.adapters:
        assert max(plan.design.indices(pool[name].domain)) < len(plan.inputs.prompts(pool[name].domain).eval)


def test_a_record_s_config_does_not_depend_on_the_other_adapters(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "params/evidence_cost.yaml").read_text()
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(text.replace("  - json-r4-mlp-s40\n", ""))
    name = "german-r16-all-s40"
    assert EvidenceCost(fewer).config(name) == EvidenceCost().config(name)
    fewer.write_text(text.replace("count: 96", "count: 4"))
    assert EvidenceCost(fewer).config(name) != EvidenceCost().config(name)


def test_bad_parameters_and_names_are_clear_errors(tmp_path: Path, cli) -> None:
    text = (Path(__file__).parents[1] / "params/evidence_cost.yaml").read_text()
    bad = tmp_path / "bad.yaml"
    bad.write_text(text.replace("target_se", "target_error"))
    with pytest.raises(ParamsError, match="target_se"):
        EvidenceCost(bad)
    with pytest.raises(LoraSpecError, match="no adapter nobody"):
        EvidenceCost().unit("nobody")
    done = cli("evidence-cost", "--params", bad)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- scores of the models themselves


def naive(
    model: Any, drafter: Any, prompt: list[int], output: list[int], temperature: float
) -> tuple[Any, Any]:
    """o_t and a_t of positions 1, 2, ..., one full softmax at a time."""
    import torch

    overlaps, accepts = [], []
    for t in range(1, len(output)):
        context = torch.tensor([[*prompt, *output[:t]]])
        with torch.no_grad():
            p, q = ((m(context).logits[0, -1] / temperature).softmax(-1) for m in (model, drafter))
        overlaps.append(float(torch.minimum(p, q).sum()))
        accepts.append(min(1.0, float(q[output[t]] / p[output[t]])))
    return overlaps, accepts


@pytest.mark.torch
def test_scores_are_those_of_each_position_alone() -> None:
    pytest.importorskip("torch")
    from lora_spec.measure.position_scores import score_outputs
    from lora_spec.measure.tiny_models import perturbed, prompts, tiny_llama

    target = tiny_llama()
    drafter = perturbed(target, 0.3)
    starts, outputs = (
        prompts(5, 6),
        [out[:n] for out, n in zip(prompts(5, 9, seed=2), (9, 1, 4, 9, 2), strict=True)],
    )
    scores = score_outputs(starts, outputs, 0.8, target=target, drafter=drafter, batch=3)
    assert [len(s.overlap) for s in scores] == [8, 0, 3, 8, 1]
    for start, output, score in zip(starts, outputs, scores, strict=True):
        overlaps, accepts = naive(target, drafter, start, output, 0.8)
        np.testing.assert_allclose(score.overlap, overlaps, atol=1e-5)
        np.testing.assert_allclose(score.accept, accepts, atol=1e-5)
        assert score.tokens == output


@pytest.mark.torch
def test_in_step_the_scores_are_those_of_the_finished_text() -> None:
    torch = pytest.importorskip("torch")
    from lora_spec.measure.position_scores import lockstep, score_outputs
    from lora_spec.measure.tiny_models import VOCAB, perturbed, prompts, tiny_llama

    target = tiny_llama()
    drafter, other = perturbed(target, 0.3), perturbed(target, 0.05, seed=9)
    starts, seeds = prompts(7, 6), list(range(7))
    options: dict[str, Any] = {"max_tokens": 12, "stop_token": -1, "batch": 4}
    free = lockstep(starts, seeds, 0.8, target=target, drafter=drafter, **options)
    stop = next(t for t in range(VOCAB) if 0 < sum(t in s.tokens for s in free) < len(free))
    options["stop_token"] = stop
    done = lockstep(starts, seeds, 0.8, target=target, drafter=drafter, **options)
    again = score_outputs(starts, [s.tokens for s in done], 0.8, target=target, drafter=drafter, batch=7)
    for one, two, whole in zip(done, again, free, strict=True):
        np.testing.assert_allclose(one.overlap, two.overlap, atol=1e-4)
        np.testing.assert_allclose(one.accept, two.accept, atol=1e-4)
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else 12
        assert one.tokens == whole.tokens[:end] and len(one.overlap) == end - 1
    # Batches do not matter, seeds do; a target much like the first draws much the same text from equal seeds.
    alone = lockstep(starts[5:6], seeds[5:6], 0.8, target=target, drafter=drafter, **options)
    assert alone[0].tokens == done[5].tokens
    fresh = lockstep(starts, [s + 50 for s in seeds], 0.8, target=target, drafter=drafter, **options)
    alike = lockstep(starts, seeds, 0.8, target=other, drafter=drafter, **options)
    same = [sum(a.tokens[0] == b.tokens[0] for a, b in zip(done, x, strict=True)) for x in (alike, fresh)]
    assert same[0] >= 6 > same[1]
    # First tokens follow the target.
    n = 2000
    first = lockstep(
        [starts[0]] * n,
        list(range(n)),
        0.8,
        target=target,
        drafter=drafter,
        max_tokens=1,
        stop_token=-1,
        batch=n,
    )
    counts = np.bincount([s.tokens[0] for s in first], minlength=VOCAB) / n
    with torch.no_grad():
        exact = (target(torch.tensor([starts[0]])).logits[0, -1] / 0.8).softmax(-1).double().numpy()
    floor = np.random.default_rng(0).multinomial(n, exact / exact.sum(), size=300) / n
    limit = np.quantile(np.abs(floor - exact).sum(1), 0.999)
    assert np.abs(counts - exact).sum() < limit


@pytest.mark.vllm
def test_one_adapter_on_four_prompts_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from lora_spec.errors import MissingTierError
    from lora_spec.provenance import load_record, load_table
    from lora_spec.substrate.model_folders import DRAFTER, TARGET, require_model

    try:
        require_model(TARGET), require_model(DRAFTER)
    except MissingTierError as error:
        pytest.skip(str(error))
    params, adapter = Path(__file__).parents[1] / "params", "german-r8-qv-s80"  # a committed one
    screen = (
        (params / "phase2_screen.yaml")
        .read_text()
        .replace("overlap_tolerance: 0.05", "overlap_tolerance: 0.5")
    )
    (tmp_path / "screen.yaml").write_text(screen)
    text = (params / "evidence_cost.yaml").read_text()
    text = text.replace("design: phase2_screen.yaml", f"design: {tmp_path / 'screen.yaml'}")
    text = text.replace("count: 96", "count: 4").replace("warmup: 32", "warmup: 2")
    (tmp_path / "cost.yaml").write_text(text.replace("german-r16-all-s40", adapter))
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    plan = EvidenceCost(tmp_path / "cost.yaml")
    assert plan.state(adapter) == "to do"
    plan.execute_unit(adapter)
    assert plan.state(adapter) == "done"
    record = load_record(plan.record_path(adapter))
    values, timings = (load_table(plan.record_path(adapter), name) for name in ("values", "timings"))
    assert record.results["windows_changed"] == [True] * 4
    assert set(values["estimator"]) == set(cost_estimates.PARTS)
    counts = values.groupby(["estimator", "arm"])["prompt_index"].apply(list)
    assert len(counts) == 12 and all(found == [0, 1, 2, 3] for found in counts)
    assert values["numerator"].between(0, values["denominator"]).all()
    served = timings[~timings["part"].str.contains("start|load")]
    assert (served["prompts"] == 4).all() and (timings["cpu_s"] > 0).all()
    needed = {part for parts in cost_estimates.PARTS.values() for part in parts}
    assert needed <= set(served["part"])
    # Both ways on the same tokens weigh the same positions.
    sums = values.groupby(["estimator", "arm"])["denominator"].sum()
    for arm in ("base", "adapted"):
        assert sums["rescored", arm] == pytest.approx(sums["counted", arm], rel=0.3)
