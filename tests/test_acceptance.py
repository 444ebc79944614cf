"""Counts to rates against a slow token-by-token oracle; censoring, pairing, refusals (cases 15-17)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.acceptance import (
    censor_last_step,
    censor_requests,
    check_base_floor,
    check_requests,
    compare,
    decide_effect,
    label_table,
    paired_alpha,
    paired_effect,
    pooled_rates,
    prompts_needed,
    reliability,
)
from lora_spec.acceptance.labels import LABEL_COLUMNS
from lora_spec.errors import EvidenceError


def oracle(steps: list[int], output: int, drafted: list[int]) -> tuple[int, int, int]:
    """Emit the output token by token and count what was seen."""
    emitted, accepted, rejections = 1, 0, 0
    for a, d in zip(steps, drafted, strict=True):
        for _ in range(a):
            if emitted < output:
                emitted += 1
                accepted += 1
        if emitted < output:  # the target's own token came out: the step's verdict was seen
            emitted += 1
            rejections += a < d
    assert emitted == output
    return accepted, rejections, len(steps)


@st.composite
def request_counts(draw: st.DrawFn, k: int | None = None) -> tuple[list[int], int, int, list[int]]:
    depth = k or draw(st.integers(1, 6))
    drafted = draw(st.lists(st.integers(1, depth), min_size=1, max_size=12))
    steps = [draw(st.integers(0, d)) for d in drafted]
    hidden = draw(st.integers(0, steps[-1]))
    return steps, 1 + sum(steps) + len(steps) - hidden, depth, drafted


@settings(deadline=None, max_examples=60)
@given(request_counts())
def test_censoring_equals_the_oracle(counts: tuple[list[int], int, int, list[int]]) -> None:
    steps, output, k, drafted = counts
    assert censor_last_step(steps, output, k, drafted) == oracle(steps, output, drafted)
    if all(d == k for d in drafted):
        assert censor_last_step(steps, output, k) == oracle(steps, output, drafted)


@settings(deadline=None, max_examples=60)
@given(st.lists(request_counts(k=4), min_size=1, max_size=8))
def test_many_requests_equal_one_at_a_time(many: list[tuple[list[int], int, int, list[int]]]) -> None:
    table = censor_requests([m[0] for m in many], [m[1] for m in many], 4, [m[3] for m in many])
    assert [tuple(row) for row in table.to_numpy()] == [oracle(m[0], m[1], m[3]) for m in many]


@pytest.mark.parametrize(
    ("steps", "output", "expected"),
    [
        ([4, 2, 3], 1 + 5 + 3 + 4, (9, 2, 3)),  # whole: nothing hidden
        ([4, 2, 3], 1 + 5 + 3 + 3, (9, 1, 3)),  # cut right after the accepted drafts: no rejection was seen
        ([4, 2, 3], 1 + 5 + 3 + 1, (7, 1, 3)),  # EOS is the first accepted draft of the last step (case 15)
        ([4, 4], 1 + 5 + 2, (6, 0, 2)),
        ([0], 2, (0, 1, 1)),
        ([], 1, (0, 0, 0)),  # stopped at the prefill's token
    ],
)
def test_examples(steps: list[int], output: int, expected: tuple[int, int, int]) -> None:
    assert censor_last_step(steps, output, 4) == expected


@pytest.mark.parametrize(
    ("steps", "output", "k", "drafted"),
    [
        ([4, 2], 10, 4, None),  # more output than the steps yield
        ([4, 2], 6, 4, None),  # output ends in the step before the last
        ([5], 6, 4, None),  # accepted beyond k
        ([-1], 1, 4, None),
        ([2], 3, 4, [1]),  # accepted beyond drafted
        ([2], 4, 4, [5]),  # drafted beyond k
        ([2], 4, 4, [3, 3]),
        ([], 5, 4, None),  # no draft step, yet output
        ([1], 0, 4, None),
        ([0], 2, 0, None),
    ],
)
def test_contradicting_counts_are_refused(
    steps: list[int], output: int, k: int, drafted: list[int] | None
) -> None:
    with pytest.raises(EvidenceError) as error:
        censor_last_step(steps, output, k, drafted)
    assert error.value.code == "counts_contradict"


def simulate(
    rng: np.random.Generator,
    alpha: float,
    prompts: int,
    k: int = 4,
    tokens: int = 48,
    eos: float = 0.0,
    **columns: object,
) -> pd.DataFrame:
    """Requests whose drafts are accepted independently with probability alpha, cut at the limit or EOS."""
    rows = []
    for index in range(prompts):
        limit = min(tokens, int(rng.geometric(eos))) if eos else tokens
        steps: list[int] = []
        while 1 + sum(steps) + len(steps) < limit:
            misses = rng.random(k) >= alpha
            steps.append(int(misses.argmax()) if misses.any() else k)
        counts = censor_last_step(steps, limit, k)
        rows.append(
            {
                "arm": "base",
                "adapter": "",
                "prompt_set": "german",
                "decoding": "t08",
                "prompt_index": index,
                "k": k,
                "steps_accepted": steps,
                "drafted": k * len(steps),
                "output_tokens": limit,
                "accepted_emitted": counts.accepted_emitted,
                "rejections": counts.rejections,
            }
            | columns
        )
    return pd.DataFrame(rows)


@pytest.mark.parametrize("eos", [0.0, 0.05])
def test_alpha_is_unbiased_and_free_of_k(eos: float) -> None:
    rng = np.random.default_rng(0)
    estimates = [pooled_rates(simulate(rng, 0.6, 300, k=k, eos=eos)) for k in (2, 4, 7)]
    for rates in estimates:
        assert rates.alpha == pytest.approx(0.6, abs=0.015)
        assert rates.conditional[:2] == pytest.approx((0.6, 0.6), abs=0.03)
        assert rates.al_emitted < rates.al_vllm
    assert abs(compare(estimates[2], estimates[0], "alpha")) < 0.02


def test_pooled_rates_by_hand() -> None:
    table = pd.DataFrame(
        {
            "k": [4, 4],
            "steps_accepted": [[4, 2, 3], [0, 4]],
            "drafted": [12, 8],
            "output_tokens": [10, 7],
            "accepted_emitted": [7, 4],
            "rejections": [1, 1],
        }
    )
    check_requests(table)
    for bad in (table.assign(drafted="x"), table.assign(k=[4.0, np.nan]), table.drop(columns="rejections")):
        with pytest.raises(EvidenceError, match="whole numbers"):
            check_requests(bad)
    rates = pooled_rates(table)
    assert rates.alpha == 11 / 13
    assert rates.acceptance_rate == 13 / 20
    assert rates.al_vllm == 1 + 13 / 5
    assert rates.al_emitted == 15 / 5
    # at risk at position 1: all five steps; at 2: [4] [2] [4] (the cut step emitted one draft only); at 3:
    # the same
    assert rates.conditional == pytest.approx((4 / 5, 1.0, 2 / 3, 1.0))
    assert rates.survival == pytest.approx((0.8, 0.8, 0.8 * 2 / 3, 0.8 * 2 / 3))


def test_survival_without_truncation_is_the_plain_share() -> None:
    table = simulate(np.random.default_rng(1), 0.5, 40)
    whole = table[table["output_tokens"] == 1 + table["steps_accepted"].map(lambda s: sum(s) + len(s))]
    steps = np.concatenate(whole["steps_accepted"].tolist())
    assert pooled_rates(whole).survival == pytest.approx([float((steps >= i).mean()) for i in range(1, 5)])


def test_short_drafts_are_left_out_of_conditional_rates_only() -> None:
    table = pd.DataFrame(
        {
            "k": [4, 4],
            "steps_accepted": [[4, 1], [2, 1]],
            "drafted": [8, 5],
            "output_tokens": [8, 6],
            "accepted_emitted": [5, 3],
            "rejections": [1, 1],
        }
    )
    check_requests(table)
    assert pooled_rates(table).conditional == pytest.approx((1.0, 0.5, 1.0, 1.0))
    assert pooled_rates(table).alpha == 8 / 10


def test_stored_counts_are_recomputed() -> None:
    table = simulate(np.random.default_rng(2), 0.5, 8)
    check_requests(table)
    table.loc[3, "rejections"] += 1
    with pytest.raises(EvidenceError, match="row 3"):
        check_requests(table)


def test_rates_that_depend_on_k_are_not_compared_between_depths() -> None:
    rng = np.random.default_rng(3)
    short, long = simulate(rng, 0.6, 8, k=2), simulate(rng, 0.6, 8, k=4)
    for measure in ("acceptance_rate", "al_vllm", "al_emitted"):
        with pytest.raises(EvidenceError) as error:
            compare(pooled_rates(short), pooled_rates(long), measure)
        assert error.value.code == "k_mismatch"
    assert math.isfinite(compare(pooled_rates(short), pooled_rates(long), "alpha"))
    with pytest.raises(EvidenceError) as error:
        pooled_rates(pd.concat([short, long]))
    assert error.value.code == "k_mismatch"
    with pytest.raises(EvidenceError, match="unknown measure"):
        compare(pooled_rates(short), pooled_rates(short), "k")


counts_arrays = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 40), st.integers(0, 20)),
    min_size=2,
    max_size=20,
)


@settings(deadline=None, max_examples=60)
@given(counts_arrays)
def test_paired_effect_equals_a_loop(rows: list[tuple[int, int, int, int]]) -> None:
    b = [float(r[0]) for r in rows]
    nb = [float(r[0] + r[1]) for r in rows]
    a = [float(r[2]) for r in rows]
    na = [float(r[2] + r[3]) for r in rows]
    if not sum(nb) or not sum(na):
        with pytest.raises(EvidenceError):
            paired_effect(b, nb, a, na, draws=10)
        return
    effect = paired_effect(b, nb, a, na, draws=50)
    alpha, alpha2, n = sum(b) / sum(nb), sum(a) / sum(na), len(rows)
    units = [
        (a[i] - alpha2 * na[i]) / (sum(na) / n) - (b[i] - alpha * nb[i]) / (sum(nb) / n) for i in range(n)
    ]
    assert effect.delta == pytest.approx(alpha2 - alpha)
    assert effect.se == pytest.approx(math.sqrt(sum(u * u for u in units) / (n - 1) / n), abs=1e-12)
    assert (effect.base, effect.adapted, effect.n) == (pytest.approx(alpha), pytest.approx(alpha2), n)


def test_errors_match_the_sampling_spread_and_repeat() -> None:
    deltas, errors, boots, covered = [], [], [], 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        effect = paired_alpha(simulate(rng, 0.6, 40), simulate(rng, 0.5, 40), draws=300, seed=seed)
        deltas.append(effect.delta)
        errors.append(effect.se)
        boots.append(effect.se_bootstrap)
        covered += effect.low <= -0.1 <= effect.high
    assert np.mean(errors) == pytest.approx(np.std(deltas, ddof=1), rel=0.3)
    assert np.mean(boots) == pytest.approx(np.mean(errors), rel=0.1)
    assert covered >= 21
    rng = np.random.default_rng(0)
    base, adapted = simulate(rng, 0.6, 16), simulate(rng, 0.5, 16)
    assert paired_alpha(base, adapted, seed=5) == paired_alpha(base, adapted, seed=5)


def test_equal_arms_have_no_effect_and_no_error() -> None:
    base = simulate(np.random.default_rng(0), 0.6, 16)
    effect = paired_alpha(base, base)
    assert (effect.delta, effect.se, effect.low, effect.high) == (0.0, 0.0, 0.0, 0.0)


def test_arms_on_different_prompts_are_refused() -> None:
    base = simulate(np.random.default_rng(0), 0.6, 6)
    with pytest.raises(EvidenceError) as error:
        paired_alpha(base, base.iloc[:5])
    assert error.value.code == "unpaired"
    with pytest.raises(EvidenceError) as error:
        paired_effect([1.0], [1.0], [1.0], [1.0])
    assert error.value.code == "too_few_prompts"
    with pytest.raises(EvidenceError) as error:
        paired_effect([1.0, 1.0], [1.0, 1.0], [1.0], [1.0])
    assert error.value.code == "unpaired"


def test_reliability_is_the_share_that_is_not_noise() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(0, 0.1, 4000)
    noisy = truth + rng.normal(0, 0.05, 4000)
    assert reliability(noisy, np.full(4000, 0.05)) == pytest.approx(0.8, abs=0.02)
    assert reliability([0.1, 0.1], [0.2, 0.2]) == 0.0
    assert reliability([0.1, 0.11], [0.2, 0.2]) == 0.0


def test_power_falls_with_the_square_of_the_effect() -> None:
    needed = prompts_needed(0.2, 0.6)
    assert needed[0.10] == math.ceil(((1.959963984540054 + 0.8416212335729143) * 0.2 / 0.06) ** 2)
    assert needed[0.03] / needed[0.10] == pytest.approx((10 / 3) ** 2, rel=0.05)


@pytest.mark.parametrize(
    ("alpha", "threshold", "verdict"), [(0.4, 0.05, "GO"), (0.6, 0.1, "STOP"), (0.58, 0.04, "INVESTIGATE")]
)
def test_decision(alpha: float, threshold: float, verdict: str) -> None:
    rng = np.random.default_rng(0)
    assert decide_effect(paired_alpha(simulate(rng, 0.6, 64), simulate(rng, alpha, 64)), threshold) == verdict


def screen() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    parts = []
    for prompt_set in ("german", "general"):
        for decoding in ("t08", "greedy"):
            where = {"prompt_set": prompt_set, "decoding": decoding}
            parts.append(simulate(rng, 0.6, 24, **where))
            parts.append(simulate(rng, 0.4, 24, arm="adapted", adapter="german-a", **where))
    parts.append(simulate(rng, 0.6, 24, arm="adapted", adapter="german-b"))
    return pd.concat(parts, ignore_index=True)


def overlap_rows() -> pd.DataFrame:
    rows = [
        {
            "arm": arm,
            "adapter": name,
            "prompt_set": "german",
            "prompt_index": i,
            "temperature": t,
            "overlap": 0.5 + 0.01 * i - shift,
            "positions": 63,
        }
        for arm, name, shift in (("base", "", 0.0), ("adapted", "german-a", 0.2))
        for i in range(5)
        for t in (0.8, 1.0)
    ]
    return pd.DataFrame(rows)


def test_label_table() -> None:
    requests = screen()
    table = label_table(requests, overlap_rows(), families={"german": "language"}, base_floor=0.2)
    assert tuple(table.columns) == LABEL_COLUMNS
    first, second = (table.iloc[i] for i in range(2))
    own = (requests["prompt_set"] == "german") & (requests["decoding"] == "t08")
    base, adapted = (
        requests[own & (requests["arm"] == "base")],
        requests[own & (requests["adapter"] == "german-a")],
    )
    assert first["delta_alpha"] == paired_alpha(base, adapted).delta
    assert first["family"] == "language" and first["n_prompts"] == 24
    assert first["delta_overlap"] == pytest.approx(-0.2)
    assert first["delta_overlap_se"] == pytest.approx(0.0, abs=1e-12)
    assert first[["delta_alpha_greedy", "delta_alpha_general"]].lt(-0.1).all()
    assert math.isnan(second["delta_alpha_greedy"]) and math.isnan(second["delta_overlap_se"])


def test_adapter_without_a_base_control_is_refused() -> None:
    requests = screen()
    with pytest.raises(EvidenceError) as error:
        label_table(requests[requests["arm"] == "adapted"])
    assert error.value.code == "missing_base_control"
    with pytest.raises(EvidenceError) as error:
        label_table(requests, overlap_rows().query("arm == 'adapted'"))
    assert error.value.code == "missing_base_control"
    with pytest.raises(EvidenceError) as error:
        label_table(requests[requests["arm"] == "base"])
    assert error.value.code == "no_adapters"


def test_base_under_its_floor_stops_the_run() -> None:
    with pytest.raises(EvidenceError) as error:
        label_table(screen(), base_floor=0.9)
    assert error.value.code == "base_below_floor"
    check_base_floor(0.5, 0.5)
    with pytest.raises(EvidenceError):
        check_base_floor(math.nan, 0.5)


def test_general_only_or_two_domains_is_refused() -> None:
    requests = screen()
    with pytest.raises(EvidenceError) as error:
        label_table(requests[(requests["prompt_set"] == "general") | (requests["arm"] == "base")])
    assert error.value.code == "own_domain"
