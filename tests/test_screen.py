"""Phase 2 statistics against oracles: claims, ceilings, groups, looping; and what must change no number."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_spec.acceptance import alpha_hat, reliability
from lora_spec.errors import EvidenceError
from lora_spec.phases import evidence, looping, relations, screen, significance, spread
from lora_spec.phases import reliability as quality
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.pool import load_pool
from lora_spec.predictor.intervals import domain_draws

SMOKE = NotebookParameters(tier="smoke", evidence_class="smoke")
JOINT = ["moved", "small"]
"""Columns that depend on all adapters at once: a false discovery rate is held over the family of tests."""


@pytest.fixture(scope="module")
def loaded(smoke_results):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_SPEC_RESULTS", str(smoke_results))
        return evidence.load_phase(SMOKE, "phase2", "screen", overlap="overlap")


@pytest.fixture(scope="module")
def found(loaded):
    return screen.screened(loaded)


def table_of(delta, error, domains=None, runs=None) -> pd.DataFrame:
    n = len(delta)
    names = [f"a{i:03d}" for i in range(n)]
    return pd.DataFrame(
        {
            "adapter": names,
            "domain": names if domains is None else domains,
            "family": "language",
            "run": names if runs is None else runs,
            "delta_alpha": np.asarray(delta, dtype=float),
            "delta_alpha_se": np.asarray(error, dtype=float),
            "delta_alpha_greedy": 0.0,
            "delta_alpha_general": 0.0,
            "moved": "none",
            "small": False,
            "frobenius": np.linspace(1, 2, n),
            "kl": np.linspace(0.1, 0.5, n),
            "tv": np.nan,
            "alpha_base": 0.5,
        }
    )


# ---------------------------------------------------------------- tests of single adapters


def normal_tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def stepwise(p: list[float], rate: float) -> set[int]:
    """Benjamini-Hochberg as it is written: the largest i with p_(i) ≤ i/m · rate, and all before it."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    last = max((i + 1 for i, at in enumerate(order) if p[at] <= (i + 1) / len(p) * rate), default=0)
    return set(order[:last])


effects = st.lists(
    st.tuples(st.floats(-0.3, 0.3), st.floats(0.001, 0.1)), min_size=1, max_size=30, unique_by=lambda t: t[0]
)


@settings(deadline=None, max_examples=60)
@given(effects, st.floats(0.01, 0.2))
def test_both_kinds_of_claim_agree_with_an_oracle(rows, margin):
    delta, error = (np.array(column) for column in zip(*rows, strict=True))
    judged = significance.judge(table_of(delta, error), margin)
    p = [2 * normal_tail(abs(d) / e) for d, e in rows]
    # Two one-sided tests: d < margin and d > -margin, both must hold.
    q = [max(normal_tail((margin - d) / e), normal_tail((margin + d) / e)) for d, e in rows]
    moved, small = stepwise(p, 0.05), stepwise(q, 0.05)
    assert [m != "none" for m in judged["moved"]] == [i in moved for i in range(len(rows))]
    assert list(judged["small"]) == [i in small for i in range(len(rows))]
    assert all((m == "down") == (d < 0) for m, d in zip(judged["moved"], delta, strict=True) if m != "none")


def test_an_adapter_that_changed_nothing_did_not_move_and_is_small():
    zero, some = np.array([0.0, 0.1]), np.array([0.0, 0.0])
    assert significance.p_different(zero, some).tolist() == [1.0, 0.0]
    assert significance.p_equivalent(zero, some, 0.05).tolist() == [0.0, 1.0]


def test_counts_in_the_sentence_add_up():
    judged = significance.judge(table_of([-0.2, 0.03, 0.0, 0.02], [0.01, 0.001, 0.005, 0.04]), 0.05)
    assert judged["moved"].tolist() == ["down", "up", "none", "none"]
    assert judged["small"].tolist() == [False, True, True, False]
    sentence = significance.counts_sentence(judged, 0.05)
    assert sentence.startswith("2 of 4 adapters can be told from no effect: 1 lower α̂, 1 raise it")
    assert "Of 2 the effect is shown to be smaller than 0.05" in sentence and "Of 1 neither" in sentence


# ---------------------------------------------------------------- reliability and ceilings


def test_the_ceiling_of_noiseless_labels_is_one_and_of_pure_noise_zero():
    values = np.random.default_rng(0).normal(size=40)
    assert quality.noise_ceiling(values, np.zeros(40)) == (1.0, 1.0)
    assert quality.noise_ceiling(values, np.full(40, 5.0)) == (0.0, 0.0)
    assert quality.noise_ceiling(np.ones(5), np.zeros(5)) == (0.0, 0.0)


def test_the_ceiling_falls_with_noise_and_is_what_the_truth_scores():
    rng = np.random.default_rng(1)
    truth = rng.normal(0, 0.1, 4000)
    ceilings = []
    for noise in (0.02, 0.05, 0.1):
        noisy = truth + rng.normal(0, noise, 4000)
        ceiling = quality.noise_ceiling(noisy, np.full(4000, noise))
        scored = 1 - ((noisy - truth) ** 2).sum() / ((noisy - noisy.mean()) ** 2).sum()
        ranks = np.corrcoef(noisy.argsort().argsort(), truth.argsort().argsort())[0, 1]
        assert ceiling.r2 == pytest.approx(scored, abs=0.03)
        assert ceiling.spearman == pytest.approx(ranks, abs=0.03)
        ceilings.append(ceiling)
    assert ceilings == sorted(ceilings, reverse=True)


def test_halves_give_the_reliability_of_the_whole():
    rng = np.random.default_rng(2)
    truth = rng.normal(0, 0.1, 5000)
    even, odd = (truth + rng.normal(0, 0.1, 5000) for _ in range(2))
    whole = (even + odd) / 2  # noise variance 0.005 against 0.01 of the truth
    assert quality.full_length(even, odd) == pytest.approx(2 / 3, abs=0.02)
    assert reliability(whole, np.full(5000, 0.1 / math.sqrt(2))) == pytest.approx(2 / 3, abs=0.02)
    assert quality.full_length(even, even) == pytest.approx(1.0)
    assert quality.full_length(even, -even) == 0.0
    assert math.isnan(quality.full_length(even, np.zeros(5000)))


def test_half_labels_are_those_of_half_the_prompts(loaded):
    halves = quality.half_labels(loaded.requests).set_index("adapter")
    requests = loaded.requests[loaded.requests["decoding"] == "t08"]
    name = "c-r16-mlp-s40"
    for half, rest in (("even", 0), ("odd", 1)):
        mine = requests[(requests["prompt_set"] == "c") & (requests["prompt_index"] % 2 == rest)]
        alphas = {
            arm: alpha_hat(rows["accepted_emitted"].sum(), rows["rejections"].sum())
            for arm, rows in mine[mine["adapter"].isin(["", name])].groupby("arm")
        }
        assert halves.loc[name, half] == pytest.approx(alphas["adapted"] - alphas["base"])
    with pytest.raises(EvidenceError) as error:
        quality.half_labels(loaded.requests[loaded.requests["arm"] == "adapted"])
    assert error.value.code == "missing_base_control"


def test_reliability_table(loaded, found):
    table = quality.reliability_table(found.labels, quality.half_labels(loaded.requests))
    assert table["value"].between(0, 1).all() and (table["low"] <= table["high"]).all()
    labels = found.labels
    assert table["value"].iloc[0] == reliability(labels["delta_alpha"], labels["delta_alpha_se"])
    assert table["value"].iloc[2] == pytest.approx(table["value"].iloc[0], abs=0.03)
    assert f"R² = {table['value'].iloc[2]:.2f}" in quality.reliability_sentence(table)
    few = quality.reliability_table(labels.head(2), quality.half_labels(loaded.requests))
    assert few.empty and "Fewer than three" in quality.reliability_sentence(few)


# ---------------------------------------------------------------- nothing else changes a number


def test_permuted_rows_change_no_number(loaded, found):
    shuffled = replace(
        loaded,
        requests=loaded.requests.sample(frac=1, random_state=5),
        overlap=loaded.overlap.sample(frac=1, random_state=6),
    )
    again = screen.screened(shuffled)
    pd.testing.assert_frame_equal(again.labels, found.labels)
    pd.testing.assert_frame_equal(again.controls, found.controls)
    halves = quality.half_labels(loaded.requests)
    pd.testing.assert_frame_equal(quality.half_labels(shuffled.requests), halves)
    pd.testing.assert_frame_equal(
        looping.looping_table(shuffled.requests), looping.looping_table(loaded.requests)
    )
    mixed = found.labels.sample(frac=1, random_state=8)
    for make in (
        relations.relation_table,
        screen.agreement_table,
        spread.domain_table,
        spread.variance_table,
        lambda labels: quality.reliability_table(labels, halves.sample(frac=1, random_state=9)),
    ):
        pd.testing.assert_frame_equal(make(mixed), make(found.labels))


def test_an_unrelated_adapter_changes_no_number_of_the_others(loaded, found):
    name = "german-r16-all-s40"
    requests, overlap = (
        pd.concat([t, t[t["adapter"] == name].assign(adapter="another")], ignore_index=True)
        for t in (loaded.requests, loaded.overlap)
    )
    record = loaded.records[f"screen/{name}"]
    more = replace(
        loaded, requests=requests, overlap=overlap, records=loaded.records | {"screen/another": record}
    )
    labels = screen.screened(more).labels
    rest = labels[labels["adapter"] != "another"].reset_index(drop=True)
    pd.testing.assert_frame_equal(rest.drop(columns=JOINT), found.labels.drop(columns=JOINT))
    halves = quality.half_labels(requests)
    pd.testing.assert_frame_equal(
        halves[halves["adapter"] != "another"].reset_index(drop=True), quality.half_labels(loaded.requests)
    )


# ---------------------------------------------------------------- controls, groups, spread


def test_adapters_without_an_update_stand_apart(loaded, found):
    null = {name for name, recipe in load_pool().items() if recipe.steps == 0}
    assert null and set(found.controls["adapter"]) == null
    assert not null & set(found.labels["adapter"])
    assert (found.controls["identical"] == found.controls["greedy_requests"]).all()
    assert (found.controls["delta_alpha_greedy"] == 0).all()
    assert all(name in screen.controls_sentence(found.controls) for name in null)
    controls = evidence.controls_table(loaded).set_index("control")
    assert controls.loc["zero update changes no logit", "passed"]
    changed = loaded.requests.copy()
    one = changed.index[changed["adapter"].isin(null) & changed["decoding"].eq("greedy")][0]
    changed.loc[one, "output_sha256"] = "0" * 64
    worse = screen.screened(replace(loaded, requests=changed)).controls
    assert (worse["greedy_requests"] - worse["identical"]).tolist() == [1] * len(worse)


def test_groups_of_one_are_the_plain_bootstrap():
    plain = np.random.default_rng(3).integers(9, size=(50, 9))
    grouped = domain_draws([f"g{i}" for i in range(9)], 50, 3)
    assert all(np.array_equal(a, b) for a, b in zip(plain, grouped, strict=True))
    delta = np.random.default_rng(4).normal(size=9)
    families = spread.family_table(table_of(delta, np.full(9, 0.01)), seed=3)
    means = delta[np.random.default_rng(3).integers(9, size=(1000, 9))].mean(axis=1)
    row = families.iloc[-1]
    assert (row["low"], row["high"]) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))


def test_checkpoints_of_a_run_count_once():
    delta = np.random.default_rng(5).normal(size=8)
    once = table_of(delta, np.full(8, 0.01))
    twice = pd.concat([once, once.assign(adapter=once["adapter"] + "-checkpoint")], ignore_index=True)
    single, double = (spread.family_table(t).iloc[-1] for t in (once, twice))
    assert (double["adapters"], double["runs"]) == (16, 8)
    assert (double["low"], double["high"]) == pytest.approx((single["low"], single["high"]))
    related, again = (relations.relation_table(t).iloc[0] for t in (once, twice))
    assert again["n"] == 16 and again["domains"] == 8
    assert again["low"] == pytest.approx(related["low"], abs=0.02)


@settings(deadline=None, max_examples=30)
@example([0.0, 0.0, 0.0, np.finfo(float).tiny], 0)  # its squares underflow
@given(st.lists(st.floats(-0.3, 0.3), min_size=4, max_size=20), st.integers(0, 5))
def test_shares_of_variance_add_up(delta, seed):
    rng = np.random.default_rng(seed)
    table = table_of(delta, np.full(len(delta), 0.01))
    table["family"] = rng.choice(["language", "code"], len(delta))
    table["domain"] = table["family"] + rng.integers(0, 3, len(delta)).astype(str)
    variance = spread.variance_table(table)
    if np.ptp(delta) < 1e-6:
        return
    assert variance["share"].iloc[:3].sum() == pytest.approx(1.0)
    assert (variance["share"] >= -1e-12).all()
    if (share := reliability(delta, table["delta_alpha_se"])) > 0:
        assert variance["share"].iloc[3] == pytest.approx(1 - share)
    assert spread.variance_sentence(spread.variance_table(table.assign(delta_alpha=0.1))).startswith("Labels")


def test_a_measure_that_orders_the_effects_correlates_perfectly():
    table = table_of(-np.linspace(0.01, 0.3, 10), np.full(10, 0.01), domains=["d1", "d2"] * 5)
    related = relations.relation_table(table).set_index("column")
    assert related.loc["frobenius", "spearman"] == related.loc["kl", "spearman"] == pytest.approx(-1.0)
    assert "tv" not in related.index
    assert relations.relation_table(table.head(2)).empty
    assert "No adapter" in relations.relation_sentence(relations.relation_table(table.head(2)))


def test_sizes_and_divergences_are_those_on_record(loaded, found):
    row = found.labels.iloc[0]
    record = loaded.records[f"screen/{row['adapter']}"]
    assert row["frobenius"] == record.results["frobenius"] > 0
    scores = loaded.overlap[loaded.overlap["adapter"] == row["adapter"]]
    assert row["kl"] == pytest.approx(np.average(scores["kl"], weights=scores["positions"]))
    without = screen.screened(replace(loaded, overlap=None)).labels
    assert without["kl"].isna().all() and without["delta_overlap"].isna().all()


# ---------------------------------------------------------------- looping


def loop_rows(ratios, alphas, arm="base", decoding="t08", stored=True) -> pd.DataFrame:
    tokens = [np.arange(100) % max(1, round(100 * r)) for r in ratios]
    frame = pd.DataFrame(
        {
            "arm": arm,
            "prompt_set": "german",
            "prompt_index": np.arange(len(ratios)),
            "decoding": decoding,
            "tokens": tokens,
            "accepted_emitted": [round(1000 * a) for a in alphas],
            "rejections": [1000 - round(1000 * a) for a in alphas],
        }
    )
    return frame.assign(unique_ratio=np.asarray(ratios, dtype=np.float32)) if stored else frame


def test_the_ratio_is_computed_where_it_was_not_stored():
    ratios = [0.1, 0.5, 1.0]
    stored = looping.unique_ratios(loop_rows(ratios, [0.5] * 3))
    computed = looping.unique_ratios(loop_rows(ratios, [0.5] * 3, stored=False))
    assert stored == pytest.approx(ratios) and computed == pytest.approx(ratios)
    mixed = pd.concat([loop_rows(ratios, [0.5] * 3), loop_rows([0.3], [0.5], stored=False)])
    assert looping.unique_ratios(mixed) == pytest.approx([*ratios, 0.3])
    with pytest.raises(EvidenceError) as error:
        looping.unique_ratios(mixed.drop(columns="tokens"))
    assert error.value.code == "no_looping"


def test_an_adapter_that_only_makes_the_output_loop_has_no_effect_at_equal_looping():
    rng = np.random.default_rng(0)
    # α depends on looping alone; the adapted arm loops more.
    base, adapted = (rng.uniform(low, low + 0.5, 3000).round(2) for low in (0.4, 0.3))
    rows = pd.concat([loop_rows(base, 0.9 - 0.5 * base), loop_rows(adapted, 0.9 - 0.5 * adapted, "adapted")])
    table = looping.looping_table(rows)
    raw, equal = looping.at_equal_looping(table, "t08")
    assert raw == pytest.approx(0.05, abs=0.01) and abs(equal) < 0.02
    cells = table.set_index(["arm", "looping"])["alpha"]
    assert cells["base", "most"] > cells["base", "middle"] > cells["base", "least"]


def test_every_request_is_in_one_cell(loaded):
    requests = loaded.requests
    table = looping.looping_table(requests)
    own = requests[requests["prompt_set"] != "general"]
    for (decoding, arm), cells in table.groupby(["decoding", "arm"]):
        rows = own[(own["decoding"] == decoding) & (own["arm"] == arm)]
        assert cells["requests"].sum() == len(rows)
        assert (cells["unique_ratio"].diff().dropna() > 0).all()
        assert cells["alpha"].between(cells["low"], cells["high"]).all()
    sentence = looping.looping_sentence(table)
    assert "T = 0.8:" in sentence and "greedy:" in sentence and "at equal looping" in sentence
