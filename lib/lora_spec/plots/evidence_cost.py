"""Figure of what evidence costs."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lora_spec.outputs import Stamp
from lora_spec.plots.style import (
    BLACK,
    BLUE,
    DOUBLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    new_figure,
    style,
    zero_line,
)

_LOOK = {
    "counted": (BLACK, "o"),
    "rescored": (PURPLE, "s"),
    "sampled": (ORANGE, "^"),
    "sampled_uniform": (GREY, "v"),
    "lockstep": (BLUE, "D"),
    "text": (VERMILION, "X"),
}
"""Estimator to (colour, marker)."""


def evidence_cost_figure(
    curves: pd.DataFrame,
    bias: pd.DataFrame,
    labels: Mapping[str, str],
    target_se: float,
    level: float,
    stamp: Stamp,
) -> Figure:
    """Standard error against compute by estimator, and each one's bias against counting.

    Args:
        curves: from ``phases.evidence_cost.curve_table``. bias: from ``bias_table``.
        labels: estimator to what readers see, in the order shown.
        target_se: the declared standard error. level: of the intervals in ``bias``.
    """
    with style():
        figure, (left, right) = new_figure(DOUBLE, 2.6, stamp, ncols=2, width_ratios=(1.3, 1.0))
        left.axhline(target_se, color=GREEN, linewidth=0.8, linestyle=":", zorder=1)
        for name, label in labels.items():
            own = curves[curves["estimator"] == name]
            if name == "sampled_uniform" or own.empty:  # the curve of "sampled", but for its noise
                continue
            colour, marker = _LOOK[name]
            for measured, line in ((True, "-"), (False, "--")):
                part = own if not measured else own[own["measured"]]
                left.plot(part["cpu_s"], part["se"], line, color=colour, linewidth=1.2 if measured else 0.7)
            reached = own[own["se"] <= target_se * (1 + 1e-9)].iloc[0]
            left.plot([reached["cpu_s"]], [reached["se"]], marker, color=colour, label=label)
        left.set(xscale="log", yscale="log")
        for axis in (left.xaxis, left.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        left.set_xlabel("CPU-s an adapter, both arms (dashed: extrapolated)")
        left.set_ylabel("standard error of Δα̂")
        left.legend(loc="best")
        rows = bias[bias["reference"] == labels["counted"]].set_index("estimator")
        names = [name for name, label in labels.items() if label in rows.index]
        zero_line(right)
        for place, name in enumerate(reversed(names)):
            row, (colour, marker) = rows.loc[labels[name]], _LOOK[name]
            ends = [[row["bias"] - row["low"]], [row["high"] - row["bias"]]]
            right.errorbar([row["bias"]], [place], xerr=ends, fmt=marker, color=colour)
        right.set_yticks(range(len(names)), [labels[name] for name in reversed(names)])
        right.set_ylim(-0.6, len(names) - 0.4)
        right.grid(axis="y", visible=False)
        right.set_xlabel(f"bias against counting\n({level:.0%} CI over adapters and prompts)")
    return figure
