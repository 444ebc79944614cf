"""Teacher-forced scores of a target, its adapted form and its drafter on fixed token windows.

Distributions are at one temperature T: p = softmax(target logits / T), p' with the adapter, q the drafter's.

* overlap = sum_x min(p, q) = 1 - TV(p, q), the acceptance probability of one probabilistic draft (Leviathan
  et al., arXiv 2211.17192, section 3); for the adapted arm p' takes the place of p.
* top1: share of positions where target and drafter agree on the most likely token.
* kl = KL(p' || p), js = Jensen-Shannon divergence, tv = TV(p', p); nats and shares of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_spec.errors import MissingTierError

if TYPE_CHECKING:
    import torch

_BATCH = 8
"""Windows a forward pass: 8 x 64 positions x 49,152 logits in fp32 are 100 MB an arm."""


@dataclass(frozen=True)
class WindowScore:
    """Means over the scored positions of one window; divergences are ``None`` for the base arm."""

    overlap: float
    top1: float
    entropy_target: float
    entropy_drafter: float
    positions: int
    kl: float | None = None
    js: float | None = None
    tv: float | None = None


def load_model(path: Path, *, adapter: Path | None = None, dtype: str = "bfloat16") -> Any:
    """A causal language model in evaluation mode, with a PEFT adapter applied (unmerged) if given.

    Raises:
        MissingTierError: transformers, torch or peft is not installed.
    """
    try:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingTierError(
            "torch, transformers and peft are needed here",
            where=str(error),
            fix="make the cpu tier with `make cpu`",
        ) from error
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


def next_token_logits(model: Any, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Logits that predict ``tokens[:, first:]``.

    Args:
        model: from :func:`load_model`.
        tokens: int64, shape (windows, length).
        first: first predicted position, at least 1.

    Returns:
        float32, shape (windows, length - first, vocabulary).
    """
    import torch

    # By index: the product of a slice with frozen weights would copy the output matrix for every window.
    keep = torch.arange(first - 1, tokens.shape[1] - 1)
    with torch.inference_mode():
        return model(input_ids=tokens, logits_to_keep=keep, use_cache=False).logits.float()


def divergences(log_p: torch.Tensor, log_q: torch.Tensor) -> dict[str, torch.Tensor]:
    """KL(p || q), Jensen-Shannon divergence and total variation along the last axis.

    Args:
        log_p, log_q: log-probabilities, float32, shape (..., vocabulary).

    Returns:
        ``kl``, ``js`` (nats) and ``tv``, each of shape (...).
    """
    import torch

    p, q = log_p.exp(), log_q.exp()
    log_m = torch.logaddexp(log_p, log_q) - np.log(2.0)
    kl_pm = (p * (log_p - log_m)).sum(-1)
    kl_qm = (q * (log_q - log_m)).sum(-1)
    return {
        "kl": (p * (log_p - log_q)).sum(-1),
        "js": 0.5 * (kl_pm + kl_qm),
        "tv": 0.5 * (p - q).abs().sum(-1),
    }


def overlap(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """sum_x min(p, q) along the last axis, from log-probabilities of shape (..., vocabulary)."""
    import torch

    return torch.minimum(log_p, log_q).exp().sum(-1)


def score_windows(
    windows: Sequence[Sequence[int]],
    first: int,
    temperature: float,
    *,
    target: Any,
    drafter: Any,
    reference: Any | None = None,
    progress: Any = None,
) -> list[WindowScore]:
    """Score every window; all have one length.

    Args:
        windows: token ids.
        first: first predicted position (the prompt's length).
        temperature: T > 0.
        target: the scored target (with its adapter for the adapted arm).
        drafter: the drafter.
        reference: the base target, for the divergences of the adapted arm.
        progress: called with the number of windows done after each batch.
    """
    import torch

    scores: list[WindowScore] = []
    models = [target, drafter] if reference is None else [target, drafter, reference]
    for start in range(0, len(windows), _BATCH):
        tokens = torch.tensor(windows[start : start + _BATCH], dtype=torch.long)
        logits = [next_token_logits(model, tokens, first) for model in models]
        # Window by window: a batch's arrays (100 MB) leave the caches and are mapped anew at every operation.
        scores += [_window_score(window, temperature) for window in zip(*logits, strict=True)]
        if progress is not None:
            progress(len(tokens))
    return scores


def _window_score(logits: Sequence[torch.Tensor], temperature: float) -> WindowScore:
    """Scores of one window from the logits of target, drafter and perhaps base, (positions, vocabulary)."""
    import torch

    log_p, log_q, *log_base = (torch.log_softmax(each / temperature, -1) for each in logits)
    columns = {
        "overlap": overlap(log_p, log_q),
        "top1": (logits[0].argmax(-1) == logits[1].argmax(-1)).float(),
        "entropy_target": -(log_p.exp() * log_p).sum(-1),
        "entropy_drafter": -(log_q.exp() * log_q).sum(-1),
    }
    if log_base:
        columns |= divergences(log_p, log_base[0])
    return WindowScore(positions=len(log_p), **{name: float(value.mean()) for name, value in columns.items()})


def attempted_positions(steps_accepted: Sequence[int], k: int, output_tokens: int) -> list[int]:
    """Output positions at which a draft was judged and the verdict was output.

    Position 0 comes from the prefill. A step with ``a`` accepted drafts that starts at position s judges
    s, ..., s + a - 1 (accepted) and, where a < k, s + a (rejected); then it moves on by a + 1.
    """
    positions: list[int] = []
    start = 1
    for accepted in steps_accepted:
        judged = accepted + (accepted < k)
        positions.extend(range(start, min(start + judged, output_tokens)))
        start += accepted + 1
    return positions


def attempted_overlap(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    steps_accepted: Sequence[Sequence[int]],
    k: int,
    temperature: float,
    *,
    target: Any,
    drafter: Any,
) -> float:
    """Mean overlap over the contexts in which the engine judged a draft: what counted α̂ should be.

    Whether a position is attempted is settled before its token is drawn, so the mean over attempted positions
    is an unbiased estimate of the counted acceptance.
    """
    import torch

    total, count = 0.0, 0
    for prompt, output, steps in zip(prompts, outputs, steps_accepted, strict=True):
        at = attempted_positions(steps, k, len(output))
        if not at:
            continue
        tokens = torch.tensor([[*prompt, *output]], dtype=torch.long)
        first = len(prompt)
        log_p = torch.log_softmax(next_token_logits(target, tokens, first)[0, at] / temperature, -1)
        log_q = torch.log_softmax(next_token_logits(drafter, tokens, first)[0, at] / temperature, -1)
        total += float(overlap(log_p, log_q).sum())
        count += len(at)
    return total / count if count else float("nan")
