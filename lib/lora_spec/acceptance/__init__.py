"""Counts of accepted drafts to rates, paired effects and labels: one place where counts become rates."""

from lora_spec.acceptance.attempts import attempt_weights
from lora_spec.acceptance.counts import (
    Censored,
    Rates,
    al_emitted,
    al_vllm,
    alpha_hat,
    censor_last_step,
    censor_requests,
    check_requests,
    compare,
    conditional_rates,
    pooled_rates,
    position_counts,
)
from lora_spec.acceptance.effects import (
    PairedEffect,
    check_base_floor,
    decide_effect,
    paired_alpha,
    paired_effect,
    prompts_needed,
    ratio_units,
    reliability,
)
from lora_spec.acceptance.labels import PRIMARY_DECODING, label_table

__all__ = [
    "PRIMARY_DECODING",
    "Censored",
    "PairedEffect",
    "Rates",
    "al_emitted",
    "al_vllm",
    "alpha_hat",
    "attempt_weights",
    "censor_last_step",
    "censor_requests",
    "check_base_floor",
    "check_requests",
    "compare",
    "conditional_rates",
    "decide_effect",
    "label_table",
    "paired_alpha",
    "paired_effect",
    "pooled_rates",
    "position_counts",
    "prompts_needed",
    "ratio_units",
    "reliability",
]
