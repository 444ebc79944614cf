"""Made-up records of what evidence costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from lora_spec.measure.evidence_cost import TIMINGS, VALUES, load_evidence_cost
from lora_spec.pool import load_pool
from lora_spec.provenance import EvidenceClass, new_record, write_record
from lora_spec.smoke import draws

_PROMPTS = 24
# Judged drafts or scored positions a prompt, noise of one, and made-up bias of the difference.
_ESTIMATORS = {
    "counted": (36, 0.5, 0.0),
    "rescored": (36, 0.25, 0.0),
    "sampled": (36, 0.25, 0.0),
    "sampled_uniform": (47, 0.24, 0.004),
    "lockstep": (36, 0.25, 0.0),
    "text": (64, 0.1, -0.012),
}
_CPU_S = {"counted": 1.4, "plain": 0.7, "sampled": 1.0, "rescored": 1.0, "lockstep": 0.8, "text": 0.5}


def write_evidence_cost(results: Path) -> list[Path]:
    """Write one record an adapter under the smoke tier."""
    params = load_evidence_cost()
    written = []
    for adapter in params.adapters:
        domain = load_pool()[adapter].domain
        record = new_record(
            experiment=params.experiment,
            tier=draws.TIER,
            phase="phase2",
            evidence_class=EvidenceClass.SMOKE,
            config={"adapter": adapter},
            seed=0,
            revisions={},
            covers={
                "adapters": [draws.content_hash(adapter)],
                "domains": [domain],
                "prompts": [f"{domain}/{i}" for i in range(_PROMPTS)],
            },
            results={"prompts": _PROMPTS, "controls": dict.fromkeys(("base", "adapted"), _control(domain))},
        )
        path = results / draws.TIER / "phase2" / params.output / f"{adapter}.json"
        write_record(path, record, {VALUES: _values(adapter, domain), TIMINGS: _timings(adapter)})
        written.append(path)
    return written


def _control(domain: str) -> dict[str, float]:
    alpha = draws.base_alpha(domain)
    return {"alpha": alpha, "floor": 0.25, "overlap_same_tokens": alpha + 0.01, "tolerance": 0.05}


def _values(adapter: str, domain: str) -> pd.DataFrame:
    frames = []
    for name, (trials, noise, bias) in _ESTIMATORS.items():
        for arm in ("base", "adapted"):
            rng = draws.rng("evidence cost", adapter, name, arm)
            level = draws.base_alpha(domain)
            if arm == "adapted":
                level += draws.effect(adapter, domain) + bias
            share = np.clip(level + rng.normal(0.0, noise / np.sqrt(trials), _PROMPTS), 0.0, 1.0)
            frames.append(
                pd.DataFrame(
                    {
                        "estimator": name,
                        "arm": arm,
                        "prompt_index": np.arange(_PROMPTS, dtype=np.int32),
                        "numerator": share * trials,
                        "denominator": float(trials),
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def _timings(adapter: str) -> pd.DataFrame:
    rng = draws.rng("evidence cost", adapter, "timings")
    rows = [
        {"part": part, "arm": arm, "cpu_s": _PROMPTS * seconds * float(rng.uniform(0.9, 1.1))}
        for part, seconds in _CPU_S.items()
        for arm in (("base", "adapted", "") if part == "text" else ("base", "adapted"))
    ]
    once = [
        {"part": part, "arm": arm, "cpu_s": 20.0}
        for part, arm in (
            *(("counted start", "base"), ("counted start", "adapted")),
            *(("plain start", "base"), ("plain start", "adapted")),
            ("load", ""),
        )
    ]
    served = pd.DataFrame(rows).assign(prompts=np.int32(_PROMPTS))
    return pd.concat([served, pd.DataFrame(once).assign(prompts=np.int32(0))], ignore_index=True)
