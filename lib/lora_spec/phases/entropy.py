"""Does an adapter that raises the target's entropy fare better with a flat drafter?

Stated in ``params/confirm.yaml`` before the confirmation was measured: Δα̂ is regressed on the entropy shift
of the target (adapted − base), the entropy of the drafter, and their product; the hypothesis is that the
coefficient of the product is positive. All entropies are teacher-forced, in nats, on text that nothing was
trained on. A DFlash drafter's mask positions are no next-token distribution, so it has none and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lora_spec.acceptance.labels import OVERLAP_TEMPERATURE
from lora_spec.phases.confirm import DRAFTERS, DRAWS, REFERENCE, Confirmed
from lora_spec.phases.evidence import PhaseEvidence
from lora_spec.phases.significance import LEVEL
from lora_spec.predictor.intervals import domain_draws, interval_of, spearman

FLATNESS = {
    "drafter_entropy": "entropy of the drafter",
    "excess": "entropy of the drafter over the target’s",
}
"""How flat a drafter is: the measure that was stated beforehand, and one beside it."""
COUNTED, FORCED, WINDOWS = "Δα̂", "Δoverlap", "Δoverlap, windows within adapters"
HEADERS = {
    "drafter": "drafter",
    "outcome": "outcome",
    "flatness": "flatness",
    "n": "points",
    "domains": "domains",
    "shift": "per nat of shift",
    "shift_low": "low",
    "shift_high": "high",
    "interaction": "shift × flatness",
    "low": "low",
    "high": "high",
}
SHIFT_HEADERS = {
    "drafter": "drafter",
    "n": "adapters",
    "raised": "raise entropy",
    "raised_up": "of these, α̂ up",
    "lowered": "lower entropy",
    "lowered_up": "of these, α̂ up",
    "spearman": "Spearman’s ρ",
    "low": "low",
    "high": "high",
}


def window_table(loaded: PhaseEvidence) -> pd.DataFrame:
    """Every scored window of every adapter beside the base on the same window.

    Returns:
        Columns adapter, domain, shift (entropy of the target, adapted − base), target_entropy (base),
        drafter_entropy, excess (drafter_entropy − target_entropy) and y (Δoverlap).
    """
    columns = ["adapter", "domain", "shift", "target_entropy", "drafter_entropy", "excess", "y"]
    if loaded.overlap is None:
        return pd.DataFrame(columns=columns)
    scores = loaded.overlap[np.isclose(loaded.overlap["temperature"], OVERLAP_TEMPERATURE)]
    key = ["prompt_set", "prompt_index"]
    measures = ["entropy_target", "entropy_drafter", "overlap"]
    base, adapted = (scores[scores["arm"] == arm] for arm in ("base", "adapted"))
    both = adapted[["adapter", *key, *measures]].merge(
        base[[*key, *measures]], on=key, suffixes=("", "_base")
    )
    both = both.sort_values(["adapter", "prompt_index"], ignore_index=True)
    return pd.DataFrame(
        {
            "adapter": both["adapter"],
            "domain": both["prompt_set"],
            "shift": both["entropy_target"] - both["entropy_target_base"],
            "target_entropy": both["entropy_target_base"],
            "drafter_entropy": both["entropy_drafter"],
            "excess": both["entropy_drafter"] - both["entropy_target_base"],
            "y": both["overlap"] - both["overlap_base"],
        },
        columns=columns,
    )


def point_table(confirmed: Confirmed, windows: pd.DataFrame, healed: pd.DataFrame | None) -> pd.DataFrame:
    """One row an adapter and drafter, all adapters of the screen under its drafter.

    Args:
        confirmed: the evidence.
        windows: from :func:`window_table`.
        healed: entropies of the healed drafter by domain (columns domain, entropy_drafter, entropy_target),
            or None where its healing is not on record.

    Returns:
        Columns adapter, domain, family, drafter (key), y (Δα̂), y_se, moved, shift, drafter_entropy, excess;
        flatness is NaN where a drafter has none.
    """
    means = windows.groupby("adapter")[["shift", "drafter_entropy", "excess"]].mean()
    parts = []
    for drafter, labels in confirmed.labels.items():
        table = labels[["adapter", "domain", "family", "delta_alpha", "delta_alpha_se", "moved"]].rename(
            columns={"delta_alpha": "y", "delta_alpha_se": "y_se"}
        )
        table = table.join(means, on="adapter").assign(drafter=drafter)
        if drafter != REFERENCE:
            table[list(FLATNESS)] = np.nan
        if drafter == "healed" and healed is not None:
            of = healed.set_index("domain")
            table["drafter_entropy"] = table["domain"].map(of["entropy_drafter"])
            table["excess"] = table["domain"].map(of["entropy_drafter"] - of["entropy_target"])
        parts.append(table.dropna(subset=["shift"]))
    return pd.concat(parts, ignore_index=True)


def interaction_table(points: pd.DataFrame, windows: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """The stated regression for each drafter that has an entropy, and for teacher-forced outcomes beside it.

    Each row is one least-squares fit of the outcome on shift, flatness and their product, the two centred:
    ``shift`` is the effect of a nat of entropy at mean flatness, ``interaction`` how much that changes per
    nat of flatness. Windows are compared within adapters (each adapter's means are taken out), where the size
    of the update is the same for all. Intervals at ``significance.LEVEL``: percentiles over domains, drawn
    whole; with few domains they cover a little less than they say.

    Args:
        points: from :func:`point_table`. windows: from :func:`window_table`.
    """
    known = set(points["adapter"])
    windows = windows[windows["adapter"].isin(known)]
    forced = windows.groupby(["adapter", "domain"], as_index=False).mean(numeric_only=True)
    sets = [(drafter, COUNTED, points[points["drafter"] == drafter]) for drafter in DRAFTERS]
    sets += [(REFERENCE, FORCED, forced), (REFERENCE, WINDOWS, windows)]
    rows = []
    for drafter, outcome, table in sets:
        for flatness, label in FLATNESS.items():
            some = table.dropna(subset=["y", "shift", flatness]).sort_values("adapter", ignore_index=True)
            if some["domain"].nunique() < 3:
                continue
            fitted = _fit(some, flatness, within=outcome == WINDOWS, seed=seed)
            about = {"drafter": drafter, "outcome": outcome, "flatness": label, "n": len(some)}
            rows.append(about | {"domains": some["domain"].nunique()} | fitted)
    numbers = dict.fromkeys(list(HEADERS)[5:], float)
    return pd.DataFrame(rows, columns=list(HEADERS)).astype(numbers)


def _fit(table: pd.DataFrame, flatness: str, *, within: bool, seed: int) -> dict[str, float | None]:
    shift, flat = (table[name] - table[name].mean() for name in ("shift", flatness))
    design = pd.DataFrame(
        {"one": 1.0, "shift": shift, "flat": flat, "product": shift * flat, "y": table["y"]}
    )
    if within:
        design = design.drop(columns="one")
        design -= design.groupby(table["adapter"]).transform("mean")
    names = [name for name in design.columns if name != "y"]
    coefficients = grouped_least_squares(
        design[names].to_numpy(), design["y"].to_numpy(), table["domain"].tolist(), seed=seed
    )
    found: dict[str, float | None] = {}
    for column, name, prefix in (("shift", "shift", "shift_"), ("product", "interaction", "")):
        values = coefficients[:, names.index(column)]
        low, high = interval_of(values[1:].tolist(), LEVEL)
        found |= {name: float(values[0]), f"{prefix}low": low, f"{prefix}high": high}
    return found


def grouped_least_squares(
    x: np.ndarray, y: np.ndarray, groups: Sequence[str], *, draws: int = DRAWS, seed: int = 0
) -> np.ndarray:
    """Coefficients of all rows, then of bootstrap samples of whole groups.

    Args:
        x: (rows, columns). y: (rows,). groups: of each row.

    Returns:
        (1 + draws, columns); NaN where a sample leaves the coefficients undetermined.
    """
    names = np.unique(np.asarray(groups))
    of = np.asarray(groups)
    squares = np.stack([x[of == name].T @ x[of == name] for name in names])
    products = np.stack([x[of == name].T @ y[of == name] for name in names])
    samples = domain_draws(names.tolist(), draws, seed)
    out = np.full((1 + draws, x.shape[1]), np.nan)
    for row, chosen in enumerate([np.arange(len(names)), *samples]):
        left, right = squares[chosen].sum(axis=0), products[chosen].sum(axis=0)
        scale = np.sqrt(np.diag(left))
        if (scale > 0).all() and np.linalg.cond(left / np.outer(scale, scale)) < 1e10:
            out[row] = np.linalg.solve(left, right)
    return out


def interaction_sentence(interactions: pd.DataFrame) -> str:
    """Whether the stated hypothesis holds, in sentences computed from the table."""
    stated = interactions[
        (interactions["flatness"] == FLATNESS["drafter_entropy"]) & (interactions["outcome"] == COUNTED)
    ]
    parts = []
    for _, row in stated.iterrows():
        if not np.isfinite(row["low"]):
            parts.append(f"Under “{DRAFTERS[row['drafter']]}” the interaction is not determined.")
            continue
        judged = "as stated" if row["low"] > 0 else "against it" if row["high"] < 0 else "not told from none"
        parts.append(
            f"Under “{DRAFTERS[row['drafter']]}” a nat of target entropy is worth "
            f"{row['interaction']:+.3f} more α̂ per nat of drafter entropy ({LEVEL:.0%} CI "
            f"{row['low']:+.3f} to {row['high']:+.3f}, {row['n']} adapters of {row['domains']} domains): "
            f"{judged}."
        )
    return " ".join(parts) or "No drafter's entropy is on record, so the interaction cannot be tested."


def shift_table(points: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """By drafter: how many adapters raise or lower the target's entropy, how many of these raise α̂ (told from
    zero), and the rank correlation of Δα̂ with the shift (percentiles over domains).
    """
    rows = []
    for drafter in DRAFTERS:
        table = points[points["drafter"] == drafter].sort_values("adapter", ignore_index=True)
        if len(table) < 3:
            continue
        x, y = (table[name].to_numpy(dtype=float) for name in ("shift", "y"))
        low, high = interval_of(
            [spearman(y[d], x[d]) for d in domain_draws(table["domain"], DRAWS, seed)], LEVEL
        )
        up = (table["moved"] == "up").to_numpy()
        row = {"drafter": drafter, "n": len(table), "spearman": spearman(y, x), "low": low, "high": high}
        for name, side in (("raised", x > 0), ("lowered", x < 0)):
            row |= {name: int(side.sum()), f"{name}_up": int((side & up).sum())}
        rows.append(row)
    return pd.DataFrame(rows, columns=list(SHIFT_HEADERS)).astype({"low": float, "high": float})
