"""The smoke tier: synthetic records with the schema of real ones, so that notebooks can be tried in seconds.

Every number is made up from a seed. Records are of class and tier ``smoke``; no loader takes them for
evidence.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lora_spec.errors import LoraSpecError
from lora_spec.features import FEATURES
from lora_spec.files import canonical_sha256
from lora_spec.measure.design import Design, MeasureUnit, UnitKind, design_units, load_design
from lora_spec.measure.engine import Completion
from lora_spec.measure.rows import request_rows
from lora_spec.paths import repo_root
from lora_spec.pool import load_pool
from lora_spec.provenance import Covers, EvidenceClass, new_record, write_record

TIER = "smoke"
DESIGNS = ("phase1_measurement.yaml", "phase2_screen.yaml")
_PROMPTS = 24
"""Prompts a set: fewer than a real screen, enough for every table."""
_OUTPUT_TOKENS = 48


def write_smoke(results: Path) -> list[Path]:
    """Write the synthetic records of every design under ``results/smoke/``.

    Args:
        results: root that stands in for the checkout's ``results/``.

    Returns:
        The records written.

    Raises:
        LoraSpecError: ``results`` is the checkout's own evidence.
    """
    own = repo_root() / "results"
    if results.resolve() == own or own in results.resolve().parents:
        raise LoraSpecError("synthetic records may not be written among the evidence", where=results)
    written = []
    for path in DESIGNS:
        design = load_design(path)
        folder = results / TIER / design.phase
        domains = {name: recipe.domain for name, recipe in load_pool().items()}
        for unit in design_units(design, domains):
            outcome, tables = _acceptance(design, unit)
            written.append(
                _write(folder / design.output / f"{unit.name}.json", design, unit, outcome, tables)
            )
            if unit.kind is not UnitKind.CONTROL and unit.domain in domains.values():
                scores = {"overlap": _overlap(design, unit)}
                written.append(_write(folder / "overlap" / f"{unit.name}.json", design, unit, {}, scores))
    _write_predictor(results)
    return written + _write_composability(results)


def _write(
    path: Path, design: Design, unit: MeasureUnit, results: dict[str, Any], tables: dict[str, pd.DataFrame]
) -> Path:
    sets = () if unit.kind is UnitKind.CONTROL else unit.prompt_sets
    record = new_record(
        experiment=design.experiment,
        tier=TIER,
        phase=design.phase,
        evidence_class=EvidenceClass.SMOKE,
        config={"design": design.config(), "unit": unit.name},
        seed=design.seed,
        revisions={},
        covers={
            "adapters": [_content_hash(unit.adapter)] if unit.adapter else [],
            "domains": [unit.domain] if unit.domain and unit.domain != "general" else [],
            "prompts": [f"{name}/{i}" for name in sets for i in _indices(design, name)],
        },
        results=results,
    )
    write_record(path, record, tables)
    return path


def _write_composability(results: Path) -> list[Path]:
    """Made-up verdicts of phase 0, drawn from a seed; planted faults are all seen."""
    from lora_spec.measure.composability.cells import load_phase0
    from lora_spec.measure.composability.units import Kind, Unit, all_units

    params = load_phase0()
    blank = new_record(
        experiment=params.experiment,
        tier=TIER,
        phase=params.phase,
        evidence_class=EvidenceClass.SMOKE,
        config={},
        seed=params.seed,
        revisions={},
    )

    def outcome(unit: Unit) -> dict[str, Any]:
        if unit.kind is Kind.REFERENCE:
            return {"sampled_first": [600, 600], "distribution": {"tv": 0.05, "limit": 0.1, "at": "token 1"}}
        statuses = ["works", "wrong", "error", "unsupported", "not exercised"]
        status = str(_rng("phase0", unit.column, unit.name).choice(statuses, p=[0.6, 0.1, 0.1, 0.1, 0.1]))
        if unit.kind is Kind.CONTROL:
            status = "wrong"
        how = [] if status == "works" else [f"made up: {status}"]
        return {"status": status, "how": how, "silent": True if status == "wrong" else None}

    written = []
    for unit in all_units(params):
        config = unit.config(params)
        record = blank.model_copy(
            update={
                "config": config,
                "config_sha256": canonical_sha256(config),
                "covers": Covers(cells=[f"{unit.column}/{unit.name}"] if unit.kind is Kind.CELL else []),
                "results": outcome(unit) | {"seconds": 1.0, "warnings": []},
            }
        )
        written.append(results / TIER / params.phase / unit.folder / f"{unit.name}.json")
        write_record(written[-1], record)
    return written


def _content_hash(adapter: str) -> str:
    return hashlib.sha256(adapter.encode()).hexdigest()


def _write_predictor(results: Path) -> None:
    """Made-up features, and the predictor that the real fit makes of them and the made-up labels."""
    from lora_spec.predictor.run import plan_fit, run_fit
    from lora_spec.predictor.tables import write_features

    design, folder = load_design(DESIGNS[-1]), results / TIER
    rows = []
    for name in sorted(design.adapters):
        size = 1.0 + 20.0 * abs(_effect(name, "own"))
        values = size * _rng("features", name).uniform(0.5, 1.5, len(FEATURES))
        rows.append(
            {"adapter": name, "content_hash": _content_hash(name)}
            | dict(zip(FEATURES, values.tolist(), strict=True))
        )
    write_features(
        folder / "phase3",
        pd.DataFrame(rows),
        tier=TIER,
        base_key=design.target,
        evidence_class=EvidenceClass.SMOKE,
        seed=design.seed,
    )
    run_fit(plan_fit(folder / "phase2", output=folder / "phase3", evidence_class=EvidenceClass.SMOKE))


def _indices(design: Design, prompt_set: str) -> range:
    chosen = design.range_of(prompt_set)
    return range(chosen.start, chosen.start + min(chosen.count, _PROMPTS))


def _rng(*key: object) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big"))


def _base_alpha(prompt_set: str) -> float:
    return float(_rng("base", prompt_set).uniform(0.45, 0.6))


def _effect(adapter: str | None, prompt_set: str) -> float:
    """Made-up change of α: mostly a loss on the own domain, a third of it elsewhere, sometimes a gain."""
    if adapter is None:
        return 0.0
    own = float(_rng("effect", adapter).choice([0.02, -0.01, -0.06, -0.12, -0.18]))
    return own / 3 if prompt_set == "general" else own


def _completion(rng: np.random.Generator, alpha: float, k: int) -> Completion:
    steps: list[int] = []
    emitted = 1
    while emitted < _OUTPUT_TOKENS:
        draws = rng.random(k) < alpha
        accepted = k if draws.all() else int(np.argmin(draws))
        steps.append(accepted)
        emitted += accepted + 1
    tokens = rng.integers(0, 1000, _OUTPUT_TOKENS).tolist()
    return Completion(tokens, "length", steps, [k] * len(steps), [], 0.0)


def _acceptance(design: Design, unit: MeasureUnit) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    if unit.kind is UnitKind.CONTROL:
        return _control(design, unit), {}
    frames = []
    for prompt_set in unit.prompt_sets:
        ease = _rng("prompts", prompt_set).normal(0.0, 0.06, _PROMPTS)
        for decoding in design.decodings:
            rng = _rng(design.seed, unit.name, prompt_set, decoding)
            level = (
                _base_alpha(prompt_set) + _effect(unit.adapter, prompt_set) + 0.08 * (decoding == "greedy")
            )
            indices = _indices(design, prompt_set)
            completions = [
                _completion(rng, float(np.clip(level + ease[i], 0.05, 0.95)), design.num_speculative_tokens)
                for i in range(len(indices))
            ]
            frames.append(
                request_rows(
                    completions,
                    arm="adapted" if unit.adapter else "base",
                    adapter=unit.adapter or "",
                    prompt_set=prompt_set,
                    prompt_indices=indices,
                    decoding=decoding,
                    k=design.num_speculative_tokens,
                )
            )
    requests = pd.concat(frames, ignore_index=True)
    checks = {name: _identical(design, len(_indices(design, name))) for name in unit.prompt_sets}
    results: dict[str, Any] = {"lossless": checks}
    if unit.kind is UnitKind.BASE:
        results["base_controls"] = _base_controls(design, requests)
    else:
        results |= {
            "frobenius": 1.0,
            "first_token_changed": [True] * len(_indices(design, unit.prompt_sets[0])),
        }
    return results, {"requests": requests}


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
    for decoding, group in requests.groupby("decoding"):
        accepted, rejected = (int(group[name].sum()) for name in ("accepted_emitted", "rejections"))
        alpha = accepted / (accepted + rejected)
        controls[decoding] = {"alpha": alpha, "floor": limits.base_alpha_floor}
        if design.decodings[decoding].temperature > 0:
            controls[decoding] |= {"overlap_same_tokens": alpha + 0.01, "tolerance": limits.overlap_tolerance}
    return controls


def _control(design: Design, unit: MeasureUnit) -> dict[str, Any]:
    limits = design.controls
    if "self-draft" in unit.name:
        modes = {f"{name}/probabilistic": {"alpha": 0.99, "expected": 1.0} for name in design.decodings}
        modes["t08/greedy"] = {"alpha": 0.63, "expected": 0.64}
        return {"self_draft": modes, "tolerance": limits.self_draft_tolerance}
    checked = ["base", *limits.fp32_adapters]
    return {"fp32_lossless": {name: _identical(design, limits.fp32_prompts) for name in checked}}


def _overlap(design: Design, unit: MeasureUnit) -> pd.DataFrame:
    prompt_set = unit.prompt_sets[0]
    indices = _indices(design, prompt_set)
    rng, n = _rng("overlap", unit.name), len(indices)
    noise = _rng("windows", prompt_set).normal(0.0, 0.05, n) + rng.normal(0.0, 0.02, n)
    shift = _effect(unit.adapter, prompt_set)
    adapted = unit.adapter is not None
    frame = pd.DataFrame(
        {
            "arm": "adapted" if adapted else "base",
            "adapter": unit.adapter or "",
            "prompt_set": prompt_set,
            "prompt_index": np.asarray(indices, dtype=np.int32),
            "temperature": design.overlap_temperature,
            "overlap": np.clip(_base_alpha(prompt_set) + shift + noise, 0.0, 1.0),
            "top1": np.clip(_base_alpha(prompt_set) + 0.08 + shift + noise, 0.0, 1.0),
            "entropy_target": 2.5,
            "entropy_drafter": 2.6,
            "positions": np.int32(64),
        }
    )
    for name, size in (("kl", 0.4), ("js", 0.1), ("tv", 0.8)):
        frame[name] = np.full(n, abs(shift) * size) if adapted else np.nan
    return frame


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m lora_spec.smoke RESULTS``: write the synthetic records under RESULTS."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="directory that stands in for results/")
    args = parser.parse_args(argv)
    try:
        written = write_smoke(args.results)
    except LoraSpecError as error:
        print(f"lora-spec: error: {error}", file=sys.stderr)
        return 2
    print(f"{len(written)} synthetic records, class smoke: no evidence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
