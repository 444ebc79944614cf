"""Acceptance by speculation depth and by draft position, base against adapted, for phase 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from lora_spec.acceptance import position_counts
from lora_spec.phases.effect import arms
from lora_spec.phases.evidence import PRIMARY, PhaseEvidence, primary_depth

ARMS = ("base", "adapted", "adapted − base")
DEPTH_HEADERS = {
    "adapter": "adapter",
    "arm": "arm",
    "k": "k",
    "alpha": "α̂",
    "alpha_low": "low",
    "alpha_high": "high",
    "change": "from primary k",
    "change_low": "low",
    "change_high": "high",
    "al": "AL emitted",
    "al_low": "low",
    "al_high": "high",
}
POSITION_HEADERS = {
    "adapter": "adapter",
    "decoding": "decoding",
    "k": "k",
    "arm": "arm",
    "position": "position",
    "rate": "accepted",
    "low": "low",
    "high": "high",
    "at_risk": "drafts judged",
}
_DRAWS = 1000
_SUMS = {"alpha": ("accepted", "tried"), "al": ("tokens", "steps")}
"""Each measure is a ratio of two sums over prompts."""


def depth_table(evidence: PhaseEvidence, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
    """α̂ and emitted AL at every depth, T = 0.8, own domain, on the prompts that all depths share.

    α̂ counts judged drafts only, so it may be compared between depths; AL grows with k by its definition.

    Columns: adapter, arm (base, adapted, their difference), k, n (prompts), alpha, change (of alpha from the
    primary depth), al, each with ``_low`` and ``_high`` (percentile bootstrap over prompts, every depth and
    arm of a prompt drawn together).
    """
    depth = primary_depth(evidence)
    sums: dict[str, dict[tuple[str, int], pd.DataFrame]] = {}
    for about, base, adapted in arms(evidence):
        if about["traffic"] == "own" and about["decoding"] == PRIMARY:
            of_adapter = sums.setdefault(str(about["adapter"]), {})
            for arm, table in zip(ARMS, (base, adapted), strict=False):
                of_adapter[arm, int(about["k"])] = _per_prompt(table)
    rows: list[dict[str, object]] = []
    for adapter, tables in sums.items():
        shared = sorted(set.intersection(*(set(t.index) for t in tables.values())))
        n = len(shared)
        draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), _DRAWS)
        weights = np.vstack([np.ones(n), draws])  # the sample itself, then what is drawn from it
        found = {
            name: {key: _ratio(t.loc[shared], top, below, weights) for key, t in tables.items()}
            for name, (top, below) in _SUMS.items()
        }
        depths = sorted({k for _, k in tables})
        for values in found.values():
            values |= {(ARMS[2], k): values[ARMS[1], k] - values[ARMS[0], k] for k in depths}
        for arm in ARMS:
            for k in depths:
                row: dict[str, object] = {"adapter": adapter, "arm": arm, "k": k, "n": n}
                alpha = found["alpha"]
                row |= _with_interval("alpha", alpha[arm, k], level)
                row |= _with_interval("change", alpha[arm, k] - alpha[arm, depth], level)
                rows.append(row | _with_interval("al", found["al"][arm, k], level))
    return pd.DataFrame(rows)


def _per_prompt(table: pd.DataFrame) -> pd.DataFrame:
    counts = pd.DataFrame(
        {
            "prompt_index": table["prompt_index"],
            "accepted": table["accepted_emitted"].astype(np.int64),
            "tried": table["accepted_emitted"].astype(np.int64) + table["rejections"],
            "tokens": table["output_tokens"].astype(np.int64) - 1,  # the prefill's token is no draft step's
            "steps": table["steps_accepted"].map(len),
        }
    )
    return counts.groupby("prompt_index").sum().sort_index()


def _ratio(table: pd.DataFrame, top: str, below: str, weights: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return (weights @ table[top].to_numpy()) / (weights @ table[below].to_numpy())


def _with_interval(name: str, values: np.ndarray, level: float) -> dict[str, float]:
    """The first value, and the percentile interval of the others."""
    low, high = np.nanquantile(values[1:], [(1 - level) / 2, (1 + level) / 2])
    return {name: float(values[0]), f"{name}_low": float(low), f"{name}_high": float(high)}


def depth_sentence(depths: pd.DataFrame, level: float) -> str:
    """Whether α̂ and Δα̂ depend on the depth, and how AL does, in sentences computed from the table."""
    ks = sorted(set(depths["k"]))
    if len(ks) < 2:
        return f"One depth was measured, k = {ks[0]}, so nothing can be said about others."
    others = depths[depths["change"] != 0.0]

    def worst(rows: pd.DataFrame, what: str) -> str:
        row = rows.loc[rows["change"].abs().idxmax()]
        return (
            f"{what} differs from that at the primary depth by {row['change']:+.3f} where it differs most "
            f"({row['adapter']}, {row['arm']}, k = {row['k']}; {level:.0%} CI {row['change_low']:+.3f} to "
            f"{row['change_high']:+.3f})"
        )

    arms_only, differences = others[others["arm"] != ARMS[2]], others[others["arm"] == ARMS[2]]
    al = depths[depths["arm"] == ARMS[0]].groupby("k")["al"].mean()
    growth = ", ".join(f"{value:.2f} at k = {k}" for k, value in al.items())
    spread = (others["change_low"] <= 0) & (others["change_high"] >= 0)
    return (
        f"{worst(arms_only, 'α̂')}; {worst(differences, 'Δα̂')}. {spread.sum()} of these {len(others)} "
        f"intervals hold zero. AL, which depends on k by its definition, is {growth} (base)."
    )


def position_table(evidence: PhaseEvidence, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
    """Conditional acceptance by draft position on own-domain prompts, base and adapted.

    Columns: adapter, decoding, k, arm, position (1..k), rate (accepted among steps whose verdict there was
    output), low, high (percentile bootstrap over prompts), at_risk (draft steps).
    """
    rows: list[dict[str, Any]] = []
    for about, *pair in arms(evidence):
        if about["traffic"] != "own":
            continue
        for arm, table in zip(ARMS, pair, strict=False):
            ordered = table.sort_values("prompt_index")
            rows += [
                {name: about[name] for name in ("adapter", "decoding", "k")} | {"arm": arm} | row
                for row in _positions(ordered, int(about["k"]), level, seed)
            ]
    return pd.DataFrame(rows)


def _positions(table: pd.DataFrame, k: int, level: float, seed: int) -> list[dict[str, Any]]:
    accepted, rejected = position_counts(table, k)
    tried, n = accepted + rejected, len(table)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), _DRAWS)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = (weights @ accepted) / (weights @ tried)
        rate = accepted.sum(axis=0) / tried.sum(axis=0)
    low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return [
        {
            "position": i + 1,
            "rate": rate[i],
            "low": low[i],
            "high": high[i],
            "at_risk": int(tried[:, i].sum()),
        }
        for i in range(k)
    ]


def primary_positions(positions: pd.DataFrame) -> pd.DataFrame:
    """Rows of :func:`position_table` at T = 0.8."""
    return positions[positions["decoding"] == PRIMARY]


def position_sentence(positions: pd.DataFrame) -> str:
    """Where in the draft an adapter costs acceptance, in one sentence per adapter (T = 0.8, deepest k)."""
    rows = primary_positions(positions)
    rows = rows[rows["k"] == rows["k"].max()]
    parts = []
    for adapter, mine in rows.groupby("adapter", sort=True):
        rate = mine.pivot(index="position", columns="arm", values="rate")
        gap = rate["adapted"] - rate["base"]
        listed = ", ".join(f"{value:+.3f}" for value in gap)
        parts.append(
            f"Conditional acceptance under {adapter} differs from the base's by {listed} at positions 1 to "
            f"{gap.index.max()} (base {rate['base'].iloc[0]:.3f} at the first, "
            f"{rate['base'].iloc[-1]:.3f} at the last)."
        )
    return " ".join(parts)
