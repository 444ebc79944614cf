"""Synthetic acceptance and overlap of one unit of a screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lora_spec.acceptance import PRIMARY_DECODING
from lora_spec.files import canonical_sha256
from lora_spec.measure.design import GENERAL, Design, MeasureUnit, UnitKind, base_unit_name, design_units
from lora_spec.measure.engine import Completion
from lora_spec.measure.rows import request_rows
from lora_spec.pool import load_pool
from lora_spec.provenance import Covers, EvidenceClass, new_record, write_record
from lora_spec.smoke import draws

_PROMPTS = 24
"""Prompts a set: fewer than a real screen, enough for every table."""
_OUTPUT_TOKENS = 48


def _indices(design: Design, prompt_set: str, decoding: str) -> range:
    return design.indices(prompt_set, decoding)[:_PROMPTS]


def _completion(rng: np.random.Generator, alpha: float, k: int, distinct: int) -> Completion:
    steps: list[int] = []
    emitted = 1
    while emitted < _OUTPUT_TOKENS:
        kept = rng.random(k) < alpha
        accepted = k if kept.all() else int(np.argmin(kept))
        steps.append(accepted)
        emitted += accepted + 1
    tokens = rng.integers(0, distinct, _OUTPUT_TOKENS).tolist()
    return Completion(tokens, "length", steps, [k] * len(steps), [], 0.0)


def write_screen(folder: Path, design: Design, *, scores: bool = True) -> list[Path]:
    """Write the records of every unit of ``design``, its scores beside them under ``overlap/`` if wanted."""
    domains = {name: recipe.domain for name, recipe in load_pool().items()}
    blank = new_record(
        experiment=design.experiment,
        tier=draws.TIER,
        phase=design.phase,
        evidence_class=EvidenceClass.SMOKE,
        config={},
        seed=design.seed,
        revisions={},
    )
    written = []
    for unit in design_units(design, domains):
        record = blank.model_copy(update=_about(design, unit))
        results, tables = acceptance(design, unit)
        written.append(folder / design.output / f"{unit.name}.json")
        write_record(written[-1], record.model_copy(update={"results": results}), tables)
        if scores and design.has_overlap and unit.kind is not UnitKind.CONTROL and unit.domain != GENERAL:
            written.append(folder / "overlap" / f"{unit.name}.json")
            write_record(written[-1], record, {"overlap": overlap(design, unit)})
    return written


def _about(design: Design, unit: MeasureUnit) -> dict[str, Any]:
    """What of a record says which unit it is of."""
    sets = () if unit.kind is UnitKind.CONTROL else unit.prompt_sets
    config = {"design": design.config(), "unit": unit.name}
    return {
        "config": config,
        "config_sha256": canonical_sha256(config),
        "covers": Covers(
            adapters=[draws.content_hash(unit.adapter)] if unit.adapter else [],
            domains=[unit.domain] if unit.domain and unit.domain != GENERAL else [],
            prompts=[f"{name}/{i}" for name in sets for i in _indices(design, name, PRIMARY_DECODING)],
        ),
    }


def acceptance(design: Design, unit: MeasureUnit) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Results and tables of a unit's record, as the collector gives them."""
    if unit.kind is UnitKind.CONTROL:
        return _control(design, unit), {}
    frames = [
        _requests(design, unit, prompt_set, decoding, k)
        for k in design.all_depths
        for prompt_set in unit.prompt_sets
        for decoding in design.decodings
        if _indices(design, prompt_set, decoding)
    ]
    requests = pd.concat(frames, ignore_index=True)
    greedy = {name: len(_indices(design, name, design.greedy)) for name in unit.prompt_sets}
    results: dict[str, Any] = {
        "lossless": {
            design.at_depth(name, k): _identical(design, count)
            for k in design.all_depths
            for name, count in greedy.items()
            if count
        }
    }
    if unit.kind is UnitKind.BASE:
        results["base_controls"] = _base_controls(design, requests)
    else:
        changed = unit.adapter not in draws.zero_adapters()
        results |= {
            "frobenius": draws.frobenius(str(unit.adapter)),
            "first_token_changed": [changed] * greedy[unit.prompt_sets[0]],
        }
    return results, {"requests": requests}


def _requests(design: Design, unit: MeasureUnit, prompt_set: str, decoding: str, k: int) -> pd.DataFrame:
    """Requests of one arm. An adapter without an update answers greedily as the base does."""
    greedy = decoding == design.greedy
    source = base_unit_name(prompt_set) if greedy and unit.adapter in draws.zero_adapters() else unit.name
    rng = draws.rng(design.seed, source, prompt_set, decoding, k)
    ease = draws.rng("prompts", prompt_set).normal(0.0, 0.06, _PROMPTS)
    level = draws.base_alpha(prompt_set) + draws.effect(unit.adapter, prompt_set) + 0.08 * greedy
    indices = _indices(design, prompt_set, decoding)
    completions = [
        _completion(
            rng,
            alpha=float(np.clip(level + ease[i], 0.05, 0.95)),
            k=k,
            distinct=max(4, int((10 if greedy else 60) * (1.0 - 8.0 * ease[i]))),
        )
        for i in range(len(indices))
    ]
    return request_rows(
        completions,
        arm="adapted" if unit.adapter else "base",
        adapter=unit.adapter or "",
        prompt_set=prompt_set,
        prompt_indices=indices,
        decoding=decoding,
        k=k,
    )


def _identical(design: Design, requests: int) -> dict[str, Any]:
    return {
        "requests": requests,
        "identical": requests,
        "max_gap_nats": 0.0,
        "near_tie_nats": design.controls.near_tie_nats,
        "divergences": [],
        "lossless": True,
    }


def _base_controls(design: Design, requests: pd.DataFrame) -> dict[str, Any]:
    limits = design.controls
    controls = {}
    for (decoding, k), group in requests.groupby(["decoding", "k"]):
        accepted, rejected = (int(group[name].sum()) for name in ("accepted_emitted", "rejections"))
        alpha = accepted / (accepted + rejected)
        check = {"alpha": alpha, "floor": limits.base_alpha_floor}
        if decoding != design.greedy and design.has_overlap:
            check |= {"overlap_same_tokens": alpha + 0.01, "tolerance": limits.overlap_tolerance}
        controls[design.at_depth(decoding, k)] = check
    return controls


def _control(design: Design, unit: MeasureUnit) -> dict[str, Any]:
    limits = design.controls
    if "self-draft" in unit.name:
        modes = {f"{name}/probabilistic": {"alpha": 0.99, "expected": 1.0} for name in design.decodings}
        modes["t08/greedy"] = {"alpha": 0.63, "expected": 0.64}
        return {"self_draft": modes, "tolerance": limits.self_draft_tolerance}
    checked = ["base", *limits.fp32_adapters]
    return {"fp32_lossless": {name: _identical(design, limits.fp32_prompts) for name in checked}}


def overlap(design: Design, unit: MeasureUnit) -> pd.DataFrame:
    """Teacher-forced scores of a unit's own-domain windows."""
    prompt_set = unit.prompt_sets[0]
    indices = _indices(design, prompt_set, PRIMARY_DECODING)
    rng, n = draws.rng("overlap", unit.name), len(indices)
    noise = draws.rng("windows", prompt_set).normal(0.0, 0.05, n) + rng.normal(0.0, 0.02, n)
    entropies, texts = draws.rng("entropies", unit.name), draws.rng("texts", prompt_set)
    shift = draws.effect(unit.adapter, prompt_set)
    adapted = unit.adapter is not None
    frame = pd.DataFrame(
        {
            "arm": "adapted" if adapted else "base",
            "adapter": unit.adapter or "",
            "prompt_set": prompt_set,
            "prompt_index": np.asarray(indices, dtype=np.int32),
            "temperature": design.overlap_temperature,
            "overlap": np.clip(draws.base_alpha(prompt_set) + shift + noise, 0.0, 1.0),
            "top1": np.clip(draws.base_alpha(prompt_set) + 0.08 + shift + noise, 0.0, 1.0),
            "entropy_target": 2.5 + draws.entropy_shift(unit.adapter) + entropies.normal(0.0, 0.2, n),
            "entropy_drafter": draws.drafter_entropy(prompt_set) + texts.normal(0.0, 0.4, n),
            "positions": np.int32(64),
        }
    )
    moved = rng.uniform(0.5, 1.5, n) * (draws.frobenius(unit.adapter) / 20 if unit.adapter else np.nan)
    for name, size in (("kl", 0.4), ("js", 0.1), ("tv", 0.8)):
        frame[name] = size * moved
    return frame
