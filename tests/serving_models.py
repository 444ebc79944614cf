"""Tiny random models for engine tests: see `lora_spec.measure.tiny_models`."""

from __future__ import annotations

from typing import Any

from lora_spec.measure.tiny_models import VOCAB, perturbed, prompts, save, tiny_llama

__all__ = ["VOCAB", "perturbed", "prompts", "save", "speculation", "tiny_llama"]


def speculation(drafter: str, k: int = 4) -> dict[str, Any]:
    """Keywords of LLM for a draft model that samples, with per-request metrics."""
    return {
        "speculative_config": {
            "method": "draft_model",
            "model": drafter,
            "num_speculative_tokens": k,
            "draft_sample_method": "probabilistic",
        },
        "per_request_spec_decode_metrics": "detailed",
    }
