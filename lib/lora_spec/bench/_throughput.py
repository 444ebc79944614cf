"""Tokens a second of several sides, timed in turn, and their ratios within a repetition."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_spec.bench._engines import Answer, EngineProcess, Order
from lora_spec.errors import EngineError

# A cell of the timing plan: a side and a batch size.
Cell = tuple[str, int]


@dataclass(frozen=True)
class Side:
    """Who answers, and with which drafter adapter each request.

    Attributes:
        engine: which engine.
        adapter: request number -> its drafter adapter's name, or None.
        smallest: batches below this size say nothing about it.
    """

    engine: str
    adapter: Callable[[int], str | None] = lambda number: None
    smallest: int = 1


def run_in_turn(
    running: Mapping[str, EngineProcess],
    sides: Mapping[str, Side],
    prompts: Sequence[Sequence[int]],
    *,
    batches: Sequence[int],
    tokens: int,
    repetitions: int,
) -> dict[Cell, list[Answer]]:
    """Time every side at every batch size, one after the other, as often as asked.

    Each repetition starts with another side, so that none always follows the same one. One run of each cell
    before the first repetition is not counted.

    Args:
        prompts: a batch of n takes the first n.

    Raises:
        EngineError: an engine failed, or answered otherwise than it did in the first repetition.
    """
    plan = [(side, batch) for batch in batches for side, s in sides.items() if batch >= s.smallest]

    def answer(cell: Cell, tokens: int) -> Answer:
        side, batch = sides[cell[0]], cell[1]
        orders = [Order(prompt, side.adapter(number)) for number, prompt in enumerate(prompts[:batch])]
        return running[side.engine].generate(orders, tokens)

    for cell in plan:
        answer(cell, min(8, tokens))
    found: dict[Cell, list[Answer]] = {cell: [] for cell in plan}
    for repetition in range(repetitions):
        shift = repetition % len(plan)
        for cell in plan[shift:] + plan[:shift]:
            found[cell].append(answer(cell, tokens))
            if found[cell][-1].tokens != found[cell][0].tokens:
                raise EngineError(
                    "the same greedy call gave other tokens", where=f"{cell[0]}, batch {cell[1]}"
                )
    return found


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Median, and the range as its interval.

    The range of n independent values covers the median of their distribution with probability 1 - 2^(1-n),
    whatever the distribution (order statistics).
    """
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "confidence": 1 - 2.0 ** (1 - len(values)),
    }


def speed(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens a second of one cell, and the drafting it did."""
    steps, drafted, accepted = answers[0].work
    return {
        "tokens_per_s": interval([a.count / a.seconds for a in answers]),
        "tokens": answers[0].count,
        "draft_steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "al_vllm": None if not steps else 1 + accepted / steps,
    }


def faster(ours: Sequence[Answer], theirs: Sequence[Answer]) -> dict[str, Any]:
    """Tokens a second of one cell over another's, paired by repetition."""
    return interval(
        [(a.count / a.seconds) / (b.count / b.seconds) for a, b in zip(ours, theirs, strict=True)]
    )


def same_tokens(ours: Answer, theirs: Answer) -> float:
    """Share of requests with identical output tokens."""
    return statistics.mean(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True))
