"""Overlap and acceptance probability at every position of the model's own text.

At position t of an output x with prefix x_<t, under temperature T: o_t = sum_x min(p_t, q_t) is the
probability that a draft there is accepted, and a_t = min(1, q_t(x_t) / p_t(x_t)) the same once x_t is known.
`score_outputs` looks at texts that are there already; `lockstep` lets target and drafter walk together
through a text that the target draws as it goes, one token a step, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_spec.measure.scorer import next_token_logits, overlap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PositionScores:
    """Positions 1, 2, ... of one output (position 0 comes from the prefill: nothing is drafted there).

    Attributes:
        overlap: o_t, float64, shape (tokens - 1,).
        accept: a_t, the same shape.
        tokens: the output.
    """

    overlap: np.ndarray
    accept: np.ndarray
    tokens: list[int]


def score_outputs(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    temperature: float,
    *,
    target: Any,
    drafter: Any,
    batch: int,
) -> list[PositionScores]:
    """Teacher-forced scores of given outputs; all prompts have one length, none is longer than its batch.

    Args:
        prompts, outputs: token ids. temperature: T > 0.
        target: with its adapter, where the outputs are the adapted target's.
        batch: texts a forward pass; shorter ones are padded on the right, where causal attention never looks.
    """
    import torch

    scores: list[PositionScores] = []
    for start in range(0, len(prompts), batch):
        texts = [
            [*prompt, *output]
            for prompt, output in zip(
                prompts[start : start + batch], outputs[start : start + batch], strict=True
            )
        ]
        longest = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], dtype=torch.long)
        first = len(prompts[start]) + 1
        log_p, log_q = (
            torch.log_softmax(next_token_logits(model, tokens, first) / temperature, -1)
            for model in (target, drafter)
        )
        both = overlap(log_p, log_q)
        kept = _kept(log_p, log_q, tokens[:, first:])
        for row, text in enumerate(texts):
            count = len(text) - first
            scores.append(
                PositionScores(
                    overlap=both[row, :count].double().numpy(),
                    accept=kept[row, :count].double().numpy(),
                    tokens=list(outputs[start + row]),
                )
            )
    return scores


def _kept(log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """min(1, q(x) / p(x)) at ``tokens``, of shape ``log_p``'s without the vocabulary."""
    at = tokens.unsqueeze(-1)
    return (log_q.gather(-1, at) - log_p.gather(-1, at)).squeeze(-1).clamp(max=0.0).exp()


def lockstep(
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    temperature: float,
    *,
    target: Any,
    drafter: Any,
    max_tokens: int,
    stop_token: int,
    batch: int,
) -> list[PositionScores]:
    """Sample an output of each prompt from the target and score it on the way.

    Args:
        prompts: token ids, of one length.
        seeds: of each output's noise. The token is argmax p / E with E exponential (the Gumbel-max trick), so
            two targets with equal seeds draw the same token as often as their distributions are alike.
        temperature: T > 0.
        max_tokens: of an output; ``stop_token`` ends it earlier and is its last token.
        batch: outputs at a time.
    """
    import torch

    done: list[PositionScores] = []
    with torch.inference_mode():
        for start in range(0, len(prompts), batch):
            chunk, noise = prompts[start : start + batch], seeds[start : start + batch]
            generators = [torch.Generator().manual_seed(seed) for seed in noise]
            walk = _Walk(torch.tensor([list(p) for p in chunk]), generators, temperature, stop_token)
            done += walk.run(target, drafter, max_tokens)
    return done


class _Walk:
    """One batch on its way."""

    def __init__(
        self, prompts: torch.Tensor, generators: list[Any], temperature: float, stop_token: int
    ) -> None:
        self.prompts, self.generators = prompts, generators
        self.temperature, self.stop_token = temperature, stop_token

    def run(self, target: Any, drafter: Any, max_tokens: int) -> list[PositionScores]:
        import torch

        of_target, of_drafter = _Decoder(target, self.temperature), _Decoder(drafter, self.temperature)
        log_p = of_target.feed(self.prompts)
        tokens = [self._draw(log_p)]
        overlaps: list[torch.Tensor] = []
        accepts: list[torch.Tensor] = []
        ended = tokens[0] == self.stop_token
        unread = torch.cat([self.prompts, tokens[0].unsqueeze(1)], dim=1)  # by the drafter
        while len(tokens) < max_tokens and not bool(ended.all()):
            log_p = of_target.feed(tokens[-1].unsqueeze(1))
            log_q = of_drafter.feed(unread)
            tokens.append(self._draw(log_p))
            overlaps.append(overlap(log_p, log_q))
            accepts.append(_kept(log_p, log_q, tokens[-1]))
            unread = tokens[-1].unsqueeze(1)
            ended |= tokens[-1] == self.stop_token
        return [self._row(i, tokens, overlaps, accepts) for i in range(len(self.prompts))]

    def _draw(self, log_p: torch.Tensor) -> torch.Tensor:
        """One token a row, int64 of shape (batch,)."""
        import torch

        noise = torch.empty_like(log_p)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return (log_p.exp() / noise).argmax(-1)

    def _row(self, row: int, tokens: list[Any], overlaps: list[Any], accepts: list[Any]) -> PositionScores:
        output = [int(token[row]) for token in tokens]
        if self.stop_token in output:
            output = output[: output.index(self.stop_token) + 1]
        count = len(output) - 1
        return PositionScores(
            overlap=np.array([float(x[row]) for x in overlaps[:count]]),
            accept=np.array([float(x[row]) for x in accepts[:count]]),
            tokens=output,
        )


class _Decoder:
    """A causal model that is fed a text piece by piece and remembers its keys and values."""

    def __init__(self, model: Any, temperature: float) -> None:
        self._model, self._temperature, self._cache = model, temperature, None

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of what follows ``tokens``, float32 of shape (batch, vocabulary)."""
        import torch

        out = self._model(
            input_ids=tokens,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor([tokens.shape[1] - 1]),  # by index, as in next_token_logits
        )
        self._cache = out.past_key_values
        return torch.log_softmax(out.logits[:, -1].float() / self._temperature, -1)
