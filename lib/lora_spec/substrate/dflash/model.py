"""The drafter's forward pass as vLLM computes it (0.32, ``model_executor/models/qwen3_dflash.py``).

A block is the last known token (the *anchor*) and ``k`` masks; the mask at position p predicts the token at
p. Each layer attends from the block to the block itself, without causality, and to a context: keys and values
of all tokens before the anchor, made from the target's hidden states (*taps*) by ``fc``, ``hidden_norm`` and
the layer's own projections. Embeddings and head are the target's.

Weights are a plain mapping under the checkpoint's names, so the same pass serves full training, adapters
(their product added to the weights first) and checkpoints as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter, named as in a Hugging Face config; ``taps`` counts the layers it reads."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    taps: int
    rms_norm_eps: float
    rope_theta: float

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Every matrix by its name in the checkpoint, with (outputs, inputs)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        found = {"fc.weight": (hidden, hidden * self.taps)}
        for number in range(self.num_hidden_layers):
            found |= {f"layers.{number}.{name}.weight": size for name, size in layer.items()}
        return found

    def norms(self) -> dict[str, int]:
        """Every norm by its name in the checkpoint, with its size."""
        found = {"hidden_norm.weight": self.hidden_size, "norm.weight": self.hidden_size}
        for number in range(self.num_hidden_layers):
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"layers.{number}.{name}.weight"] = self.hidden_size
            for name in ("q_norm", "k_norm"):
                found[f"layers.{number}.self_attn.{name}.weight"] = self.head_dim
        return found


def block_hidden(
    weights: Weights, shape: Shape, taps: torch.Tensor, block: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Hidden states of blocks after the final norm; times the target's head they are logits.

    Args:
        weights: under the checkpoint's names, all in the dtype to compute in.
        taps: the target's hidden states of a sequence, [batch, length, taps * hidden], as the target gives
            them.
        block: embeddings of anchor and masks, [batch, anchors, 1 + k, hidden].
        anchors: position of each block's last known token, int64 [batch, anchors]; the context ends before
            it.

    Returns:
        [batch, anchors, 1 + k, hidden]; index i belongs to position anchor + i.
    """
    import torch

    length, size = taps.shape[1], block.shape[2]
    context = _norm(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"], shape)
    before = torch.arange(length)
    positions = anchors.unsqueeze(-1) + torch.arange(size)
    bias = torch.zeros(*anchors.shape, 1, 1, length + size)
    bias[..., :length].masked_fill_((before >= anchors.unsqueeze(-1))[:, :, None, None], float("-inf"))
    for number in range(shape.num_hidden_layers):
        prefix = f"layers.{number}."
        layer = {
            name.removeprefix(prefix).removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        block = block + _attention(layer, shape, context, before, block, positions, bias)
        inner = _norm(block, layer["post_attention_layernorm"], shape)
        gate = torch.nn.functional.silu(inner @ layer["mlp.gate_proj"].T)
        block = block + (gate * (inner @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    return _norm(block, weights["norm.weight"], shape)


def _attention(
    layer: Weights,
    shape: Shape,
    context: torch.Tensor,
    before: torch.Tensor,
    block: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """What attention adds to the block: [batch, anchors, 1 + k, hidden].

    Query heads that share a key head are stacked along the block, so the context is read once and not copied
    for every anchor.
    """
    import torch

    batch, count, size, _ = block.shape
    length, groups = context.shape[1], shape.num_key_value_heads
    inner = _norm(block, layer["input_layernorm"], shape)
    q = _heads(inner, layer, "q", shape, positions)
    k, v = _heads(inner, layer, "k", shape, positions), _heads(inner, layer, "v", shape, None)
    k_context = _heads(context, layer, "k", shape, before)
    v_context = _heads(context, layer, "v", shape, None)
    q = q.reshape(batch, count, groups, -1, shape.head_dim)
    scores = torch.cat(
        [torch.einsum("bahqd,bhtd->bahqt", q, k_context), torch.einsum("bahqd,bahkd->bahqk", q, k)], dim=-1
    )
    shares = (scores.float() * shape.head_dim**-0.5 + bias).softmax(-1).to(v.dtype)
    mixed = torch.einsum("bahqt,bhtd->bahqd", shares[..., :length], v_context)
    mixed = mixed + torch.einsum("bahqk,bahkd->bahqd", shares[..., length:], v)
    mixed = mixed.reshape(batch, count, -1, size, shape.head_dim).transpose(2, 3).flatten(-2)
    return mixed @ layer["self_attn.o_proj"].T


def _heads(
    x: torch.Tensor, layer: Weights, kind: str, shape: Shape, positions: torch.Tensor | None
) -> torch.Tensor:
    """[..., length, hidden] to [..., heads, length, head size]; with positions also normed and rotated."""
    projected = x @ layer[f"self_attn.{kind}_proj"].T
    split = projected.unflatten(-1, (-1, shape.head_dim)).transpose(-2, -3)
    if positions is None:
        return split
    return _rotated(_norm(split, layer[f"self_attn.{kind}_norm"], shape), positions, shape)


def _rotated(x: torch.Tensor, positions: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Rotary position embedding, halves paired (as in GPT-NeoX)."""
    import torch

    speeds = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = (positions.unsqueeze(-1) * speeds).unsqueeze(-3)  # one for all heads
    cos, sin = (torch.cat([f, f], dim=-1).to(x.dtype) for f in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _norm(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Root-mean-square norm over the last axis, computed in float32."""
    from torch.nn import functional

    normed = functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), shape.rms_norm_eps)
    return normed.to(x.dtype)
