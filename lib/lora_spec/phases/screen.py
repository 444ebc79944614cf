"""Phase 2: how do the adapters of the pool move acceptance?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from lora_spec.acceptance import label_table
from lora_spec.gate import load_gate_params
from lora_spec.phases.evidence import PhaseEvidence, domain_families
from lora_spec.phases.relations import divergences, frobenius
from lora_spec.phases.significance import LEVEL, Z, judge
from lora_spec.pool import load_pool
from lora_spec.predictor.intervals import domain_draws, interval_of

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
    "small": "small",
    "delta_alpha_greedy": "Δα̂ greedy",
    "delta_alpha_general": "Δα̂ general",
    "delta_overlap": "Δoverlap",
}
"""Columns of the label table that are printed, with their headers."""
CONTROL_HEADERS = {
    "adapter": "adapter",
    "greedy_requests": "greedy requests",
    "identical": "as the base",
    "delta_alpha_greedy": "Δα̂ greedy",
    "delta_alpha": "Δα̂",
    "low": "low",
    "high": "high",
}
OTHER_LABELS = {
    "delta_overlap": "Δoverlap, teacher-forced",
    "delta_alpha_greedy": "Δα̂, greedy",
    "delta_alpha_general": "Δα̂, general traffic",
}
"""Labels beside the primary one, with what readers see."""
AGREEMENT_HEADERS = {
    "label": "label",
    "n": "adapters",
    "pearson": "r",
    "low": "low",
    "high": "high",
    "spearman": "Spearman’s ρ",
    "mean_difference": "mean difference",
    "mean_absolute_difference": "mean absolute difference",
}
_DRAWS = 1000


class Screened(NamedTuple):
    """Labels of a screen.

    Attributes:
        labels: adapters that change the target, one row each.
        controls: adapters whose update is zero, declared to have no effect; they are no part of ``labels``.
    """

    labels: pd.DataFrame
    controls: pd.DataFrame


def margin() -> float:
    """|Δα̂| that counts: the threshold of ``params/gate.yaml``, fixed before any label was seen."""
    return load_gate_params().phase1_effect.threshold


def screened(evidence: PhaseEvidence) -> Screened:
    """The label tables, sorted by shift family, then by effect.

    Columns added to ``acceptance.label_table``: run (training run; checkpoints of one share it), frobenius
    (‖ΔW‖_F), kl and tv (``relations.divergences``), and those of ``significance.judge``. Controls have
    greedy_requests and identical (of these, how many outputs equal the base's on the same prompt) instead of
    moved and small: samples cannot be compared, because every adapter's requests have seeds of their own.
    """
    table = label_table(evidence.requests, evidence.overlap, families=domain_families())
    runs = {name: recipe.run for name, recipe in load_pool().items()}
    table["run"] = [runs.get(name, name) for name in table["adapter"]]
    table = table.join(frobenius(evidence), on="adapter").join(divergences(evidence), on="adapter")
    null = table["frobenius"] == 0.0
    labels = judge(table[~null], margin())
    error = table["delta_alpha_se"]
    controls = table.assign(low=table["delta_alpha"] - Z * error, high=table["delta_alpha"] + Z * error)[null]
    controls = controls.join(_identical(evidence.requests), on="adapter")
    return Screened(
        labels.sort_values(["family", "delta_alpha", "adapter"], ignore_index=True),
        controls.sort_values("adapter", ignore_index=True),
    )


def _identical(requests: pd.DataFrame) -> pd.DataFrame:
    """Greedy requests of each adapter, and how many gave the base's output on the same prompt."""
    greedy = requests[requests["decoding"] == "greedy"]
    key = ["prompt_set", "prompt_index", "k"]
    base, adapted = (greedy[greedy["arm"] == arm] for arm in ("base", "adapted"))
    both = adapted.merge(base[[*key, "output_sha256"]], on=key, suffixes=("", "_base"))
    same = (both["output_sha256"] == both["output_sha256_base"]).groupby(both["adapter"])
    return pd.DataFrame({"greedy_requests": same.size(), "identical": same.sum()})


def controls_sentence(controls: pd.DataFrame) -> str:
    """What adapters without an update show, in one sentence each."""
    if controls.empty:
        return "No adapter whose update is zero was measured."
    return " ".join(
        f"{row.adapter} has an update of zero: {row.identical:.0f} of its {row.greedy_requests:.0f} greedy "
        f"outputs are the base's, and its Δα̂ of {row.delta_alpha:+.3f} ({LEVEL:.0%} CI {row.low:+.3f} to "
        f"{row.high:+.3f}), under seeds of its own, is noise of the measurement. It is left out below."
        for row in controls.itertuples()
    )


def agreement_table(labels: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """How far the other labels agree with Δα: one row for overlap, greedy and general traffic.

    Columns: label, n, pearson with low/high (percentile bootstrap over domains), spearman, mean_difference
    (other minus Δα), mean_absolute_difference. Rows with fewer than three adapters are left out.
    """
    rows = []
    for column, label in OTHER_LABELS.items():
        both = labels.dropna(subset=["delta_alpha", column]).sort_values("adapter")
        if len(both) < 3:
            continue
        x, y = both["delta_alpha"].to_numpy(), both[column].to_numpy()
        draws = domain_draws(both["domain"], _DRAWS, seed)
        low, high = interval_of([_pearson(x[d], y[d]) for d in draws], LEVEL)
        rows.append(
            {
                "label": label,
                "n": len(both),
                "pearson": _pearson(x, y),
                "low": low,
                "high": high,
                "spearman": float(stats.spearmanr(x, y).statistic),
                "mean_difference": float((y - x).mean()),
                "mean_absolute_difference": float(np.abs(y - x).mean()),
            }
        )
    return pd.DataFrame(rows, columns=list(AGREEMENT_HEADERS)).astype({"low": float, "high": float})


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.corrcoef(x, y)[0, 1])


def agreement_sentence(agreement: pd.DataFrame) -> str:
    """Whether counted acceptance and teacher-forced overlap tell the same, in one sentence."""
    row = agreement[agreement["label"] == OTHER_LABELS["delta_overlap"]]
    if row.empty:
        return "Too few adapters have an overlap label to compare the two."
    one = row.iloc[0]
    return (
        f"Teacher-forced Δoverlap follows counted Δα̂ with r = {one['pearson']:.2f} ({LEVEL:.0%} CI over "
        f"domains {one['low']:.2f} to {one['high']:.2f}, {one['n']} adapters); they differ by "
        f"{one['mean_difference']:+.3f} on average, in absolute terms by "
        f"{one['mean_absolute_difference']:.3f}."
    )


def takeaway(labels: pd.DataFrame) -> str:
    """The distribution of Δα̂, in sentences computed from the labels."""
    delta = labels["delta_alpha"]
    lowest, highest = (labels.loc[pick(delta)] for pick in (pd.Series.idxmin, pd.Series.idxmax))
    first, middle, third = (f"{q:+.3f}" for q in delta.quantile([0.25, 0.5, 0.75]))
    return (
        f"Δα̂ of {len(labels)} adapters ({labels['run'].nunique()} training runs, "
        f"{labels['domain'].nunique()} domains) has mean {delta.mean():+.3f}, median {middle}, quartiles "
        f"{first} and {third}, and standard deviation {delta.std():.3f} where a label's standard error is "
        f"{labels['delta_alpha_se'].mean():.3f} on average. It runs from {lowest['delta_alpha']:+.3f} "
        f"({lowest['adapter']}) to {highest['delta_alpha']:+.3f} ({highest['adapter']}); "
        f"{(delta < 0).mean():.0%} are negative. Predicting no effect errs by {delta.abs().mean():.3f} on "
        "average."
    )
