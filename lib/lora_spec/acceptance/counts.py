"""Counts of accepted drafts to rates.

Words (the same everywhere in this project):

* *draft step*: one drafting of up to ``k`` tokens and its verification. A step with ``a`` accepted drafts
  yields ``a + 1`` tokens: the accepted ones and one token of the target.
* *acceptance rate* = accepted / drafted. *AL* = tokens per draft step. Both depend on ``k``.
* *survival* ``s_i`` = share of draft steps with at least ``i`` accepted drafts; *conditional rate* = ``s_i /
  s_{i-1}``.
* ``alpha`` (α̂) = Σ accepted / (Σ accepted + number of steps with a rejection): the maximum-likelihood
  acceptance probability of one draft when drafts are accepted independently and a step stops at its first
  rejection or at ``k``. Its expectation does not depend on ``k`` then, so it is the only rate that may be
  compared between depths.

The last draft step of a request is censored at emission: drafts accepted beyond EOS or the token limit are no
output, and a rejection that the truncation hid was never seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from lora_spec.errors import EvidenceError

#: Measures that change with the depth k even when the drafter does not.
K_DEPENDENT = frozenset({"acceptance_rate", "al_vllm", "al_emitted"})
#: Measures that may be compared between depths.
K_FREE = frozenset({"alpha"})


class Censored(NamedTuple):
    """Counts of one request after censoring its last draft step at emission."""

    accepted_emitted: int
    rejections: int
    steps: int


def _contradiction(what: str, where: str | None = None) -> EvidenceError:
    return EvidenceError(
        what,
        where=where,
        fix="collect the request again: these counts are no evidence",
        code="counts_contradict",
    )


def censor_last_step(
    steps_accepted: Sequence[int],
    output_tokens: int,
    k: int,
    drafted: Sequence[int] | None = None,
) -> Censored:
    """Censor the last draft step of one request at emission.

    The output is one token of the prefill and ``a_j + 1`` tokens of each draft step; only the last step may
    have emitted fewer (EOS inside it, or the token limit). Of a last step that emitted ``e <= a_j`` tokens,
    ``e`` accepted drafts count and no rejection does, because the verification result after them was never
    output.

    Args:
        steps_accepted: accepted drafts ``a_j`` of each draft step, in order.
        output_tokens: tokens in the request's output, EOS included, prompt not.
        k: depth asked for.
        drafted: drafts ``d_j <= k`` proposed in each step, where the engine reports them; a step with ``a_j
            == d_j`` is fully accepted. Defaults to ``k`` everywhere.

    Returns:
        ``(accepted_emitted, rejections, steps)``; ``steps`` counts the steps in which something was drafted.

    Raises:
        EvidenceError: (code ``counts_contradict``) when the counts cannot belong to one request.
    """
    counts = censor_requests([steps_accepted], [output_tokens], k, None if drafted is None else [drafted])
    return Censored(*(int(counts[name].iloc[0]) for name in Censored._fields))


def censor_requests(
    steps_accepted: Sequence[Sequence[int]],
    output_tokens: Sequence[int],
    k: int | Sequence[int],
    drafted: Sequence[Sequence[int]] | None = None,
) -> pd.DataFrame:
    """`censor_last_step` for many requests at once.

    Returns:
        One row per request, in order, with the columns ``accepted_emitted``, ``rejections``, ``steps``
        (int64).

    Raises:
        EvidenceError: (code ``counts_contradict``) naming the first request whose counts contradict each
            other.
    """
    n = len(steps_accepted)
    depth = np.broadcast_to(np.asarray(k, dtype=np.int64), (n,))
    output = np.asarray(output_tokens, dtype=np.int64)
    lengths = np.fromiter((len(s) for s in steps_accepted), dtype=np.int64, count=n)
    if output.shape != (n,):
        raise _contradiction(f"{n} requests but {output.size} output lengths")
    request = np.repeat(np.arange(n), lengths)
    accepted = _flat(steps_accepted)
    if drafted is None:
        proposed = depth[request]
    else:
        if [len(d) for d in drafted] != lengths.tolist():
            raise _contradiction("accepted and drafted counts have different numbers of draft steps")
        proposed = _flat(drafted)

    def refuse(bad: np.ndarray, what: str) -> None:
        if bad.any():
            raise _contradiction(what, where=f"request {int(np.flatnonzero(bad)[0])}")

    refuse(depth < 1, "speculation depth below 1")
    refuse(output < 1, "no output token, not even the prefill's")
    refuse(_any_by(request, (proposed < 0) | (proposed > depth[request]), n), "drafted count outside 0..k")
    refuse(_any_by(request, (accepted < 0) | (accepted > proposed), n), "accepted count outside 0..drafted")

    has_steps = lengths > 0
    last = np.cumsum(lengths) - 1
    last_accepted = np.zeros(n, dtype=np.int64)
    last_proposed = np.zeros(n, dtype=np.int64)
    last_accepted[has_steps] = accepted[last[has_steps]]
    last_proposed[has_steps] = proposed[last[has_steps]]
    total = np.bincount(request, weights=accepted, minlength=n).astype(np.int64)
    emitted_last = output - 1 - (total - last_accepted) - (lengths - has_steps)
    refuse(~has_steps & (output > 1), "output beyond the prefill token without any draft step")
    refuse(emitted_last > last_accepted + has_steps, "more output tokens than the draft steps can yield")
    refuse(has_steps & (emitted_last < 1), "output ends before the last draft step")

    hidden = has_steps & (emitted_last <= last_accepted)
    rejected = np.bincount(request, weights=accepted < proposed, minlength=n).astype(np.int64)
    return pd.DataFrame(
        {
            "accepted_emitted": total - np.where(hidden, last_accepted - emitted_last, 0),
            "rejections": rejected - (hidden & (last_accepted < last_proposed)),
            "steps": np.bincount(request, weights=proposed > 0, minlength=n).astype(np.int64),
        }
    )


def _flat(lists: Sequence[Sequence[int]]) -> np.ndarray:
    parts = [np.asarray(x, dtype=np.int64).reshape(-1) for x in lists]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _any_by(group: np.ndarray, flag: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(group, weights=flag, minlength=n) > 0


def alpha_hat(accepted: float, rejections: float) -> float:
    """α̂ = accepted / (accepted + rejections); NaN when no draft was ever tried."""
    trials = accepted + rejections
    return accepted / trials if trials > 0 else math.nan


def al_vllm(accepted: int, steps: int) -> float:
    """1 + accepted / draft steps, counting drafts that were never output: the number vLLM reports."""
    return 1.0 + accepted / steps if steps else math.nan


def al_emitted(output_tokens: int, steps: int, requests: int = 1) -> float:
    """Output tokens per draft step, without the prefill token of each request: the AL that claims use."""
    return (output_tokens - requests) / steps if steps else math.nan


@dataclass(frozen=True)
class Rates:
    """Rates of one arm, pooled over requests (ratios of sums); ``survival[i-1]`` is s_i."""

    k: int
    requests: int
    steps: int
    accepted_emitted: int
    rejections: int
    alpha: float
    acceptance_rate: float
    al_vllm: float
    al_emitted: float
    survival: tuple[float, ...]
    conditional: tuple[float, ...]


def check_requests(requests: pd.DataFrame) -> None:
    """Recompute the stored censored counts of a ``requests`` table from its draft steps.

    Rows in which a step drafted fewer than ``k`` (``drafted`` is less than ``k`` per step) cannot be
    recomputed from the table and are only checked for bounds.

    Raises:
        EvidenceError: (code ``counts_contradict``) naming the first row that does not follow from its steps,
            or the column that is absent or holds other than whole numbers.
    """
    for name in ("k", "output_tokens", "accepted_emitted", "rejections", "drafted"):
        if name not in requests or not (requests.empty or pd.api.types.is_integer_dtype(requests[name])):
            raise EvidenceError(
                f"column {name} of the requests is absent or holds other than whole numbers",
                code="counts_contradict",
            )
    steps = requests["steps_accepted"].tolist()
    k = requests["k"].to_numpy(dtype=np.int64)
    counts = censor_requests(steps, requests["output_tokens"].to_numpy(), k)
    accepted = requests["accepted_emitted"].to_numpy(dtype=np.int64)
    rejections = requests["rejections"].to_numpy(dtype=np.int64)
    full = requests["drafted"].to_numpy(dtype=np.int64) == k * np.fromiter(
        map(len, steps), np.int64, len(steps)
    )
    wrong = (accepted != counts["accepted_emitted"]) | (rejections > counts["rejections"]) | (rejections < 0)
    wrong |= full & (rejections != counts["rejections"])
    if wrong.any():
        raise _contradiction(
            "accepted_emitted or rejections do not follow from the draft steps",
            where=f"row {int(np.flatnonzero(wrong)[0])}",
        )


def pooled_rates(requests: pd.DataFrame) -> Rates:
    """Rates of the requests of one arm, all at the same k.

    Args:
        requests: rows of a screen unit's ``requests`` table (``k``, ``steps_accepted``, ``drafted``,
            ``output_tokens``, ``accepted_emitted``, ``rejections``); see `check_requests`.

    ``survival`` is the product of `conditional_rates`, so a truncated last step neither raises nor lowers it;
    without truncation it is vLLM's per-position rate.

    Raises:
        EvidenceError: for an empty table, or several depths (code ``k_mismatch``).
    """
    if requests.empty:
        raise EvidenceError("no request in the table", code="no_requests")
    depths = sorted(set(requests["k"].astype(int)))
    if len(depths) != 1:
        raise k_mismatch("pooled rates", depths)
    k, steps_accepted = depths[0], requests["steps_accepted"].tolist()
    steps = sum(map(len, steps_accepted))
    accepted, rejections = (int(requests[name].sum()) for name in ("accepted_emitted", "rejections"))
    raw, drafted = int(_flat(steps_accepted).sum()), int(requests["drafted"].sum())
    conditional = conditional_rates(requests, k)
    return Rates(
        k=k,
        requests=len(requests),
        steps=steps,
        accepted_emitted=accepted,
        rejections=rejections,
        alpha=alpha_hat(accepted, rejections),
        acceptance_rate=raw / drafted if drafted else math.nan,
        al_vllm=al_vllm(raw, steps),
        al_emitted=al_emitted(int(requests["output_tokens"].sum()), steps, len(requests)),
        survival=tuple(np.cumprod(conditional).tolist()),
        conditional=tuple(conditional.tolist()),
    )


def conditional_rates(requests: pd.DataFrame, k: int) -> np.ndarray:
    """Share of drafts accepted at position i among the draft steps whose verdict at i was output
    (Kaplan-Meier).

    See `position_counts` for which steps and requests count.

    Returns:
        float64 of shape (k,); NaN where no step reached the position.
    """
    passed, failed = (counts.sum(axis=0) for counts in position_counts(requests, k))
    at_risk = passed + failed
    return np.divide(passed, at_risk, out=np.full(k, np.nan), where=at_risk > 0)


def position_counts(requests: pd.DataFrame, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Draft steps of each request that accepted, and that rejected, the draft at each position.

    A last step cut at emission counts up to the cut only. Requests with a step that drafted fewer than ``k``
    count nothing, because the table does not say which step that was.

    Returns:
        ``(accepted, rejected)``, int64 of shape (requests, k), rows in the table's order.
    """
    n = len(requests)
    lengths = requests["steps_accepted"].map(len).to_numpy(dtype=np.int64)
    drafted = requests["drafted"].to_numpy(dtype=np.int64)
    used = (drafted == k * lengths) & (drafted > 0)
    lengths = np.where(used, lengths, 0)
    accepted = _flat([s for s, use in zip(requests["steps_accepted"], used, strict=True) if use])
    request = np.repeat(np.arange(n), lengths)
    rejected = accepted < k
    last = (np.cumsum(lengths) - 1)[used]
    lost = np.bincount(request, weights=accepted, minlength=n).astype(np.int64) - requests["accepted_emitted"]
    seen = np.bincount(request, weights=rejected, minlength=n).astype(np.int64) == requests["rejections"]
    accepted[last] -= lost.to_numpy(dtype=np.int64)[used]
    rejected[last] &= seen.to_numpy()[used]
    position = np.arange(1, k + 1)
    counts = [np.zeros((n, k), dtype=np.int64) for _ in range(2)]
    np.add.at(counts[0], request, accepted[:, None] >= position)
    np.add.at(counts[1], request, rejected[:, None] & (accepted[:, None] + 1 == position))
    return counts[0], counts[1]


def k_mismatch(what: str, depths: Sequence[int]) -> EvidenceError:
    """The refusal to compare depth-dependent rates between depths."""
    return EvidenceError(
        f"{what} over different depths k = {', '.join(map(str, depths))}",
        fix="acceptance rate and AL change with k: compare alpha or conditional survival",
        code="k_mismatch",
    )


def compare(adapted: Rates, base: Rates, measure: str) -> float:
    """Difference ``adapted - base`` of one measure.

    Raises:
        EvidenceError: (code ``k_mismatch``) for a depth-dependent measure between depths; for an unknown
            measure.
    """
    if measure in K_DEPENDENT and adapted.k != base.k:
        raise k_mismatch(f"{measure} compared", sorted({adapted.k, base.k}))
    if measure not in K_DEPENDENT | K_FREE:
        raise EvidenceError(f"unknown measure {measure!r}", fix=f"use one of {sorted(K_DEPENDENT | K_FREE)}")
    return getattr(adapted, measure) - getattr(base, measure)
