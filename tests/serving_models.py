"""Tiny random Llama models, made on the fly: big enough for vLLM, small enough for seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 16


def tiny_llama(seed: int = 0, *, spread: float = 2.0) -> Any:
    """A random Llama with next-token distributions neither flat nor one-hot (`spread` scales its head)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(spread)
    return model


def perturbed(model: Any, amount: float, seed: int = 1) -> Any:
    """A copy with noise of `amount` times each weight's own spread: a drafter that agrees in part."""
    import copy

    import torch

    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight.add_(amount * weight.std() * torch.randn(weight.shape, generator=generator))
    return other


def save(model: Any, folder: Path) -> str:
    """Write the model in fp32; returns the folder."""
    model.save_pretrained(folder)
    return str(folder)


def prompts(count: int, length: int = 8, *, seed: int = 0) -> list[list[int]]:
    """Random prompts of token ids."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist()


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
