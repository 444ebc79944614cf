"""What the gate would do with the adapters of a screen, under a cost profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from lora_spec.cost import load_profile
from lora_spec.gate import Action, Interval, decide, load_gate_params
from lora_spec.outputs import Stamp

HEADERS = {
    "adapter": "adapter",
    "action": "action",
    "depth": "depth",
    "regret": "largest regret",
    "reason": "reason",
    "cost_profile": "cost profile",
    "load": "load",
}


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
