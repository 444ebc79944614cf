"""The conceptual matrix of phase 0 with what was measured laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lora_spec.errors import EvidenceError
from lora_spec.measure.composability.cells import (
    AXES,
    COLUMNS,
    Cell,
    Phase0Params,
    full_matrix,
    load_phase0,
)
from lora_spec.measure.composability.fallback import advise
from lora_spec.measure.composability.units import Kind
from lora_spec.measure.composability.verdict import Status
from lora_spec.outputs import Stamp
from lora_spec.paths import results_dir
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.provenance import EvidenceClass, Record, load_records

NOT_RUN = "not run"
PLANNED = "planned"
NOT_APPLICABLE = "not applicable"
STATUSES = (*(status.value for status in Status), PLANNED, NOT_RUN, NOT_APPLICABLE)
"""Every status a cell of the full matrix can have."""


@dataclass(frozen=True)
class Matrix:
    """The full conceptual matrix with what was measured laid over it.

    Attributes:
        stamp: measured (or smoke), or ``contract`` where nothing was run.
        params: what was planned.
        records: of all kinds, by ``folder/name``; empty for a contract.
        table: one row per combination: the axes, ``cell`` (name), and per column ``<column>`` (status),
            ``<column>_how``, ``<column>_silent``; ``fallback_stock`` (without the plugin) and ``fallback``.
    """

    stamp: Stamp
    params: Phase0Params
    records: dict[str, Record]
    table: pd.DataFrame


def load_matrix(parameters: NotebookParameters) -> Matrix:
    """Read ``results/<tier>/phase0``; without any record the matrix is the plan, of class ``contract``.

    Raises:
        EvidenceError: a damaged record, or one of another class or of other parameters.
    """
    params = load_phase0()
    folder = results_dir(parameters.tier, params.phase)
    records: dict[str, Record] = {}
    for name in (*(k.value for k in Kind if k is not Kind.CELL), *COLUMNS):
        if any((folder / name).glob("*.json")):
            found = load_records(folder / name, allow={parameters.evidence_class})
            records |= {f"{name}/{stem}": record for stem, record in found.items()}
    for name, record in records.items():
        if record.config["params"] != params.settings():
            raise EvidenceError("measured under other parameters", where=name, fix="measure again")
        if record.tier != parameters.tier:
            raise EvidenceError(f"record of tier {record.tier}", where=name, code="tier")
    evidence_class = parameters.evidence_class if records else EvidenceClass.CONTRACT.value
    return Matrix(
        Stamp(parameters.tier, evidence_class), params, records, matrix_table(params, _verdicts(records))
    )


def _verdicts(records: Mapping[str, Record]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(column, cell name) to what its record says."""
    found = {}
    for name, record in records.items():
        folder, stem = name.split("/")
        if folder in COLUMNS:
            found[folder, stem] = record.results
    return found


def matrix_table(params: Phase0Params, verdicts: Mapping[tuple[str, str], Mapping[str, Any]]) -> pd.DataFrame:
    """The table of a :class:`Matrix`.

    Args:
        verdicts: (column, cell name) to ``{status, how, silent}``.
    """
    planned = {cell.name for cell in params.cells()}

    def status(cell: Cell, column: str) -> str:
        if not cell.meaningful:
            return NOT_APPLICABLE
        if (column, cell.name) in verdicts:
            return str(verdicts[column, cell.name]["status"])
        return PLANNED if not verdicts and cell.name in planned else NOT_RUN

    def works(cell: Cell, column: str) -> bool:
        return status(cell, column) == Status.WORKS.value

    rows = []
    for cell in full_matrix():
        row: dict[str, Any] = {"cell": cell.name, **cell.values(), "measured": cell.name in planned}
        for column in COLUMNS:
            verdict = verdicts.get((column, cell.name), {})
            row[column] = status(cell, column)
            row[f"{column}_how"] = "; ".join(verdict.get("how", []))
            row[f"{column}_silent"] = {True: "silent", False: "said"}.get(verdict.get("silent"), "")
        told = cell.meaningful and bool(verdicts)
        row["fallback_stock"] = advise(cell, works, COLUMNS[:1]) if told else ""
        row["fallback"] = advise(cell, works, COLUMNS) if told else ""
        rows.append(row)
    return pd.DataFrame(rows)


def measured_rows(matrix: Matrix) -> pd.DataFrame:
    """The cells that the parameter file lists, in its order."""
    order = {cell.name: place for place, cell in enumerate(matrix.params.cells())}
    rows = matrix.table[matrix.table["measured"]]
    return rows.sort_values("cell", key=lambda names: names.map(order)).reset_index(drop=True)


def contexts(matrix: Matrix, *, full: bool) -> list[dict[str, str]]:
    """Column heads of the figure: values of all axes but method and drafter LoRA, measured ones or all."""
    axes = [axis for axis in AXES if axis not in ("method", "drafter_lora")]
    rows = matrix.table if full else measured_rows(matrix)
    seen = rows[axes].drop_duplicates()
    place = {axis: {value: i for i, value in enumerate(AXES[axis])} for axis in axes}
    order = ["slots", "execution", "prefix_cache", "sampling", "target_lora"]
    keys = sorted(seen.to_dict("records"), key=lambda context: [place[axis][context[axis]] for axis in order])
    return [{str(k): str(v) for k, v in context.items()} for context in keys]
