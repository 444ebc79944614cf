"""Accuracy of drafts on the target's greedy continuations that nothing is learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lora_spec.substrate.dflash.optimise import Material, Reader

if TYPE_CHECKING:
    import torch

_BATCH = 16


def heldout_accuracy(
    weights: Mapping[str, torch.Tensor], reader: Reader, material: Material, *, drafts: int, every: int = 4
) -> dict[str, Any]:
    """Greedy drafts after every ``every``-th token that the target wrote, over the whole vocabulary.

    Returns:
        ``accuracy``: share of right tokens by position of the block. ``acceptance_length``: 1 + the mean
        number of right tokens before the first wrong one, over these anchors (an engine's anchors follow its
        accepted blocks, so its number differs a little).
    """
    import torch

    length = material.tokens.shape[1]
    anchors = torch.arange(material.first, length - drafts, every)
    after = anchors.unsqueeze(-1) + torch.arange(1, drafts + 1)
    right, valid = [], []
    with torch.inference_mode():
        for start in range(0, len(material.tokens), _BATCH):
            numbers = list(range(start, min(start + _BATCH, len(material.tokens))))
            tokens = material.tokens[numbers]
            taps, _, _ = material.rows(numbers)
            hidden = reader.drafted(weights, taps, tokens, anchors.expand(len(numbers), -1), drafts)
            drafted = torch.stack([(row @ reader.head.T).argmax(-1) for row in hidden])
            right.append(drafted == tokens[:, after])
            valid.append(after[:, -1] < material.lengths[numbers].unsqueeze(1))
    whole = torch.cat(right)[torch.cat(valid)].float()
    return {
        "accuracy": [round(share, 5) for share in whole.mean(0).tolist()],
        "acceptance_length": round(1 + whole.cumprod(1).sum(1).mean().item(), 5),
    }
