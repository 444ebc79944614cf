"""Looping: a small model's continuations repeat themselves, and repeated text is easy to draft."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from lora_spec.errors import EvidenceError
from lora_spec.measure.rows import unique_ratio
from lora_spec.phases.evidence import DECODINGS, GENERAL
from lora_spec.phases.significance import LEVEL

TERCILES = ("most", "middle", "least")
HEADERS = {
    "decoding": "decoding",
    "looping": "looping",
    "arm": "arm",
    "requests": "requests",
    "unique_ratio": "unique tokens",
    "alpha": "α̂",
    "low": "low",
    "high": "high",
}
ARMS = ("base", "adapted")
_DRAWS = 500


def unique_ratios(requests: pd.DataFrame) -> np.ndarray:
    """Distinct output tokens over output tokens of each request, in (0, 1]; low where the output loops.

    The stored column where there is one, else computed from the tokens.

    Raises:
        EvidenceError: neither is there.
    """
    if "unique_ratio" in requests:
        stored = requests["unique_ratio"].to_numpy(dtype=np.float64, copy=True)
    else:
        stored = np.full(len(requests), np.nan)
    missing = np.isnan(stored)
    if missing.any():
        if "tokens" not in requests:
            raise EvidenceError("requests have neither unique_ratio nor tokens", code="no_looping")
        stored[missing] = [unique_ratio(tokens) for tokens in requests.loc[missing, "tokens"]]
    return stored


def looping_table(requests: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """α̂ on own-domain prompts by how much the output loops: terciles of :func:`unique_ratios`.

    The cuts are those of one decoding over both arms, so that base and adapted stand at equal looping.

    Returns:
        Columns decoding, looping (of :data:`TERCILES`), arm, requests, unique_ratio (mean), alpha (pooled),
        low, high (percentile bootstrap at :data:`LEVEL` over prompts; all requests of a prompt are drawn
        together).
    """
    own = requests[requests["prompt_set"] != GENERAL]
    own = own.assign(unique_ratio=unique_ratios(own), tried=own["accepted_emitted"] + own["rejections"])
    rows = []
    for decoding in (d for d in DECODINGS if d in set(own["decoding"])):
        table = own[own["decoding"] == decoding].reset_index(drop=True)
        cuts = table["unique_ratio"].quantile([1 / 3, 2 / 3]).to_numpy()
        tercile = np.digitize(table["unique_ratio"], cuts, right=True)
        prompt = table.groupby(["prompt_set", "prompt_index"], sort=True).ngroup().to_numpy()
        count = prompt.max() + 1
        draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), _DRAWS)
        for third, label in enumerate(TERCILES):
            for arm in ARMS:
                cell = (tercile == third) & (table["arm"] == arm).to_numpy()
                if not cell.any():
                    continue
                sums = [
                    np.bincount(prompt[cell], table.loc[cell, name], minlength=count)
                    for name in ("accepted_emitted", "tried")
                ]
                with np.errstate(invalid="ignore", divide="ignore"):
                    drawn = (draws @ sums[0]) / (draws @ sums[1])
                    alpha = sums[0].sum() / sums[1].sum()
                low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
                rows.append(
                    {
                        "decoding": decoding,
                        "looping": label,
                        "arm": arm,
                        "requests": int(cell.sum()),
                        "unique_ratio": table.loc[cell, "unique_ratio"].mean(),
                        "alpha": alpha,
                        "low": low,
                        "high": high,
                    }
                )
    return pd.DataFrame(rows)


def at_equal_looping(table: pd.DataFrame, decoding: str) -> tuple[float, float]:
    """Difference adapted − base of one decoding, raw and at equal looping, of means over requests.

    At equal looping: the differences within terciles, weighted by the adapted arm's requests (direct
    standardisation), so that what an adapter changes by making the output loop more or less is taken out.

    Args:
        table: from :func:`looping_table`.
    """
    rows = table[table["decoding"] == decoding].pivot(index="looping", columns="arm")
    alpha, requests = rows["alpha"], rows["requests"].fillna(0)
    raw = [np.average(alpha[arm].fillna(0), weights=requests[arm]) for arm in ARMS]
    both = alpha.notna().all(axis=1)
    gaps = (alpha["adapted"] - alpha["base"])[both]
    return float(raw[1] - raw[0]), float(np.average(gaps, weights=requests["adapted"][both]))


def looping_sentence(table: pd.DataFrame, names: Mapping[str, str] = DECODINGS) -> str:
    """How much output loops, and what that is worth in acceptance, computed from the table."""
    parts = []
    for decoding in dict.fromkeys(table["decoding"]):
        rows = table[table["decoding"] == decoding]
        mean = {
            arm: np.average(group["unique_ratio"], weights=group["requests"])
            for arm, group in rows.groupby("arm")
        }
        alpha = rows.set_index(["looping", "arm"])["alpha"]
        ends = [
            f"{alpha.get(('most', arm), np.nan):.3f} in the third that loops most against "
            f"{alpha.get(('least', arm), np.nan):.3f} in the third that loops least ({arm})"
            for arm in ARMS
        ]
        raw, equal = at_equal_looping(table, decoding)
        parts.append(
            f"{names.get(decoding, decoding)}: {mean['base']:.0%} of a base output's tokens are distinct, "
            f"{mean['adapted']:.0%} of an adapted one's. α̂ is {' and '.join(ends)}. Adapted − base is "
            f"{raw:+.3f} over all requests, {equal:+.3f} at equal looping."
        )
    return " ".join(parts)
