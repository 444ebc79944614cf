"""How good the labels are: the share of their spread that is no noise, and what no predictor can exceed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from lora_spec.acceptance import alpha_hat, reliability
from lora_spec.errors import EvidenceError
from lora_spec.phases.evidence import GENERAL, PRIMARY
from lora_spec.phases.significance import LEVEL
from lora_spec.predictor.intervals import domain_draws, interval_of, r2, spearman

HEADERS = {"measure": "measure", "value": "value", "low": "low", "high": "high"}
_DRAWS = 1000


class Ceiling(NamedTuple):
    """What the true labels themselves would score, on average, against labels as noisy as the measured."""

    r2: float
    spearman: float


def noise_ceiling(values: np.ndarray, errors: np.ndarray, *, draws: int = _DRAWS, seed: int = 0) -> Ceiling:
    """Simulate the scores that a perfect predictor would get.

    True labels are taken to be the measured ones shrunk to their mean by the root of their reliability, so
    that their variance is the measured one less the noise; to these, normal noise of each label's own
    standard error is added ``draws`` times. Zero where the labels are all noise, 1 where they have none.

    Args:
        values: labels, shape (n,), in an order that does not depend on how they were read.
        errors: their standard errors, shape (n,).
    """
    v, se = np.asarray(values, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    share = reliability(v, se)
    if share == 0.0:
        return Ceiling(0.0, 0.0)
    truth = v.mean() + math.sqrt(share) * (v - v.mean())
    noisy = truth + np.random.default_rng(seed).standard_normal((draws, v.size)) * se
    return Ceiling(*(float(np.mean([score(row, truth) for row in noisy])) for score in (r2, spearman)))


def half_labels(requests: pd.DataFrame) -> pd.DataFrame:
    """The primary label from the even and from the odd prompt windows alone.

    Returns:
        One row per adapter: adapter, even, odd (Δα̂; NaN where a half has no draft).

    Raises:
        EvidenceError: an adapter without its base control arm.
    """
    own = requests[(requests["decoding"] == PRIMARY) & (requests["prompt_set"] != GENERAL)]
    counts = ["accepted_emitted", "rejections"]
    base = own[own["arm"] == "base"].groupby(["prompt_set", "prompt_index"])[counts].sum()
    rows = []
    for name, arm in own[own["arm"] == "adapted"].groupby("adapter", sort=True):
        mine = arm.groupby(["prompt_set", "prompt_index"])[counts].sum()
        if not mine.index.isin(base.index).all():
            raise EvidenceError(
                "no base control arm on some prompts", where=str(name), code="missing_base_control"
            )
        control = base.loc[mine.index]
        odd = mine.index.get_level_values("prompt_index").to_numpy() % 2 == 1
        halves = [
            alpha_hat(*mine[half].sum().to_numpy()) - alpha_hat(*control[half].sum().to_numpy())
            for half in (~odd, odd)
        ]
        rows.append({"adapter": name, "even": halves[0], "odd": halves[1]})
    return pd.DataFrame(rows, columns=["adapter", "even", "odd"])


def full_length(even: np.ndarray, odd: np.ndarray) -> float:
    """Reliability of the whole from the correlation of its halves: 2r / (1 + r), at least 0.

    Spearman 1910 and Brown 1910; NaN where a half is constant.
    """
    if np.ptp(even) == 0 or np.ptp(odd) == 0:
        return math.nan
    r = float(np.corrcoef(even, odd)[0, 1])
    return max(0.0, 2.0 * r / (1.0 + r)) if r > -1.0 else 0.0


def reliability_table(labels: pd.DataFrame, halves: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Reliability of Δα̂ in two ways, and the ceilings it sets.

    Args:
        labels: from ``phases.screen.labels``. halves: from :func:`half_labels`.

    Returns:
        Columns measure, value, low, high: percentile intervals at :data:`LEVEL` over domains, drawn whole, so
        that neither checkpoints of one run nor adapters with one base arm pass for independent. The interval
        of a ceiling holds one draw of noise for each of its samples too. Empty with fewer than three
        adapters.
    """
    if len(labels) < 3:
        return pd.DataFrame(columns=list(HEADERS))
    table = labels.merge(halves, on="adapter").sort_values("adapter", ignore_index=True)
    v, se, even, odd = (table[c].to_numpy() for c in ("delta_alpha", "delta_alpha_se", "even", "odd"))
    whole = np.arange(len(table))
    samples = domain_draws(table["domain"], _DRAWS, seed)
    by_samples = [noise_ceiling(v[s], se[s], draws=1, seed=i) for i, s in enumerate(samples)]

    def row(measure: str, score: Callable[[np.ndarray], float]) -> dict[str, object]:
        low, high = interval_of([score(s) for s in samples], LEVEL)
        return {"measure": measure, "value": score(whole), "low": low, "high": high}

    rows = [
        row("reliability, 1 − mean SE² / variance", lambda s: reliability(v[s], se[s])),
        row("test–retest, odd and even windows", lambda s: full_length(even[s], odd[s])),
    ]
    for name, label in (("r2", "ceiling of R²"), ("spearman", "ceiling of Spearman’s ρ")):
        low, high = interval_of([getattr(one, name) for one in by_samples], LEVEL)
        value = getattr(noise_ceiling(v, se, seed=seed), name)
        rows.append({"measure": label, "value": value, "low": low, "high": high})
    return pd.DataFrame(rows).astype({"low": float, "high": float})


def reliability_sentence(table: pd.DataFrame) -> str:
    """What noise allows, in one sentence."""
    if table.empty:
        return "Fewer than three adapters have no reliability to speak of."
    shown = [f"{row.value:.2f} ({row.low:.2f} to {row.high:.2f})" for row in table.itertuples()]
    return (
        f"By its standard errors {shown[0]} of the variance of Δα̂ is no noise, by the agreement of odd and "
        f"even windows {shown[1]}; no predictor can be expected beyond R² = {shown[2]} or a rank correlation "
        f"of {shown[3]} ({LEVEL:.0%} intervals over domains)."
    )
