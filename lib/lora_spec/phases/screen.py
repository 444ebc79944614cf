"""Phase 2: how do the adapters of the pool move acceptance?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from lora_spec.acceptance import label_table, reliability
from lora_spec.cost import load_profile
from lora_spec.gate import Action, Interval, decide, load_gate_params
from lora_spec.outputs import Stamp
from lora_spec.phases.evidence import PhaseEvidence, domain_families

DESIGN = "phase2_screen.yaml"
HEADERS = {
    "adapter": "adapter",
    "family": "family",
    "n_prompts": "prompts",
    "alpha_base": "α̂ base",
    "delta_alpha": "Δα̂",
    "low": "low",
    "high": "high",
    "moved": "moved",
    "delta_alpha_greedy": "Δα̂ greedy",
    "delta_alpha_general": "Δα̂ general",
    "delta_overlap": "Δoverlap",
}
"""Columns of the label table that are printed, with their headers."""
LEVEL = 0.95
FALSE_DISCOVERY = 0.05
Z = float(stats.norm.ppf(0.5 + LEVEL / 2))
"""Half width of an interval at :data:`LEVEL`, in standard errors."""
_DRAWS = 1000


def labels(evidence: PhaseEvidence) -> pd.DataFrame:
    """The label table with the primary label's interval and test, sorted by shift family, then by effect.

    Columns added to ``acceptance.label_table``: low, high (Δα ± z·se at :data:`LEVEL`, prompts as the unit)
    and moved: "down", "up" or "none" at a false discovery rate of :data:`FALSE_DISCOVERY`
    (Benjamini-Hochberg).
    """
    table = label_table(evidence.requests, evidence.overlap, families=domain_families())
    error = table["delta_alpha_se"]
    table["low"], table["high"] = (table["delta_alpha"] + sign * Z * error for sign in (-1, 1))
    adjusted = stats.false_discovery_control(_p_values(table["delta_alpha"].to_numpy(), error.to_numpy()))
    table["moved"] = np.select(
        [(adjusted <= FALSE_DISCOVERY) & (table["delta_alpha"] < 0), adjusted <= FALSE_DISCOVERY],
        ["down", "up"],
        "none",
    )
    return table.sort_values(["family", "delta_alpha", "adapter"], ignore_index=True)


def _p_values(delta: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Two-sided; an adapter that changed no request at all has no error, and p = 1."""
    ratio = np.divide(np.abs(delta), error, out=np.where(delta == 0, 0.0, np.inf), where=error > 0)
    return 2 * stats.norm.sf(ratio)


def family_table(table: pd.DataFrame) -> pd.DataFrame:
    """One row per shift family: adapters, domains, mean, extremes, and how many moved down, up or not."""
    rows = []
    for family, group in [*table.groupby("family", sort=True), ("all", table)]:
        rows.append(
            {
                "family": family,
                "adapters": len(group),
                "domains": group["domain"].nunique(),
                "mean": group["delta_alpha"].mean(),
                "lowest": group["delta_alpha"].min(),
                "highest": group["delta_alpha"].max(),
                "mean_greedy": group["delta_alpha_greedy"].mean(),
                "mean_general": group["delta_alpha_general"].mean(),
            }
            | {way: int((group["moved"] == way).sum()) for way in ("down", "none", "up")}
        )
    return pd.DataFrame(rows)


def agreement_table(table: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """How far the other labels agree with Δα: one row for overlap, greedy and general traffic.

    Columns: label, n, pearson with low/high (percentile bootstrap over domains), spearman, mean_difference
    (other minus Δα), mean_absolute_difference. Rows with fewer than three adapters are left out.
    """
    rows = []
    for column in ("delta_overlap", "delta_alpha_greedy", "delta_alpha_general"):
        both = table.dropna(subset=["delta_alpha", column])
        if len(both) < 3:
            continue
        x, y = both["delta_alpha"].to_numpy(), both[column].to_numpy()
        low, high = _correlation_interval(x, y, both["domain"].to_numpy(), seed)
        rows.append(
            {
                "label": column,
                "n": len(both),
                "pearson": float(np.corrcoef(x, y)[0, 1]),
                "low": low,
                "high": high,
                "spearman": float(stats.spearmanr(x, y).statistic),
                "mean_difference": float((y - x).mean()),
                "mean_absolute_difference": float(np.abs(y - x).mean()),
            }
        )
    return pd.DataFrame(rows)


def _correlation_interval(x: np.ndarray, y: np.ndarray, group: np.ndarray, seed: int) -> tuple[float, float]:
    """Percentile interval of Pearson's r, groups resampled with replacement."""
    _, member = np.unique(group, return_inverse=True)
    count = member.max() + 1
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), _DRAWS)
    weight = draws[:, member].astype(np.float64)
    total = weight.sum(axis=1, keepdims=True)
    dx, dy = (v - (weight @ v)[:, None] / total for v in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        r = (weight * dx * dy).sum(1) / np.sqrt((weight * dx**2).sum(1) * (weight * dy**2).sum(1))
    low, high = np.nanquantile(r, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def takeaway(table: pd.DataFrame) -> str:
    """What the screen says, in sentences computed from the labels."""
    counts = table["moved"].value_counts()
    lowest, highest = (table.loc[pick(table["delta_alpha"])] for pick in (pd.Series.idxmin, pd.Series.idxmax))
    cap = reliability(table["delta_alpha"].tolist(), table["delta_alpha_se"].tolist())
    return (
        f"Of {len(table)} adapters on {table['domain'].nunique()} domains, {counts.get('down', 0)} lower α̂, "
        f"{counts.get('up', 0)} raise it and {counts.get('none', 0)} cannot be told from no effect "
        f"(false discovery rate {FALSE_DISCOVERY:.0%}). Δα̂ runs from {lowest['delta_alpha']:+.3f} "
        f"({lowest['adapter']}) to {highest['delta_alpha']:+.3f} ({highest['adapter']}). "
        f"Predicting no effect errs by {table['delta_alpha'].abs().mean():.3f} on average, "
        f"and label noise caps R² at {cap:.2f}."
    )


def agreement_sentence(agreement: pd.DataFrame) -> str:
    """Whether counted acceptance and teacher-forced overlap tell the same, in one sentence."""
    row = agreement[agreement["label"] == "delta_overlap"]
    if row.empty:
        return "No adapter has an overlap label, so the two cannot be compared."
    one = row.iloc[0]
    return (
        f"Teacher-forced Δoverlap follows counted Δα̂ with r = {one['pearson']:.2f} ({LEVEL:.0%} CI over "
        f"domains {one['low']:.2f} to {one['high']:.2f}, {one['n']} adapters); they differ by "
        f"{one['mean_difference']:+.3f} on average, in absolute terms by "
        f"{one['mean_absolute_difference']:.3f}."
    )


def decision_table(deltas: pd.DataFrame, profile_name: str, load: int = 0) -> pd.DataFrame:
    """What the gate would do with each adapter.

    Args:
        deltas: columns adapter, point, low, high: change of α̂ and its interval.
        profile_name: cost profile. load: concurrent requests, 0 for the profile's default.

    Returns:
        Columns adapter, action, depth, regret (largest over the interval, share of the best goodput), reason
        (code), and cost_profile, load, evidence_class of the profile.
    """
    profile, params = load_profile(profile_name), load_gate_params()
    at = load or profile.load.default
    rows = []
    for row in deltas.itertuples():
        decision = decide(Interval(point=row.point, low=row.low, high=row.high), profile, at, params)
        rows.append(
            {
                "adapter": row.adapter,
                "action": decision.action.value,
                "depth": decision.depth,
                "regret": decision.regret.high if decision.regret else float("nan"),
                "reason": decision.reasons[0].code,
                "cost_profile": decision.cost_profile,
                "load": decision.load,
                "evidence_class": decision.evidence_class.value,
            }
        )
    return pd.DataFrame(rows)


def decision_heading(profile_name: str) -> str:
    """What decisions under a cost profile rest on, in one line."""
    profile = load_profile(profile_name)
    return f"cost profile {profile.name} ({profile.evidence_class}): {profile.title}"


def decision_stamp(stamp: Stamp, profile_name: str) -> Stamp:
    """The stamp of decisions: of the evidence and of the cost profile."""
    return stamp.joined(load_profile(profile_name).evidence_class)


def measured_deltas(table: pd.DataFrame) -> pd.DataFrame:
    """The measured label and its interval, as :func:`decision_table` takes them."""
    return table[["adapter", "delta_alpha", "low", "high"]].rename(columns={"delta_alpha": "point"})


def decision_counts(
    told: Mapping[str, pd.DataFrame], profile_name: str, loads: Sequence[int]
) -> pd.DataFrame:
    """Adapters by action, at each load and for each thing the gate may be told.

    Args:
        told: name to frame, as :func:`decision_table` takes them.
        profile_name: cost profile. loads: concurrent requests.

    Returns:
        Columns told, load, green, amber, red, abstain, depths (the distinct ones).
    """
    rows = []
    for name, deltas in told.items():
        for load in loads:
            decisions = decision_table(deltas, profile_name, load)
            rows.append(
                {"told": name, "load": load}
                | {action.value: int((decisions["action"] == action.value).sum()) for action in Action}
                | {"depths": ", ".join(map(str, sorted(decisions["depth"].unique())))}
            )
    return pd.DataFrame(rows)


def decision_sentence(decisions: pd.DataFrame, known: str) -> str:
    """Where the decisions come from, and how many of each, in one sentence.

    Args:
        decisions: from :func:`decision_table`.
        known: what the gate was told, such as "measured Δα̂".
    """
    first = decisions.iloc[0]
    counts = decisions["action"].value_counts()
    listed = ", ".join(f"{counts.get(action.value, 0)} {action.value}" for action in Action)
    return (
        f"Told the {known}, the gate under {first['cost_profile']} ({first['evidence_class']}) at load "
        f"{first['load']} answers: {listed}."
    )
