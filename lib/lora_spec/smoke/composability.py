"""Made-up verdicts of phase 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_spec.files import canonical_sha256
from lora_spec.provenance import Covers, EvidenceClass, new_record, write_record
from lora_spec.smoke.draws import TIER, rng


def write_composability(results: Path) -> list[Path]:
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
        status = str(rng("phase0", unit.column, unit.name).choice(statuses, p=[0.6, 0.1, 0.1, 0.1, 0.1]))
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
