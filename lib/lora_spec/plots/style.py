"""How every figure looks: sizes, colours, fonts and the stamp that names its evidence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lora_spec.outputs import Stamp

COLUMN = 3.3
"""Width of a figure in one column, inches."""
DOUBLE = 7.0
"""Width of a figure over two columns, inches."""
STAMP_STRIP = 0.16
"""Height kept free for the stamp at the lower edge, inches."""

RC: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 7.5,
    "errorbar.capsize": 0.0,
    "figure.dpi": 100,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so every machine has it
    "font.size": 7.5,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.4,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.handletextpad": 0.5,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "mathtext.fontset": "dejavusans",
    "pdf.fonttype": 42,  # embed TrueType; Type 3 fonts are refused by many venues
    "ps.fonttype": 42,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "lora-spec",
    "xtick.labelsize": 6.5,
    "xtick.major.width": 0.6,
    "ytick.labelsize": 6.5,
    "ytick.major.width": 0.6,
}

# Okabe and Ito's colours, told apart with the common colour vision deficiencies; markers repeat them.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY = "#777777"
FAMILY_LOOK: dict[str, tuple[str, str]] = {
    "language": (BLUE, "o"),
    "code": (VERMILION, "s"),
    "structured": (GREEN, "^"),
    "register": (PURPLE, "D"),
    "controlled": (GREY, "v"),
}
"""Shift family to (colour, marker)."""
_OTHER_FAMILY = (BLACK, "X")


def family_look(family: str) -> tuple[str, str]:
    """Colour and marker of a shift family."""
    return FAMILY_LOOK.get(family, _OTHER_FAMILY)


def family_order(families: set[str]) -> list[str]:
    """Known families in their fixed order, then others by name."""
    return [f for f in FAMILY_LOOK if f in families] + sorted(families - set(FAMILY_LOOK))


@contextlib.contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults plus :data:`RC`, whatever the reader's own matplotlibrc says."""
    with matplotlib.style.context(["default", RC]):
        yield


def new_figure(width: float, height: float, stamp: Stamp, **subplots: Any) -> tuple[Figure, Any]:
    """A stamped figure and its axes, without pyplot and so without global state. Call within :func:`style`.

    Args:
        width, height: inches.
        stamp: printed in the lower right corner; smoke evidence also gets a large watermark.
        **subplots: as for ``Figure.subplots``.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    strip = STAMP_STRIP / height
    figure.get_layout_engine().set(rect=(0.0, strip, 1.0, 1.0 - strip), w_pad=0.03, h_pad=0.03)
    axes = figure.subplots(**subplots)
    figure.text(
        1.0 - 0.04 / width,
        0.03 / height,
        stamp.text,
        ha="right",
        va="bottom",
        size=5.5,
        color=GREY,
        gid="stamp",
    )
    if stamp.is_smoke:
        figure.text(
            0.5,
            0.5,
            "SMOKE",
            ha="center",
            va="center",
            rotation=30,
            size=min(16 * width, 22 * height),
            weight="bold",
            color=VERMILION,
            alpha=0.18,
            zorder=10,
            gid="watermark",
        )
    return figure, axes


def zero_line(axes: Axes, *, vertical: bool = True) -> None:
    """A line at no effect."""
    draw = axes.axvline if vertical else axes.axhline
    draw(0.0, color=BLACK, linewidth=0.6, zorder=1.5)


def shorten(name: str, limit: int = 26) -> str:
    """``name`` with its middle elided beyond ``limit`` characters, so that both ends stay readable."""
    if len(name) <= limit:
        return name
    head = (limit - 1 + 1) // 2
    return f"{name[:head]}…{name[-(limit - 1 - head) :]}"


def short_names(names: list[str], limit: int = 26) -> list[str]:
    """:func:`shorten` for labels of one axis; names that would become equal keep their full length."""
    short = [shorten(name, limit) for name in names]
    return [s if short.count(s) == names.count(n) else n for s, n in zip(short, names, strict=True)]
