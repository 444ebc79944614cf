"""Figures of phase 1."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from lora_spec.outputs import Stamp
from lora_spec.plots.style import BLACK, BLUE, COLUMN, ORANGE, new_figure, shorten, style, zero_line

_DECODINGS = {"t08": ("T = 0.8", BLUE, "o", 0.14), "greedy": ("greedy", ORANGE, "s", -0.14)}
_ARMS = {"base": ("base", BLACK, "o", "-", -0.07), "adapted": ("adapted", BLUE, "s", "--", 0.07)}


def effect_figure(effects: pd.DataFrame, threshold: float, level: float, stamp: Stamp) -> Figure:
    """Paired change of α̂ per adapter and traffic, both decodings, with the threshold's band.

    Args:
        effects: from ``phases.effect.effect_table``.
        threshold: |Δα̂| that counts. level: of the intervals in it.
    """
    order = list(dict.fromkeys(zip(effects["adapter"], effects["traffic"], strict=True)))
    place = {key: len(order) - 1 - i for i, key in enumerate(order)}
    with style():
        figure, axes = new_figure(COLUMN, 0.9 + 0.28 * len(order), stamp)
        axes.axvspan(-threshold, threshold, color="#EEEEEE", zorder=0, label=f"|Δα̂| < {threshold:g}")
        zero_line(axes)
        for decoding, (label, colour, marker, shift) in _DECODINGS.items():
            rows = effects[effects["decoding"] == decoding]
            y = [place[key] + shift for key in zip(rows["adapter"], rows["traffic"], strict=True)]
            axes.errorbar(
                rows["delta"],
                y,
                xerr=[rows["delta"] - rows["low"], rows["high"] - rows["delta"]],
                fmt=marker,
                color=colour,
                label=label,
            )
        labels = [f"{shorten(adapter, 24)}\n{traffic} traffic" for adapter, traffic in order]
        axes.set_yticks([place[key] for key in order], labels)
        axes.set_ylim(-0.6, len(order) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"Δα̂, adapted − base\n({level:.0%} CI over paired prompts)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3)
    return figure


def position_figure(positions: pd.DataFrame, level: float, stamp: Stamp) -> Figure:
    """Conditional acceptance by draft position, base against adapted, one panel per adapter.

    Args:
        positions: from ``phases.effect.position_table``. level: of the intervals in it.
    """
    adapters = list(dict.fromkeys(positions["adapter"]))
    with style():
        figure, grid = new_figure(
            COLUMN, 2.0, stamp, ncols=len(adapters), sharex=True, sharey=True, squeeze=False
        )
        for axes, adapter in zip(grid[0], adapters, strict=True):
            for arm, (label, colour, marker, line, shift) in _ARMS.items():
                rows = positions[(positions["adapter"] == adapter) & (positions["arm"] == arm)]
                axes.errorbar(
                    rows["position"] + shift,
                    rows["rate"],
                    yerr=[rows["rate"] - rows["low"], rows["high"] - rows["rate"]],
                    fmt=marker + line,
                    color=colour,
                    label=label,
                )
            axes.set_title(shorten(adapter, 48 // len(adapters)), size=6.5)
            axes.set_xlabel("draft position")
            axes.set_xticks(sorted(set(positions["position"])))
        grid[0][0].set_ylabel(f"accepted, given all before\n({level:.0%} CI over prompts)")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure
