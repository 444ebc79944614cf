"""Where the spread of Δα̂ lies: between shift families, domains, training runs, or nowhere but in noise."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lora_spec.phases.significance import LEVEL
from lora_spec.predictor.intervals import domain_draws, interval_of

LEVELS = {"family": "between families", "domain": "between domains of a family"}
FAMILY_HEADERS = {
    "family": "family",
    "adapters": "adapters",
    "runs": "runs",
    "domains": "domains",
    "mean": "mean Δα̂",
    "low": "low",
    "high": "high",
    "lowest": "lowest",
    "highest": "highest",
    "mean_greedy": "mean, greedy",
    "mean_general": "mean, general",
    "down": "down",
    "none": "none",
    "up": "up",
    "small": "small",
}
DOMAIN_HEADERS = {
    "domain": "domain",
    "family": "family",
    "adapters": "adapters",
    "runs": "runs",
    "alpha_base": "α̂ base",
    "mean": "mean Δα̂",
    "lowest": "lowest",
    "highest": "highest",
}
VARIANCE_HEADERS = {"source": "source", "groups": "groups", "share": "share of variance"}
_DRAWS = 1000


def family_table(labels: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """One row per shift family: adapters, runs, domains, mean with interval, extremes, and how many moved.

    low and high: percentile bootstrap at :data:`LEVEL` of the mean; training runs are drawn with all their
    checkpoints, because most families have too few domains to draw those. Errors of a base arm that several
    runs share are not in it.
    """
    rows = []
    for family, group in [*labels.groupby("family", sort=True), ("all", labels)]:
        delta = group["delta_alpha"].to_numpy()
        draws = domain_draws(group["run"], _DRAWS, seed)
        low, high = interval_of([delta[rows_drawn].mean() for rows_drawn in draws], LEVEL)
        rows.append(
            {"family": family}
            | _counted(group)
            | {
                "low": low,
                "high": high,
                "lowest": delta.min(),
                "highest": delta.max(),
                "mean_greedy": group["delta_alpha_greedy"].mean(),
                "mean_general": group["delta_alpha_general"].mean(),
            }
            | {way: int((group["moved"] == way).sum()) for way in ("down", "none", "up")}
            | {"small": int(group["small"].sum())}
        )
    return pd.DataFrame(rows)[list(FAMILY_HEADERS)]


def _counted(group: pd.DataFrame) -> dict[str, float]:
    return {
        "adapters": len(group),
        "runs": group["run"].nunique(),
        "domains": group["domain"].nunique(),
        "mean": group["delta_alpha"].mean(),
    }


def domain_table(labels: pd.DataFrame) -> pd.DataFrame:
    """One row per domain, sorted by family and mean effect."""
    rows = [
        {"domain": domain, "family": group["family"].iloc[0]}
        | _counted(group)
        | {
            "alpha_base": group["alpha_base"].iloc[0],
            "lowest": group["delta_alpha"].min(),
            "highest": group["delta_alpha"].max(),
        }
        for domain, group in labels.groupby("domain", sort=True)
    ]
    table = pd.DataFrame(rows)[list(DOMAIN_HEADERS)]
    return table.sort_values(["family", "mean"], ignore_index=True)


def variance_table(labels: pd.DataFrame) -> pd.DataFrame:
    """The sum of squares of Δα̂ about its mean, split along the nesting family > domain > adapter.

    The shares of the first three rows add up to 1. Noise is inside them: mean squared standard error over the
    variance. Descriptive: with few domains a family, some of what lies between families is chance.

    Returns:
        Columns source, groups (levels there are), share (NaN of labels without any spread).
    """
    delta = labels["delta_alpha"]
    # Zero also where the squares of a spread of 1e-308 underflow.
    squares = float(((delta - delta.mean()) ** 2).sum()) if np.ptp(delta) > 0 else 0.0
    total = squares or np.nan
    rows, above = [], pd.Series(delta.mean(), index=labels.index)
    for column, source in LEVELS.items():
        means = delta.groupby(labels[column]).transform("mean")
        rows.append((source, labels[column].nunique(), float(((means - above) ** 2).sum())))
        above = means
    rows.append(("between adapters of a domain", len(labels), float(((delta - above) ** 2).sum())))
    noise = float((labels["delta_alpha_se"] ** 2).mean()) * (len(labels) - 1)
    rows.append(("of all this: noise of the labels", len(labels), noise))
    shares = [(source, groups, square / total) for source, groups, square in rows]
    return pd.DataFrame(shares, columns=list(VARIANCE_HEADERS))


def variance_sentence(variance: pd.DataFrame) -> str:
    """Where most of the spread lies, in one sentence."""
    if variance["share"].isna().any():
        return "Labels without any spread have none to part."
    share = variance["share"].to_list()
    return (
        f"Of the variance of Δα̂ {share[0]:.0%} lies between families, {share[1]:.0%} between domains of a "
        f"family and {share[2]:.0%} between adapters of a domain, where no knowledge of the domain helps; "
        f"noise of the labels makes up {share[3]:.0%}."
    )
