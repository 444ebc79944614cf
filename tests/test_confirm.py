"""The confirmation: who is chosen, what carries over, and what partial or foreign evidence is told."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lora_spec.errors import EvidenceError, ParamsError
from lora_spec.measure.design import load_design
from lora_spec.phases import agreement, confirm, entropy, healing, predictor, screen, selection, strength
from lora_spec.phases.carryover import Errors, deming_slope, disattenuated, pearson
from lora_spec.phases.parameters import ConfirmParameters, NotebookParameters
from lora_spec.phases.selection import ConfirmRule, choose
from lora_spec.pool import without_update
from lora_spec.provenance import load_record, write_record

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ConfirmParameters(tier="smoke", evidence_class="smoke")
POCKET = ConfirmParameters(tier="pocket", evidence_class="measured")

# ---------------------------------------------------------------- the choice


def rule(**changes: object) -> ConfirmRule:
    values = {"schema": "lora-spec-confirm/1", "designs": ["x.yaml"], "extremes": 2, "per_domain": 1}
    values |= {"ranked_by": ["elasticnet", "norm_log"], "moved_share": 0.5, "random": 2, "seed": 7}
    return ConfirmRule(**(values | changes))


def left_out(labels: np.ndarray, domains: np.ndarray, weights: np.ndarray, norm: np.ndarray) -> pd.DataFrame:
    """Predictions for left-out domains: the mean label of the others, and what weights or norm add to it."""
    constant = np.array([labels[domains != domain].mean() for domain in domains])
    return pd.DataFrame(
        {
            "adapter": [f"adapter-{i:02d}" for i in range(len(labels))],
            "domain": domains,
            "delta_alpha": labels,
            "constant": constant,
            "elasticnet": constant + weights,
            "norm_log": constant + norm,
        }
    )


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 10))
def test_adapters_are_ranked_by_their_weights_and_never_by_their_labels(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    domains = np.repeat(list("abcdef"), 3)
    weights, norm = rng.permutation(18) / 100, rng.permutation(18) / 100
    labels = spread * rng.normal(size=18)
    ranked = selection.rank(left_out(labels, domains, weights, norm), rule())
    assert ranked["predicted"].argsort().tolist() == weights.argsort().tolist()
    assert ranked["predicted"].mean() == pytest.approx(labels.mean() + weights.mean())
    few = np.where(np.arange(18) < 8, weights, 0.0)  # says something of 7 or 8 of 18
    ranked = selection.rank(left_out(labels, domains, few, norm), rule())
    assert ranked["predicted"].argsort().tolist() == norm.argsort().tolist()
    assert set(ranked["ranked_by"]) == {"norm_log"}


def test_models_that_all_predict_the_mean_rank_nobody() -> None:
    table = left_out(np.arange(6.0), np.array(list("abcdef")), np.zeros(6), np.zeros(6))
    with pytest.raises(EvidenceError, match="none of elasticnet, norm_log tells 50% of the adapters"):
        selection.rank(table, rule())


@st.composite
def predicted(draw: st.DrawFn) -> pd.DataFrame:
    """Adapters of some domains; predictions may be equal."""
    domains = draw(st.lists(st.sampled_from("abcdef"), min_size=6, max_size=20))
    values = draw(st.lists(st.integers(-3, 3), min_size=len(domains), max_size=len(domains)))
    names = [f"adapter-{i:02d}" for i in range(len(domains))]
    predictions = [value / 10 for value in values]
    return pd.DataFrame(
        {"adapter": names, "domain": domains, "predicted": predictions, "ranked_by": "elasticnet"}
    )


@settings(deadline=None, max_examples=80)
@given(predicted(), st.randoms(use_true_random=False))
def test_the_choice_depends_on_no_order_and_keeps_its_caps(table: pd.DataFrame, random) -> None:
    order = list(range(len(table)))
    random.shuffle(order)
    excluded = {"adapter-01", "adapter-04"}
    try:
        chosen = choose(table, rule(), excluded)
    except EvidenceError:
        with pytest.raises(EvidenceError):
            choose(table.iloc[order], rule(), excluded)
        return
    pd.testing.assert_frame_equal(chosen, choose(table.iloc[order], rule(), excluded))
    assert not excluded & set(chosen["adapter"])
    assert chosen["adapter"].is_unique
    assert chosen["role"].value_counts().to_dict() == {"lowest": 2, "highest": 2, "random": 2}
    for role, sign in (("lowest", 1), ("highest", -1)):
        own = chosen[chosen["role"] == role]
        assert own["domain"].value_counts().max() <= 1
        # Whoever would have been more extreme was kept out by the cap of the domain, or is on the other side.
        rest = table[
            ~table["adapter"].isin(set(chosen["adapter"]) - set(chosen.query("role == 'random'")["adapter"]))
        ]
        rest = rest[~rest["adapter"].isin(excluded)]
        beyond = rest[
            sign * rest["predicted"] < sign * own["predicted"].max()
            if sign == 1
            else rest["predicted"] > own["predicted"].min()
        ]
        assert set(beyond["domain"]) <= set(own["domain"])


def test_another_seed_draws_others_and_the_extremes_stay() -> None:
    table = pd.DataFrame(
        {
            "adapter": [f"adapter-{i:02d}" for i in range(40)],
            "domain": [f"domain-{i % 10}" for i in range(40)],
            "predicted": np.linspace(-0.2, 0.1, 40),
            "ranked_by": "elasticnet",
        }
    )
    first, second = (choose(table, rule(seed=seed, random=8)) for seed in (1, 2))
    extremes = [chosen[chosen["role"] != "random"].reset_index(drop=True) for chosen in (first, second)]
    pd.testing.assert_frame_equal(*extremes)
    assert set(first["adapter"]) != set(second["adapter"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prediction_that_is_no_number_is_refused(value: float) -> None:
    table = pd.DataFrame(
        {"adapter": list("abcdefgh"), "domain": list("abcdefgh"), "predicted": 0.1, "ranked_by": ""}
    )
    table.loc[3, "predicted"] = value
    with pytest.raises(EvidenceError, match="not finite"):
        choose(table, rule())


def test_too_few_adapters_are_one_clear_error() -> None:
    table = pd.DataFrame({"adapter": list("abc"), "domain": list("abc"), "predicted": 0.1, "ranked_by": ""})
    with pytest.raises(EvidenceError, match="3 adapters can be chosen where the rule wants 6"):
        choose(table, rule())


def test_the_declared_rule_wants_enough_and_leaves_out_what_has_no_update() -> None:
    declared = selection.load_rule()
    assert 2 * declared.extremes + declared.random >= 16
    assert "html-r16-all-s0" in without_update()
    for name in declared.designs:
        design = load_design(name)
        screened = load_design(screen.DESIGN)
        assert design.own == screened.own and design.decodings["t08"].own is None
        assert design.num_speculative_tokens == screened.num_speculative_tokens
        assert design.target == screened.target and design.drafter != screened.drafter
        assert design.seed != screened.seed


@pytest.fixture
def checkout(tmp_path: Path, smoke_results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own with a made-up screen and predictor, and no choice yet."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "params", root / "params")
    (root / "pyproject.toml").touch()
    shutil.copytree(smoke_results, root / "results")
    shutil.rmtree(root / "results" / "smoke" / "phase2" / "selection")
    monkeypatch.setenv("LORA_SPEC_ROOT", str(root))
    monkeypatch.delenv("LORA_SPEC_RESULTS", raising=False)
    return root


def test_a_choice_is_recorded_once_and_written_into_the_designs(checkout: Path) -> None:
    names = [checkout / "params" / name for name in selection.load_rule().designs]
    assert all(len(load_design(name).adapters) > 20 for name in names), (
        "planned as the whole pool until it is chosen"
    )
    chosen, same = selection.select(SMOKE)
    assert not same and selection.load_selection(SMOKE)["adapter"].tolist() == chosen["adapter"].tolist()
    for name in names:
        design = load_design(name)
        assert design.selected and design.adapters == chosen["adapter"].tolist()
        assert set(design.controls.fp32_adapters) <= set(chosen.query("role != 'random'")["adapter"])
    record = load_record(selection.record_path("smoke"), allow={"smoke"})
    fit = load_record(checkout / "results" / "smoke" / "phase3" / "record.json", allow={"smoke"})
    assert record.revisions["fit"] == fit.record_sha256
    before = [path.read_bytes() for path in (*names, selection.record_path("smoke"))]
    again, same = selection.select(SMOKE)
    assert same and again.equals(chosen)
    assert [path.read_bytes() for path in (*names, selection.record_path("smoke"))] == before


def test_a_choice_is_fixed_once_anything_is_measured_on_it(checkout: Path) -> None:
    first, _ = selection.select(SMOKE)
    declared = checkout / "params" / "confirm.yaml"
    declared.write_text(declared.read_text().replace("seed: 2033", "seed: 2034"))
    other, _ = selection.plan_selection(SMOKE)
    assert set(other["adapter"]) != set(first["adapter"])
    folder = load_design("phase2_confirm.yaml").directory()
    folder.mkdir(parents=True)
    (folder / "base--german.json").write_text("{}")
    with pytest.raises(EvidenceError, match="the choice is fixed"):
        selection.select(SMOKE)
    assert selection.load_selection(SMOKE)["adapter"].tolist() == first["adapter"].tolist()
    assert load_design("phase2_confirm.yaml").adapters == first["adapter"].tolist()
    (folder / "base--german.json").unlink()
    chosen, same = selection.select(SMOKE)
    assert not same and chosen.equals(other)


def test_a_predictor_of_another_screen_chooses_nothing(checkout: Path) -> None:
    path = checkout / "results" / "smoke" / "phase2" / "screen" / "base--german.json"
    record = load_record(path, allow={"smoke"})
    table = pd.read_parquet(path.with_name("base--german.requests.parquet"))
    write_record(path, record.model_copy(update={"seed": 1}), {"requests": table})
    with pytest.raises(EvidenceError, match="fitted on other records"):
        selection.plan_selection(SMOKE)


def test_the_command_says_what_is_missing(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    done = cli("select-confirm", "--execute")
    assert done.returncode == 2 and "no predictor has been fitted" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_measured_before_its_adapters_are_chosen(cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    text = (ROOT / "params" / screen.DESIGN).read_text(encoding="utf-8")
    design = tmp_path / "design.yaml"
    design.write_text(text.replace("\nadapters: pool\n", "\nadapters: unselected\n"), encoding="utf-8")
    done = cli("measure", design, "--execute")
    assert done.returncode == 2 and "chosen first: lora-spec select-confirm --execute" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_design_without_a_list_of_adapters_is_refused() -> None:
    chosen = pd.DataFrame({"adapter": ["a", "b"], "role": ["lowest", "highest"]})
    with pytest.raises(ParamsError, match="one list of adapters"):
        selection.with_adapters("schema: x\n", chosen)


# ---------------------------------------------------------------- slopes and correlations

ERRORS = st.tuples(st.floats(0.001, 0.1), st.floats(0.001, 0.1), st.floats(-0.9, 0.9))


def errors_of(n: int, x: float, y: float, correlation: float = 0.0) -> Errors:
    """The same errors for n adapters."""
    return Errors(np.full(n, x**2), np.full(n, y**2), np.full(n, correlation * x * y))


def points(n: int, slope: float = 1.0, scatter: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(-0.05, 0.08, n)
    return x, slope * x + 0.01 + scatter * rng.normal(size=n)


@given(ERRORS, st.integers(3, 30), st.integers(0, 99))
def test_perfect_carry_over_is_slope_one_whatever_the_errors(sizes, n: int, seed: int) -> None:
    x, _ = points(n, seed=seed)
    assert deming_slope(x, x, errors_of(n, *sizes)) == pytest.approx(1.0, abs=1e-6)


@given(ERRORS, st.floats(-3, 3), st.floats(0.0, 0.05), st.integers(0, 99))
def test_exchanging_the_sides_gives_the_reciprocal(sizes, slope: float, scatter: float, seed: int) -> None:
    assume(abs(slope) > 0.05)
    x, y = points(12, slope, scatter, seed)
    forth = deming_slope(x, y, errors_of(12, *sizes))
    back = deming_slope(y, x, errors_of(12, sizes[1], sizes[0], sizes[2]))
    assume(1e-3 < abs(forth) < 1e3)
    assert forth * back == pytest.approx(1.0, rel=1e-6)


@given(st.floats(0.2, 5.0), st.floats(0.001, 0.1), st.integers(0, 99))
def test_deming_is_its_closed_form(ratio: float, x_error: float, seed: int) -> None:
    x, y = points(15, 0.7, 0.04, seed)
    (sxx, sxy), (_, syy) = np.cov(x, y)
    spread = syy - ratio * sxx
    oracle = (spread + np.sqrt(spread**2 + 4 * ratio * sxy**2)) / (2 * sxy)
    assert deming_slope(x, y, errors_of(15, x_error, np.sqrt(ratio) * x_error)) == pytest.approx(
        oracle, rel=1e-6
    )


def test_without_errors_it_is_the_first_principal_direction() -> None:
    x, y = points(20, 0.6, 0.03)
    _, _, directions = np.linalg.svd(np.column_stack([x - x.mean(), y - y.mean()]))
    oracle = directions[0, 1] / directions[0, 0]
    nothing = errors_of(20, 0.0, 0.0)
    assert deming_slope(x, y, nothing) == pytest.approx(oracle)
    assert disattenuated(x, y, nothing) == pytest.approx(pearson(x, y))


def test_noise_flattens_a_regression_and_lowers_a_correlation_but_not_these() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(0, 0.05, 4000)
    x, y = truth + rng.normal(0, 0.03, 4000), 0.8 * truth + rng.normal(0, 0.02, 4000)
    errors = errors_of(4000, 0.03, 0.02)
    assert np.polyfit(x, y, 1)[0] < 0.65
    assert deming_slope(x, y, errors) == pytest.approx(0.8, abs=0.03)
    assert pearson(x, y) < 0.85
    assert disattenuated(x, y, errors) == pytest.approx(1.0, abs=0.02)


def test_errors_that_both_share_do_not_pass_for_agreement() -> None:
    rng = np.random.default_rng(2)
    common = rng.normal(0, 0.03, 4000)
    x, y = (rng.normal(0, 0.03, 4000) + common for _ in range(2))
    errors = errors_of(4000, 0.03, 0.03, 1.0)
    assert pearson(x, y) > 0.4
    assert disattenuated(x, y, errors) == pytest.approx(0.0, abs=0.06)


def test_what_cannot_be_told_is_nan() -> None:
    flat, (x, y) = np.zeros(5), points(5)
    assert np.isnan(deming_slope(flat, flat, errors_of(5, 0.1, 0.1)))
    assert np.isnan(deming_slope(x[:2], y[:2], errors_of(2, 0.1, 0.1)))
    assert np.isnan(disattenuated(x, y, errors_of(5, 1.0, 0.1))), "all noise"
    assert np.isnan(pearson(flat, y))
    assert deming_slope(flat, y, errors_of(5, 0.1, 0.1)) == np.inf


# ---------------------------------------------------------------- tables


def made_up_pairs(n: int = 18, slope: float = 1.0, scatter: float = 0.0, moved: str = "down") -> pd.DataFrame:
    x, _ = points(n)
    rng = np.random.default_rng(5)
    frames = []
    for drafter in ("healed", "dflash"):
        y = slope * x + scatter * rng.normal(size=n)
        table = pd.DataFrame({"adapter": [f"a{i:02d}" for i in range(n)], "drafter": drafter, "x": x, "y": y})
        table = table.assign(
            domain=[f"d{i % 9}" for i in range(n)], moved_x=moved, x_se=0.01, y_se=0.01, xy=0.0
        )
        for name in ("x", "y", "x_se", "y_se"):
            table[f"relative_{name}"] = table[name] / 0.5
        frames.append(table.assign(relative_xy=0.0))
    return pd.concat(frames, ignore_index=True)


def value(table: pd.DataFrame, measure: str, drafter: str = "healed") -> pd.Series:
    (row,) = [r for _, r in table.iterrows() if (r["drafter"], r["measure"]) == (drafter, measure)]
    return row


def test_perfect_carry_over_is_told() -> None:
    table = agreement.agreement_table(made_up_pairs())
    for measure in (agreement.SIGNS, agreement.RANKS, agreement.SLOPE, agreement.RELATIVE_SLOPE):
        assert value(table, measure)["value"] == pytest.approx(1.0)
    assert value(table, agreement.DIFFERENCE)["value"] == pytest.approx(0.0)
    sentence = agreement.agreement_sentence(table)
    assert "18 of the 18 adapters" in sentence and "not told from one" in sentence


def test_reversed_effects_are_told() -> None:
    table = agreement.agreement_table(made_up_pairs(slope=-1.0))
    assert value(table, agreement.SIGNS)["value"] == 0.0
    assert value(table, agreement.SLOPE)["value"] == pytest.approx(-1.0)
    assert "less than chance" in agreement.agreement_sentence(table)


def test_no_effect_at_all_is_told_and_not_an_error() -> None:
    table = agreement.agreement_table(made_up_pairs(slope=0.0, scatter=0.01, moved="none"))
    sentence = agreement.agreement_sentence(table)
    assert "none of its 18 adapters was told from zero" in sentence
    assert value(table, agreement.SIGNS)["n"] == 0
    constant = agreement.agreement_table(made_up_pairs(slope=0.0))
    assert "undefined" in agreement.agreement_sentence(constant)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_adapters_give_tables_without_intervals(count: int) -> None:
    pairs = made_up_pairs(n=count, scatter=0.01)
    table = agreement.agreement_table(pairs)
    assert len(table) == 14
    assert agreement.agreement_sentence(table) and agreement.panel_titles(table)


def test_the_order_of_rows_changes_nothing() -> None:
    pairs = made_up_pairs(scatter=0.02)
    shuffled = pairs.sample(frac=1.0, random_state=3)
    pd.testing.assert_frame_equal(agreement.agreement_table(pairs), agreement.agreement_table(shuffled))
    measured = pairs.assign(role=["lowest", "highest", "random"] * 12, predicted=0.0)
    first, second = (agreement.calibration_table(t, 0.1) for t in (measured, measured.sample(frac=1.0)))
    pd.testing.assert_frame_equal(first, second)


def test_predictions_that_are_right_are_told_right() -> None:
    pairs = made_up_pairs()
    measured = pairs.assign(predicted=pairs["y"]).sort_values(["drafter", "y"], ignore_index=True)
    measured["role"] = (["lowest"] * 6 + ["random"] * 6 + ["highest"] * 6) * 2
    table = agreement.calibration_table(measured, 0.01)
    assert (table["mae"] == 0).all() and (table["covered"] == 1).all()
    assert table["predicted"].to_numpy() == pytest.approx(table["observed"].to_numpy())
    contrast = table[table["role"] == agreement.CONTRAST]
    assert (contrast["low"] > 0).all()
    assert "in the predicted order" in agreement.calibration_sentence(table, 0.8)


# ---------------------------------------------------------------- entropy


def test_grouped_least_squares_is_least_squares() -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(40), rng.normal(size=(40, 2))])
    y = x @ [0.1, -0.2, 0.3] + rng.normal(0, 0.1, 40)
    groups = [f"g{i % 8}" for i in range(40)]
    found = entropy.grouped_least_squares(x, y, groups, draws=50)
    assert found[0] == pytest.approx(np.linalg.lstsq(x, y, rcond=None)[0])
    assert found[1:].std(axis=0) == pytest.approx(np.full(3, 0.017), abs=0.012)
    twice = np.column_stack([x, x[:, 1]])
    assert np.isnan(entropy.grouped_least_squares(twice, y, groups, draws=2)).all()


def made_up_windows(interaction: float, seed: int = 0, noise: float = 0.005) -> pd.DataFrame:
    """Windows of 30 adapters in 10 domains, whose outcome follows the stated regression."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(30):
        flat, shift = 2.0 + 0.3 * (i % 10), rng.normal(0, 0.3)
        for _ in range(12):
            window, move = flat + rng.normal(0, 0.3), shift + rng.normal(0, 0.2)
            outcome = -0.05 - 0.02 * move + interaction * move * (window - 3.0) + rng.normal(0, noise)
            target = rng.normal(2.5, 0.3)
            rows.append((f"a{i:02d}", f"d{i % 10}", move, target, window, window - target, outcome))
    columns = ["adapter", "domain", "shift", "target_entropy", "drafter_entropy", "excess", "y"]
    return pd.DataFrame(rows, columns=columns)


def points_of(windows: pd.DataFrame) -> pd.DataFrame:
    means = windows.groupby(["adapter", "domain"], as_index=False).mean(numeric_only=True)
    return means.assign(drafter=confirm.REFERENCE, y_se=0.01, moved="none", family="")


def test_a_planted_interaction_is_found_and_none_is_not() -> None:
    for planted, judged in ((0.1, "as stated"), (-0.1, "against it")):
        windows = made_up_windows(planted)
        table = entropy.interaction_table(points_of(windows), windows)
        stated = table[table["flatness"] == entropy.FLATNESS["drafter_entropy"]].set_index("outcome")
        assert stated.loc[entropy.COUNTED, "interaction"] == pytest.approx(planted, abs=0.03)
        assert stated.loc[entropy.WINDOWS, "interaction"] == pytest.approx(planted, abs=0.02)
        assert judged in entropy.interaction_sentence(table)
    told = 0
    for seed in range(12):
        points = points_of(made_up_windows(0.0, seed))
        points["y"] += np.random.default_rng(seed).normal(0, 0.03, len(points))
        table = entropy.interaction_table(points, points.iloc[:0])
        told += "not told from none" not in entropy.interaction_sentence(table)
    assert told <= 3, "intervals at 95 % of 12 samples without any interaction"


def test_within_adapters_what_an_adapter_does_everywhere_counts_for_nothing() -> None:
    windows = made_up_windows(0.1)
    moved = windows.assign(y=windows["y"] + windows["adapter"].map(hash) % 7)
    tables = [entropy.interaction_table(points_of(w), w) for w in (windows, moved)]
    first, second = (t[t["outcome"] == entropy.WINDOWS]["interaction"].to_numpy() for t in tables)
    assert first == pytest.approx(second)


def test_entropy_tables_do_not_depend_on_the_order_of_rows() -> None:
    windows = made_up_windows(0.05)
    mixed = windows.sample(frac=1.0, random_state=1)
    first, second = (entropy.interaction_table(points_of(w), w) for w in (windows, mixed))
    pd.testing.assert_frame_equal(first, second)


def test_without_entropies_it_says_so() -> None:
    nothing = made_up_windows(0.0).iloc[:0]
    table = entropy.interaction_table(points_of(nothing), nothing)
    assert table.empty and "cannot be tested" in entropy.interaction_sentence(table)
    assert entropy.shift_table(points_of(nothing)).empty


# ---------------------------------------------------------------- evidence


@pytest.fixture
def results(smoke_results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(smoke_results))
    return smoke_results


@pytest.fixture
def own_results(tmp_path: Path, smoke_results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Smoke records of this test alone."""
    shutil.copytree(smoke_results, tmp_path / "results")
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results" / "smoke" / "phase2"


@pytest.fixture(scope="module")
def whole(smoke_results: Path) -> confirm.Confirmed:
    """The made-up confirmation, complete."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_SPEC_RESULTS", str(smoke_results))
        loaded = confirmed_of(SMOKE)
    assert loaded is not None
    return loaded


def confirmed_of(parameters: NotebookParameters) -> confirm.Confirmed | None:
    return confirm.load_confirmed(parameters, selection.load_selection(parameters))


def test_without_evidence_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    assert selection.load_selection(POCKET) is None
    assert confirmed_of(POCKET) is None
    assert confirm.coverage_sentence(None) == confirm.ABSENT
    assert "chosen" in selection.selection_sentence(None)
    assert "healed" in healing.healing_sentence(healing.load_calibration(POCKET))


def test_standard_errors_and_what_drafters_share_come_from_prompts(whole: confirm.Confirmed) -> None:
    pairs = confirm.pair_table(whole)
    for drafter in whole.others:
        labels = whole.labels[drafter].set_index("adapter")["delta_alpha_se"]
        own = pairs[pairs["drafter"] == drafter].set_index("adapter")
        assert own["y_se"].to_numpy() == pytest.approx(labels.loc[own.index].to_numpy())
    reference = whole.labels[confirm.REFERENCE].set_index("adapter")["delta_alpha_se"]
    assert pairs["x_se"].to_numpy() == pytest.approx(reference.loc[pairs["adapter"]].to_numpy())
    assert (pairs["xy"].abs() <= pairs["x_se"] * pairs["y_se"] + 1e-12).all()
    # A drafter compared with itself shares all its errors.
    same = dataclasses.replace(
        whole,
        evidence={name: whole.evidence["healed"] for name in (confirm.REFERENCE, "healed")},
        labels={name: whole.labels["healed"] for name in (confirm.REFERENCE, "healed")},
    )
    itself = confirm.pair_table(same)
    assert itself["xy"].to_numpy() == pytest.approx((itself["x_se"] ** 2).to_numpy())
    assert itself["relative_xy"].to_numpy() == pytest.approx((itself["relative_x_se"] ** 2).to_numpy())


def test_tables_and_sentences_of_whole_evidence(whole: confirm.Confirmed, results: Path) -> None:
    assert whole.others == ["healed", "dflash"]
    strong = strength.strength_table(whole)
    assert list(strong["drafter"]) == list(confirm.DRAFTERS) and strong["adapters"].nunique() == 1
    assert (strong["low"] < strong["mean"]).all() and (strong["mean"] < strong["high"]).all()
    assert (strong[["down", "none", "up"]].sum(axis=1) == strong["adapters"]).all()
    assert strength.strength_sentence(strong).count("α̂ without an adapter") == 3
    assert strength.base_table(whole).notna().all(axis=None)
    assert confirm.controls_table(whole)["passed"].all()
    look = predictor.load_first_look(SMOKE)
    table = agreement.calibration_table(confirm.measured_table(whole), look.interval[0])
    assert set(table["drafter"]) == set(confirm.DRAFTERS)
    assert table.groupby("drafter")["n"].sum().eq(28).all(), "18 adapters, and ten of them in the contrast"


def test_part_of_the_evidence_is_told_to_be_part(own_results: Path) -> None:
    shutil.rmtree(own_results / "confirm_dflash")
    chosen = selection.load_selection(SMOKE)["adapter"].tolist()
    for name in chosen[5:]:
        for path in (own_results / "confirm_healed").glob(f"{name}.*"):
            path.unlink()
    confirmed = confirmed_of(SMOKE)
    assert confirmed.others == ["healed"]
    sentence = confirm.coverage_sentence(confirmed)
    assert "5 of the 18 chosen adapters" in sentence and chosen[9] in sentence
    assert "0 of the 18 chosen adapters were measured under the drafter “DFlash" in sentence
    pairs = confirm.pair_table(confirmed)
    assert len(pairs) == 5 and agreement.agreement_sentence(agreement.agreement_table(pairs))
    assert len(strength.strength_table(confirmed)) == 2
    points = entropy.point_table(confirmed, entropy.window_table(confirmed.evidence[confirm.REFERENCE]), None)
    table = entropy.interaction_table(points, entropy.window_table(confirmed.evidence[confirm.REFERENCE]))
    assert "healed" not in set(table["drafter"]), "its entropy is not on record"


def test_a_base_arm_alone_confirms_nothing(own_results: Path) -> None:
    shutil.rmtree(own_results / "confirm_dflash")
    chosen = set(selection.load_selection(SMOKE)["adapter"])
    for path in (own_results / "confirm_healed").iterdir():
        if path.name.split(".")[0] in chosen:
            path.unlink()
    assert confirmed_of(SMOKE) is None


def rewrite(path: Path, **changes: object) -> None:
    """The record at ``path`` with other values, under its new hash."""
    record = load_record(path, allow={"smoke"})
    tables = {"requests": pd.read_parquet(path.with_name(f"{path.stem}.requests.parquet"))}
    write_record(path, record.model_copy(update=changes), tables)


def test_foreign_evidence_is_refused(own_results: Path) -> None:
    chosen = selection.load_selection(SMOKE)
    path = own_results / "confirm_healed" / f"{chosen['adapter'].iloc[0]}.json"
    record = load_record(path, allow={"smoke"})
    with pytest.raises(EvidenceError, match="was not chosen"):
        confirm.load_confirmed(SMOKE, chosen.iloc[1:])
    with pytest.raises(EvidenceError, match="before any were chosen"):
        confirm.load_confirmed(SMOKE, None)
    rewrite(path, covers=record.covers.model_copy(update={"adapters": ["0" * 64]}))
    with pytest.raises(EvidenceError, match="not the one that was screened"):
        confirm.load_confirmed(SMOKE, chosen)
    rewrite(path, covers=record.covers, created_utc="2000-01-01T00:00:00Z")
    with pytest.raises(EvidenceError, match="before the choice was recorded"):
        confirm.load_confirmed(SMOKE, chosen)
    rewrite(path, created_utc=record.created_utc, revisions={"adapter": {"recipe_sha256": "1" * 64}})
    with pytest.raises(EvidenceError, match="not the one that was screened"):
        confirm.load_confirmed(SMOKE, chosen)


def test_smoke_is_no_confirmation(results: Path) -> None:
    borrowed = SMOKE.model_copy(update={"evidence_class": "measured"})
    with pytest.raises(EvidenceError, match="evidence class smoke"):
        selection.load_selection(borrowed)
    with pytest.raises(EvidenceError, match="evidence class smoke"):
        healing.load_calibration(borrowed)
