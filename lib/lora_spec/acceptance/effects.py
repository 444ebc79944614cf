"""Paired effects of an adapter on acceptance, their errors, power, and the GO / INVESTIGATE / STOP decision.

The unit is the prompt: both arms ran on the same prompts, and every error is over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import pandas as pd

from lora_spec.errors import EvidenceError


@dataclass(frozen=True)
class PairedEffect:
    """A signed difference ``adapted - base`` of two ratios of sums, over ``n`` paired prompts.

    ``se`` is linearised (delta method), ``se_bootstrap`` from resampled prompts; ``low``/``high`` is the
    percentile interval at ``level``; ``unit_sd`` is the per-prompt standard deviation that power calculations
    need.
    """

    delta: float
    se: float
    se_bootstrap: float
    low: float
    high: float
    level: float
    base: float
    adapted: float
    unit_sd: float
    n: int


def ratio_units(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Linearised value of each unit for a ratio r of sums: (a_i - r n_i) / mean(n), which sum to zero.

    Args:
        numerator, denominator: a and n, shape (units,). Their covariance over √n with the units of another
            ratio on the same units is the covariance of the two ratios' errors.
    """
    return (numerator - numerator.sum() / denominator.sum() * denominator) / denominator.mean()


def paired_effect(
    base_num: Sequence[float],
    base_den: Sequence[float],
    adapted_num: Sequence[float],
    adapted_den: Sequence[float],
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> PairedEffect:
    """Difference of two ratios of sums with prompts as the unit, rows paired.

    Args:
        base_num, base_den, adapted_num, adapted_den: per prompt numerators and denominators, shape (n,). For
            α̂: accepted emitted drafts, and these plus rejections.
        draws: bootstrap resamples of prompts. level: of the interval. seed: of the resampling.

    The linearised value of prompt i is u_i = (a'_i - α' n'_i) / mean(n') - (a_i - α n_i) / mean(n); its
    standard deviation over sqrt(n) is the standard error (Cochran, Sampling Techniques, ch. 6, for a
    difference of ratios).

    Raises:
        EvidenceError: with fewer than two prompts, or an arm without a single trial.
    """
    b, nb, a, na = (np.asarray(x, dtype=np.float64) for x in (base_num, base_den, adapted_num, adapted_den))
    n = b.size
    if not (b.shape == nb.shape == a.shape == na.shape == (n,)):
        raise EvidenceError("arms have different numbers of prompts", code="unpaired")
    if n < 2:
        raise EvidenceError("fewer than two paired prompts", code="too_few_prompts")
    if nb.sum() <= 0 or na.sum() <= 0:
        raise EvidenceError("an arm without a single draft tried", code="no_trials")
    base, adapted = b.sum() / nb.sum(), a.sum() / na.sum()
    unit = ratio_units(a, na) - ratio_units(b, nb)
    unit_sd = float(unit.std(ddof=1))
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=draws).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        resampled = (weights @ a) / (weights @ na) - (weights @ b) / (weights @ nb)
    resampled = resampled[np.isfinite(resampled)]
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return PairedEffect(
        delta=float(adapted - base),
        se=unit_sd / math.sqrt(n),
        se_bootstrap=float(resampled.std(ddof=1)),
        low=float(low),
        high=float(high),
        level=level,
        base=float(base),
        adapted=float(adapted),
        unit_sd=unit_sd,
        n=n,
    )


def paired_alpha(base: pd.DataFrame, adapted: pd.DataFrame, **options: float) -> PairedEffect:
    """Paired Δα̂ of two ``requests`` tables; rows of one prompt are summed, prompts must be the same on both
    sides.

    Columns used: ``prompt_index``, ``accepted_emitted``, ``rejections``. Options go to `paired_effect`.

    Raises:
        EvidenceError: (code ``unpaired``) when the arms' prompts differ.
    """
    arms = []
    for table in (base, adapted):
        sums = table.groupby("prompt_index")[["accepted_emitted", "rejections"]].sum().sort_index()
        arms.append(sums)
    if not arms[0].index.equals(arms[1].index):
        raise EvidenceError("base and adapted arms were run on different prompts", code="unpaired")
    args = []
    for sums in arms:
        accepted = sums["accepted_emitted"].to_numpy(dtype=np.float64)
        args += [accepted, accepted + sums["rejections"].to_numpy(dtype=np.float64)]
    return paired_effect(*args, **options)  # type: ignore[arg-type]


def reliability(values: Sequence[float], standard_errors: Sequence[float]) -> float:
    """Share of the variance of labels that is not measurement noise: 1 - mean(se²) / var(values), at least 0.

    No predictor can explain more of the labels' variance than this (in expectation), so it caps R².
    """
    v, se = np.asarray(values, dtype=np.float64), np.asarray(standard_errors, dtype=np.float64)
    if v.size < 2 or (variance := float(v.var(ddof=1))) == 0.0:
        return 0.0
    return max(0.0, 1.0 - float(np.mean(se**2)) / variance)


def prompts_needed(
    unit_sd: float,
    alpha_base: float,
    relative_effects: Sequence[float] = (0.03, 0.05, 0.10),
    *,
    level: float = 0.95,
    power: float = 0.8,
) -> dict[float, int]:
    """Paired prompts needed to tell an effect of ``relative × alpha_base`` from zero (two-sided, normal
    approximation).

    Args:
        unit_sd: per-prompt standard deviation of the linearised difference (`PairedEffect.unit_sd`).
    """
    z = NormalDist().inv_cdf(0.5 + level / 2.0) + NormalDist().inv_cdf(power)
    return {r: max(2, math.ceil((z * unit_sd / (r * alpha_base)) ** 2)) for r in relative_effects}


Verdict = Literal["GO", "INVESTIGATE", "STOP"]


def decide_effect(effect: PairedEffect, threshold: float) -> Verdict:
    """GO: the interval excludes zero and \\|Δ\\| reaches the threshold. STOP: the interval lies within
    ±threshold.
    INVESTIGATE: neither, more prompts may tell."""
    if (effect.low > 0.0 or effect.high < 0.0) and abs(effect.delta) >= threshold:
        return "GO"
    if -threshold < effect.low and effect.high < threshold:
        return "STOP"
    return "INVESTIGATE"


def check_base_floor(alpha_base: float, floor: float, where: str | None = None) -> None:
    """Refuse a run whose unadapted control arm accepts too little: the engine is at fault there, not an
    adapter.

    Raises:
        EvidenceError: (code ``base_below_floor``).
    """
    if not alpha_base >= floor:
        raise EvidenceError(
            f"base acceptance {alpha_base:.3f} is under its floor {floor:.3f}",
            where=where,
            fix="check the engine and the drafter before measuring adapters",
            code="base_below_floor",
        )
