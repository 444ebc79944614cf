"""Made-up confirmation: the real choice from made-up predictions, its records, and a healing."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lora_spec.measure.design import load_design
from lora_spec.phases import healing, selection
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.pool import without_update
from lora_spec.predictor.run import FIT_RECORD, OUT_OF_FOLD
from lora_spec.provenance import EvidenceClass, load_table, new_record, write_record
from lora_spec.smoke import draws
from lora_spec.smoke.acceptance import write_screen

_OVERLAP = {"untrained": 0.2, healing.HEALED: 0.5, "layer-drop": 0.55}
"""Made-up overlap of each drafter that a healing compares."""


def write_confirm(results: Path) -> list[Path]:
    """Choose from the predictions in ``results``, and write records of that choice under other drafters."""
    folder, rule = results / draws.TIER, selection.load_rule()
    smoke = NotebookParameters(tier=draws.TIER, evidence_class=EvidenceClass.SMOKE.value)
    predictions = load_table(folder / "phase3" / FIT_RECORD, OUT_OF_FOLD)
    chosen = selection.choose(selection.rank(predictions, rule), rule, without_update())
    path = folder / "phase2" / selection.RECORD
    selection.write_selection(path, chosen, rule, {}, smoke)
    written = [path, _write_healing(folder / "phase2", sorted(set(predictions["domain"])))]
    for name in rule.designs:
        design = load_design(name).model_copy(update={"adapters": chosen["adapter"].tolist()})
        written += write_screen(folder / design.phase, design, scores=False)
    return written


def _write_healing(folder: Path, domains: list[str]) -> Path:
    rows = [
        {
            "drafter": drafter,
            "domain": domain,
            "windows": 8,
            "overlap": level + draws.rng("healing", drafter, domain).normal(0.0, 0.03),
            "top1": level + 0.05,
            "entropy_target": 2.5,
            "entropy_drafter": draws.drafter_entropy(domain) + 0.2,
        }
        for drafter, level in _OVERLAP.items()
        for domain in domains
    ]
    record = new_record(
        experiment="healed_drafter",
        tier=draws.TIER,
        phase="phase2",
        evidence_class=EvidenceClass.SMOKE,
        config={},
        seed=0,
        revisions={},
        covers={"domains": domains},
    )
    path = folder / healing.FOLDER / "made-up.json"
    write_record(path, record, {healing.TABLE: pd.DataFrame(rows)})
    return path
