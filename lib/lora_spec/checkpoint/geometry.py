"""Shapes and names of the linear modules of a Llama-like base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lora_spec.errors import CheckpointError

MODULE_TYPES = ("q", "k", "v", "o", "gate", "up", "down")
BLOCK_OF = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn",
            "gate": "mlp", "up": "mlp", "down": "mlp"}  # fmt: skip
FC = "fc"
FC_LAYER = -1  # it stands before the blocks
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclass(frozen=True)
class BaseGeometry:
    """Shapes of a base whose blocks are ``<prefix>layers.<i>.{self_attn,mlp}.<type>_proj``.

    Attributes:
        num_layers: number of blocks.
        hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: sizes, in elements.
        prefix: what module names begin with, ``"model."`` for Llama and Qwen.
        name: label of the base (compared with ``base_model_name_or_path``), or empty.
        fc: (out_features, in_features) of ``<prefix>fc``, with which drafters like DFlash read the target's
            hidden states, or None.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    prefix: str = "model."
    name: str = ""
    fc: tuple[int, int] | None = None

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        name: str = "",
        prefix: str = "model.",
        fc: tuple[int, int] | None = None,
    ) -> BaseGeometry:
        """Geometry from a transformers ``config.json`` (or the same keys in a parameter file).

        Raises:
            CheckpointError: ``bad_config`` where a size is missing or no positive integer.
        """

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if type(value) is not int or value <= 0:
                raise CheckpointError(
                    f"base config: {key} is not a positive integer", where=name or None, code="bad_config"
                )
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        return cls(
            num_layers=size("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            intermediate_size=size("intermediate_size"),
            vocab_size=size("vocab_size"),
            prefix=prefix,
            name=name,
            fc=fc,
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module type → (out_features, in_features)."""
        attention, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q": (attention, self.hidden_size),
            "k": (kv, self.hidden_size),
            "v": (kv, self.hidden_size),
            "o": (self.hidden_size, attention),
            "gate": (self.intermediate_size, self.hidden_size),
            "up": (self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            **({FC: self.fc} if self.fc else {}),
        }

    def shape(self, module_type: str) -> tuple[int, int]:
        """(out_features, in_features) of a type, or of a fused one (outputs stacked in order)."""
        parts = FUSED.get(module_type, (module_type,))
        return sum(self.shapes[part][0] for part in parts), self.shapes[parts[0]][1]

    def modules(self) -> dict[str, tuple[int, int]]:
        """Every adaptable module by its full name → (out_features, in_features)."""
        found = {f"{self.prefix}{FC}": self.fc} if self.fc else {}
        for layer in range(self.num_layers):
            for kind, block in BLOCK_OF.items():
                found[f"{self.prefix}layers.{layer}.{block}.{kind}_proj"] = self.shapes[kind]
        return found

    def full_over_adapter(self, rank: int) -> float:
        """Parameters of all modules over those of a rank-``rank`` adapter on every one of them.

        Σ in·out / (rank · Σ (in + out)): what N full copies of a drafter need in memory over N adapters of
        it, embeddings, head and norms (shared, or small) apart.
        """
        shapes = self.modules().values()
        return sum(o * i for o, i in shapes) / (rank * sum(o + i for o, i in shapes))

    def has(self, prefix: str, layer: int) -> bool:
        """Whether a block of that prefix and index exists (``FC_LAYER`` where there is an ``fc``)."""
        first = FC_LAYER if self.fc else 0
        return prefix == self.prefix and first <= layer < self.num_layers
