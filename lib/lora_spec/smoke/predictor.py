"""Made-up features, and the predictor that the real fit makes of them and the made-up labels."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lora_spec.features import FEATURES
from lora_spec.measure.design import Design
from lora_spec.provenance import EvidenceClass
from lora_spec.smoke.draws import TIER, content_hash, frobenius, rng


def write_predictor(results: Path, design: Design) -> None:
    """Write features of every adapter of ``design``, and fit."""
    from lora_spec.predictor.run import plan_fit, run_fit
    from lora_spec.predictor.tables import write_features

    folder = results / TIER
    rows = []
    for name in sorted(design.adapters):
        values = frobenius(name) * rng("features", name).uniform(0.5, 1.5, len(FEATURES))
        rows.append(
            {"adapter": name, "content_hash": content_hash(name)}
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
