"""A DFlash drafter fitted to a tiny target in seconds, so that its drafts depend on what it reads.

A random DFlash drafter proposes nearly the same tokens whatever the context, and hardly any is accepted:
faults in the context's keys and values would change nothing that can be counted.

The forward pass is that of `substrate.dflash.model`, kept apart from it: records of phase 0 carry the hash of
what is fitted here, which the order of additions decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_spec.measure.tiny_models import HEADS, HIDDEN, KV_HEADS, VOCAB, Checkpoint, prompts

if TYPE_CHECKING:
    import torch

_HEAD = HIDDEN // HEADS
_EPS = 1e-6
_THETA = 10000.0
_BATCH, _ANCHORS = 16, 8


def fitted(
    drafter: Checkpoint,
    target: Any,
    *,
    drafts: int,
    length: int,
    generated: int,
    steps: int = 250,
    seed: int = 0,
) -> Checkpoint:
    """Fit a drafter of `tiny_models.tiny_dflash` to a target's own continuations of random prompts.

    Args:
        target: a Llama of `tiny_models.tiny_llama`.
        drafts: drafted tokens per block.
        length: tokens of a prompt. generated: tokens of a continuation.
        steps: of Adam; the number of steps ends it, never the time.
    """
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(seed)
    tokens = _continuations(target, prompts(64, length, seed=seed + 1), generated, generator)
    taps = _tap_states(target, tokens, drafter.config["dflash_config"]["target_layer_ids"])
    weights = {name: weight.clone().requires_grad_() for name, weight in drafter.state.items()}
    assert drafter.mask_embedding is not None
    mask = drafter.mask_embedding.clone().requires_grad_()
    embeddings, head = (w.detach() for w in (target.model.embed_tokens.weight, target.lm_head.weight))
    optimiser = torch.optim.Adam([*weights.values(), mask], lr=2e-3)
    offsets = torch.arange(1, drafts + 1)
    for _ in range(steps):
        rows = torch.randint(len(tokens), (_BATCH,), generator=generator)
        anchors = (
            length - 1 + torch.randint(generated - drafts, (_BATCH, _ANCHORS), generator=generator)
        )  # where the last known token stands
        block = torch.cat(
            [
                embeddings[tokens[rows].gather(1, anchors)].unsqueeze(2),
                mask.expand(_BATCH, _ANCHORS, drafts, HIDDEN),
            ],
            dim=2,
        )
        logits = forward(weights, taps[rows], block, anchors)[:, :, 1:] @ head.T
        wanted = tokens[rows].gather(1, (anchors.unsqueeze(-1) + offsets).flatten(1))
        loss = functional.cross_entropy(logits.reshape(-1, VOCAB), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    state = {name: weight.detach() for name, weight in weights.items()}
    return Checkpoint(drafter.config, state, mask.detach())


def forward(
    weights: dict[str, torch.Tensor], taps: torch.Tensor, block: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Hidden states of the block, as vLLM's `qwen3_dflash` computes them.

    Args:
        taps: the target's hidden states, [batch, length, taps * hidden].
        block: embeddings of the last known token and of the undrafted ones, [batch, anchors, 1 + k, hidden].
        anchors: position of the last known token, [batch, anchors]; the context ends before it.

    Returns:
        [batch, anchors, 1 + k, hidden], after the final norm.
    """
    import torch

    batch, count, size, _ = block.shape
    length = taps.shape[1]
    context = _rms(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    positions = anchors.unsqueeze(-1) + torch.arange(size)
    visible = torch.arange(length) < anchors.unsqueeze(-1)
    bias = torch.zeros(batch, count, 1, 1, length + size)
    bias[..., :length].masked_fill_(~visible[:, :, None, None], float("-inf"))
    layers = sum(name.endswith("o_proj.weight") for name in weights)
    for number in range(layers):
        layer = {
            name.removeprefix(f"layers.{number}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        inner = _rms(block, layer["input_layernorm"])
        q = _heads(inner, layer, "q", HEADS, positions)
        k = _heads(inner, layer, "k", KV_HEADS, positions)
        v = _heads(inner, layer, "v", KV_HEADS, None)
        k_context = _heads(context, layer, "k", KV_HEADS, torch.arange(length))
        v_context = _heads(context, layer, "v", KV_HEADS, None)
        k, v = (
            torch.cat([c.unsqueeze(1).expand(-1, count, -1, -1, -1), own], dim=3).repeat_interleave(
                HEADS // KV_HEADS, dim=2
            )
            for c, own in ((k_context, k), (v_context, v))
        )
        scores = q @ k.transpose(-1, -2) / _HEAD**0.5 + bias
        mixed = (scores.softmax(-1) @ v).transpose(2, 3).reshape(batch, count, size, HIDDEN)
        block = block + mixed @ layer["self_attn.o_proj"].T
        inner = _rms(block, layer["post_attention_layernorm"])
        gate = torch.nn.functional.silu(inner @ layer["mlp.gate_proj"].T)
        block = block + (gate * (inner @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    return _rms(block, weights["norm.weight"])


def _heads(
    x: torch.Tensor, layer: dict[str, torch.Tensor], kind: str, heads: int, positions: torch.Tensor | None
) -> torch.Tensor:
    """[..., length, hidden] to [..., heads, length, head size]; with positions also normed and rotated."""
    projected = x @ layer[f"self_attn.{kind}_proj"].T
    split = projected.unflatten(-1, (heads, _HEAD)).transpose(-2, -3)
    if positions is None:
        return split
    return _rotated(_rms(split, layer[f"self_attn.{kind}_norm"]), positions)


def _rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    import torch

    speeds = _THETA ** (-torch.arange(0, _HEAD, 2) / _HEAD)
    angles = (positions.unsqueeze(-1) * speeds).unsqueeze(-3)  # one for all heads
    cos, sin = (torch.cat([f, f], dim=-1) for f in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight


def _continuations(
    target: Any, starts: list[list[int]], count: int, generator: torch.Generator
) -> torch.Tensor:
    """[prompts, length + count]: the first half continued greedily, the others sampled at temperature 0.8."""
    import torch

    ids = torch.tensor(starts)
    half = len(ids) // 2
    with torch.no_grad():
        for _ in range(count):
            logits = target(ids).logits[:, -1]
            following = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            following[:half] = logits[:half].argmax(-1, keepdim=True)
            ids = torch.cat([ids, following], dim=1)
    return ids


def _tap_states(target: Any, tokens: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """Outputs of the layers, side by side: [batch, length, taps * hidden]."""
    import torch

    seen: list[torch.Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hooks = [target.model.layers[i].register_forward_hook(keep) for i in layers]
    with torch.no_grad():
        target(tokens)
    for hook in hooks:
        hook.remove()
    return torch.cat(seen, dim=-1)
