"""Figures of phase 0: the matrix of cells, stock vLLM and vLLM with the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lora_spec.outputs import Stamp
from lora_spec.plots.style import BLACK, BLUE, DOUBLE, GREY, ORANGE, PURPLE, SKY, VERMILION, new_figure, style

# Status to (colour, sign, colour of the sign): each has a sign of its own, so colours are never needed.
_LOOK = {
    "works": (BLUE, "✓", "white"),
    "wrong": (VERMILION, "✗", "white"),
    "error": (ORANGE, "!", BLACK),
    "unsupported": ("#BBBBBB", "–", BLACK),
    "not exercised": (SKY, "○", BLACK),
    "planned": ("#EBD3E2", "□", PURPLE),
    "not run": ("#FFFFFF", "·", GREY),
    "not applicable": ("#F2F2F2", "", GREY),
}
_MEANING = {
    "works": "works, lossless",
    "wrong": "works but wrong (s: silently)",
    "error": "error",
    "not run": "not run",
}
_TITLES = {"stock": "stock vLLM", "plugin": "vLLM with the plugin"}
_SHORT = {"draft_model": "draft model", "eagle3": "EAGLE-3", "dflash": "DFlash", "ngram": "n-gram"}
_ROW = 0.165
_MARGIN = {"none": "", "merged": " + merged", "dynamic": " + dynamic"}


def composability_figure(table: pd.DataFrame, contexts: Sequence[dict[str, str]], stamp: Stamp) -> Figure:
    """Two panels, stock and plugin: methods × drafter adapters down, everything else across.

    Args:
        table: of ``phases.cell_matrix.Matrix``.
        contexts: heads of the panels' columns, from ``phases.cell_matrix.contexts``.
    """
    columns = list(_TITLES)
    rows = _rows(table)
    found = {(r["method"], r["drafter_lora"], *_key(r)): r for r in table.to_dict("records")}
    across = len(contexts) <= 24
    shape = {"ncols": len(columns)} if across else {"nrows": len(columns)}
    panels = 1 if across else len(columns)
    height = panels * (_ROW * len(rows) + 0.2) + (1.65 if across else 1.85)
    with style():
        figure, grid = new_figure(DOUBLE, height, stamp, squeeze=False, **shape)
        for place, (axes, column) in enumerate(zip(grid.ravel(), columns, strict=True)):
            for y, (method, drafter) in enumerate(rows):
                for x, context in enumerate(contexts):
                    _square(axes, x, y, found.get((method, drafter, *_key(context))), column)
            _dress(axes, rows, contexts, left=place == 0 or not across, below=across or place == panels - 1)
            axes.set_title(_TITLES[column], pad=4)
        used = {str(v) for c in columns for v in table[c]}
        handles = [
            Patch(
                facecolor=colour,
                edgecolor=GREY,
                linewidth=0.4,
                label=f"{sign} {_MEANING.get(status, status)}",
            )
            for status, (colour, sign, _) in _LOOK.items()
            if status in used
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), columnspacing=1.0)
    return figure


def _key(values: dict[str, Any]) -> tuple[str, ...]:
    return tuple(values[axis] for axis in ("target_lora", "sampling", "prefix_cache", "execution", "slots"))


def _rows(table: pd.DataFrame) -> list[tuple[str, str]]:
    """(method, drafter LoRA) in the table's order, pairs that mean nothing left out."""
    pairs = table[["method", "drafter_lora"]].drop_duplicates().itertuples(index=False, name=None)
    drafters = {"draft_model", "eagle3", "dflash"}
    return [(m, d) for m, d in pairs if d == "none" or m in drafters]


def _square(axes: Axes, x: int, y: int, row: dict[str, Any] | None, column: str) -> None:
    status = "not run" if row is None else row[column]
    colour, sign, ink = _LOOK[status]
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.8))
    if row is not None and row[f"{column}_silent"] == "silent":
        sign += "s"
    axes.text(x + 0.5, y + 0.52, sign, ha="center", va="center", size=5.5, color=ink)


def _dress(
    axes: Axes,
    rows: Sequence[tuple[str, str]],
    contexts: Sequence[dict[str, str]],
    *,
    left: bool,
    below: bool,
) -> None:
    axes.set_xlim(0, len(contexts))
    axes.set_ylim(len(rows), 0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    names = [f"{_SHORT.get(m, m)}{_MARGIN[d]}" for m, d in rows]
    axes.set_yticks([y + 0.5 for y in range(len(rows))], names if left else [])
    axes.set_xticks([x + 0.5 for x in range(len(contexts))], [_label(c) for c in contexts] if below else [])
    axes.tick_params(axis="x", rotation=90, labelsize=5.2 if len(contexts) > 24 else 6.0)
    for x in range(1, len(contexts)):
        if _options(contexts[x]) != _options(contexts[x - 1]):
            axes.axvline(x, color=BLACK, linewidth=0.6)


def _options(context: dict[str, str]) -> tuple[str, ...]:
    return (context["prefix_cache"], context["execution"], context["slots"])


def _label(context: dict[str, str]) -> str:
    """``mixed, T > 0, prefix cache``: target adapters first, options only where they are on."""
    parts = [{"none": "no LoRA", "one": "one LoRA", "mixed": "mixed"}[context["target_lora"]]]
    parts += ["T > 0"] * (context["sampling"] == "sampled")
    parts += ["prefix"] * (context["prefix_cache"] == "on")
    parts += ["compiled"] * (context["execution"] == "compiled")
    parts += ["1 slot"] * (context["slots"] == "limited")
    return ", ".join(parts)
