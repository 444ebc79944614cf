"""Figures of phase 2."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lora_spec.outputs import Stamp
from lora_spec.plots.style import (
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

_PANELS = {
    "delta_alpha": "T = 0.8, own domain\n(primary)",
    "delta_alpha_greedy": "greedy, own domain",
    "delta_alpha_general": "T = 0.8, general traffic",
}


def screen_figure(labels: pd.DataFrame, z: float, stamp: Stamp) -> Figure:
    """Change of α̂ of every adapter, sorted within its shift family; greedy and general-traffic labels beside.

    Args:
        labels: from ``phases.screen.labels``. z: half width of the intervals in standard errors.
    """
    families = family_order(set(labels["family"]))
    rows = pd.concat(
        [labels[labels["family"] == f].sort_values(["delta_alpha", "adapter"]) for f in families],
        ignore_index=True,
    )
    gaps = rows["family"].map({f: i for i, f in enumerate(families)}).to_numpy() * 0.6
    y = -(np.arange(len(rows)) + gaps)
    with style():
        height = 0.95 + 0.13 * (len(rows) + 0.6 * len(families))
        figure, panels = new_figure(DOUBLE, height, stamp, ncols=3, sharex=True, sharey=True)
        for axes, (column, title) in zip(panels, _PANELS.items(), strict=True):
            zero_line(axes)
            for family in families:
                colour, marker = family_look(family)
                own = (rows["family"] == family).to_numpy()
                axes.errorbar(
                    rows.loc[own, column],
                    y[own],
                    xerr=z * rows.loc[own, f"{column}_se"],
                    fmt=marker,
                    color=colour,
                    label=family or "other",
                )
            axes.set_title(title)
            axes.grid(axis="y", linewidth=0.2)
            axes.tick_params(axis="y", length=0)
        panels[0].set_yticks(y, short_names(list(rows["adapter"]), 34))
        panels[0].set_ylim(y.min() - 0.8, 0.8)
        panels[1].set_xlabel(f"Δα̂, adapted − base (bars: ± {z:.2f} standard errors over paired prompts)")
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=len(families),
            markerscale=1.2,
        )
    return figure


def agreement_figure(labels: pd.DataFrame, z: float, stamp: Stamp) -> Figure:
    """Teacher-forced Δoverlap against counted Δα̂, both at T = 0.8 on the own domain.

    Args:
        labels: from ``phases.screen.labels``. z: half width of the error bars in standard errors.
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
        handles = [Line2D([], [], color=GREY, linestyle=":", label="equal")]
        for family in family_order(set(rows["family"])):
            colour, marker = family_look(family)
            own = rows[rows["family"] == family]
            axes.errorbar(
                own["delta_alpha"],
                own["delta_overlap"],
                xerr=z * own["delta_alpha_se"],
                yerr=z * own["delta_overlap_se"],
                fmt="none",
                ecolor=colour,
                elinewidth=0.6,
                alpha=0.6,
            )
            axes.scatter(
                own["delta_alpha"], own["delta_overlap"], s=14, color=colour, marker=marker, zorder=3
            )
            handles.append(
                Line2D([], [], color=colour, marker=marker, linestyle="none", label=family or "other")
            )
        axes.set_xlim(low - pad, high + pad)
        axes.set_ylim(low - pad, high + pad)
        axes.set_aspect("equal")
        axes.set_xlabel(f"counted Δα̂\n(error bars on both axes: ± {z:.2f} standard errors)")
        axes.set_ylabel("teacher-forced Δoverlap")
        axes.legend(handles=handles, loc="best")
    return figure
