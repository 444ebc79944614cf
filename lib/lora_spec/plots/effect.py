"""Figures of phase 1."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lora_spec.outputs import Stamp
from lora_spec.plots.style import (
    BLACK,
    BLUE,
    COLUMN,
    DOUBLE,
    GREY,
    ORANGE,
    VERMILION,
    new_figure,
    shorten,
    style,
    zero_line,
)

_DECODINGS = {"t08": ("T = 0.8", BLUE, "o", 0.16), "greedy": ("greedy", ORANGE, "s", -0.16)}
_ARMS = {"base": ("base", BLACK, "o", "-", -0.07), "adapted": ("adapted", BLUE, "s", "--", 0.07)}
_ADAPTERS = ((BLUE, "o"), (VERMILION, "s"), (ORANGE, "^"), (GREY, "D"))
_STOP, _GO = "#E4E4E4", "#E3F1EA"


def effect_figure(effects: pd.DataFrame, threshold: float, level: float, stamp: Stamp) -> Figure:
    """Forest plot of the paired change of α̂: one row per adapter, traffic and depth, both decodings on it.

    The primary rows carry their decision and a heavier bar. An interval wholly in the grey zone is a STOP; an
    estimate in a green one whose interval excludes zero is a GO.

    Args:
        effects: from ``phases.effect.effect_table``.
        threshold: |Δα̂| that counts. level: of the intervals in it.
    """
    rows = effects.assign(row=list(zip(effects["adapter"], effects["traffic"], effects["k"], strict=True)))
    blocks = list(dict.fromkeys((adapter, traffic) for adapter, traffic, _ in rows["row"]))
    place: dict[tuple[str, str, int], float] = {}
    heads, y = {}, 0.0
    for block in blocks:
        heads[block] = y
        for k in sorted({k for *key, k in rows["row"] if tuple(key) == block}):
            y -= 1.0
            place[*block, k] = y
        y -= 1.3
    with style():
        figure, axes = new_figure(COLUMN, 0.95 + 0.155 * -y, stamp)
        _zones(axes, threshold, rows)
        for decoding, (label, colour, marker, shift) in _DECODINGS.items():
            for heavy in (False, True):
                some = rows[(rows["decoding"] == decoding) & ((rows["verdict"] != "") == heavy)]
                axes.errorbar(
                    some["delta"],
                    [place[row] + shift for row in some["row"]],
                    xerr=[some["delta"] - some["low"], some["high"] - some["delta"]],
                    fmt=marker,
                    color=colour,
                    elinewidth=1.8 if heavy else 0.8,
                    markersize=4.5 if heavy else 2.8,
                    label="_" if heavy else label,
                )
        verdicts = rows[rows["verdict"] != ""].set_index("row")["verdict"].to_dict()
        ticks = {
            at: (f"{verdicts[key]}: k = {key[2]}" if key in verdicts else f"k = {key[2]}", key in verdicts)
            for key, at in place.items()
        }
        ticks |= {at: (f"{shorten(name, 25)}, {traffic}", False) for (name, traffic), at in heads.items()}
        axes.set_yticks(list(ticks), [label for label, _ in ticks.values()])
        for tick, (at, (_, bold)) in zip(axes.get_yticklabels(), ticks.items(), strict=True):
            tick.set(size=6.0, weight="bold" if bold else "normal", color=BLACK if bold else GREY)
            if at in heads.values():
                tick.set_color(BLACK)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(y + 0.7, 0.7)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"Δα̂, adapted − base\n({level:.0%} CI over paired prompts)")
        handles, _ = axes.get_legend_handles_labels()
        zones = [Patch(color=_STOP, label="STOP zone"), Patch(color=_GO, label="GO zone")]
        figure.legend(handles=[*handles, *zones], loc="outside upper right", ncols=4, columnspacing=1.0)
    return figure


def _zones(axes: Axes, threshold: float, rows: pd.DataFrame) -> None:
    reach = max(rows["high"].max(), -rows["low"].min(), 2 * threshold) * 1.12
    axes.axvspan(-threshold, threshold, color=_STOP, linewidth=0, zorder=0)
    for low, high in ((-reach, -threshold), (threshold, reach)):
        axes.axvspan(low, high, color=_GO, linewidth=0, zorder=0)
    axes.set_xlim(-reach, reach)
    zero_line(axes)


def position_figure(positions: pd.DataFrame, level: float, stamp: Stamp) -> Figure:
    """Conditional acceptance by draft position at T = 0.8, base against adapted.

    A row of panels per adapter and a panel per depth; one row of adapters where there is one depth.

    Args:
        positions: from ``phases.depths.position_table``. level: of the intervals in it.
    """
    positions = positions[positions["decoding"] == "t08"]
    adapters, depths = (sorted(set(positions[name])) for name in ("adapter", "k"))
    shape = (len(adapters), len(depths)) if len(depths) > 1 else (1, len(adapters))
    width = DOUBLE if shape[1] > 2 else COLUMN
    with style():
        figure, grid = new_figure(
            width,
            0.8 + 1.35 * shape[0],
            stamp,
            nrows=shape[0],
            ncols=shape[1],
            sharey=True,
            sharex="col",
            squeeze=False,
            width_ratios=[k + 0.6 for k in depths] if len(depths) > 1 else None,
        )
        panels = [(adapter, k) for adapter in adapters for k in depths]
        for axes, (adapter, k) in zip(grid.flat, panels, strict=True):
            for arm, (label, colour, marker, line, shift) in _ARMS.items():
                own = (positions["adapter"] == adapter) & (positions["k"] == k) & (positions["arm"] == arm)
                rows = positions[own]
                axes.errorbar(
                    rows["position"] + shift,
                    rows["rate"],
                    yerr=[rows["rate"] - rows["low"], rows["high"] - rows["rate"]],
                    fmt=marker + line,
                    color=colour,
                    label=label,
                )
            axes.set_title(f"{shorten(adapter, 24)}, k = {k}" if shape[0] == 1 else f"k = {k}", size=6.0)
            axes.set_xticks(range(1, k + 1))
            axes.set_xlim(0.6, k + 0.4)
        for axes in grid[-1]:
            axes.set_xlabel("draft position")
        for axes, adapter in zip(grid[:, 0], adapters, strict=False):
            name = "" if shape[0] == 1 else f"{shorten(adapter, 26)}\n"
            axes.set_ylabel(f"{name}accepted, given all before", size=6.0)
        bars = f"bars: {level:.0%} CI over prompts"
        figure.legend(
            *grid[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2, title=bars
        ).get_title().set_fontsize(6.0)
    return figure


def depth_figure(depths: pd.DataFrame, level: float, stamp: Stamp) -> Figure:
    """α̂, Δα̂ and emitted AL by speculation depth, T = 0.8, own domain.

    Args:
        depths: from ``phases.depths.depth_table``. level: of the intervals in it.
    """
    panels = (
        ("alpha", "α̂", ("base", "adapted")),
        ("alpha", "Δα̂, adapted − base", ("adapted − base",)),
        ("al", "AL emitted", ("base", "adapted")),
    )
    adapters, ks = (sorted(set(depths[name])) for name in ("adapter", "k"))
    looks = {name: _ADAPTERS[i % len(_ADAPTERS)] for i, name in enumerate(adapters)}
    with style():
        figure, grid = new_figure(DOUBLE, 2.3, stamp, ncols=3)
        for axes, (measure, label, arms) in zip(grid, panels, strict=True):
            for i, adapter in enumerate(adapters):
                colour, marker = looks[adapter]
                for arm in arms:
                    rows = depths[(depths["adapter"] == adapter) & (depths["arm"] == arm)]
                    axes.errorbar(
                        rows["k"] + 0.12 * (i - (len(adapters) - 1) / 2) + 0.05 * (arm == "base"),
                        rows[measure],
                        yerr=[
                            rows[measure] - rows[f"{measure}_low"],
                            rows[f"{measure}_high"] - rows[measure],
                        ],
                        fmt=marker + (":" if arm == "base" else "-"),
                        color=colour,
                        markerfacecolor="white" if arm == "base" else colour,
                    )
            axes.set_xticks(ks)
            axes.set_xlim(ks[0] - 0.7, ks[-1] + 0.7)
            axes.set_xlabel(f"speculation depth k\n(bars: {level:.0%} CI over prompts)")
            axes.set_title(label)
        zero_line(grid[1], vertical=False)
        handles = [
            Line2D([], [], color=colour, marker=marker, label=shorten(name, 34))
            for name, (colour, marker) in looks.items()
        ]
        handles += [
            Line2D([], [], color=GREY, marker="o", markerfacecolor="white", linestyle=":", label="base"),
            Line2D([], [], color=GREY, marker="o", label="adapted"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure
