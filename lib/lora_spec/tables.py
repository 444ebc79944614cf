"""Tables as text for notebooks, and as CSV and LaTeX for papers: one fixed number format, no timestamps."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lora_spec.files import atomic_write_text
from lora_spec.outputs import Stamp, output_dir
from lora_spec.paths import rel

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_SYMBOLS = {
    "Δα̂": r"$\Delta\hat{\alpha}$",
    "α̂": r"$\hat{\alpha}$",
    "α": r"$\alpha$",
    "Δ": r"$\Delta$",
    "‖": r"$\|$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "−": r"$-$",
    "…": r"\ldots{}",
    "–": "--",
    "’": "'",
    "²": r"$^2$",
    "ρ": r"$\rho$",
}


@dataclass(frozen=True)
class SavedTable:
    """The files of one table."""

    csv: Path
    tex: Path

    def __repr__(self) -> str:
        return f"{rel(self.csv)}, {self.tex.name}"


def significant(value: float, digits: int = 4) -> str:
    """``value`` at ``digits`` significant digits without exponent where readable; never a negative zero."""
    if math.isnan(value):
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value + 0.0:g}"
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-6 <= abs(value) < 1e9:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:.{decimals}f}"
    return text


def decimals(value: float, digits: int) -> str:
    """``value`` with ``digits`` decimals; empty for NaN, never a negative zero."""
    if math.isnan(value):
        return ""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def text(frame: pd.DataFrame, digits: int = 3) -> str:
    """``frame`` for a notebook's text output: floats with ``digits`` decimals, nothing left out."""
    shown = frame.copy()
    for name in shown.columns:
        if pd.api.types.is_float_dtype(shown[name]):
            shown[name] = [decimals(float(v), digits) for v in shown[name]]
    return shown.to_string(index=False)


def paragraph(sentences: str) -> str:
    """``sentences`` wrapped for a notebook's text output."""
    return textwrap.fill(sentences, 110, break_long_words=False, break_on_hyphens=False)


def show(*parts: str | pd.DataFrame) -> None:
    """Print tables and sentences, an empty line between them, in one write: a stored output is one piece."""
    shown = [text(part) if isinstance(part, pd.DataFrame) else paragraph(part) for part in parts]
    print("\n\n".join(shown))


def csv_text(frame: pd.DataFrame) -> str:
    """CSV with floats at four significant digits, so that machines that agree to 1e-6 write equal bytes."""
    shown = frame.copy()
    for name in shown.columns:
        if pd.api.types.is_float_dtype(shown[name]):
            shown[name] = [significant(float(v)) for v in shown[name]]
    buffer = io.StringIO()
    shown.to_csv(buffer, index=False, lineterminator="\n")
    return buffer.getvalue()


def escape(value: str) -> str:
    """``value`` for LaTeX text."""
    escaped = "".join(_ESCAPES.get(character, character) for character in value)
    for symbol, command in _SYMBOLS.items():
        escaped = escaped.replace(symbol, command)
    return escaped


def latex_text(
    frame: pd.DataFrame,
    headers: Mapping[str, str],
    stamp: Stamp,
    digits: int = 3,
    *,
    words: Mapping[str, str] | None = None,
    group: str | None = None,
) -> str:
    """A booktabs ``tabular`` of the columns in ``headers`` (column to header), numbers right-aligned.

    Args:
        words: what readers see instead of a text cell that stands in it (an identifier, a key).
        group: a column of text by which the rows are sorted; it becomes a line of its own above each group.
    """
    columns = [name for name in headers if name != group]
    told = words or {}
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in columns]
    lines = [
        f"% {stamp.text.replace('·', '-')}",
        rf"\begin{{tabular}}{{{''.join('r' if n else 'l' for n in numeric)}}}",
        r"\toprule",
        " & ".join(escape(headers[name]) for name in columns) + r" \\",
        r"\midrule",
    ]
    above: str | None = None
    for (_, row), cells in zip(frame.iterrows(), frame[columns].itertuples(index=False), strict=True):
        if group is not None and row[group] != above:
            lines += [r"\midrule"] if above is not None else []
            above = row[group]
            title = escape(told.get(above, above))
            lines.append(rf"\multicolumn{{{len(columns)}}}{{l}}{{\emph{{{title}}}}} \\")
        shown = [_cell(told.get(v, v) if isinstance(v, str) else v, digits) for v in cells]
        lines.append(" & ".join(shown) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (float, np.floating)):
        shown = decimals(float(value), digits)
        return f"${shown}$" if shown.startswith("-") else shown
    return escape(str(value))


def save_table(
    frame: pd.DataFrame,
    name: str,
    stamp: Stamp,
    headers: Mapping[str, str] | None = None,
    digits: int = 3,
    *,
    words: Mapping[str, str] | None = None,
    group: str | None = None,
) -> SavedTable:
    """Write ``figures/<name>.csv`` (all columns, and the evidence class) and ``.tex`` (those of ``headers``).

    The CSV keeps identifiers for machines; ``words`` and ``group`` are for readers of the LaTeX, see
    :func:`latex_text`.

    Raises:
        EvidenceError: smoke evidence on its way into the checkout's own figures.
    """
    folder = output_dir(stamp)
    shown = headers or {column: column.replace("_", " ") for column in frame.columns}
    saved = SavedTable(csv=folder / f"{name}.csv", tex=folder / f"{name}.tex")
    atomic_write_text(saved.csv, csv_text(frame.assign(evidence_class=stamp.evidence_class)))
    latex = latex_text(frame, shown, stamp, digits, words=words, group=group)
    atomic_write_text(saved.tex, latex)
    return saved
