"""What serving should do where a cell does not work: the smallest change that leads to cells that do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lora_spec.measure.composability.cells import Cell

Works = Callable[[Cell, str], bool]
"""Whether a cell was measured in a column and works there, losslessly."""

AS_IT_IS = "as it is"
USE_PLUGIN = "plugin"
NOTHING = "do not serve"


@dataclass(frozen=True)
class _Change:
    """One thing an operator can change; cells it does not concern stay as they are."""

    advice: str
    apply: Callable[[Cell], tuple[Cell, ...]]


def _set(axis: str, old: Iterable[str], new: str) -> Callable[[Cell], tuple[Cell, ...]]:
    olds = frozenset(old)
    return lambda cell: (replace(cell, **{axis: new}),) if getattr(cell, axis) in olds else (cell,)


def _split_targets(cell: Cell) -> tuple[Cell, ...]:
    """Adapters and base requests on servers of their own: both kinds must work."""
    if cell.target_lora != "mixed":
        return (cell,)
    slots = "warm" if cell.drafter_lora != "dynamic" else cell.slots
    return tuple(replace(cell, target_lora=t, slots=slots) for t in ("one", "none"))


def _no_speculation(cell: Cell) -> tuple[Cell, ...]:
    slots = cell.slots if cell.target_lora == "mixed" else "warm"
    return (replace(cell, method="none", drafter_lora="none", slots=slots),)


def _fixed_drafter(value: str) -> Callable[[Cell], tuple[Cell, ...]]:
    def apply(cell: Cell) -> tuple[Cell, ...]:
        if cell.drafter_lora in ("none", value):
            return (cell,)
        slots = cell.slots if cell.target_lora == "mixed" else "warm"
        return (replace(cell, drafter_lora=value, slots=slots),)

    return apply


def _merged_target(cell: Cell) -> tuple[Cell, ...]:
    slots = cell.slots if cell.drafter_lora == "dynamic" else "warm"
    return (replace(cell, target_lora="none", slots=slots),)


# What costs least comes first; among as few changes the earlier ones win.
_CHANGES = (
    _Change("eager", _set("execution", ["compiled"], "eager")),
    _Change("no prefix cache", _set("prefix_cache", ["on"], "off")),
    _Change("more slots", _set("slots", ["limited"], "warm")),
    _Change("n-gram drafts", _set("method", ["suffix"], "ngram")),
    _Change("merge drafter LoRA", _fixed_drafter("merged")),
    _Change("split traffic", _split_targets),
    _Change("base drafter", _fixed_drafter("none")),
    _Change("merge target LoRA", _merged_target),
    _Change("no speculation", _no_speculation),
)
MEANINGS = {
    AS_IT_IS: "stock vLLM serves it losslessly",
    USE_PLUGIN: "with this package's plugin",
    "eager": "run eagerly",
    "no prefix cache": "turn prefix caching off",
    "more slots": "give every adapter a slot",
    "n-gram drafts": "draft from n-grams instead of suffixes",
    "merge drafter LoRA": "merge the adapter into the drafter, one server for each",
    "split traffic": "base requests and each adapter on servers of their own",
    "base drafter": "draft with the unadapted drafter",
    "merge target LoRA": "merge the adapter into the target, one server for each",
    "no speculation": "turn speculation off",
    NOTHING: "nothing near it is known to work",
}
"""What each word of an advice stands for."""


def advise(cell: Cell, works: Works, columns: Sequence[str]) -> str:
    """What to do about a cell, given what is known to work in the columns an operator may use.

    The cell itself in stock vLLM, else with the plugin, else after the fewest changes.
    """
    for column in columns:
        if works(cell, column):
            return AS_IT_IS if column == "stock" else USE_PLUGIN
    for count in range(1, len(_CHANGES) + 1):
        for changes in itertools.combinations(_CHANGES, count):
            reached = _apply(cell, changes)
            if reached is None:
                continue
            for column in columns:
                if all(works(other, column) for other in reached):
                    texts = [USE_PLUGIN] * (column == "plugin") + [change.advice for change in changes]
                    return " + ".join(texts)
    return NOTHING


def _apply(cell: Cell, changes: Sequence[_Change]) -> tuple[Cell, ...] | None:
    """Cells that must work after the changes, or None where one of them changes nothing."""
    reached: tuple[Cell, ...] = (cell,)
    for change in changes:
        after = tuple(dict.fromkeys(new for old in reached for new in change.apply(old)))
        if after == reached:
            return None
        reached = after
    return reached
