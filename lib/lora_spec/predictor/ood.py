"""How far an adapter lies from those in training, and how far a left-out training domain lay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shrunk_precision(points: np.ndarray, shrinkage: float) -> np.ndarray:
    """Inverse of (1 - λ) S + λ tr(S)/p · I, with S the covariance of the rows about zero.

    Args:
        points: standardised features, float64 of shape (n, p), centred.
        shrinkage: λ in (0, 1].
    """
    p = points.shape[1]
    covariance = points.T @ points / max(len(points) - 1, 1)
    mean_variance = max(float(np.trace(covariance)) / p, 1e-12)
    return np.linalg.inv((1.0 - shrinkage) * covariance + shrinkage * mean_variance * np.eye(p))


def distances(
    points: np.ndarray, precision: np.ndarray, queries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mahalanobis distance from zero and Euclidean distance to the nearest point, shape (queries,)."""
    mahalanobis = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", queries, precision, queries), 0.0))
    nearest = np.linalg.norm(queries[:, None, :] - points[None, :, :], axis=2).min(axis=1)
    return mahalanobis, nearest


def left_out_thresholds(values: np.ndarray, groups: Sequence[str], shrinkage: float) -> tuple[float, float]:
    """Largest Mahalanobis and nearest-neighbour distance of an adapter from a model of the other groups.

    With G exchangeable groups of one adapter a new one exceeds either with probability 1 / (G + 1) by chance.

    Args:
        values: transformed but not standardised features, float64 of shape (n, p).
    """
    names = np.asarray(groups)
    largest = np.zeros(2)
    for group in np.unique(names):
        inside = names == group
        mean, scale = standardiser(values[~inside])
        points = (values[~inside] - mean) / scale
        found = distances(points, shrunk_precision(points, shrinkage), (values[inside] - mean) / scale)
        largest = np.maximum(largest, [d.max() for d in found])
    return float(largest[0]), float(largest[1])


def standardiser(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation of each column; a constant column keeps the scale 1."""
    scale = values.std(axis=0)
    return values.mean(axis=0), np.where(
        scale > 1e-12 * np.maximum(1.0, np.abs(values).max(axis=0)), scale, 1.0
    )
