"""Predict the change of acceptance from adapter weights; the exported file is evaluated with numpy alone.

Fitting needs scikit-learn and lives in `lora_spec.predictor.fit` and `lora_spec.predictor.run`, not imported
here.
"""

from lora_spec.predictor.params import PredictorParams, load_predictor_params
from lora_spec.predictor.portable import (
    PortablePredictor,
    Prediction,
    PredictorError,
    load_predictor,
    save_predictor,
)

__all__ = [
    "PortablePredictor",
    "Prediction",
    "PredictorError",
    "PredictorParams",
    "load_predictor",
    "load_predictor_params",
    "save_predictor",
]
