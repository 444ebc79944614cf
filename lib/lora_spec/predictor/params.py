"""``params/predictor.yaml`` and the feature modes."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from lora_spec.features import FEATURES
from lora_spec.params import StrictModel, load_params

Mode = Literal["checkpoint_only"]
Transform = Literal["identity", "log1p"]
OpenShare = Annotated[float, Field(gt=0.0, lt=1.0)]


class FeatureChoice(StrictModel):
    """A column of the features table and what is done to it before standardising."""

    name: str
    transform: Transform


class Penalties(StrictModel):
    """Geometric grid of ElasticNet penalties, in label units."""

    low: Annotated[float, Field(gt=0.0)]
    high: Annotated[float, Field(gt=0.0)]
    count: Annotated[int, Field(ge=2, le=200)]

    def grid(self) -> np.ndarray:
        """Penalties in falling order (the order a warm-started path wants)."""
        return np.geomspace(self.high, self.low, self.count)


class ElasticNetParams(StrictModel):
    """Grid from which each fold chooses by itself."""

    l1_ratios: Annotated[tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], Field(min_length=1)]
    penalty: Penalties


class Bootstrap(StrictModel):
    """Resampling of domains."""

    draws: Annotated[int, Field(ge=10)]
    level: OpenShare


class PredictorParams(StrictModel):
    """``params/predictor.yaml``."""

    schema_: Literal["lora-spec-predictor-params/1"] = Field(alias="schema")
    mode: Mode
    pair: str
    label: Literal["delta_alpha"]
    k: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0.0)]
    seed: int
    features: Annotated[tuple[FeatureChoice, ...], Field(min_length=1)]
    norm_feature: str
    elasticnet: ElasticNetParams
    interval_level: OpenShare
    ood_shrinkage: Annotated[float, Field(gt=0.0, le=1.0)]
    bootstrap: Bootstrap

    @model_validator(mode="after")
    def _columns_belong_to_the_mode(self) -> PredictorParams:
        names = self.feature_names
        if len(set(names)) != len(names):
            raise ValueError("a feature is named twice")
        for name in (*names, self.norm_feature):
            if name not in FEATURES:
                raise ValueError(f"{name} is no checkpoint feature, so mode {self.mode} may not see it")
        return self

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Declared columns, in order."""
        return tuple(choice.name for choice in self.features)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every features column the mode may open: the declared ones and the baseline's."""
        return tuple(dict.fromkeys((*self.feature_names, self.norm_feature)))


def load_predictor_params(path: str = "predictor.yaml") -> PredictorParams:
    """Read and check ``params/predictor.yaml``."""
    return load_params(PredictorParams, path)
