"""What evidence costs: compute to a standard error of Δα̂, and the bias against counting, by estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from lora_spec.phases.cost_estimates import (
    COUNTED,
    LEVEL,
    PARTS,
    RESCORED,
    CostEvidence,
    Draws,
    difference,
    estimate_table,
    interval,
    load_cost,
    prompts_needed,
)
from lora_spec.phases.evidence import CONTROL_COLUMNS

__all__ = [
    "BIAS_HEADERS",
    "COST_HEADERS",
    "LABELS",
    "LEVEL",
    "bias_table",
    "controls_table",
    "cost_table",
    "curve_table",
    "estimate_table",
    "load_cost",
    "measured_sentence",
    "takeaway",
]

LABELS = {
    COUNTED: "counted",
    "rescored": "counted, then scored",
    "sampled": "sampled, then scored",
    "sampled_uniform": "the same, positions alike",
    "lockstep": "sampled and scored in step",
    "text": "held-out text",
}
COST_HEADERS = {
    "estimator": "estimator",
    "prompts": "prompts",
    "cpu_per_prompt": "CPU-s a prompt",
    "cpu_to_target": "CPU-s to the target",
    "ratio": "times less",
    "low": "low",
    "high": "high",
    "goal": "goal met",
    "ratio_whole": "with starts",
}
BIAS_HEADERS = {
    "estimator": "estimator",
    "reference": "against",
    "bias": "bias",
    "low": "low",
    "high": "high",
    "rms": "rms by adapter",
}


_REFERENCES = {COUNTED: "against counting", RESCORED: "against scoring the counted texts"}


def measured_sentence(cost: CostEvidence | None) -> str:
    """What was measured, in one sentence."""
    if cost is None:
        return "Nothing of this has been measured yet: lora-spec evidence-cost --execute, on an idle machine."
    prompts = sorted({int(record.results["prompts"]) for record in cost.records.values()})
    missing = [name for name in cost.params.adapters if name not in cost.records]
    tail = f" Missing: {', '.join(missing)}." if missing else ""
    return (
        f"{len(cost.records)} of the {len(cost.params.adapters)} declared adapters, "
        f"{' or '.join(map(str, prompts))} prompts each, both arms.{tail}"
    )


def controls_table(cost: CostEvidence) -> pd.DataFrame:
    """Counted α̂ against the overlap on the same tokens, the worst of each arm, and the floor of the base."""
    rows = []
    for arm in ("base", "adapted"):
        checks = {name: record.results["controls"][arm] for name, record in cost.records.items()}
        name, worst = max(checks.items(), key=lambda item: _distance(item[1]))
        passed = all(_distance(check) <= check["tolerance"] for check in checks.values())
        where = f"{arm}, furthest of {len(checks)}: {name}"
        expected, limit = worst["overlap_same_tokens"], worst["tolerance"]
        rows.append(("counted α̂ is the overlap", where, worst["alpha"], expected, limit, passed))
    checks = {name: record.results["controls"]["base"] for name, record in cost.records.items()}
    name, lowest = min(checks.items(), key=lambda item: item[1]["alpha"] - item[1]["floor"])
    passed = all(check["alpha"] >= check["floor"] for check in checks.values())
    where = f"lowest of {len(checks)}: {name}"
    rows.append(("base α̂ over its floor", where, lowest["alpha"], math.nan, lowest["floor"], passed))
    return pd.DataFrame([dict(zip(CONTROL_COLUMNS, row, strict=True)) for row in rows])


def _distance(check: Mapping[str, float]) -> float:
    return abs(check["alpha"] - check["overlap_same_tokens"])


def cost_table(cost: CostEvidence, estimates: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Compute to the target standard error, pooled over the adapters: one row an estimator.

    Columns: estimator, prompts (median needed), cpu_per_prompt (mean), cpu_to_target (sum over adapters),
    ratio (counted's sum over this one's) with low and high (percentile bootstrap over adapters and prompts
    at :data:`LEVEL`), goal (whether the ratio reaches the declared one), and the ratio with what is paid once
    an adapter, such as an engine's start.
    """
    draws = Draws(cost, seed)
    of_counted = draws.cpu_to_target(COUNTED)
    totals = estimates.groupby("estimator")[["cpu_to_target", "cpu_once"]].sum()
    whole = totals.sum(axis=1)
    rows = []
    for estimator in PARTS:
        own = estimates[estimates["estimator"] == estimator]
        ratio = totals.loc[COUNTED, "cpu_to_target"] / totals.loc[estimator, "cpu_to_target"]
        low, high = interval(of_counted / draws.cpu_to_target(estimator))
        rows.append(
            {
                "estimator": LABELS[estimator],
                "prompts": int(own["prompts"].median()),
                "cpu_per_prompt": own["cpu_per_prompt"].mean(),
                "cpu_to_target": own["cpu_to_target"].sum(),
                "ratio": ratio,
                "low": low,
                "high": high,
                "goal": bool(ratio >= cost.params.goal),
                "ratio_whole": whole[COUNTED] / whole[estimator],
            }
        )
    return pd.DataFrame(rows)


def bias_table(cost: CostEvidence, *, seed: int = 0) -> pd.DataFrame:
    """Bias of each estimator, pooled over adapters: against counting, and against scoring the counted texts.

    The second reference has the same expectation as the first and less noise.

    Columns: estimator, reference, bias (mean of Δ_estimator - Δ_reference), low and high (bootstrap over
    adapters and prompts), rms (root mean square by adapter, noise taken off; 0 where noise explains it all).
    """
    draws = Draws(cost, seed)
    rows = []
    for reference in _REFERENCES:
        for estimator in PARTS:
            if estimator in (COUNTED, reference):
                continue
            pairs = [difference(cost, adapter, estimator, reference) for adapter in cost.records]
            bias = np.array([delta for delta, _ in pairs])
            noise = np.array([units.std(ddof=1) ** 2 / len(units) for _, units in pairs])
            low, high = interval(draws.mean_of([delta for delta, _ in pairs], [units for _, units in pairs]))
            rows.append(
                {
                    "estimator": LABELS[estimator],
                    "reference": LABELS[reference],
                    "bias": float(bias.mean()),
                    "low": low,
                    "high": high,
                    "rms": math.sqrt(max(0.0, float((bias**2 - noise).mean()))),
                }
            )
    return pd.DataFrame(rows)


def curve_table(cost: CostEvidence, estimates: pd.DataFrame) -> pd.DataFrame:
    """Standard error against compute, for the figure: columns estimator, prompts, cpu_s, se, measured.

    ``se`` is the root mean square over adapters of unit_sd / √n, ``cpu_s`` the mean over adapters of n
    prompts; rows beyond the prompts that were measured extrapolate.
    """
    most = min(int(record.results["prompts"]) for record in cost.records.values())
    rows = []
    for estimator, own in estimates.groupby("estimator", sort=False):
        sd = math.sqrt(float((own["unit_sd"] ** 2).mean()))
        needed = float(prompts_needed(sd, cost.params))
        ends = np.geomspace(cost.params.minimum, max(float(most), 1.3 * needed), 24)
        for n in np.unique([*ends, needed, float(most)]):
            rows.append(
                {
                    "estimator": estimator,
                    "prompts": float(n),
                    "cpu_s": float(n * own["cpu_per_prompt"].mean()),
                    "se": sd / math.sqrt(n),
                    "measured": bool(n <= most),
                }
            )
    return pd.DataFrame(rows)


def takeaway(cost: CostEvidence, costs: pd.DataFrame, bias: pd.DataFrame) -> str:
    """Which estimator reaches the target with less compute, how biased it is, and whether the goal is met."""
    params = cost.params
    others = costs[costs["estimator"] != LABELS[COUNTED]]
    cheapest = others.loc[others["ratio"].idxmax()]
    same = others[others["estimator"].isin([LABELS[name] for name in ("rescored", "sampled", "lockstep")])]
    unbiased = same.loc[same["ratio"].idxmax()]
    met = "met" if cheapest["goal"] else "missed"
    sentences = [
        f"To a standard error of {params.target_se:g} on Δα̂, {cheapest['estimator']} takes "
        f"{_times(cheapest)} less compute than counting: the goal of {params.goal:g} times is {met}.",
        _bias_sentence(str(cheapest["estimator"]), bias),
    ]
    if unbiased["estimator"] != cheapest["estimator"]:
        met = "meets" if unbiased["goal"] else "misses"
        sentences += [
            f"Of those with the expectation of counting, {unbiased['estimator']} is the cheapest, "
            f"{_times(unbiased)} less, which {met} the goal.",
            _bias_sentence(str(unbiased["estimator"]), bias),
        ]
    return " ".join(sentences)


def _times(row: pd.Series) -> str:
    return (
        f"{row['ratio']:.1f} times [{row['low']:.1f}, {row['high']:.1f}] "
        f"({row['ratio_whole']:.1f} with starts of engines and models)"
    )


def _bias_sentence(name: str, bias: pd.DataFrame) -> str:
    rows = bias[bias["estimator"] == name].set_index("reference")
    told = [
        f"{what} {row['bias']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] "
        f"({'not told apart from none' if row['low'] <= 0 <= row['high'] else 'biased'}), "
        f"by adapter {row['rms']:.3f} (rms, noise taken off)"
        for reference, what in _REFERENCES.items()
        if LABELS[reference] in rows.index
        for row in [rows.loc[LABELS[reference]]]
    ]
    return f"Bias of {name}, pooled over adapters: {'; '.join(told)}."
