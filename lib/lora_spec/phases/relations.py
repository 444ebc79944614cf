"""What Δα̂ goes with: the size of the update, and how far it moves the target's distribution."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lora_spec.acceptance.labels import OVERLAP_TEMPERATURE
from lora_spec.phases.evidence import PhaseEvidence
from lora_spec.phases.significance import LEVEL
from lora_spec.predictor.intervals import domain_draws, interval_of, spearman

MEASURES = {
    "frobenius": "‖ΔW‖ (Frobenius)",
    "kl": "KL(adapted ‖ base)",
    "tv": "TV(adapted, base)",
}
"""Column of the label table to what readers see."""
HEADERS = {
    "measure": "measure",
    "n": "adapters",
    "domains": "domains",
    "spearman": "Spearman’s ρ",
    "low": "low",
    "high": "high",
}
_DRAWS = 1000


def frobenius(evidence: PhaseEvidence) -> pd.Series:
    """‖ΔW‖_F over all adapted modules, by adapter, as it was measured with the acceptance."""
    found = {
        name.split("/")[1]: float(record.results["frobenius"])
        for name, record in evidence.records.items()
        if "frobenius" in record.results
    }
    return pd.Series(found, name="frobenius", dtype=float)


def divergences(evidence: PhaseEvidence) -> pd.DataFrame:
    """Mean kl (nats) and tv of the adapted target from the base, by adapter (index).

    Over the next-token distributions at T = 0.8 of the own-domain windows that were scored, which are text
    that nothing was trained on; empty where none was.
    """
    scores = evidence.overlap
    if scores is None:
        return pd.DataFrame(columns=["kl", "tv"], dtype=float)
    scores = scores[(scores["arm"] == "adapted") & np.isclose(scores["temperature"], OVERLAP_TEMPERATURE)]
    scores = scores[scores["adapter"].ne("")]
    weight = scores["positions"].astype(float)
    sums = scores[["kl", "tv"]].mul(weight, axis=0).groupby(scores["adapter"]).sum()
    return sums.div(weight.groupby(scores["adapter"]).sum(), axis=0)


def relation_table(labels: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Rank correlation of Δα̂ with each of :data:`MEASURES`.

    Returns:
        Columns column (of the labels), measure, n, domains, spearman, low, high (percentile bootstrap at
        :data:`LEVEL`, domains drawn whole). Measures that fewer than three adapters have are left out.
    """
    rows = []
    for column, label in MEASURES.items():
        both = labels.dropna(subset=["delta_alpha", column]).sort_values("adapter")
        if len(both) < 3:
            continue
        x, y = (both[c].to_numpy(dtype=float) for c in (column, "delta_alpha"))
        draws = domain_draws(both["domain"], _DRAWS, seed)
        low, high = interval_of([spearman(y[d], x[d]) for d in draws], LEVEL)
        rows.append(
            {
                "column": column,
                "measure": label,
                "n": len(both),
                "domains": both["domain"].nunique(),
                "spearman": spearman(y, x),
                "low": low,
                "high": high,
            }
        )
    return pd.DataFrame(rows, columns=["column", *HEADERS]).astype({"low": float, "high": float})


def relation_sentence(relations: pd.DataFrame) -> str:
    """How closely Δα̂ follows each measure, in one sentence."""
    if relations.empty:
        return "No adapter has its size or divergence on record."
    shown = [
        f"{row.spearman:+.2f} with {row.measure} ({row.low:+.2f} to {row.high:+.2f})"
        for row in relations.itertuples()
    ]
    return (
        f"Rank correlation of Δα̂: {'; '.join(shown)} ({LEVEL:.0%} intervals over domains; divergences are "
        "teacher-forced at T = 0.8 on the own-domain windows of the screen)."
    )
