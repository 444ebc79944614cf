"""Figures of the confirmation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lora_spec.outputs import Stamp
from lora_spec.plots.style import (
    BLACK,
    DOUBLE,
    GREY,
    family_look,
    family_order,
    new_figure,
    style,
    zero_line,
)

_CHOSEN = {True: "predicted extreme", False: "random"}


def confirm_figure(
    pairs: pd.DataFrame, slopes: Mapping[str, str], names: Mapping[str, str], z: float, stamp: Stamp
) -> Figure:
    """Δα̂ under each other drafter against Δα̂ under the screen's, with errors on both sides.

    Args:
        pairs: from ``phases.confirm.pair_table``.
        slopes: what to say of each drafter above its panel. names: drafter to what readers see.
        z: half width of the error bars in standard errors.
    """
    drafters = list(dict.fromkeys(pairs["drafter"]))
    ends = [pairs[side] + sign * z * pairs[f"{side}_se"] for side in ("x", "y") for sign in (-1, 1)]
    low, high = min(end.min() for end in ends), max(end.max() for end in ends)
    pad = 0.04 * (high - low)
    line = np.array([low - pad, high + pad])
    with style():
        width = DOUBLE if len(drafters) > 1 else DOUBLE / 2 + 0.2
        figure, grid = new_figure(width, 3.6, stamp, ncols=len(drafters), sharey=True, squeeze=False)
        for axes, drafter in zip(grid[0], drafters, strict=True):
            rows = pairs[pairs["drafter"] == drafter]
            axes.plot(line, line, color=GREY, linestyle=":", zorder=1)
            zero_line(axes)
            zero_line(axes, vertical=False)
            for family in family_order(set(rows["family"])):
                _points(axes, rows[rows["family"] == family], family, z)
            axes.set_xlim(*line)
            axes.set_ylim(*line)
            axes.set_aspect("equal")
            axes.locator_params(nbins=6)
            axes.set_title(f"{names[drafter]}\n{slopes[drafter]}", size=6.8)
        grid[0][0].set_ylabel("Δα̂ under this drafter")
        figure.supxlabel(
            f"Δα̂ under the screen’s drafter (bars on both axes: ± {z:.2f} standard errors)", size=7.5
        )
        equal = Line2D([], [], color=GREY, linestyle=":", label="equal")
        kinds = [
            Line2D([], [], color=BLACK, marker="o", linestyle="none", label=label, markerfacecolor=face)
            for label, face in zip(_CHOSEN.values(), (BLACK, "white"), strict=True)
        ]
        handles = [*_family_handles(set(pairs["family"])), *kinds, equal]
        columns = len(handles) if len(drafters) > 1 else 4
        figure.legend(handles=handles, loc="outside upper center", ncols=columns)
    return figure


def _points(axes: Axes, rows: pd.DataFrame, family: str, z: float) -> None:
    """Error bars in both directions; open markers for adapters that were drawn at random."""
    colour, marker = family_look(family)
    for extreme in _CHOSEN:
        own = rows[(rows["role"] != "random") == extreme]
        axes.errorbar(
            own["x"],
            own["y"],
            xerr=z * own["x_se"],
            yerr=z * own["y_se"],
            fmt=marker,
            color=colour,
            markerfacecolor=colour if extreme else "white",
            elinewidth=0.6,
            zorder=3,
        )


def _family_handles(families: set[str]) -> list[Line2D]:
    looks = {family: family_look(family) for family in family_order(families)}
    return [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=family or "other")
        for family, (colour, marker) in looks.items()
    ]


def entropy_figure(points: pd.DataFrame, names: Mapping[str, str], z: float, stamp: Stamp) -> Figure:
    """Δα̂ against the entropy shift of the target, a panel a drafter.

    Args:
        points: from ``phases.entropy.point_table``. names: drafter to what readers see.
        z: half width of the error bars in standard errors.
    """
    drafters = list(dict.fromkeys(points["drafter"]))
    with style():
        figure, grid = new_figure(DOUBLE, 2.7, stamp, ncols=len(drafters), sharey=True, squeeze=False)
        for axes, drafter in zip(grid[0], drafters, strict=True):
            rows = points[points["drafter"] == drafter]
            zero_line(axes)
            zero_line(axes, vertical=False)
            for family in family_order(set(rows["family"])):
                colour, marker = family_look(family)
                own = rows[rows["family"] == family]
                axes.errorbar(
                    own["shift"],
                    own["y"],
                    yerr=z * own["y_se"],
                    fmt=marker,
                    color=colour,
                    elinewidth=0.6,
                )
            axes.set_title(f"{names[drafter]} ({len(rows)})", size=6.8)
        grid[0][0].set_ylabel(f"Δα̂ (± {z:.2f} standard errors)")
        figure.supxlabel(
            "entropy shift of the target, adapted − base, nats (T = 0.8, own-domain text)", size=7.5
        )
        figure.legend(handles=_family_handles(set(points["family"])), loc="outside upper center", ncols=6)
    return figure
