"""Phase 1: do adapters that change the target a lot move acceptance at all?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import pandas as pd

from lora_spec.acceptance import PairedEffect, check_requests, decide_effect, paired_alpha, prompts_needed
from lora_spec.errors import EvidenceError
from lora_spec.gate import Phase1Effect, load_gate_params
from lora_spec.measure.design import load_design
from lora_spec.phases.evidence import DECODINGS, GENERAL, PRIMARY, TRAFFIC, PhaseEvidence, primary_depth

DESIGN = "phase1_measurement.yaml"
SCREEN_DESIGN = "phase2_screen.yaml"
"""Whose prompts phase 1 must not use: labels, features and predictors are made from them."""
HEADERS = {
    "adapter": "adapter",
    "traffic": "traffic",
    "decoding": "decoding",
    "k": "k",
    "n": "prompts",
    "alpha_base": "α̂ base",
    "alpha_adapted": "α̂ adapted",
    "delta": "Δα̂",
    "low": "low",
    "high": "high",
    "verdict": "decision",
}
"""Columns of the effect table that are printed, with their headers."""
POWER_HEADERS = {"adapter": "adapter", "prompts": "prompts", "smallest": "smallest effect told"}
"""Columns of the power table; one for each relative effect follows them."""


def thresholds() -> Phase1Effect:
    """Thresholds of the decision, fixed in ``params/gate.yaml`` before any label was seen."""
    return load_gate_params().phase1_effect


def limits_sentence(limits: Phase1Effect) -> str:
    """The thresholds and where they are fixed, in one sentence."""
    return (
        f"GO where the {limits.level:.0%} interval excludes zero and |Δα̂| ≥ {limits.threshold:g}, STOP where "
        f"it lies within ± {limits.threshold:g} (params/gate.yaml, fixed beforehand)."
    )


def prompts_sentence(evidence: PhaseEvidence) -> str:
    """On how many prompts each adapter was measured, and whether anything else was made from them."""
    requests = evidence.requests
    mine = requests[(requests["arm"] == "adapted") & (requests["decoding"] == PRIMARY)]
    screen = load_design(SCREEN_DESIGN)
    shared = sum(index in screen.indices(name) for name, index in prompts_of(mine))
    own, general = (
        mine[(mine["prompt_set"] == GENERAL) == wanted].groupby("adapter")["prompt_index"].nunique()
        for wanted in (False, True)
    )
    counts = [f"{_span(own)} own-domain"] + ([f"{_span(general)} general"] if len(general) else [])
    used = "none of them is" if shared == 0 else f"{shared} of them are"
    return (
        f"Each adapter answers {' and '.join(counts)} prompts at T = 0.8; {used} among those of "
        f"params/{SCREEN_DESIGN}, from which labels and predictors are made."
    )


def prompts_of(requests: pd.DataFrame) -> set[tuple[str, int]]:
    """The distinct prompts of some requests: set and window."""
    return set(requests[["prompt_set", "prompt_index"]].itertuples(index=False, name=None))


def _span(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low} to {high}"


def arms(evidence: PhaseEvidence) -> Iterator[tuple[dict[str, object], pd.DataFrame, pd.DataFrame]]:
    """Both arms of every comparison: a description, and base and adapted requests on the same prompts.

    The description holds adapter, domain, traffic, decoding and k, in the order of the tables: own domain
    first, the primary decoding first, k rising.

    Raises:
        EvidenceError: no adapted arm, one on two domains, or one whose base arm is missing.
    """
    requests = evidence.requests
    check_requests(requests)
    adapted, base = (requests[requests["arm"] == arm] for arm in ("adapted", "base"))
    if adapted.empty:
        raise EvidenceError("no adapted arm among the records", code="no_adapters")
    for adapter, mine in adapted.groupby("adapter", sort=True):
        domains = sorted(set(mine["prompt_set"]) - {GENERAL})
        if len(domains) != 1:
            raise EvidenceError(
                f"adapter has {len(domains)} own domains instead of one",
                where=str(adapter),
                code="own_domain",
            )
        for traffic, prompt_set in zip(TRAFFIC, (domains[0], GENERAL), strict=True):
            for decoding in DECODINGS:
                for k in sorted(set(mine["k"].astype(int))):
                    pair = [
                        table[
                            (table["prompt_set"] == prompt_set)
                            & (table["decoding"] == decoding)
                            & (table["k"] == k)
                        ]
                        for table in (base, mine)
                    ]
                    if pair[1].empty:
                        continue
                    control = pair[0][pair[0]["prompt_index"].isin(pair[1]["prompt_index"])]
                    if control.empty:
                        raise EvidenceError(
                            f"no base control arm for {prompt_set}, {decoding}, k = {k}",
                            where=str(adapter),
                            fix="measure the base on the same prompts",
                            code="missing_base_control",
                        )
                    about = {"adapter": adapter, "domain": domains[0], "traffic": traffic}
                    yield about | {"decoding": decoding, "k": k}, control, pair[1]


def effect_table(evidence: PhaseEvidence, limits: Phase1Effect) -> pd.DataFrame:
    """Paired effects, one row per adapter, traffic (own domain, general), decoding and depth.

    Columns: adapter, domain, traffic, decoding, k, n (paired prompts), alpha_base, alpha_adapted, delta, low,
    high (percentile bootstrap over prompts at ``limits.level``), se, unit_sd, verdict ("" where the row is no
    primary endpoint: own domain, T = 0.8, the design's own k).

    Raises:
        EvidenceError: no adapted arm, or arms that cannot be paired.
    """
    depth = primary_depth(evidence)
    rows = []
    for about, base, adapted in arms(evidence):
        effect = paired_alpha(base, adapted, level=limits.level)
        is_primary = (about["traffic"], about["decoding"], about["k"]) == ("own", PRIMARY, depth)
        verdict = decide_effect(effect, limits.threshold) if is_primary else ""
        rows.append(about | _columns(effect) | {"verdict": verdict})
    return pd.DataFrame(rows)


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
    """Rows of the primary endpoint, the only ones with a decision."""
    return effects[effects["verdict"] != ""]


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


def power_headers(limits: Phase1Effect) -> dict[str, str]:
    """Headers of :func:`power_table`."""
    wanted = {f"n_{r * 100:g}pct": f"prompts for {r * 100:g} %" for r in limits.relative_effects}
    return POWER_HEADERS | wanted


def verdict(effects: pd.DataFrame) -> str:
    """GO if any adapter's primary effect says so, STOP if all say STOP, else INVESTIGATE."""
    verdicts = set(primary(effects)["verdict"])
    if "GO" in verdicts:
        return "GO"
    return "STOP" if verdicts == {"STOP"} else "INVESTIGATE"


def takeaway(effects: pd.DataFrame, limits: Phase1Effect, *, complete: bool) -> str:
    """What the primary endpoint says, in sentences computed from the table.

    Args:
        complete: whether every adapter of the frozen design was measured; no decision is told before that.
    """
    parts = [
        f"{row.adapter} moves α̂ by {row.delta:+.3f} ({limits.level:.0%} CI {row.low:+.3f} to "
        f"{row.high:+.3f}, base {row.alpha_base:.3f}, {row.n} paired prompts, k = {row.k}): {row.verdict}."
        for row in primary(effects).itertuples()
    ]
    general = effects[(effects["traffic"] == GENERAL) & (effects["decoding"] == PRIMARY)]
    if len(general):
        worst = general.loc[general["delta"].abs().idxmax()]
        parts.append(
            f"On general traffic the largest change is {worst['delta']:+.3f} ({worst['adapter']}, "
            f"k = {worst['k']})."
        )
    if not complete:
        return " ".join([*parts, "Part of the frozen design is not measured yet, so this is no decision."])
    parts.append(
        f"With the threshold |Δα̂| ≥ {limits.threshold:g}, fixed beforehand, the phase's decision is "
        f"{verdict(effects)}."
    )
    return " ".join(parts)
