"""Which labels can be told from zero, and which can be told to be too small to matter."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.95
FALSE_DISCOVERY = 0.05
Z = float(stats.norm.ppf(0.5 + LEVEL / 2))
"""Half width of an interval at :data:`LEVEL`, in standard errors."""


def p_different(delta: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Two-sided p of "no effect"; an adapter that changed no request at all has no error, and p = 1."""
    ratio = np.divide(np.abs(delta), error, out=np.where(delta == 0, 0.0, np.inf), where=error > 0)
    return 2 * stats.norm.sf(ratio)


def p_equivalent(delta: np.ndarray, error: np.ndarray, margin: float) -> np.ndarray:
    """p of "the effect is at least ``margin`` in size" by two one-sided tests (Schuirmann 1987).

    The larger of the two one-sided p values, that of the nearer margin. Without any error it is 0 inside the
    margin and 1 elsewhere.
    """
    room = margin - np.abs(delta)
    ratio = np.divide(room, error, out=np.where(room > 0, np.inf, -np.inf), where=error > 0)
    return stats.norm.sf(ratio)


def judge(table: pd.DataFrame, margin: float) -> pd.DataFrame:
    """``table`` with the intervals and tests of ``delta_alpha``.

    Columns added: low, high (Δα ± z·se at :data:`LEVEL`, prompts as the unit), moved ("down", "up" or "none")
    and small (whether the effect is shown to lie within ± ``margin``). Each kind of claim is held to a false
    discovery rate of :data:`FALSE_DISCOVERY` (Benjamini & Hochberg 1995). An effect may be both: real, and
    small. One that is neither moved nor small needs more prompts.
    """
    delta, error = (table[name].to_numpy() for name in ("delta_alpha", "delta_alpha_se"))
    different = stats.false_discovery_control(p_different(delta, error)) <= FALSE_DISCOVERY
    small = stats.false_discovery_control(p_equivalent(delta, error, margin)) <= FALSE_DISCOVERY
    return table.assign(
        low=delta - Z * error,
        high=delta + Z * error,
        moved=np.select([different & (delta < 0), different], ["down", "up"], "none"),
        small=small,
    )


def counts_sentence(table: pd.DataFrame, margin: float) -> str:
    """How many adapters can be told from no effect, and how many from a large one, in sentences."""
    moved, small = (table["moved"] != "none").to_numpy(), table["small"].to_numpy(dtype=bool)
    ways = table["moved"].value_counts()
    both = f", {(small & moved).sum()} of which can be told from zero all the same" if small.any() else ""
    return (
        f"{moved.sum()} of {len(table)} adapters can be told from no effect: {ways.get('down', 0)} lower α̂, "
        f"{ways.get('up', 0)} raise it (false discovery rate {FALSE_DISCOVERY:.0%}). Of "
        f"{small.sum()} the effect is shown to be smaller than {margin:g}, the margin of params/gate.yaml "
        f"(two one-sided tests, same rate){both}. Of {(~small & ~moved).sum()} neither is shown: more "
        "prompts would be needed to place them."
    )
