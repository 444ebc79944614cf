"""The loss of drafted blocks: what the target wrote, and what else it thought likely.

The vocabulary's softmax is estimated from a part of it (sampled softmax, Bengio & Senécal 2003): tokens that
are common or wanted are counted exactly, and a uniform sample of the others stands for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Wanted:
    """What blocks should predict.

    Attributes:
        labels: token at each drafted position, int64 [batch, anchors, k].
        weights: of each position in the loss, float32 [batch, anchors, k]; 0 beyond the sequence's end.
        top_ids: the target's most probable tokens there, int64 [batch, anchors, k, top].
        top_shares: their probabilities, made to sum to one, float32 [batch, anchors, k, top].
    """

    labels: torch.Tensor
    weights: torch.Tensor
    top_ids: torch.Tensor
    top_shares: torch.Tensor


def wanted_tokens(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    anchors: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
    *,
    drafts: int,
    decay: float,
) -> Wanted:
    """Labels of the blocks after ``anchors``; position i of a block counts ``decay`` to the i.

    Args:
        tokens: int64 [batch, length]. lengths: valid tokens of each row, int64 [batch].
        anchors: int64 [batch, anchors]; a block must end within ``length``.
        top_ids, top_logprobs: the target's most probable next tokens after each position, [batch, length - 1,
            top].
    """
    import torch

    after = anchors.unsqueeze(-1) + torch.arange(1, drafts + 1)
    row = torch.arange(len(tokens))[:, None, None]
    valid = after < lengths[:, None, None]
    return Wanted(
        labels=tokens[row, after],
        weights=valid * decay ** torch.arange(drafts),
        top_ids=top_ids[row, after - 1],
        top_shares=top_logprobs[row, after - 1].float().softmax(-1),
    )


@dataclass(frozen=True)
class Candidates:
    """The part of the vocabulary that a step's softmax is taken over.

    Attributes:
        ids: int64 [candidates], ascending among the exact, then among the sampled.
        correction: log of how many tokens each stands for, float32 [candidates].
        place: index in ``ids`` of every token, -1 where it is none, int64 [vocabulary].
    """

    ids: torch.Tensor
    correction: torch.Tensor
    place: torch.Tensor


def candidates(
    wanted: Wanted, hot: torch.Tensor, vocabulary: int, random: int, generator: torch.Generator
) -> Candidates:
    """All wanted and ``hot`` tokens, and up to ``random`` of the others.

    Args:
        hot: tokens that are always counted exactly, int64.
    """
    import torch

    exact = torch.zeros(vocabulary, dtype=torch.bool)
    exact[torch.cat([wanted.labels.flatten(), wanted.top_ids.flatten(), hot])] = True
    must = exact.nonzero().squeeze(1)
    drawn = torch.randint(vocabulary, (random,), generator=generator).unique()
    drawn = drawn[~exact[drawn]]
    ids = torch.cat([must, drawn])
    correction = torch.zeros(len(ids))
    if len(drawn):
        correction[len(must) :] = math.log((vocabulary - len(must)) / len(drawn))
    place = torch.full((vocabulary,), -1)
    place[ids] = torch.arange(len(ids))
    return Candidates(ids, correction, place)


def block_loss(
    hidden: torch.Tensor, head: torch.Tensor, wanted: Wanted, chosen: Candidates, *, distill: float
) -> torch.Tensor:
    """Mean over positions of −log p(label) − ``distill`` · Σ q log p, in nats, by their weights.

    Args:
        hidden: of the drafted positions, [batch, anchors, k, hidden].
        head: the target's output matrix, [vocabulary, hidden].
    """
    import torch

    logits = (hidden @ head[chosen.ids].T).float() + chosen.correction
    label = logits.gather(-1, chosen.place[wanted.labels].unsqueeze(-1)).squeeze(-1)
    soft = (logits.gather(-1, chosen.place[wanted.top_ids]) * wanted.top_shares).sum(-1)
    each = (1 + distill) * torch.logsumexp(logits, -1) - label - distill * soft
    return (each * wanted.weights).sum() / wanted.weights.sum().clamp_min(1e-9)
