"""Tiny random models and adapters, made on the fly from a seed: enough for vLLM, and done in seconds.

Targets and draft models are Llamas of transformers; EAGLE-3 heads and DFlash drafters, which transformers has
no class for, are plain checkpoints. All weights are float32, so that greedy outputs of two ways to compute
the same thing can be compared token by token. The vocabulary is tiny, so that even poor drafters have drafts
accepted.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB = 16
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
POSITIONS = 512
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, HIDDEN),
    "mlp.up_proj": (HIDDEN, HIDDEN),
    "mlp.down_proj": (HIDDEN, HIDDEN),
}


def tiny_llama(seed: int = 0, *, spread: float = 2.0) -> Any:
    """A random Llama with next-token distributions neither flat nor one-hot (`spread` scales its head)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, initializer_range=0.1, **_SHAPE)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(spread)
    return model


def perturbed(model: Any, amount: float, seed: int = 1) -> Any:
    """A copy with noise of `amount` times each weight's own spread: a drafter that agrees in part."""
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


@dataclass(frozen=True)
class Checkpoint:
    """A drafter that only vLLM has a class for.

    Attributes:
        config: content of ``config.json``.
        state: weights by their name in the checkpoint.
        mask_embedding: [hidden], a DFlash drafter's own vector for undrafted positions.
    """

    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    mask_embedding: torch.Tensor | None = None

    def save(self, folder: Path) -> str:
        """Write it as vLLM reads it; returns the folder."""
        import torch
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1, sort_keys=True))
        save_file(self.state, folder / "model.safetensors", metadata={"format": "pt"})
        if self.mask_embedding is not None:
            mask = {"embedding": self.mask_embedding, "mask_token_id": _mask_token(self.config)}
            torch.save(mask, folder / "mask_embedding.pt")
        return str(folder)

    def with_state(self, state: dict[str, torch.Tensor]) -> Checkpoint:
        """The same drafter with other weights."""
        return Checkpoint(self.config, state, self.mask_embedding)


def _mask_token(config: Mapping[str, Any]) -> int:
    return config["dflash_config"]["mask_token_id"]


def tiny_dflash(seed: int = 0, *, layers: int = 1, taps: Sequence[int] = (0, 1)) -> Checkpoint:
    """A random DFlash drafter of :func:`tiny_llama`: embeddings and head are the target's, so not stored.

    Args:
        taps: target layers whose outputs it reads.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    state = {"fc.weight": _normal(generator, HIDDEN, HIDDEN * len(taps))}
    for layer in range(layers):
        for name, shape in _PROJECTIONS.items():
            state[f"layers.{layer}.{name}.weight"] = _normal(generator, *shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            state[f"layers.{layer}.self_attn.{norm}.weight"] = torch.ones(HIDDEN // HEADS)
    state |= {"hidden_norm.weight": torch.ones(HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    config = {
        **_SHAPE,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "dtype": "float32",
        "block_size": 8,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": list(taps)},
    }
    return Checkpoint(config, state, 0.1 * torch.randn(HIDDEN, generator=generator))


def tiny_eagle3(seed: int = 0, *, taps: Sequence[int] = (0, 1, 2)) -> Checkpoint:
    """A random EAGLE-3 head of :func:`tiny_llama`, with a head of its own and the target's embeddings.

    Args:
        taps: inputs of these target layers are what it reads (2 is the last layer's output); vLLM's default
            names layers that a target of two layers lacks.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    state = {"fc.weight": _normal(generator, HIDDEN, HIDDEN * len(taps))}
    for name, (rows, columns) in _PROJECTIONS.items():
        # queries, keys and values read embedding and hidden state side by side
        doubled = name.startswith("self_attn") and "o_proj" not in name
        state[f"midlayer.{name}.weight"] = _normal(generator, rows, columns * (2 if doubled else 1))
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        state[f"midlayer.{norm}.weight"] = torch.ones(HIDDEN)
    state |= {"norm.weight": torch.ones(HIDDEN), "lm_head.weight": 2.0 * _normal(generator, VOCAB, HIDDEN)}
    config = {
        **_SHAPE,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "dtype": "float32",
    }
    return Checkpoint(config, state)


def _normal(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    import torch

    return torch.randn(rows, columns, generator=generator) / columns**0.5


def linear_weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights an adapter may change, by module: every matrix but those of embeddings and head."""
    return {
        name.removesuffix(".weight"): weight
        for name, weight in state.items()
        if weight.dim() == 2 and not {"embed_tokens", "lm_head"} & set(name.split("."))
    }


def save_random_adapter(
    state: Mapping[str, torch.Tensor], folder: Path, *, seed: int, rank: int = 8, size: float = 1.0
) -> str:
    """Write a PEFT adapter on every linear module of `state`, in its dtype; returns the folder.

    Args:
        size: ‖ΔW‖_F over ‖W‖_F of each module, large enough to change most outputs.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    modules = linear_weights(state)
    for module, weight in modules.items():
        rows, columns = weight.shape
        a = torch.randn(rank, columns, generator=generator)
        b = torch.randn(rows, rank, generator=generator)
        b *= size * weight.norm() / (b @ a).norm()
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(weight.dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(weight.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.split(".")[-1] for module in modules}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    return str(folder)


def merged_state(state: Mapping[str, torch.Tensor], adapter: Path | str) -> dict[str, torch.Tensor]:
    """`state` with an adapter of :func:`save_random_adapter` added to its weights (alpha is the rank)."""
    from safetensors.torch import load_file

    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    out = {name: weight.clone() for name, weight in state.items()}
    for module in linear_weights(state):
        a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        out[f"{module}.weight"] += b.float() @ a.float()
    return out


def merged_llama(model: Any, adapter: Path | str) -> Any:
    """A copy of a Llama with the adapter merged into its weights."""
    other = copy.deepcopy(model)
    other.load_state_dict(merged_state(model.state_dict(), adapter))
    return other


def prompts(count: int, length: int = 8, *, seed: int = 0) -> list[list[int]]:
    """Random prompts of token ids."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist()
