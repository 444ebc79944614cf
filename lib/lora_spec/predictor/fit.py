"""Fit the weights-only predictor: ElasticNet against trivial baselines, honest about few adapters.

Outer folds leave one domain out. Scaling and the choice of the penalty happen inside each fold, the choice by
leaving one more domain out, so that nothing about a domain reaches the model that predicts it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lora_spec.acceptance import reliability
from lora_spec.errors import EvidenceError
from lora_spec.features import FEATURES
from lora_spec.files import canonical_sha256
from lora_spec.predictor import intervals
from lora_spec.predictor.ood import left_out_thresholds, shrunk_precision, standardiser
from lora_spec.predictor.params import ElasticNetParams, PredictorParams
from lora_spec.predictor.portable import (
    SCHEMA,
    Base,
    Drafter,
    Feature,
    IntervalSpec,
    OodSpec,
    PortablePredictor,
    Target,
    Training,
    transformed,
)
from lora_spec.provenance import EvidenceClass

MIN_DOMAINS = 5
MODEL = "elasticnet"
#: Baselines that say the same for every adapter, so that a rank correlation means nothing.
FLAT = ("no_effect", "constant")


@dataclass(frozen=True)
class Fit:
    """A fitted predictor and the predictions that it made for left-out domains.

    ``out_of_fold``: one row per adapter with the label, its error, and a column per model and baseline.
    """

    predictor: PortablePredictor
    out_of_fold: pd.DataFrame


@dataclass(frozen=True)
class _Linear:
    mean: np.ndarray
    scale: np.ndarray
    coefficients: np.ndarray
    intercept: float
    l1_ratio: float
    penalty: float

    def predict(self, values: np.ndarray) -> np.ndarray:
        return self.intercept + (values - self.mean) / self.scale @ self.coefficients


def fit_predictor(
    features: pd.DataFrame,
    labels: pd.DataFrame,
    params: PredictorParams,
    *,
    base: Base,
    drafter: Drafter,
    evidence_class: EvidenceClass,
) -> Fit:
    """Cross-validate, then fit on everything.

    Args:
        features: one row per adapter, ``adapter`` and the columns of ``params.columns``; others are not
        looked at.
        labels: from `lora_spec.acceptance.label_table`; matched by ``adapter``.
        params: declared features and grid. base, drafter: the pair the labels belong to.
        evidence_class: of the labels, carried into the predictor.

    Raises:
        EvidenceError: adapters without features, fewer than five domains (code ``too_few_domains``), or a
            label that is not finite.
        PredictorError: a feature value that is not finite.
    """
    data = _joined(features, labels, params)
    names = list(params.feature_names)
    transforms = [choice.transform for choice in params.features]
    raw = data[names].to_numpy(dtype=np.float64)
    values = transformed(raw, transforms, names)
    norm = transformed(
        data[[params.norm_feature]].to_numpy(dtype=np.float64), ["identity"], [params.norm_feature]
    )
    y = data["delta_alpha"].to_numpy(dtype=np.float64)
    groups = data["domain"].to_numpy(dtype=str)

    out_of_fold = data[["adapter", "domain", "family", "delta_alpha", "delta_alpha_se"]].copy()
    out_of_fold[[MODEL, "l1_ratio", "penalty"]] = _elasticnet_out_of_fold(
        values, y, groups, params.elasticnet
    )
    for name, predictions in _baselines(norm[:, 0], y, groups).items():
        out_of_fold[name] = predictions

    final = _select_and_fit(values, y, groups, params.elasticnet)
    points = (values - final.mean) / final.scale
    thresholds = left_out_thresholds(values, groups, params.ood_shrinkage)
    domains = len(set(groups))
    predictor = PortablePredictor(
        schema_=SCHEMA,
        mode=params.mode,
        target=Target(
            label="delta_alpha", units="acceptance probability", k=params.k, temperature=params.temperature
        ),
        base=base,
        drafter=drafter,
        features=tuple(
            Feature(
                name=choice.name,
                unit=FEATURES[choice.name].unit,
                transform=choice.transform,
                mean=_tidy(final.mean[i]),
                scale=_tidy(final.scale[i]),
                minimum=float(raw[:, i].min()),
                maximum=float(raw[:, i].max()),
                coefficient=_tidy(final.coefficients[i]),
            )
            for i, choice in enumerate(params.features)
        ),
        intercept=_tidy(final.intercept),
        interval=_interval(y - out_of_fold[MODEL].to_numpy(), groups, params.interval_level),
        ood=OodSpec(
            method="shrunk Mahalanobis and nearest neighbour in the standardised features",
            shrinkage=params.ood_shrinkage,
            precision=_tidy_rows(shrunk_precision(points, params.ood_shrinkage)),
            mahalanobis_threshold=_tidy(thresholds[0]),
            points=_tidy_rows(points),
            nearest_threshold=_tidy(thresholds[1]),
            note=f"Thresholds are the largest distances of {domains} left-out domains: by chance alone a "
            f"familiar adapter exceeds either with probability of about 1 in {domains + 1}.",
        ),
        training=Training(
            adapters=tuple(data["adapter"]),
            domains=tuple(groups.tolist()),
            data_sha256=canonical_sha256(_data(data, params)),
        ),
        evidence_class=evidence_class,
        metrics=_metrics(out_of_fold, groups, params, final),
    )
    return Fit(predictor, out_of_fold)


def _joined(features: pd.DataFrame, labels: pd.DataFrame, params: PredictorParams) -> pd.DataFrame:
    missing = sorted(set(labels["adapter"]) - set(features["adapter"]))
    if missing:
        raise EvidenceError(
            f"no features for {len(missing)} labelled adapters, first {missing[0]}",
            fix="write the features table with the adapters on disk: `lora-spec fit --execute`",
            code="features_missing",
        )
    columns = ["adapter", "domain", "family", "delta_alpha", "delta_alpha_se"]
    data = labels[columns].merge(features[["adapter", *params.columns]], on="adapter", validate="one_to_one")
    data = data.sort_values("adapter", ignore_index=True)
    if not np.isfinite(data[["delta_alpha", "delta_alpha_se"]].to_numpy(dtype=np.float64)).all():
        raise EvidenceError("a label or its error is not finite", code="label_value")
    domains = data["domain"].nunique()
    if domains < MIN_DOMAINS:
        raise EvidenceError(
            f"{domains} domains are too few to leave one out",
            fix=f"measure adapters of at least {MIN_DOMAINS} domains",
            code="too_few_domains",
        )
    return data


def _data(data: pd.DataFrame, params: PredictorParams) -> dict[str, Any]:
    """What the fit depends on, as JSON."""
    columns = ["adapter", "domain", "delta_alpha", "delta_alpha_se", *params.columns]
    return {"params": params.model_dump(mode="json", by_alias=True), "rows": data[columns].to_dict("records")}


def _elasticnet_out_of_fold(
    values: np.ndarray, y: np.ndarray, groups: np.ndarray, grid: ElasticNetParams
) -> np.ndarray:
    """Prediction, chosen l1_ratio and penalty of each adapter, shape (n, 3)."""
    out = np.empty((len(y), 3))
    for group in np.unique(groups):
        held = groups == group
        model = _select_and_fit(values[~held], y[~held], groups[~held], grid)
        out[held] = np.column_stack(
            [
                model.predict(values[held]),
                np.full(held.sum(), model.l1_ratio),
                np.full(held.sum(), model.penalty),
            ]
        )
    return out


def _select_and_fit(values: np.ndarray, y: np.ndarray, groups: np.ndarray, grid: ElasticNetParams) -> _Linear:
    """Choose l1_ratio and penalty by leaving one group out, then fit on all rows given.

    The score is the squared error, averaged over groups; of equal ones the largest penalty (the simplest
    model) wins.
    """
    penalties = grid.penalty.grid()
    score = np.zeros((len(grid.l1_ratios), len(penalties)))
    for group in np.unique(groups):
        held = groups == group
        mean, scale = standardiser(values[~held])
        inside, outside = (values[~held] - mean) / scale, (values[held] - mean) / scale
        for i, l1_ratio in enumerate(grid.l1_ratios):
            coefficients, intercept = _path(inside, y[~held], l1_ratio, penalties, tolerance=1e-6)
            error = y[held][:, None] - (intercept + outside @ coefficients)
            score[i] += np.mean(error**2, axis=0)
    column, row = np.unravel_index(int(np.argmin(score.T)), score.T.shape)
    l1_ratio, penalty = grid.l1_ratios[row], float(penalties[column])
    mean, scale = standardiser(values)
    coefficients, intercept = _path((values - mean) / scale, y, l1_ratio, np.array([penalty]))
    return _Linear(mean, scale, coefficients[:, 0], intercept, l1_ratio, penalty)


def _path(
    z: np.ndarray, y: np.ndarray, l1_ratio: float, penalties: np.ndarray, tolerance: float = 1e-10
) -> tuple[np.ndarray, float]:
    """ElasticNet coefficients (features, penalties) for centred columns, and the intercept (mean label)."""
    from sklearn import config_context
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import enet_path

    centre = float(y.mean())
    with warnings.catch_warnings(), config_context(assume_finite=True, skip_parameter_validation=True):
        warnings.simplefilter("error", ConvergenceWarning)
        _, coefficients, _ = enet_path(
            np.asfortranarray(z),
            y - centre,
            l1_ratio=l1_ratio,
            alphas=penalties,
            tol=tolerance,
            max_iter=200_000,
        )
    return coefficients, centre


def _baselines(norm: np.ndarray, y: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    """Out-of-fold predictions of the trivial baselines."""

    def line(x: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        def predict(train: np.ndarray, held: np.ndarray) -> np.ndarray:
            design = np.column_stack([np.ones(train.sum()), x[train]])
            beta = np.linalg.lstsq(design, y[train], rcond=None)[0]
            return beta[0] + beta[1] * x[held]

        return predict

    rules: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray | float]] = {
        "no_effect": lambda train, held: 0.0,
        "constant": lambda train, held: float(y[train].mean()),
        "norm_linear": line(norm),
        "norm_log": line(np.log1p(norm)),
    }
    out = {name: np.empty(len(y)) for name in rules}
    for group in np.unique(groups):
        held = groups == group
        for name, rule in rules.items():
            out[name][held] = rule(~held, held)
    return out


def _interval(residuals: np.ndarray, groups: np.ndarray, level: float) -> IntervalSpec:
    domains = len(set(groups))
    half_width = intervals.grouped_half_width(residuals, groups.tolist(), level)
    if not np.isfinite(half_width):
        raise EvidenceError(f"{domains} domains support no {level:.0%} interval", code="too_few_domains")
    return IntervalSpec(
        method="pooled residuals of left-out domains, each domain one draw",
        level=level,
        half_width=_tidy(half_width),
        groups=domains,
        note=f"{domains} domains support at most {domains / (domains + 1):.0%}, and coverage varies by "
        f"about {np.sqrt(level * (1 - level) / (domains + 2)):.0%} (one standard deviation) from one set of "
        "domains to the next; approximate, because the residuals come from models with one domain less.",
    )


def _metrics(
    table: pd.DataFrame, groups: np.ndarray, params: PredictorParams, final: _Linear
) -> dict[str, Any]:
    y = table["delta_alpha"].to_numpy()
    draws = intervals.domain_draws(groups.tolist(), params.bootstrap.draws, params.seed)
    level = params.bootstrap.level
    models: dict[str, Any] = {}
    for name in (MODEL, "norm_log", "norm_linear", *FLAT):
        predicted = table[name].to_numpy()
        scores = {
            "mae": intervals.with_interval(intervals.mae, y, predicted, draws, level),
            "r2": intervals.with_interval(intervals.r2, y, predicted, draws, level),
        }
        if name not in FLAT:
            scores["spearman"] = intervals.with_interval(intervals.spearman, y, predicted, draws, level)
        models[name] = scores
    error = np.abs(y[:, None] - table[["constant", "no_effect", "norm_log", MODEL]].to_numpy())
    gains = {}
    for column, name in enumerate(("constant", "no_effect", "norm_log")):
        gain = error[:, column] - error[:, 3]
        low, high = intervals.interval_of([float(gain[rows].mean()) for rows in draws], level)
        gains[name] = {"value": float(gain.mean()), "low": low, "high": high}
    coverage = intervals.left_out_coverage(
        y - table[MODEL].to_numpy(), groups.tolist(), params.interval_level
    )
    metrics = {
        "validation": "leave one domain out; penalty chosen inside each fold by leaving one more out",
        "interval_level": level,
        "models": models,
        "mae_gain": gains,
        "beats_constant": bool(gains["constant"]["low"] is not None and gains["constant"]["low"] > 0),
        "interval_coverage_left_out": coverage,
        "label_reliability": reliability(y, table["delta_alpha_se"].to_numpy()),
        "l1_ratio": final.l1_ratio,
        "penalty": final.penalty,
        "features_used": int(np.count_nonzero(final.coefficients)),
    }
    return _tidy_tree(metrics)


def _tidy(value: float) -> float:
    """Twelve significant digits: far below any meaning, above what differs between machines."""
    return float(f"{float(value):.12g}")


def _tidy_rows(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(_tidy(x) for x in row) for row in values)


def _tidy_tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tidy_tree(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_tidy_tree(item) for item in value]
    return _tidy(value) if isinstance(value, float) else value
