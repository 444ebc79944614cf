"""How far Δα̂ under one drafter agrees with Δα̂ under another, and with what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
from scipy import stats

from lora_spec.phases.carryover import Errors, deming_slope, disattenuated, pearson
from lora_spec.phases.confirm import DRAFTERS, DRAWS
from lora_spec.phases.selection import ROLES
from lora_spec.phases.significance import LEVEL
from lora_spec.predictor.intervals import domain_draws, interval_of, mae, spearman

SIGNS = "same sign, of those told from zero in the screen"
RANKS = "rank correlation (Spearman)"
CORRELATION = "correlation (Pearson)"
TRUE_CORRELATION = "correlation without noise"
SLOPE = "slope (Deming)"
RELATIVE_SLOPE = "slope of Δα̂/α̂ base (Deming)"
DIFFERENCE = "mean difference from the screen"
HEADERS = {
    "drafter": "drafter",
    "measure": "measure",
    "n": "adapters",
    "domains": "domains",
    "value": "value",
    "low": "low",
    "high": "high",
}
CALIBRATION_HEADERS = {
    "drafter": "drafter",
    "role": "chosen as",
    "n": "adapters",
    "predicted": "mean predicted",
    "observed": "mean measured",
    "low": "low",
    "high": "high",
    "mae": "mean absolute error",
    "covered": "in interval",
}
CONTRAST = "highest − lowest"
Score = Callable[[np.ndarray], float]


def agreement_table(pairs: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Measures of agreement with the screen, a few rows for each other drafter.

    Intervals at ``significance.LEVEL``: percentiles over domains, drawn whole; of the share of equal signs,
    where such draws say nothing once all agree, Wilson's (1927), which takes adapters as independent. NaN or
    no interval where a measure is undefined (fewer than three adapters, a side without spread).

    Args:
        pairs: from ``phases.confirm.pair_table``.

    Returns:
        Columns drafter (key), measure, n, domains, value, low, high.
    """
    rows = []
    for drafter, table in _by_drafter(pairs):
        told = table[table["moved_x"] != "none"]
        same = int((np.sign(told["x"]) == np.sign(told["y"])).sum())
        about = {"drafter": drafter, "measure": SIGNS, "n": len(told), "domains": told["domain"].nunique()}
        rows.append(about | _share(same, len(told)))
        draws = domain_draws(table["domain"], DRAWS, seed)
        for measure, score in _scores(table).items():
            low, high = interval_of([score(rows_drawn) for rows_drawn in draws], LEVEL)
            about |= {"measure": measure, "n": len(table), "domains": table["domain"].nunique()}
            rows.append(about | {"value": score(np.arange(len(table))), "low": low, "high": high})
    return pd.DataFrame(rows, columns=list(HEADERS)).astype({"value": float, "low": float, "high": float})


def _by_drafter(pairs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each other drafter's rows, in an order that does not depend on theirs."""
    for drafter in DRAFTERS:
        table = pairs[pairs["drafter"] == drafter].sort_values("adapter", ignore_index=True)
        if len(table):
            yield drafter, table


def _share(same: int, n: int) -> dict[str, float]:
    if n == 0:
        return dict.fromkeys(("value", "low", "high"), float("nan"))
    interval = stats.binomtest(same, n).proportion_ci(LEVEL, method="wilson")
    return {"value": same / n, "low": interval.low, "high": interval.high}


def _scores(table: pd.DataFrame) -> dict[str, Score]:
    """Each measure as a function of row numbers, which may come twice."""

    def sides(prefix: str) -> tuple[np.ndarray, np.ndarray, Errors]:
        x, y, x_se, y_se, both = (
            table[f"{prefix}{name}"].to_numpy(dtype=float) for name in ("x", "y", "x_se", "y_se", "xy")
        )
        return x, y, Errors(x_se**2, y_se**2, both)

    x, y, errors = sides("")
    a, b, relative = sides("relative_")
    return {
        RANKS: lambda rows: spearman(x[rows], y[rows]),
        CORRELATION: lambda rows: pearson(x[rows], y[rows]),
        TRUE_CORRELATION: lambda rows: disattenuated(x[rows], y[rows], errors.at(rows)),
        SLOPE: lambda rows: deming_slope(x[rows], y[rows], errors.at(rows)),
        RELATIVE_SLOPE: lambda rows: deming_slope(a[rows], b[rows], relative.at(rows)),
        DIFFERENCE: lambda rows: float(np.mean(y[rows] - x[rows])),
    }


def agreement_sentence(agreement: pd.DataFrame) -> str:
    """Whether Δα̂ carries over to each other drafter, in sentences computed from the table."""
    return " ".join(_carries(drafter, table) for drafter, table in agreement.groupby("drafter", sort=False))


def _carries(drafter: str, table: pd.DataFrame) -> str:
    of = table.set_index("measure")
    signs, ranks, slope = of.loc[SIGNS], of.loc[RANKS], of.loc[SLOPE]
    if signs["n"] == 0:
        kept = f"none of its {ranks['n']:.0f} adapters was told from zero in the screen"
    else:
        kept = (
            f"{signs['value'] * signs['n']:.0f} of the {signs['n']:.0f} adapters told from zero in the "
            f"screen keep their sign ({LEVEL:.0%} CI {signs['low']:.0%} to {signs['high']:.0%})"
        )
    order = _judged(ranks, 0.0, "more than chance", "less than chance", "not told from chance")
    steep = _judged(slope, 1.0, "steeper than one", "flatter than one", "not told from one")
    return (
        f"Under “{DRAFTERS[drafter]}” {kept}; ranks agree with ρ = {_with_interval(ranks)}, {order}; the "
        f"slope is {_with_interval(slope)}, {steep}."
    )


def panel_titles(agreement: pd.DataFrame) -> dict[str, str]:
    """What stands above each drafter's panel: slope and rank correlation, by drafter."""
    titles = {}
    for drafter, table in agreement.groupby("drafter", sort=False):
        of = table.set_index("measure")
        titles[str(drafter)] = (
            f"slope {_with_interval(of.loc[SLOPE])}, ρ = {_with_interval(of.loc[RANKS])}, "
            f"{of.loc[RANKS, 'n']} adapters"
        )
    return titles


def _with_interval(row: pd.Series) -> str:
    if not np.isfinite(row["value"]):
        return "undefined"
    if not np.isfinite(row["low"]):
        return f"{row['value']:.2f} (no interval)"
    return f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _judged(row: pd.Series, at: float, above: str, below: str, neither: str) -> str:
    """Where the interval of a measure lies; comparisons with NaN are false."""
    return above if row["low"] > at else below if row["high"] < at else neither


def calibration_table(measured: pd.DataFrame, half_width: float, *, seed: int = 0) -> pd.DataFrame:
    """Predicted against measured Δα̂ by drafter and by why an adapter was chosen.

    Args:
        measured: from ``phases.confirm.measured_table``.
        half_width: of the predictor's interval.

    Returns:
        Columns drafter (key), role, n, predicted, observed (means), low, high (of observed: percentiles at
        ``significance.LEVEL`` over domains), mae, covered (share within the predictor's interval). The row
        :data:`CONTRAST` is the difference of the two extremes, predicted and observed.
    """
    rows = []
    for drafter, table in _by_drafter(measured):
        masks = {role: (table["role"] == role).to_numpy() for role in ROLES}
        predicted, observed = (table[name].to_numpy(dtype=float) for name in ("predicted", "y"))
        draws = domain_draws(table["domain"], DRAWS, seed)
        everything = np.arange(len(table))
        for role in (*ROLES, CONTRAST):
            own = masks["highest"] | masks["lowest"] if role == CONTRAST else masks[role]
            if not own.any():
                continue
            score = _role_mean(observed, masks, role)
            low, high = interval_of([score(drawn) for drawn in draws], LEVEL)
            about = {"drafter": drafter, "role": role, "n": int(own.sum()), "low": low, "high": high}
            about |= {"predicted": _role_mean(predicted, masks, role)(everything)}
            about |= {"observed": score(everything), "mae": mae(observed[own], predicted[own])}
            inside = np.abs(observed[own] - predicted[own]) <= half_width
            rows.append(about | {"covered": float(np.mean(inside))})
    return pd.DataFrame(rows, columns=list(CALIBRATION_HEADERS)).astype({"low": float, "high": float})


def _role_mean(values: np.ndarray, masks: dict[str, np.ndarray], role: str) -> Score:
    """Mean of the values of one role, or the difference of the extremes', as a function of row numbers."""
    if role == CONTRAST:
        highest, lowest = (_role_mean(values, masks, side) for side in ("highest", "lowest"))
        return lambda rows: highest(rows) - lowest(rows)

    def mean(rows: np.ndarray) -> float:
        some = rows[masks[role][rows]]
        return float(values[some].mean()) if len(some) else float("nan")

    return mean


def calibration_sentence(calibration: pd.DataFrame, level: float) -> str:
    """Whether the predicted extremes hold, in sentences computed from the table.

    Args:
        calibration: from :func:`calibration_table`. level: of the predictor's interval.
    """
    parts = []
    for _, row in calibration[calibration["role"] == CONTRAST].iterrows():
        order = _judged(row, 0.0, "in the predicted order", "in the reverse order", "not told apart")
        parts.append(
            f"Under “{DRAFTERS[row['drafter']]}” the adapters predicted highest lie {row['observed']:+.3f} "
            f"above those predicted lowest ({row['low']:+.3f} to {row['high']:+.3f}, predicted "
            f"{row['predicted']:+.3f}): {order}; {row['covered']:.0%} of the two groups lie in the "
            f"predictor's {level:.0%} interval."
        )
    return " ".join(parts) or "The predicted extremes have not been measured."
