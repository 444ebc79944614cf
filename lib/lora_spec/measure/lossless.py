"""Is greedy speculation token-identical to plain greedy decoding, up to ties that numerics may break?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_spec.measure.engine import Completion

_ROUNDING = 1e-5
"""Nats: a log-probability is the float32 difference of two numbers of about 20, on a grid of 2e-6. Without it
a gap of exactly the limit would now count as above it, now as below."""


@dataclass(frozen=True)
class Divergence:
    """First place where two greedy outputs of one prompt differ.

    Attributes:
        request: index of the request.
        position: index of the first differing output token.
        gap: plain target's top-1 minus top-2 log-probability there, nats.
    """

    request: int
    position: int
    gap: float


def first_divergences(plain: Sequence[Completion], speculative: Sequence[Completion]) -> list[Divergence]:
    """Compare outputs request by request; ``plain`` must carry ``top2``.

    One output being a proper prefix of the other is a divergence at the first missing token.
    """
    found = []
    for index, (a, b) in enumerate(zip(plain, speculative, strict=True)):
        if a.tokens == b.tokens:
            continue
        shared = min(len(a.tokens), len(b.tokens))
        position = next((i for i in range(shared) if a.tokens[i] != b.tokens[i]), shared)
        at = min(position, len(a.top2) - 1)
        found.append(Divergence(index, position, a.top2[at][0] - a.top2[at][1]))
    return found


def is_near_tie(gap: float, limit: float) -> bool:
    """Whether numerics alone may decide between two tokens ``gap`` nats apart."""
    return gap <= limit + _ROUNDING


def losslessness(
    plain: Sequence[Completion], speculative: Sequence[Completion], near_tie: float
) -> dict[str, Any]:
    """Summary for a record: how many outputs are identical, and the largest gap at a first divergence.

    ``lossless`` holds when every first divergence lies at a near-tie: a gap of at most ``near_tie`` nats.
    """
    divergences = first_divergences(plain, speculative)
    gaps = [d.gap for d in divergences]
    return {
        "requests": len(plain),
        "identical": len(plain) - len(divergences),
        "max_gap_nats": max(gaps, default=0.0),
        "near_tie_nats": near_tie,
        "divergences": [
            {"request": d.request, "position": d.position, "gap_nats": d.gap} for d in divergences
        ],
        "lossless": all(is_near_tie(gap, near_tie) for gap in gaps),
    }


def settle(check: dict[str, Any], in_float32: Callable[[list[int]], dict[str, Any]]) -> dict[str, Any]:
    """``check`` with what float32 says of the requests that diverge at more than a near-tie.

    Some CPUs round a product otherwise when it has more rows, as a verification has: most differences it
    makes are at near-ties, a few are not. A speculation that is lossy is so in float32 too.

    Args:
        check: from :func:`losslessness`.
        in_float32: the check of some requests (by index), asked again in float32.
    """
    limit = check["near_tie_nats"]
    asked = [d["request"] for d in check["divergences"] if not is_near_tie(d["gap_nats"], limit)]
    if not asked:
        return check
    exact = in_float32(asked)
    return check | {"float32": exact | {"asked": asked}, "lossless": exact["lossless"]}


def largest_near_tie(check: Mapping[str, Any]) -> float:
    """Largest gap at a first divergence of the requests that were not asked again in float32, nats."""
    asked = set(check.get("float32", {}).get("asked", ()))
    return max((d["gap_nats"] for d in check["divergences"] if d["request"] not in asked), default=0.0)
