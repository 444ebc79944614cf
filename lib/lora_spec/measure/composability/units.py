"""Units of phase 0, one record each: references, controls, and cells in two columns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_spec.measure.composability.cells import COLUMNS, Cell, Phase0Params
from lora_spec.measure.composability.engine import EngineJob
from lora_spec.measure.composability.inputs import Inputs
from lora_spec.measure.composability.jobs import cell_job, reference_job
from lora_spec.measure.composability.workload import BASE, SELF, Arm, ReferencePair, reference_pairs
from lora_spec.paths import results_dir

SELF_DRAFT = ReferencePair("draft_model", Arm(BASE, SELF))
"""A drafter equal to its target, whose drafts must all be accepted."""


class Kind(enum.StrEnum):
    """In the order they run; also the folder of the records, but for cells, whose folder is the column."""

    REFERENCE = "references"
    CONTROL = "controls"
    CELL = "cells"


@dataclass(frozen=True)
class Unit:
    """One engine and one record.

    Attributes:
        name: file stem.
        column: ``stock`` or ``plugin``.
        cell: what is judged; of a control, the cell its fault is planted in.
        pair: of a reference, its merged models.
        fault: of a control, what is planted.
    """

    kind: Kind
    name: str
    column: str
    cell: Cell | None = None
    pair: ReferencePair | None = None
    fault: str = ""

    @property
    def batch(self) -> str:
        """Units of one batch run in forks of one process; also the name of the batch's log."""
        if self.kind is Kind.CELL:
            assert self.cell is not None
            return f"{self.column}--{self.cell.method}-{self.cell.target_lora}"
        if self.kind is Kind.REFERENCE:
            assert self.pair is not None
            return f"references--{self.pair.method}"
        return f"controls--{self.column}"

    @property
    def folder(self) -> str:
        """Of its record, below the phase's."""
        return self.column if self.kind is Kind.CELL else self.kind.value

    def path(self, params: Phase0Params) -> Path:
        """Its record."""
        return results_dir(params.tier, params.phase) / self.folder / f"{self.name}.json"

    def config(self, params: Phase0Params) -> dict[str, Any]:
        """A record's config: what decides its numbers."""
        unit: dict[str, Any] = {"kind": self.kind.value, "name": self.name, "column": self.column}
        if self.cell is not None:
            unit["cell"] = self.cell.values()
        if self.fault:
            unit["fault"] = self.fault
        return {"params": params.settings(), "unit": unit}

    def job(self, inputs: Inputs) -> EngineJob:
        """Its engine."""
        if self.pair is not None:
            return reference_job(inputs, self.pair)
        assert self.cell is not None
        job = cell_job(inputs, self.cell)
        return _PLANTED[self.fault](inputs, job) if self.fault else job


def _swap_target_adapters(inputs: Inputs, job: EngineJob) -> EngineJob:
    swapped = dict(zip(job.target_adapters, reversed(job.target_adapters.values()), strict=True))
    return replace(job, target_adapters=swapped)


def _other_drafter(inputs: Inputs, job: EngineJob) -> EngineJob:
    speculative = job.options["speculative_config"] | {"model": inputs.drafter("draft_model", "d2")}
    return replace(job, options=job.options | {"speculative_config": speculative})


def _warmer(inputs: Inputs, job: EngineJob) -> EngineJob:
    calls = [[replace(r, temperature=1.25 * r.temperature) for r in call] for call in job.calls]
    return replace(job, calls=calls)


def _no_fields(inputs: Inputs, job: EngineJob) -> EngineJob:
    return replace(job, draft_fields=False)


def _blind_cache(inputs: Inputs, job: EngineJob) -> EngineJob:
    return replace(job, disabled=("lora_spec.serving.prefix_cache:install",))


_PLANTED = {
    "target adapters swapped": _swap_target_adapters,
    "another merged drafter": _other_drafter,
    "temperature a quarter higher": _warmer,
    "requests do not say which drafter adapter": _no_fields,
    "cached blocks do not say which drafter adapter": _blind_cache,
}
"""Faults, each of which must turn its cell to wrong: the oracles can see what they are for."""

_CONTROLS = (
    ("planted-target-adapters", "plugin", Cell("none", "mixed"), "target adapters swapped"),
    ("planted-merged-drafter", "stock", Cell("draft_model", drafter_lora="merged"), "another merged drafter"),
    ("planted-temperature", "stock", Cell("none", sampling="sampled"), "temperature a quarter higher"),
    (
        "planted-draft_model-fields",
        "plugin",
        Cell("draft_model", drafter_lora="dynamic"),
        "requests do not say which drafter adapter",
    ),
    (
        "planted-dflash-fields",
        "plugin",
        Cell("dflash", drafter_lora="dynamic"),
        "requests do not say which drafter adapter",
    ),
    (
        "planted-draft_model-cache",
        "plugin",
        Cell("draft_model", drafter_lora="dynamic", prefix_cache="on"),
        "cached blocks do not say which drafter adapter",
    ),
    (
        "planted-dflash-cache",
        "plugin",
        Cell("dflash", drafter_lora="dynamic", prefix_cache="on"),
        "cached blocks do not say which drafter adapter",
    ),
)


def all_units(params: Phase0Params) -> list[Unit]:
    """References, controls, then the stock column, then the plugin's."""
    cells = params.cells()
    pairs = [SELF_DRAFT, *reference_pairs(cells)]
    units = [Unit(Kind.REFERENCE, pair.name, "stock", pair=pair) for pair in pairs]
    units += [
        Unit(Kind.CONTROL, name, column, cell=cell, fault=fault) for name, column, cell, fault in _CONTROLS
    ]
    # Batches of one method stay together; within one, the order of the parameter file.
    order = {cell: place for place, cell in enumerate(cells)}
    grouped = sorted(cells, key=lambda c: (_first(cells, c), order[c]))
    units += [Unit(Kind.CELL, cell.name, column, cell=cell) for column in COLUMNS for cell in grouped]
    return units


def _first(cells: list[Cell], cell: Cell) -> int:
    return next(
        i for i, c in enumerate(cells) if (c.method, c.target_lora) == (cell.method, cell.target_lora)
    )
