"""Phase 0: which cells of LoRA × speculation work, losslessly, and what to do about the others?"""

from __future__ import annotations

import pandas as pd

from lora_spec.measure.composability.cells import COLUMNS
from lora_spec.measure.composability.fallback import MEANINGS, NOTHING
from lora_spec.measure.composability.units import Kind, all_units
from lora_spec.measure.composability.verdict import Status
from lora_spec.phases.cell_matrix import (
    NOT_APPLICABLE,
    NOT_RUN,
    PLANNED,
    STATUSES,
    Matrix,
    measured_rows,
)
from lora_spec.phases.evidence import CONTROL_COLUMNS, folder_table
from lora_spec.provenance import Record

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


def evidence_table(matrix: Matrix) -> pd.DataFrame:
    """Per folder: records, the engine seconds they took, and how many ran uncommitted code."""
    return folder_table(
        matrix.records,
        matrix.stamp,
        lambda records: {"engine_seconds": round(sum(r.results["seconds"] for r in records))},
    )


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


def faults_table(matrix: Matrix, column: str) -> pd.DataFrame | str:
    """Cells of a column that are wrong or broken, cells with equal axes but sampling and options joined.

    A sentence where there are none. Columns: method, target_lora, drafter_lora, status, cells, silent, how
    (of the first cell).
    """
    rows = measured_rows(matrix)
    rows = rows[rows[column].isin([Status.WRONG.value, Status.ERROR.value])]
    if rows.empty:
        return "No cell that was run is wrong or broken."
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
    return pd.DataFrame(grouped).rename(columns={column: "status"})


def _shortened(text: str, limit: int = 110) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fallback_table(matrix: Matrix) -> pd.DataFrame:
    """What to do about the measured cells, with the plugin allowed and without it.

    Columns: fallback, without_plugin, cells (how many get both advices), example.
    """
    rows = measured_rows(matrix)
    table = [
        {"fallback": advice, "without_plugin": other, "cells": len(group), "example": group["cell"].iloc[0]}
        for (advice, other), group in rows.groupby(["fallback", "fallback_stock"], sort=False)
    ]
    order = pd.DataFrame(table, columns=["fallback", "without_plugin", "cells", "example"])
    return order.sort_values("cells", ascending=False, kind="stable")


def meanings_table(fallbacks: pd.DataFrame) -> pd.DataFrame:
    """The words that occur in :func:`fallback_table`, and what an operator does."""
    used = {
        word
        for name in ("fallback", "without_plugin")
        for text in fallbacks[name]
        for word in text.split(" + ")
    }
    return pd.DataFrame([{"word": w, "meaning": text} for w, text in MEANINGS.items() if w in used])


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
