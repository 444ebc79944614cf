"""Errors of out-of-fold predictions: metrics with intervals over domains, and the width of prediction
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def grouped_half_width(residuals: Sequence[float], groups: Sequence[str], level: float) -> float:
    """Half width of an interval that covers a member of a new group with probability ``level``.

    Groups are taken as exchangeable, members of a group as one draw each: every residual weighs 1 / (G + 1) /
    (size of its group), and 1 / (G + 1) lies at infinity (pooled distribution of Dunn, Wasserman & Ramdas
    2022). The residuals come from models that did not see their group, but not from one common model, so the
    guarantee is approximate.

    Returns:
        The smallest |residual| whose cumulated weight reaches ``level``; infinity with fewer than level / (1
        - level) groups.
    """
    size = np.abs(np.asarray(residuals, dtype=np.float64))
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    weight = 1.0 / ((len(counts) + 1) * counts[index])
    order = np.argsort(size, kind="stable")
    reached = np.cumsum(weight[order]) >= level - 1e-12
    return float(size[order][np.argmax(reached)]) if reached.any() else math.inf


def left_out_coverage(residuals: Sequence[float], groups: Sequence[str], level: float) -> float:
    """Mean share of each group's residuals within the half width of the other groups' residuals."""
    size, names = np.abs(np.asarray(residuals, dtype=np.float64)), np.asarray(groups)
    shares = []
    for group in np.unique(names):
        inside = names == group
        half_width = grouped_half_width(size[~inside], names[~inside], level)
        shares.append(float(np.mean(size[inside] <= half_width)))
    return float(np.mean(shares))


Metric = Callable[[np.ndarray, np.ndarray], float]


def mae(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(truth - predicted)))


def r2(truth: np.ndarray, predicted: np.ndarray) -> float:
    """1 - Σ(y - ŷ)² / Σ(y - ȳ)², negative where the mean of the same labels would do better; NaN for constant
    y.
    """
    spread = float(np.sum((truth - truth.mean()) ** 2))
    return 1.0 - float(np.sum((truth - predicted) ** 2)) / spread if spread > 0 else math.nan


def spearman(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Rank correlation; NaN where either side is constant."""
    if np.ptp(truth) == 0 or np.ptp(predicted) == 0:
        return math.nan
    a, b = (ranks - ranks.mean() for ranks in (_ranks(truth), _ranks(predicted)))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values sharing their mean rank."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[index]


def domain_draws(groups: Sequence[str], draws: int, seed: int) -> list[np.ndarray]:
    """Row indices of bootstrap samples that draw whole groups with replacement."""
    names = np.asarray(groups)
    unique = np.unique(names)
    rows = [np.flatnonzero(names == name) for name in unique]
    chosen = np.random.default_rng(seed).integers(len(unique), size=(draws, len(unique)))
    return [np.concatenate([rows[i] for i in sample]) for sample in chosen]


def interval_of(values: Sequence[float], level: float) -> tuple[float | None, float | None]:
    """Percentile interval of the finite values; (None, None) when more than half are not finite."""
    finite = np.asarray([v for v in values if math.isfinite(v)])
    if finite.size * 2 <= len(values):
        return None, None
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def with_interval(
    metric: Metric, truth: np.ndarray, predicted: np.ndarray, draws: Sequence[np.ndarray], level: float
) -> dict[str, float | None]:
    """``{"value", "low", "high"}`` of a metric, null where it is undefined."""
    value = metric(truth, predicted)
    low, high = interval_of([metric(truth[rows], predicted[rows]) for rows in draws], level)
    if not math.isfinite(value):
        return {"value": None, "low": None, "high": None}
    return {"value": value, "low": low, "high": high}
