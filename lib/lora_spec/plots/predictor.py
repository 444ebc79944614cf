"""Figures of predictions."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lora_spec.outputs import Stamp
from lora_spec.plots.style import BLACK, DOUBLE, GREY, family_look, family_order, new_figure, style, zero_line


def predictor_figure(
    out_of_fold: pd.DataFrame,
    errors: pd.DataFrame,
    interval: tuple[float, float],
    error_level: float,
    stamp: Stamp,
) -> Figure:
    """Out-of-fold predictions against labels, and the mean absolute error beside that of the baselines.

    Args:
        out_of_fold: columns family, delta_alpha, delta_alpha_se, predicted.
        errors: one row per model: model, mae, low, high.
        interval: half width and level of the prediction interval, drawn as a band about the line of equality.
        error_level: of the intervals in ``errors``.
    """
    half_width, level = interval
    with style():
        figure, (left, right) = new_figure(DOUBLE, 2.9, stamp, ncols=2, width_ratios=[1.15, 1.0])
        truth, predicted = (out_of_fold[c].to_numpy() for c in ("delta_alpha", "predicted"))
        error = out_of_fold["delta_alpha_se"].to_numpy()
        low, high = min((truth - error).min(), predicted.min()), max((truth + error).max(), predicted.max())
        pad = 0.08 * (high - low) or 0.05
        line = np.array([low - pad, high + pad])
        left.fill_between(line, line - half_width, line + half_width, color="#EEEEEE", linewidth=0, zorder=0)
        left.plot(line, line, color=GREY, linestyle=":")
        zero_line(left)
        zero_line(left, vertical=False)
        handles = [
            Line2D([], [], color="#DDDDDD", linewidth=5, label=f"{level:.0%} interval"),
            Line2D([], [], color=GREY, linestyle=":", label="equal"),
        ]
        for family in family_order(set(out_of_fold["family"])):
            colour, marker = family_look(family)
            own = out_of_fold[out_of_fold["family"] == family]
            left.errorbar(
                own["predicted"],
                own["delta_alpha"],
                yerr=own["delta_alpha_se"],
                fmt=marker,
                color=colour,
                elinewidth=0.6,
            )
            handles.append(
                Line2D([], [], color=colour, marker=marker, linestyle="none", label=family or "other")
            )
        left.set_xlim(*line)
        left.set_ylim(*line)
        left.set_aspect("equal")
        left.set_xlabel("predicted Δα̂ (domain left out)")
        left.set_ylabel("measured Δα̂ (± 1 standard error)")
        left.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5))

        y = -np.arange(len(errors))
        right.errorbar(
            errors["mae"],
            y,
            xerr=[errors["mae"] - errors["low"], errors["high"] - errors["mae"]],
            fmt="o",
            color=BLACK,
        )
        right.set_yticks(y, errors["model"])
        right.set_ylim(y.min() - 0.6, 0.6)
        right.set_xlim(left=0.0)
        right.grid(axis="y", visible=False)
        right.set_xlabel(f"mean absolute error of Δα̂\n({error_level:.0%} CI over domains)")
    return figure
