"""Phase 0: which cells of LoRA × speculation work, losslessly, and what to do about the others?"""

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
from lora_spec.measure.composability.fallback import NOTHING, advise
from lora_spec.measure.composability.units import Kind, all_units
from lora_spec.measure.composability.verdict import Status
from lora_spec.outputs import Stamp
from lora_spec.paths import results_dir
from lora_spec.phases.evidence import CONTROL_COLUMNS
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.provenance import EvidenceClass, Record, load_records

NOT_RUN = "not run"
PLANNED = "planned"
NOT_APPLICABLE = "not applicable"
STATUSES = (*(status.value for status in Status), PLANNED, NOT_RUN, NOT_APPLICABLE)
"""Every status a cell of the full matrix can have."""
HEADERS = {
    "method": "drafts",
    "target_lora": "target LoRA",
    "drafter_lora": "drafter LoRA",
    "sampling": "sampling",
    "prefix_cache": "prefix cache",
    "execution": "execution",
    "slots": "slots",
    "stock": "stock",
    "plugin": "plugin",
    "fallback": "what to do",
}
"""Columns of the matrix that are printed, with their headers."""


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


def evidence_table(matrix: Matrix) -> pd.DataFrame:
    """Per folder: records, the engine seconds they took, and how many ran uncommitted code."""
    rows = []
    for folder in dict.fromkeys(name.split("/")[0] for name in matrix.records):
        records = [r for name, r in matrix.records.items() if name.split("/")[0] == folder]
        rows.append(
            {
                "evidence": folder,
                "tier": matrix.stamp.tier,
                "class": matrix.stamp.evidence_class,
                "records": len(records),
                "engine_seconds": round(sum(r.results["seconds"] for r in records)),
                "uncommitted": sum(bool(r.git.get("dirty")) for r in records),
            }
        )
    return pd.DataFrame(rows)


def coverage_sentence(matrix: Matrix) -> str:
    """How much of the conceptual matrix was planned and run, in one sentence."""
    table = matrix.table
    meaningful = int((table[COLUMNS[0]] != NOT_APPLICABLE).sum())
    planned = int(table["measured"].sum())
    text = f"{len(table)} combinations, of which {meaningful} mean something and {planned} are to be measured"
    if not matrix.records:
        return f"{text}. Nothing was run: this matrix is the plan, of class contract."
    ran = {c: int((~measured_rows(matrix)[c].isin([NOT_RUN, PLANNED])).sum()) for c in COLUMNS}
    return f"{text}. Run: {', '.join(f'{n} in {c}' for c, n in ran.items())} (vLLM {matrix.params.vllm})."


def controls_table(matrix: Matrix) -> pd.DataFrame:
    """Planted faults that must be seen, and the merged models that cells are compared with.

    Columns as in ``phases.evidence.controls_table``.
    """
    rows: list[tuple[str, str, float, float, float, bool]] = []
    nan = float("nan")
    controls = [u for u in all_units(matrix.params) if u.kind is Kind.CONTROL]
    for unit in controls:
        record = matrix.records.get(f"{Kind.CONTROL.value}/{unit.name}")
        if record is not None:
            seen = record.results["status"] == Status.WRONG.value
            rows.append((f"planted: {unit.fault}", f"{unit.column}/{unit.cell.name}", nan, nan, nan, seen))
    references = {n: r for n, r in matrix.records.items() if n.startswith(f"{Kind.REFERENCE.value}/")}
    for name, record in references.items():
        if name.endswith("-self"):
            hits, count = record.results["sampled_first"]
            rows.append(("self-draft, first drafts", "T > 0", hits / count, 1.0, 0.0, hits == count))
    if references:
        worst_name, worst = max(references.items(), key=lambda item: _variation(item[1]))
        found = worst.results["distribution"]
        rows.append(
            (
                "merged models, total variation",
                f"worst of {len(references)}: {worst_name.split('/')[1]}",
                found["tv"],
                nan,
                found["limit"],
                found["tv"] <= found["limit"],
            )
        )
    return pd.DataFrame([dict(zip(CONTROL_COLUMNS, row, strict=True)) for row in rows])


def _variation(record: Record) -> float:
    found = record.results["distribution"]
    return float(found["tv"] / found["limit"])


def status_table(matrix: Matrix) -> pd.DataFrame:
    """Measured cells by status, one row per column."""
    rows = measured_rows(matrix)
    counts = {c: rows[c].value_counts() for c in COLUMNS}
    used = [s for s in STATUSES if any(s in counts[c] for c in COLUMNS)]
    return pd.DataFrame([{"column": c} | {s: int(counts[c].get(s, 0)) for s in used} for c in COLUMNS])


def faults_table(matrix: Matrix, column: str) -> pd.DataFrame:
    """Cells of a column that are wrong or broken, cells with equal axes but sampling and options joined.

    Columns: method, target_lora, drafter_lora, status, cells, silent, how (of the first cell).
    """
    rows = measured_rows(matrix)
    rows = rows[rows[column].isin([Status.WRONG.value, Status.ERROR.value])]
    keys = ["method", "target_lora", "drafter_lora", column]
    grouped = [
        dict(zip(keys, key, strict=True))
        | {
            "cells": len(group),
            "silent": int((group[f"{column}_silent"] == "silent").sum()),
            "how": _shortened(group[f"{column}_how"].iloc[0]),
        }
        for key, group in rows.groupby(keys, sort=False)
    ]
    return pd.DataFrame(grouped, columns=[*keys, "cells", "silent", "how"]).rename(columns={column: "status"})


def _shortened(text: str, limit: int = 110) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fallback_table(matrix: Matrix) -> pd.DataFrame:
    """What to do, with the plugin and without it, and for how many measured cells.

    Columns: fallback, cells, without_plugin (the commonest advice for the same cells), example.
    """
    rows = measured_rows(matrix)
    table = []
    for advice, group in rows.groupby("fallback", sort=False):
        table.append(
            {
                "fallback": advice,
                "cells": len(group),
                "without_plugin": group["fallback_stock"].mode().iloc[0],
                "example": group["cell"].iloc[0],
            }
        )
    return pd.DataFrame(table, columns=["fallback", "cells", "without_plugin", "example"]).sort_values(
        "cells", ascending=False, kind="stable"
    )


def takeaway(matrix: Matrix) -> str:
    """What the matrix says, in sentences computed from it."""
    rows = measured_rows(matrix)
    if not matrix.records:
        return (
            f"{len(rows)} cells are planned in {len(COLUMNS)} columns; nothing was run, nothing is claimed."
        )
    parts = []
    for column in COLUMNS:
        ran = rows[~rows[column].isin([NOT_RUN, PLANNED])]
        if ran.empty:
            parts.append(f"The column {column} was not run.")
            continue
        wrong = ran[ran[column] == Status.WRONG.value]
        works = int((ran[column] == Status.WORKS.value).sum())
        silent = int((wrong[f"{column}_silent"] == "silent").sum())
        errors = int((ran[column] == Status.ERROR.value).sum())
        parts.append(
            f"{column}: {works} of {len(ran)} cells work losslessly, {len(wrong)} are wrong ({silent} "
            f"of them without a word), {errors} fail with an error."
        )
    both = rows[(rows["stock"] != Status.WORKS.value) & (rows["plugin"] == Status.WORKS.value)]
    lost = rows[(rows["stock"] == Status.WORKS.value) & ~rows["plugin"].isin([Status.WORKS.value, NOT_RUN])]
    parts.append(
        f"The plugin makes {len(both)} cells work that stock vLLM does not serve, and breaks {len(lost)}."
    )
    stuck = int((rows["fallback"] == NOTHING).sum())
    parts.append(f"For {stuck} measured cells nothing near them is known to work.")
    return " ".join(parts)


def contexts(matrix: Matrix, *, full: bool) -> list[dict[str, str]]:
    """Column heads of the figure: values of all axes but method and drafter LoRA, measured ones or all."""
    axes = [axis for axis in AXES if axis not in ("method", "drafter_lora")]
    rows = matrix.table if full else measured_rows(matrix)
    seen = rows[axes].drop_duplicates()
    place = {axis: {value: i for i, value in enumerate(AXES[axis])} for axis in axes}
    order = ["slots", "execution", "prefix_cache", "sampling", "target_lora"]
    keys = sorted(seen.to_dict("records"), key=lambda context: [place[axis][context[axis]] for axis in order])
    return [{str(k): str(v) for k, v in context.items()} for context in keys]
