"""Figures: functions from data frames to :class:`matplotlib.figure.Figure`, and one place that saves them."""

from lora_spec.plots.composability import composability_figure
from lora_spec.plots.confirm import confirm_figure, entropy_figure
from lora_spec.plots.effect import depth_figure, effect_figure, position_figure
from lora_spec.plots.evidence_cost import evidence_cost_figure
from lora_spec.plots.predictor import predictor_figure
from lora_spec.plots.saving import SavedFigure, save_figure
from lora_spec.plots.screen import agreement_figure, looping_figure, relation_figure, screen_figure

__all__ = [
    "SavedFigure",
    "agreement_figure",
    "composability_figure",
    "confirm_figure",
    "depth_figure",
    "effect_figure",
    "entropy_figure",
    "evidence_cost_figure",
    "looping_figure",
    "position_figure",
    "predictor_figure",
    "relation_figure",
    "save_figure",
    "screen_figure",
]
