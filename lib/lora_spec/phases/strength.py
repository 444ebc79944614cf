"""How strong each drafter of the confirmation is, and how much the chosen adapters take from it."""

from __future__ import annotations

import pandas as pd

from lora_spec.phases.confirm import DRAFTERS, DRAWS, Confirmed
from lora_spec.phases.significance import LEVEL
from lora_spec.predictor.intervals import domain_draws, interval_of

HEADERS = {
    "drafter": "drafter",
    "adapters": "adapters",
    "domains": "domains",
    "alpha_base": "mean α̂ base",
    "alpha_base_low": "lowest",
    "alpha_base_high": "highest",
    "mean": "mean Δα̂",
    "low": "low",
    "high": "high",
    "relative": "mean Δα̂/α̂ base",
    "relative_low": "low",
    "relative_high": "high",
    "down": "down",
    "none": "none",
    "up": "up",
}


def strength_table(confirmed: Confirmed, *, seed: int = 0) -> pd.DataFrame:
    """How good each drafter is without an adapter, and how much the chosen ones move it; one row a drafter.

    Over the adapters that were measured under all drafters. alpha_base: mean over their domains, with the
    lowest and highest domain. mean and relative: over adapters, with percentile intervals at
    ``significance.LEVEL`` over domains, drawn whole.
    """
    common = set.intersection(*(set(labels["adapter"]) for labels in confirmed.labels.values()))
    common &= set(confirmed.selection["adapter"])
    rows = []
    for drafter, labels in confirmed.labels.items():
        some = labels[labels["adapter"].isin(common)].sort_values("adapter")
        if some.empty:
            continue
        base = some.groupby("domain")["alpha_base"].mean()
        row = {"drafter": drafter, "adapters": len(some), "domains": len(base)}
        row |= {"alpha_base": base.mean(), "alpha_base_low": base.min(), "alpha_base_high": base.max()}
        delta = some["delta_alpha"].to_numpy()
        draws = domain_draws(some["domain"], DRAWS, seed)
        for name, values in (("mean", delta), ("relative", delta / some["alpha_base"].to_numpy())):
            low, high = interval_of([values[d].mean() for d in draws], LEVEL)
            prefix = "" if name == "mean" else f"{name}_"
            row |= {name: values.mean(), f"{prefix}low": low, f"{prefix}high": high}
        rows.append(row | {way: int((some["moved"] == way).sum()) for way in ("down", "none", "up")})
    return pd.DataFrame(rows, columns=list(HEADERS))


def base_table(confirmed: Confirmed) -> pd.DataFrame:
    """α̂ without an adapter by domain (of the chosen adapters) and drafter."""
    columns = {
        DRAFTERS[drafter]: labels.groupby("domain")["alpha_base"].first()
        for drafter, labels in confirmed.labels.items()
    }
    domains = sorted(set(confirmed.selection["domain"]))
    return pd.DataFrame(columns).reindex(domains).rename_axis("domain").reset_index()


def strength_sentence(strength: pd.DataFrame) -> str:
    """Whether stronger drafters lose more, in sentences computed from the table."""
    if strength.empty:
        return "No adapter has been measured under all of these drafters yet."
    parts = [
        f"{DRAFTERS[row['drafter']]}: α̂ without an adapter {row['alpha_base']:.3f} on average ("
        f"{row['alpha_base_low']:.3f} to {row['alpha_base_high']:.3f} by domain), mean Δα̂ {row['mean']:+.3f} "
        f"({row['low']:+.3f} to {row['high']:+.3f}), relative to the base {row['relative']:+.1%} "
        f"({row['relative_low']:+.1%} to {row['relative_high']:+.1%})."
        for _, row in strength.iterrows()
    ]
    first = strength.iloc[0]
    return " ".join(parts) + (
        f" {first['adapters']} adapters of {first['domains']} domains, {LEVEL:.0%} intervals over domains."
    )
