"""Agreement of two noisy measurements of the same adapters: slopes and correlations that allow for the noise.

Both sides have errors of known size, correlated because both were measured on the same prompts. An ordinary
regression would be too flat for that reason alone, and a correlation too low.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Errors(NamedTuple):
    """Error variances of two measurements and their covariance, one value an adapter, shape (n,)."""

    x: np.ndarray
    y: np.ndarray
    xy: np.ndarray

    def at(self, rows: np.ndarray) -> Errors:
        """Those of some rows."""
        return Errors(self.x[rows], self.y[rows], self.xy[rows])

    def mean(self) -> np.ndarray:
        """Mean error covariance, shape (2, 2)."""
        both = float(self.xy.mean())
        return np.array([[float(self.x.mean()), both], [both, float(self.y.mean())]])


def deming_slope(x: np.ndarray, y: np.ndarray, errors: Errors) -> float:
    """Slope of the line through the mean that is nearest to the points in units of their errors.

    Maximum likelihood where points lie on a line but for their errors (Deming 1943; with correlated errors
    Fuller 1987, section 1.3): the direction across which the spread is smallest, compared with that of the
    errors. Symmetric: exchanging x and y gives the reciprocal. Without any errors, and where they are all
    common to both sides, both sides count alike.

    Returns:
        NaN with fewer than three points or without spread, infinity for a vertical line.
    """
    if len(x) < 3:
        return math.nan
    spread, noise = np.cov(x, y), errors.mean()
    if not spread.trace() > 0:
        return math.nan
    if np.linalg.det(noise) <= 1e-9 * noise.trace() ** 2:
        noise = np.eye(2)
    root = np.linalg.inv(np.linalg.cholesky(noise))
    values, vectors = np.linalg.eigh(root @ spread @ root.T)
    if math.isclose(*values, rel_tol=1e-12):
        return math.nan
    across = root.T @ vectors[:, 0]
    return float(-across[0] / across[1]) if abs(across[1]) > 1e-12 * abs(across[0]) else math.inf


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Correlation of the measurements as they are; NaN where one side is constant."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def disattenuated(x: np.ndarray, y: np.ndarray, errors: Errors) -> float:
    """Correlation of what was measured, its errors taken out of variances and covariance (Spearman 1904).

    An estimate: it may exceed 1, and NaN means that a side is all noise.
    """
    if len(x) < 3:
        return math.nan
    true = np.cov(x, y) - errors.mean()
    if not min(true[0, 0], true[1, 1]) > 0:
        return math.nan
    return float(true[0, 1] / math.sqrt(true[0, 0] * true[1, 1]))
