"""Phase 2, confirmation: does what an adapter does to acceptance carry over to other drafters?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lora_spec.acceptance import ratio_units
from lora_spec.errors import EvidenceError
from lora_spec.paths import results_dir
from lora_spec.phases import evidence, screen
from lora_spec.phases.evidence import PRIMARY, PhaseEvidence
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.phases.selection import record_path
from lora_spec.provenance import Record, load_record

REFERENCE = "layer_drop"
FOLDERS = {REFERENCE: "screen", "healed": "confirm_healed", "dflash": "confirm_dflash"}
DRAFTERS = {
    REFERENCE: "layer-drop, 26 layers",
    "healed": "healed, 22 layers",
    "dflash": "DFlash, 2 layers",
}
"""Key in the tables to what readers see; that of the screen, which the others are compared with, first."""
ABSENT = "No adapter has been measured under another drafter yet, so there is nothing to confirm here."
HEADERS = {
    "adapter": "adapter",
    "family": "family",
    "role": "chosen as",
    "drafter": "drafter",
    "predicted": "predicted",
    "x": "Δα̂ screen",
    "x_se": "SE screen",
    "alpha_base": "α̂ base",
    "y": "Δα̂",
    "y_se": "SE",
    "moved": "moved",
}
DRAWS = 1000


@dataclass(frozen=True)
class Confirmed:
    """Evidence of the chosen adapters under every drafter that was measured.

    Attributes:
        selection: the chosen adapters, from ``phases.selection``.
        evidence: by drafter, the screen's first.
        labels: by drafter, from ``phases.screen.screened``; the screen's holds its other adapters too.
    """

    selection: pd.DataFrame
    evidence: dict[str, PhaseEvidence]
    labels: dict[str, pd.DataFrame]

    @property
    def others(self) -> list[str]:
        """Drafters that are compared with the screen's."""
        return [drafter for drafter in self.evidence if drafter != REFERENCE]


def load_confirmed(parameters: NotebookParameters, selection: pd.DataFrame | None) -> Confirmed | None:
    """The evidence of the confirmation, or None where no adapter has been measured under another drafter.

    Raises:
        EvidenceError: damaged or of another class; measured before a choice was recorded; an adapter that was
            not chosen, or that is another one than in the screen.
    """
    folder = results_dir(parameters.tier, "phase2")
    found: dict[str, PhaseEvidence] = {}
    for drafter, name in FOLDERS.items():
        if drafter != REFERENCE and any((folder / name).glob("*.requests.parquet")):
            loaded = evidence.load_phase(parameters, "phase2", name)
            if evidence.measured_adapters(loaded):
                found[drafter] = loaded
    if not found:
        return None
    if selection is None:
        raise EvidenceError("adapters were measured before any were chosen", code="no_selection")
    reference = evidence.load_phase(parameters, "phase2", FOLDERS[REFERENCE], overlap="overlap")
    fixed = load_record(record_path(parameters.tier), allow={parameters.evidence_class}).created_utc
    for drafter, loaded in found.items():
        _check(drafter, loaded, reference, set(selection["adapter"]), fixed)
    every = {REFERENCE: reference, **found}
    labels = {drafter: screen.screened(loaded).labels for drafter, loaded in every.items()}
    return Confirmed(selection, every, labels)


def _check(
    drafter: str, loaded: PhaseEvidence, reference: PhaseEvidence, chosen: set[str], fixed: str
) -> None:
    for adapter in sorted(evidence.measured_adapters(loaded)):
        if adapter not in chosen:
            raise EvidenceError(f"adapter {adapter} was not chosen", where=drafter, code="undeclared")
        mine = loaded.records[f"{FOLDERS[drafter]}/{adapter}"]
        screened = reference.records.get(f"{FOLDERS[REFERENCE]}/{adapter}")
        if screened is None or not _same_adapter(mine, screened):
            raise EvidenceError(
                "the adapter is not the one that was screened",
                where=f"{drafter}, {adapter}",
                code="other_adapter",
            )
        if mine.created_utc < fixed:
            raise EvidenceError(
                "measured before the choice was recorded", where=f"{drafter}, {adapter}", code="no_selection"
            )


def _same_adapter(one: Record, other: Record) -> bool:
    """By recipe; by content too where both were made on machines that train the same bytes."""
    recipes = [record.revisions.get("adapter", {}).get("recipe_sha256") for record in (one, other)]
    if recipes[0] != recipes[1]:
        return False
    comparable = one.runtime.get("cpu_flags") == other.runtime.get("cpu_flags")
    return one.covers.adapters == other.covers.adapters or not comparable


def evidence_table(confirmed: Confirmed) -> pd.DataFrame:
    """What there is under the other drafters, one row each."""
    tables = [evidence.summary_table(confirmed.evidence[drafter]) for drafter in confirmed.others]
    return pd.concat(tables, ignore_index=True)


def coverage_sentence(confirmed: Confirmed | None) -> str:
    """How many of the chosen adapters were measured under each drafter, in sentences."""
    if confirmed is None:
        return ABSENT
    parts = []
    for drafter in DRAFTERS:
        if drafter == REFERENCE:
            continue
        done = set(confirmed.labels[drafter]["adapter"]) if drafter in confirmed.labels else set()
        missing = sorted(set(confirmed.selection["adapter"]) - done)
        tail = f" Missing: {', '.join(missing)}." if missing and done else ""
        parts.append(
            f"{len(done)} of the {len(confirmed.selection)} chosen adapters were measured under the drafter "
            f"“{DRAFTERS[drafter]}”, all after the choice.{tail}"
        )
    return " ".join(parts)


def controls_table(confirmed: Confirmed) -> pd.DataFrame:
    """The controls of each other drafter's run, as ``phases.evidence.controls_table`` gives them."""
    return pd.concat(
        [
            evidence.controls_table(confirmed.evidence[drafter]).assign(drafter=drafter)
            for drafter in confirmed.others
        ],
        ignore_index=True,
    )[["drafter", *evidence.CONTROL_COLUMNS]]


def pair_table(confirmed: Confirmed) -> pd.DataFrame:
    """The chosen adapters under the screen's drafter (x) and another (y), one row an adapter and drafter.

    Columns: adapter, domain, family, role, predicted, drafter (key), x, y (Δα̂), x_se, y_se, xy (covariance of
    their errors, from the prompts that both answered), the same of the relative change Δα̂/α̂ base with the
    prefix ``relative_``, alpha_base_x and alpha_base (of the other drafter), moved_x and moved.
    """
    reference = confirmed.labels[REFERENCE].set_index("adapter")
    rows = []
    for drafter in confirmed.others:
        labels = confirmed.labels[drafter].set_index("adapter")
        both = [name for name in confirmed.selection["adapter"] if name in labels.index]
        for name in both:
            here, there = labels.loc[name], reference.loc[name]
            units = [
                prompt_units(confirmed.evidence[which], name, str(here["domain"]))
                for which in (REFERENCE, drafter)
            ]
            row = {"adapter": name, "drafter": drafter, "x": there["delta_alpha"], "y": here["delta_alpha"]}
            row |= {"alpha_base_x": there["alpha_base"], "alpha_base": here["alpha_base"]}
            row |= {"moved_x": there["moved"], "moved": here["moved"]}
            row |= _errors(units, "absolute", "") | _errors(units, "relative", "relative_")
            for side, label in (("x", there), ("y", here)):
                row[f"relative_{side}"] = label["delta_alpha"] / label["alpha_base"]
            rows.append(row)
    chosen = confirmed.selection[["adapter", "domain", "family", "role", "predicted"]]
    return (
        chosen.merge(pd.DataFrame(rows), on="adapter")
        .sort_values(
            ["drafter", "adapter"], key=lambda c: c.map(list(DRAFTERS).index) if c.name == "drafter" else c
        )
        .reset_index(drop=True)
    )


def measured_table(confirmed: Confirmed) -> pd.DataFrame:
    """Δα̂ of the chosen adapters under every drafter, the screen's too; one row an adapter and drafter.

    Columns: adapter, domain, family, role, predicted, drafter (key), y, y_se.
    """
    names = {"delta_alpha": "y", "delta_alpha_se": "y_se"}
    parts = [
        labels[["adapter", *names]].rename(columns=names).assign(drafter=drafter)
        for drafter, labels in confirmed.labels.items()
    ]
    chosen = confirmed.selection[["adapter", "domain", "family", "role", "predicted"]]
    return chosen.merge(pd.concat(parts), on="adapter")


def prompt_units(loaded: PhaseEvidence, adapter: str, domain: str) -> pd.DataFrame:
    """Linearised contribution of each own-domain prompt to Δα̂ and to Δα̂/α̂ base, at T = 0.8.

    Returns:
        Index prompt_index; columns absolute and relative, each with mean zero; the standard deviation over
        √n is the standard error of the effect.
    """
    rows = loaded.requests
    rows = rows[
        (rows["decoding"] == PRIMARY)
        & (rows["prompt_set"] == domain)
        & (rows["k"] == evidence.primary_depth(loaded))
    ]
    arms = []
    for arm in (rows[rows["adapter"] == adapter], rows[rows["arm"] == "base"]):
        counts = arm.groupby("prompt_index")[["accepted_emitted", "rejections"]].sum().astype(float)
        arms.append(counts)
    shared = arms[0].index
    accepted, tried = zip(
        *(
            (c["accepted_emitted"].to_numpy(), c.sum(axis=1).to_numpy())
            for c in (a.loc[shared] for a in arms)
        ),
        strict=True,
    )
    adapted, base = (ratio_units(*both) for both in zip(accepted, tried, strict=True))
    rate = [a.sum() / t.sum() for a, t in zip(accepted, tried, strict=True)]
    relative = (adapted - rate[0] / rate[1] * base) / rate[1]
    return pd.DataFrame({"absolute": adapted - base, "relative": relative}, index=shared)


def _errors(units: list[pd.DataFrame], column: str, prefix: str) -> dict[str, float]:
    """Standard errors of both sides and their covariance, from per-prompt contributions."""
    x, y = (table[column] for table in units)
    found = {f"{prefix}x_se": x.std() / np.sqrt(len(x)), f"{prefix}y_se": y.std() / np.sqrt(len(y))}
    shared = x.index.intersection(y.index)
    common = 0.0
    if len(shared) > 2:
        common = float(np.cov(x.loc[shared], y.loc[shared])[0, 1]) * len(shared) / (len(x) * len(y))
    return found | {f"{prefix}xy": common}
