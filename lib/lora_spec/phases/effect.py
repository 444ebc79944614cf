"""Phase 1: do adapters that change the target a lot move acceptance at all?"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pandas as pd

from lora_spec.acceptance import PairedEffect, decide_effect, paired_alpha, position_counts, prompts_needed
from lora_spec.errors import EvidenceError
from lora_spec.gate import Phase1Effect, load_gate_params
from lora_spec.phases.evidence import DECODINGS, PhaseEvidence

GENERAL = "general"
PRIMARY = "t08"
DESIGN = "phase1_measurement.yaml"
HEADERS = {
    "adapter": "adapter",
    "traffic": "traffic",
    "decoding": "decoding",
    "n": "prompts",
    "alpha_base": "α̂ base",
    "alpha_adapted": "α̂ adapted",
    "delta": "Δα̂",
    "low": "low",
    "high": "high",
    "verdict": "decision",
}
"""Columns of the effect table that are printed, with their headers."""
_DRAWS = 1000


def thresholds() -> Phase1Effect:
    """Thresholds of the decision, fixed in ``params/gate.yaml`` before any label was seen."""
    return load_gate_params().phase1_effect


def limits_sentence(limits: Phase1Effect) -> str:
    """The thresholds and where they are fixed, in one sentence."""
    return (
        f"GO where the {limits.level:.0%} interval excludes zero and |Δα̂| ≥ {limits.threshold:g}, STOP where "
        f"it lies within ± {limits.threshold:g} (params/gate.yaml, fixed beforehand)."
    )


def effect_table(evidence: PhaseEvidence, limits: Phase1Effect) -> pd.DataFrame:
    """Paired effects, one row per adapter, traffic (own domain, general) and decoding.

    Columns: adapter, domain, traffic, decoding, n (paired prompts), alpha_base, alpha_adapted, delta, low,
    high (percentile bootstrap over prompts at ``limits.level``), se, unit_sd, verdict ("" where the row is no
    primary endpoint).

    Raises:
        EvidenceError: no adapted arm, or arms that cannot be paired.
    """
    requests = evidence.requests
    adapted = requests[requests["arm"] == "adapted"]
    if adapted.empty:
        raise EvidenceError("no adapted arm among the records", code="no_adapters")
    base = requests[requests["arm"] == "base"]
    rows = []
    for adapter, arms in adapted.groupby("adapter", sort=True):
        domains = sorted(set(arms["prompt_set"]) - {GENERAL})
        for prompt_set in [*domains, *({GENERAL} & set(arms["prompt_set"]))]:
            for decoding in DECODINGS:
                mine, control = (_arm(table, prompt_set, decoding) for table in (arms, base))
                if mine.empty:
                    continue
                control = control[control["prompt_index"].isin(mine["prompt_index"])]
                effect = paired_alpha(control, mine, level=limits.level)
                primary = prompt_set != GENERAL and decoding == PRIMARY
                rows.append(
                    {
                        "adapter": adapter,
                        "domain": domains[0] if domains else "",
                        "traffic": "general" if prompt_set == GENERAL else "own",
                        "decoding": decoding,
                    }
                    | _columns(effect)
                    | {"verdict": decide_effect(effect, limits.threshold) if primary else ""}
                )
    return pd.DataFrame(rows)


def _arm(table: pd.DataFrame, prompt_set: str, decoding: str) -> pd.DataFrame:
    return table[(table["prompt_set"] == prompt_set) & (table["decoding"] == decoding)]


def _columns(effect: PairedEffect) -> dict[str, float | int]:
    return {
        "n": effect.n,
        "alpha_base": effect.base,
        "alpha_adapted": effect.adapted,
        "delta": effect.delta,
        "low": effect.low,
        "high": effect.high,
        "se": effect.se,
        "unit_sd": effect.unit_sd,
    }


def primary(effects: pd.DataFrame) -> pd.DataFrame:
    """Rows of the primary endpoint: T = 0.8 on own-domain prompts."""
    return effects[(effects["traffic"] == "own") & (effects["decoding"] == PRIMARY)]


def position_table(evidence: PhaseEvidence, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
    """Conditional acceptance by draft position at T = 0.8 on own-domain prompts, base and adapted.

    Columns: adapter, arm, position (1..k), rate (accepted among steps whose verdict there was output), low,
    high (percentile bootstrap over prompts), at_risk (draft steps).
    """
    requests = evidence.requests[evidence.requests["decoding"] == PRIMARY]
    rows = []
    for adapter, arms in requests[requests["arm"] == "adapted"].groupby("adapter", sort=True):
        own = arms[arms["prompt_set"] != GENERAL]
        base = requests[(requests["arm"] == "base") & (requests["prompt_set"].isin(own["prompt_set"]))]
        base = base[base["prompt_index"].isin(own["prompt_index"])]
        for arm, table in (("base", base), ("adapted", own)):
            k = int(table["k"].max())
            accepted, rejected = position_counts(table, k)
            tried = accepted + rejected
            n = len(table)
            weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), _DRAWS)
            with np.errstate(invalid="ignore", divide="ignore"):
                drawn = (weights @ accepted) / (weights @ tried)
                rate = accepted.sum(axis=0) / tried.sum(axis=0)
            low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
            rows += [
                {
                    "adapter": adapter,
                    "arm": arm,
                    "position": i + 1,
                    "rate": rate[i],
                    "low": low[i],
                    "high": high[i],
                    "at_risk": int(tried[:, i].sum()),
                }
                for i in range(k)
            ]
    return pd.DataFrame(rows)


def power_table(effects: pd.DataFrame, limits: Phase1Effect) -> pd.DataFrame:
    """Paired prompts needed to tell small relative effects from none, given the scatter between prompts seen.

    Columns: adapter, prompts (used here), smallest (relative effect these prompts can tell), and one column
    ``n_<percent>pct`` for each relative effect of ``limits``.
    """
    z = NormalDist().inv_cdf(0.5 + limits.level / 2) + NormalDist().inv_cdf(limits.power)
    rows = []
    for row in primary(effects).itertuples():
        needed = prompts_needed(
            row.unit_sd, row.alpha_base, limits.relative_effects, level=limits.level, power=limits.power
        )
        rows.append(
            {
                "adapter": row.adapter,
                "prompts": row.n,
                "smallest": z * row.unit_sd / math.sqrt(row.n) / row.alpha_base,
            }
            | {f"n_{relative * 100:g}pct": count for relative, count in needed.items()}
        )
    return pd.DataFrame(rows)


def verdict(effects: pd.DataFrame) -> str:
    """GO if any adapter's primary effect says so, STOP if all say STOP, else INVESTIGATE."""
    verdicts = set(primary(effects)["verdict"])
    if "GO" in verdicts:
        return "GO"
    return "STOP" if verdicts == {"STOP"} else "INVESTIGATE"


def takeaway(effects: pd.DataFrame, limits: Phase1Effect) -> str:
    """What the primary endpoint says, in sentences computed from the table."""
    parts = [
        f"{row.adapter} moves α̂ by {row.delta:+.3f} ({limits.level:.0%} CI {row.low:+.3f} to "
        f"{row.high:+.3f}, base {row.alpha_base:.3f}, {row.n} paired prompts): {row.verdict}."
        for row in primary(effects).itertuples()
    ]
    general = effects[(effects["traffic"] == "general") & (effects["decoding"] == PRIMARY)]
    if len(general):
        worst = general.loc[general["delta"].abs().idxmax()]
        parts.append(f"On general traffic the largest change is {worst['delta']:+.3f} ({worst['adapter']}).")
    parts.append(
        f"With the threshold |Δα̂| ≥ {limits.threshold:g}, fixed beforehand, the phase's decision is "
        f"{verdict(effects)}."
    )
    return " ".join(parts)
