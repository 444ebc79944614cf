"""The exported predictor: one JSON file, checked when it is read, evaluated with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from lora_spec.errors import LoraSpecError
from lora_spec.files import atomic_write_json, parse_json
from lora_spec.paths import rel
from lora_spec.predictor.params import Mode, Transform
from lora_spec.provenance import EvidenceClass

SCHEMA = "lora-spec-predictor/1"
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class PredictorError(LoraSpecError):
    """A predictor file or its input is not usable."""

    default_code = "predictor"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Target(_Model):
    """What is predicted."""

    label: Literal["delta_alpha"]
    units: str
    k: Annotated[int, Field(ge=1)]
    temperature: NonNegative


class Base(_Model):
    """The base model whose adapters the predictor knows: names as adapters give them, and its shapes."""

    key: str
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    hidden_size: Annotated[int, Field(ge=1)]
    num_hidden_layers: Annotated[int, Field(ge=1)]


class Drafter(_Model):
    """The drafter the labels were measured with."""

    key: str
    method: str


class Feature(_Model):
    """One input. ``mean`` and ``scale`` are of the transformed value, ``min`` and ``max`` of the raw one in
    training;
    ``coefficient`` belongs to the standardised value."""

    name: str
    unit: str
    transform: Transform
    mean: FiniteFloat
    scale: Positive
    minimum: Annotated[FiniteFloat, Field(alias="min")]
    maximum: Annotated[FiniteFloat, Field(alias="max")]
    coefficient: FiniteFloat


class IntervalSpec(_Model):
    """Half width of the prediction interval at ``level``, from residuals of ``groups`` left-out domains."""

    method: str
    level: Annotated[float, Field(gt=0.0, lt=1.0)]
    half_width: NonNegative
    groups: Annotated[int, Field(ge=1)]
    note: str


class OodSpec(_Model):
    """Distances in the standardised feature space and the largest ones that a left-out training domain had.

    ``precision`` (p, p) is the inverse of the shrunk covariance; ``points`` (n, p) are the training adapters.
    """

    method: str
    shrinkage: Annotated[float, Field(gt=0.0, le=1.0)]
    precision: tuple[tuple[FiniteFloat, ...], ...]
    mahalanobis_threshold: Positive
    points: Annotated[tuple[tuple[FiniteFloat, ...], ...], Field(min_length=1)]
    nearest_threshold: Positive
    note: str


class Training(_Model):
    """What the predictor was fitted on."""

    adapters: Annotated[tuple[str, ...], Field(min_length=1)]
    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    data_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Prediction(_Model):
    """A predicted label, its interval, and how far the adapter lies from those in training.

    ``outside`` names the features beyond their training range; ``unfamiliar`` is the out-of-distribution
    verdict.
    """

    point: float
    low: float
    high: float
    level: float
    mahalanobis: float
    mahalanobis_threshold: float
    nearest: str
    nearest_distance: float
    nearest_threshold: float
    outside: tuple[str, ...]
    unfamiliar: bool


class PortablePredictor(_Model):
    """A linear predictor of Δα from checkpoint features; ``metrics`` is free-form and for reading only."""

    schema_: Literal["lora-spec-predictor/1"] = Field(default=SCHEMA, alias="schema")
    mode: Mode
    target: Target
    base: Base
    drafter: Drafter
    features: Annotated[tuple[Feature, ...], Field(min_length=1)]
    intercept: FiniteFloat
    interval: IntervalSpec
    ood: OodSpec
    training: Training
    evidence_class: EvidenceClass
    metrics: dict[str, Any]

    @model_validator(mode="after")
    def _shapes(self) -> PortablePredictor:
        p, n = len(self.features), len(self.training.adapters)
        if len({f.name for f in self.features}) != p:
            raise ValueError("a feature is named twice")
        if len(self.training.domains) != n or len(self.ood.points) != n:
            raise ValueError("training.adapters, training.domains and ood.points have different lengths")
        if len(self.ood.precision) != p or any(
            len(row) != p for row in (*self.ood.precision, *self.ood.points)
        ):
            raise ValueError("ood.precision or ood.points does not fit the number of features")
        if any(f.minimum > f.maximum for f in self.features):
            raise ValueError("a feature has min above max")
        if self.evidence_class not in (EvidenceClass.MEASURED, EvidenceClass.SMOKE):
            raise ValueError("a predictor is fitted on measured or on smoke numbers")
        _check_precision(np.array(self.ood.precision))
        return self

    def standardised(self, rows: Sequence[Mapping[str, float]]) -> np.ndarray:
        """Transformed, centred and scaled features, float64 of shape (rows, features); other keys are not
        looked at.

        Raises:
            PredictorError: (code ``feature_missing`` or ``feature_value``) naming the feature.
        """
        names = [feature.name for feature in self.features]
        for row in rows:
            if missing := [name for name in names if name not in row]:
                raise PredictorError(f"feature {missing[0]} is missing", code="feature_missing")
        raw = np.array([[row[name] for name in names] for row in rows], dtype=np.float64).reshape(
            len(rows), -1
        )
        values = transformed(raw, [feature.transform for feature in self.features], names)
        mean, scale = (np.array([getattr(f, key) for f in self.features]) for key in ("mean", "scale"))
        return (values - mean) / scale

    def predict(self, row: Mapping[str, float]) -> Prediction:
        """Predict the label of one adapter from its features (`lora_spec.features.feature_row`).

        Raises:
            PredictorError: a feature is missing, not finite, or outside its transform's domain; the result
                leaves the range of float64 (code ``overflow``).
        """
        ood = self.ood
        with np.errstate(over="ignore", invalid="ignore"):
            z = self.standardised([row])[0]
            point = float(self.intercept + z @ np.array([f.coefficient for f in self.features]))
            mahalanobis = float(np.sqrt(np.maximum(0.0, z @ np.array(ood.precision) @ z)))
            distances = np.linalg.norm(np.array(ood.points) - z, axis=1)
        nearest = int(np.argmin(distances))
        if not np.isfinite([point + self.interval.half_width, mahalanobis, distances[nearest]]).all():
            raise PredictorError("the prediction leaves the range of float64", code="overflow")
        return Prediction(
            point=point,
            low=point - self.interval.half_width,
            high=point + self.interval.half_width,
            level=self.interval.level,
            mahalanobis=mahalanobis,
            mahalanobis_threshold=ood.mahalanobis_threshold,
            nearest=self.training.adapters[nearest],
            nearest_distance=float(distances[nearest]),
            nearest_threshold=ood.nearest_threshold,
            outside=tuple(f.name for f in self.features if not f.minimum <= row[f.name] <= f.maximum),
            unfamiliar=mahalanobis > ood.mahalanobis_threshold
            or float(distances[nearest]) > ood.nearest_threshold,
        )

    def knows_base(self, name: str | None) -> bool:
        """Whether an adapter that names its base ``name`` belongs to this predictor's base.

        The last part of the name decides, as copies and mirrors differ in what comes before it; shapes are
        checked when the adapter is read.
        """
        return name is not None and _last_part(name) in map(_last_part, self.base.names)

    def payload(self) -> dict[str, Any]:
        """JSON form under the names of the file."""
        return self.model_dump(mode="json", by_alias=True)


def _check_precision(precision: np.ndarray) -> None:
    """An inverse covariance is symmetric and positive definite; else distances mean nothing."""
    try:
        if not np.allclose(precision, precision.T, rtol=0.0, atol=1e-9 * np.abs(precision).max()):
            raise ValueError("ood.precision is not symmetric")
        np.linalg.cholesky(precision)
    except np.linalg.LinAlgError as error:
        raise ValueError("ood.precision is not positive definite") from error


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def transformed(values: np.ndarray, transforms: Sequence[Transform], names: Sequence[str]) -> np.ndarray:
    """Apply each column's transform.

    Args:
        values: float64 of shape (n, p).

    Raises:
        PredictorError: (code ``feature_value``) for a value that is not finite, or at most -1 under log1p.
    """
    bad = ~np.isfinite(values) | ((values <= -1.0) & (np.array(transforms) == "log1p"))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise PredictorError(f"feature {names[column]} is {values[row, column]}", code="feature_value")
    out = values.copy()
    for column, transform in enumerate(transforms):
        if transform == "log1p":
            out[:, column] = np.log1p(values[:, column])
    return out


def save_predictor(path: Path, predictor: PortablePredictor) -> None:
    """Write the JSON file, whole or not at all."""
    atomic_write_json(path, predictor.payload())


def load_predictor(path: Path) -> PortablePredictor:
    """Read and check a predictor file.

    Raises:
        PredictorError: missing, not JSON, of another schema version, an unknown or missing key, a number that
            is not finite or is given as text, or shapes that do not fit.
    """
    try:
        raw = path.read_bytes()
        data = parse_json(raw)
    except FileNotFoundError as error:
        raise PredictorError(
            "predictor file not found",
            where=rel(path),
            fix="fit one with `lora-spec fit --execute`",
            code="no_predictor",
        ) from error
    except (OSError, ValueError) as error:
        raise PredictorError("cannot read the predictor", where=rel(path), fix=str(error)) from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise PredictorError(f"expected a {SCHEMA} file, got {schema!r:.60}", where=rel(path), code="schema")
    try:
        return PortablePredictor.model_validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "(top level)"
        raise PredictorError(f"not a valid predictor: {name}: {first['msg']}", where=rel(path)) from error
