"""The label table: one row per adapter, every effect paired with the base arm on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from lora_spec.acceptance.counts import check_requests, k_mismatch, pooled_rates
from lora_spec.acceptance.effects import PairedEffect, check_base_floor, paired_alpha, paired_effect
from lora_spec.errors import EvidenceError

GENERAL = "general"
PRIMARY_DECODING = "t08"
PRIMARY_K = 4
OVERLAP_TEMPERATURE = 0.8
_USED = [
    "arm",
    "adapter",
    "prompt_set",
    "prompt_index",
    "decoding",
    "k",
    "steps_accepted",
    "drafted",
    "output_tokens",
    "accepted_emitted",
    "rejections",
]
"""Columns of ``requests`` that labels are made from; the others are not carried along."""
LABEL_COLUMNS = (
    "adapter",
    "domain",
    "family",
    "delta_alpha",
    "delta_alpha_se",
    "alpha_base",
    "alpha_adapted",
    "delta_alpha_greedy",
    "delta_alpha_greedy_se",
    "delta_alpha_general",
    "delta_alpha_general_se",
    "delta_overlap",
    "delta_overlap_se",
    "al_base",
    "al_adapted",
    "n_prompts",
)


def label_table(
    requests: pd.DataFrame,
    overlap: pd.DataFrame | None = None,
    *,
    families: Mapping[str, str] | None = None,
    base_floor: float | None = None,
    k: int | None = None,
) -> pd.DataFrame:
    """Labels of every adapter in a screen, at one depth.

    Args:
        requests: ``requests`` tables of all screen units, base and adapted arms, concatenated.
        overlap: ``overlap`` tables of all score units, concatenated; None leaves ``delta_overlap`` NaN.
        families: shift family by domain; domains it lacks get "".
        base_floor: smallest α̂ a base arm may have at T = 0.8.
        k: the depth; without it the only one that was measured, or of several that of the primary label.

    Returns:
        One row per adapter, sorted by name, with the columns of `LABEL_COLUMNS`. ``delta_alpha`` is the
        primary label: α̂(adapter) - α̂(base) at T = 0.8 on the adapter's own domain, ``al_*`` the emitted
        acceptance lengths there. Labels that were not measured are NaN.

    Raises:
        EvidenceError: when a base control arm is missing (code ``missing_base_control``) or under its floor,
            arms have different prompts or depths, an adapter has two own domains, or counts contradict each
            other.
    """
    check_requests(requests)
    requests = requests.loc[requests["k"] == (k or _primary_depth(requests)), _USED]
    adapted, base = (requests[requests["arm"] == arm] for arm in ("adapted", "base"))
    if adapted.empty:
        raise EvidenceError("no adapted arm among the records", code="no_adapters")
    rows = [
        _adapter_row(name, group, base, overlap, families or {}, base_floor)
        for name, group in adapted.groupby("adapter", sort=True)
    ]
    return pd.DataFrame(rows, columns=list(LABEL_COLUMNS))


def _primary_depth(requests: pd.DataFrame) -> int:
    depths = sorted(set(requests["k"].astype(int)))
    if len(depths) == 1:
        return depths[0]
    if PRIMARY_K not in depths:
        raise k_mismatch("labels", depths)
    return PRIMARY_K


def _adapter_row(
    name: str,
    group: pd.DataFrame,
    control: pd.DataFrame,
    overlap: pd.DataFrame | None,
    families: Mapping[str, str],
    base_floor: float | None,
) -> dict[str, object]:
    domains = sorted(set(group["prompt_set"]) - {GENERAL})
    if len(domains) != 1:
        raise EvidenceError(
            f"adapter has {len(domains)} own domains instead of one", where=name, code="own_domain"
        )
    domain = domains[0]
    primary = _effect(name, group, control, domain, PRIMARY_DECODING)
    if primary is None:
        raise EvidenceError(f"no {PRIMARY_DECODING} request on {domain}", where=name, code="no_requests")
    if base_floor is not None:
        check_base_floor(primary.base, base_floor, where=domain)
    own = _arm(group, domain, PRIMARY_DECODING)
    base = _arm(control, domain, PRIMARY_DECODING)
    rates = [pooled_rates(arm) for arm in (base[base["prompt_index"].isin(own["prompt_index"])], own)]
    row: dict[str, object] = {
        "adapter": name,
        "domain": domain,
        "family": families.get(domain, ""),
        "alpha_base": primary.base,
        "alpha_adapted": primary.adapted,
        "al_base": rates[0].al_emitted,
        "al_adapted": rates[1].al_emitted,
        "n_prompts": primary.n,
    }
    effects = {
        "delta_alpha": primary,
        "delta_alpha_greedy": _effect(name, group, control, domain, "greedy"),
        "delta_alpha_general": _effect(name, group, control, GENERAL, PRIMARY_DECODING),
        "delta_overlap": None if overlap is None else _overlap_effect(name, overlap, domain),
    }
    for column, effect in effects.items():
        row[column] = effect.delta if effect else np.nan
        row[f"{column}_se"] = effect.se if effect else np.nan
    return row


def _arm(table: pd.DataFrame, prompt_set: str, decoding: str) -> pd.DataFrame:
    return table[(table["prompt_set"] == prompt_set) & (table["decoding"] == decoding)]


def _effect(
    name: str, group: pd.DataFrame, control: pd.DataFrame, prompt_set: str, decoding: str
) -> PairedEffect | None:
    """Paired Δα̂ of one adapter on one prompt set, or None when the adapter has no such requests."""
    adapted = _arm(group, prompt_set, decoding)
    if adapted.empty:
        return None
    base = _arm(control, prompt_set, decoding)
    base = base[base["prompt_index"].isin(adapted["prompt_index"])]
    if base.empty:
        raise _no_control(name, f"{prompt_set}, {decoding}")
    return paired_alpha(base, adapted)


def _overlap_effect(name: str, overlap: pd.DataFrame, domain: str) -> PairedEffect | None:
    at = overlap[(overlap["prompt_set"] == domain) & np.isclose(overlap["temperature"], OVERLAP_TEMPERATURE)]
    adapted = at[(at["arm"] == "adapted") & (at["adapter"] == name)].set_index("prompt_index").sort_index()
    if adapted.empty:
        return None
    base = at[at["arm"] == "base"].set_index("prompt_index").sort_index()
    base = base[base.index.isin(adapted.index)]
    if base.empty:
        raise _no_control(name, f"overlap on {domain}")
    if not base.index.equals(adapted.index):
        raise EvidenceError(
            "base and adapted arms were scored on different prompts", where=name, code="unpaired"
        )
    args = []
    for table in (base, adapted):
        positions = table["positions"].to_numpy(dtype=np.float64)
        args += [table["overlap"].to_numpy(dtype=np.float64) * positions, positions]
    return paired_effect(*args)


def _no_control(name: str, what: str) -> EvidenceError:
    return EvidenceError(
        f"no base control arm for {what}",
        where=name,
        fix="measure the base on the same prompts",
        code="missing_base_control",
    )
