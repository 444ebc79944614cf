"""Figures of phase 2."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lora_spec.outputs import Stamp
from lora_spec.plots.style import (
    BLACK,
    BLUE,
    COLUMN,
    DOUBLE,
    GREY,
    family_look,
    family_order,
    new_figure,
    short_names,
    style,
    zero_line,
)

_BESIDE = {
    "delta_alpha_greedy": ("greedy, own domain", "+"),
    "delta_alpha_general": ("T = 0.8, general traffic", "x"),
}
_ONE_COLUMN = 22
"""Rows that stand in one column of the sorted plot; more are parted into two."""
_BAND = "#EEEEEE"


def screen_figure(labels: pd.DataFrame, z: float, margin: float, stamp: Stamp) -> Figure:
    """Change of α̂ of every adapter, sorted within its shift family; greedy and general-traffic labels beside.

    Args:
        labels: from ``phases.screen.screened``. z: half width of the intervals in standard errors.
        margin: |Δα̂| that counts, drawn as a band.
    """
    families = family_order(set(labels["family"]))
    sizes = [int((labels["family"] == f).sum()) + 1 for f in families]
    columns = _columns(families, sizes)
    tallest = max(sum(sizes[families.index(f)] for f in column) for column in columns)
    with style():
        figure, grid = new_figure(
            DOUBLE, 0.95 + 0.128 * tallest, stamp, ncols=len(columns), sharex=True, squeeze=False
        )
        for axes, column in zip(grid[0], columns, strict=True):
            _sorted_column(axes, labels, column, z, margin)
            axes.set_ylim(-tallest + 0.2, 0.8)
            axes.set_xlabel(f"Δα̂, adapted − base\n(± {z:.2f} standard errors)")
        handles = [
            Line2D([], [], color=BLACK, marker="o", label="T = 0.8, own domain (primary)"),
            Line2D([], [], color=BLACK, marker="o", markerfacecolor="white", label="… not told from zero"),
            *(
                Line2D([], [], color=GREY, marker=marker, linestyle="none", label=label)
                for label, marker in _BESIDE.values()
            ),
            Patch(color=_BAND, label=f"|Δα̂| < {margin:g}"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _columns(families: list[str], sizes: list[int]) -> list[list[str]]:
    """Families in order, in one column or parted where the taller of two is least tall."""
    if sum(sizes) <= _ONE_COLUMN or len(families) < 2:
        return [families]
    cut = min(range(1, len(families)), key=lambda i: max(sum(sizes[:i]), sum(sizes[i:])))
    return [families[:cut], families[cut:]]


def _sorted_column(axes: Axes, labels: pd.DataFrame, families: list[str], z: float, margin: float) -> None:
    axes.axvspan(-margin, margin, color=_BAND, linewidth=0, zorder=0)
    zero_line(axes)
    ticks: list[tuple[float, str, str | None]] = []
    y = 0
    for family in families:
        colour, marker = family_look(family)
        rows = labels[labels["family"] == family].sort_values(["delta_alpha", "adapter"])
        ticks.append((y, f"{family or 'other'} ({len(rows)})", colour))
        places = y - 1 - np.arange(len(rows))
        for column, (_, sign) in _BESIDE.items():
            axes.scatter(rows[column], places, marker=sign, s=9, color=GREY, linewidths=0.6, zorder=2)
        for moved in (True, False):
            some = ((rows["moved"] != "none") == moved).to_numpy()
            axes.errorbar(
                rows.loc[some, "delta_alpha"],
                places[some],
                xerr=z * rows.loc[some, "delta_alpha_se"],
                fmt=marker,
                color=colour,
                markerfacecolor=colour if moved else "white",
                zorder=3,
            )
        ticks += [
            (at, name, None) for at, name in zip(places, short_names(list(rows["adapter"]), 36), strict=True)
        ]
        y -= len(rows) + 1
    axes.set_yticks([at for at, *_ in ticks], [name for _, name, _ in ticks])
    for tick, (*_, colour) in zip(axes.get_yticklabels(), ticks, strict=True):
        tick.set(size=5.8, color=colour or BLACK, weight="bold" if colour else "normal")
    axes.grid(axis="y", linewidth=0.2)
    axes.tick_params(axis="y", length=0)


def agreement_figure(labels: pd.DataFrame, z: float, stamp: Stamp) -> Figure:
    """Teacher-forced Δoverlap against counted Δα̂, both at T = 0.8 on the own domain.

    Args:
        labels: from ``phases.screen.screened``. z: half width of the error bars in standard errors.
    """
    rows = labels.dropna(subset=["delta_alpha", "delta_overlap"])
    with style():
        figure, axes = new_figure(COLUMN, 3.2, stamp)
        ends = [rows[c] + s * z * rows[f"{c}_se"] for c in ("delta_alpha", "delta_overlap") for s in (-1, 1)]
        low, high = (float(f([f(e) for e in ends])) for f in (np.min, np.max)) if len(rows) else (-0.1, 0.1)
        pad = 0.05 * (high - low)
        axes.plot([low - pad, high + pad], [low - pad, high + pad], color=GREY, linestyle=":", zorder=1)
        zero_line(axes)
        zero_line(axes, vertical=False)
        equal = Line2D([], [], color=GREY, linestyle=":", label="equal")
        handles = _scatter(axes, rows, "delta_alpha", "delta_overlap", z)
        axes.set_xlim(low - pad, high + pad)
        axes.set_ylim(low - pad, high + pad)
        axes.set_aspect("equal")
        axes.set_xlabel(f"counted Δα̂\n(error bars on both axes: ± {z:.2f} standard errors)")
        axes.set_ylabel("teacher-forced Δoverlap")
        axes.legend(handles=[equal, *handles], loc="best")
    return figure


def _scatter(axes: Axes, rows: pd.DataFrame, x: str, y: str, z: float) -> list[Line2D]:
    """Points by family with error bars where a column has a standard error; the legend's handles."""
    handles = []
    for family in family_order(set(rows["family"])):
        colour, marker = family_look(family)
        own = rows[rows["family"] == family]
        bars = {
            f"{axis}err": z * own[f"{column}_se"]
            for axis, column in (("x", x), ("y", y))
            if f"{column}_se" in own
        }
        axes.errorbar(own[x], own[y], **bars, fmt="none", ecolor=colour, elinewidth=0.6, alpha=0.6, zorder=2)
        axes.scatter(own[x], own[y], s=12, color=colour, marker=marker, linewidths=0.0, zorder=3)
        handles.append(_family_handle(family))
    return handles


def _family_handle(family: str) -> Line2D:
    colour, marker = family_look(family)
    return Line2D([], [], color=colour, marker=marker, linestyle="none", label=family or "other")


def relation_figure(labels: pd.DataFrame, relations: pd.DataFrame, z: float, stamp: Stamp) -> Figure:
    """Δα̂ against the size of the update and against the KL divergence of the adapted target from the base.

    Args:
        labels: from ``phases.screen.screened``. z: half width of the error bars in standard errors.
        relations: from ``phases.relations.relation_table``, for the rank correlations in the titles.
    """
    panels = {
        "frobenius": "‖ΔW‖ (Frobenius, log scale)",
        "kl": "KL(adapted ‖ base), nats, own-domain text\n(T = 0.8, log scale)",
    }
    told = relations.set_index("column")
    with style():
        figure, grid = new_figure(DOUBLE, 2.7, stamp, ncols=2, sharey=True)
        for axes, (column, label) in zip(grid, panels.items(), strict=True):
            rows = labels.dropna(subset=["delta_alpha", column])
            rows = rows[rows[column] > 0]
            zero_line(axes, vertical=False)
            _scatter(axes, rows, column, "delta_alpha", z)
            axes.set_xscale("log")
            wide = not rows.empty and rows[column].max() > 500 * rows[column].min()
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(label)
            if column in told.index:
                one = told.loc[column]
                told_as = f"Spearman’s ρ = {one['spearman']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
                axes.set_title(told_as.replace("-", "−"), size=6.5)
        grid[0].set_ylabel(f"Δα̂ (± {z:.2f} standard errors)")
        handles = [_family_handle(f) for f in family_order(set(labels["family"]))]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def looping_figure(looping: pd.DataFrame, names: dict[str, str], level: float, stamp: Stamp) -> Figure:
    """α̂ by how much the output loops, base against adapted, one panel per decoding.

    Args:
        looping: from ``phases.looping.looping_table``. names: decoding to its title.
        level: of the intervals in it.
    """
    arms = {"base": (BLACK, "o", "-", -0.06), "adapted": (BLUE, "s", "--", 0.06)}
    decodings = list(dict.fromkeys(looping["decoding"]))
    terciles = list(dict.fromkeys(looping["looping"]))
    with style():
        figure, grid = new_figure(COLUMN, 2.3, stamp, ncols=len(decodings), sharey=True, squeeze=False)
        for axes, decoding in zip(grid[0], decodings, strict=True):
            for arm, (colour, marker, line, shift) in arms.items():
                rows = looping[(looping["decoding"] == decoding) & (looping["arm"] == arm)]
                axes.errorbar(
                    [terciles.index(t) + shift for t in rows["looping"]],
                    rows["alpha"],
                    yerr=[rows["alpha"] - rows["low"], rows["high"] - rows["alpha"]],
                    fmt=marker + line,
                    color=colour,
                    label=arm,
                )
            axes.set_xticks(range(len(terciles)), terciles)
            axes.set_title(names.get(decoding, decoding))
            axes.margins(x=0.15)
            axes.set_xlabel("third of the requests\nthat loops …")
        grid[0][0].set_ylabel(f"α̂ ({level:.0%} CI over prompts)")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure
