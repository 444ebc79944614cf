"""What a cell is asked: which prompts, under which target and drafter adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_spec.measure.composability.cells import DRAFTER_METHODS, Cell, Workload

BASE = "base"
SELF = "self"
"""Drafter variant of the control whose drafter is the target."""
TARGET_ADAPTERS = ("t1", "t2")
DRAFTER_ADAPTERS = ("d1", "d2")
DRAFTER_OF = {"t1": "d1", "t2": "d2"}
"""The map from target adapters to drafter adapters that dynamic cells are configured with."""


@dataclass(frozen=True, order=True)
class Arm:
    """Which adapters should apply to a request; ``base`` is none."""

    target: str
    drafter: str

    @property
    def name(self) -> str:
        """For records."""
        return f"{self.target}/{self.drafter}"

    @property
    def draft_field(self) -> str | None:
        """What a request of a dynamic cell says about its drafter adapter; None leaves it to the map."""
        if DRAFTER_OF.get(self.target, BASE) == self.drafter and self.target != BASE:
            return None
        return "none" if self.drafter == BASE else self.drafter


@dataclass(frozen=True)
class CellRequest:
    """One request: the number of its prompt, its arm, and how many tokens to generate."""

    prompt: int
    arm: Arm
    tokens: int
    temperature: float = 0.0


def targets(cell: Cell) -> tuple[str, ...]:
    """Target adapters that the cell's requests carry."""
    return {"none": (BASE,), "one": TARGET_ADAPTERS[:1], "mixed": (BASE, *TARGET_ADAPTERS)}[cell.target_lora]


def arms(cell: Cell) -> list[Arm]:
    """All combinations that occur in the cell."""
    drafters = {"none": (BASE,), "merged": DRAFTER_ADAPTERS[:1], "dynamic": (BASE, *DRAFTER_ADAPTERS)}
    return [Arm(t, d) for d in drafters[cell.drafter_lora] for t in targets(cell)]


def calls(cell: Cell, work: Workload) -> list[list[CellRequest]]:
    """Calls of ``generate``, one after the other in one engine.

    Greedy: three calls. The second gives every prompt to other arms than the first did, the third repeats the
    first, so that a prefix cache meets blocks of its own arm and of others. Sampled: one call, one prompt,
    ``samples`` requests per target arm.
    """
    every = arms(cell)
    if cell.sampling == "sampled":
        count = work.samples * len(targets(cell))
        arm_of = [every[i % len(every)] for i in range(count)]
        return [[CellRequest(0, arm, work.sample_tokens, work.temperature) for arm in arm_of]]
    return [list(_greedy_call(every, work, shift)) for shift in (0, 1, 0)]


def _greedy_call(every: list[Arm], work: Workload, shift: int) -> Iterator[CellRequest]:
    for i in range(work.requests):
        turn = i % work.prompts + i // work.prompts * len(every) // 3
        yield CellRequest(i % work.prompts, every[(turn + shift) % len(every)], work.max_tokens)


@dataclass(frozen=True)
class ReferencePair:
    """One pair of merged full models that acceptance is compared with."""

    method: str
    arm: Arm

    @property
    def name(self) -> str:
        """File stem."""
        return f"{self.method}-{self.arm.target}-{self.arm.drafter}"


def reference_pairs(cells: list[Cell]) -> list[ReferencePair]:
    """The pairs that the cells need: methods without a drafter need none, suffix has a memory of its own."""
    needed = {
        ReferencePair(cell.method, arm)
        for cell in cells
        if cell.method in (*DRAFTER_METHODS, "ngram")
        and not (cell.method == "eagle3" and cell.drafter_lora == "dynamic")
        for arm in arms(cell)
    }
    return sorted(needed, key=lambda pair: (pair.method, pair.arm))
