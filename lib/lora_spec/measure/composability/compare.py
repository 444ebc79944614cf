"""Comparisons behind a verdict: token lists, sampled distributions, shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FLOOR_DRAWS = 200


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing token, a missing one included; None where both are equal."""
    shared = min(len(a), len(b))
    for i in range(shared):
        if a[i] != b[i]:
            return i
    return None if len(a) == len(b) else shared


def worst_variation(tokens: np.ndarray, joint: np.ndarray, deviations: float) -> tuple[float, float, str]:
    """The single token or neighbouring pair that is farthest from the exact distribution.

    Args:
        tokens: [requests, n]. joint: [vocabulary] * n.
        deviations: standard deviations of the floor (multinomial draws of as many requests) over its mean.

    Returns:
        total variation, its limit, and which tokens.
    """
    count, length = tokens.shape
    vocabulary = joint.shape[0]
    checks = []
    for i in range(length):
        rest = tuple(axis for axis in range(length) if axis != i)
        checks.append((f"token {i + 1}", tokens[:, i], joint.sum(axis=rest)))
    for i in range(length - 1):
        rest = tuple(axis for axis in range(length) if axis not in (i, i + 1))
        both = tokens[:, i] * vocabulary + tokens[:, i + 1]
        checks.append((f"tokens {i + 1} and {i + 2}", both, joint.sum(axis=rest).ravel()))
    worst = (0.0, 0.0, "", -np.inf)
    for where, values, exact in checks:
        exact = exact / exact.sum()
        floor = np.random.default_rng(0).multinomial(count, exact, size=_FLOOR_DRAWS) / count
        distances = 0.5 * np.abs(floor - exact).sum(axis=1)
        limit = float(distances.mean() + deviations * distances.std())
        shares = np.bincount(values, minlength=len(exact)) / count
        tv = float(0.5 * np.abs(shares - exact).sum())
        if tv / limit > worst[3]:
            worst = (tv, limit, where, tv / limit)
    return worst[:3]


def two_share_z(hits: int, count: int, other_hits: int, other_count: int) -> float:
    """z of two shares' difference with a pooled variance; infinite where one has no trials."""
    if not count or not other_count:
        return float("inf")
    pooled = (hits + other_hits) / (count + other_count)
    deviation = (pooled * (1 - pooled) * (1 / count + 1 / other_count)) ** 0.5
    difference = hits / count - other_hits / other_count
    return 0.0 if difference == 0 else float(difference / max(deviation, 1e-12))
