"""Made-up features, labels and screen records (class smoke) for the predictor's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from adapter_factory import random_pairs, write_adapter

from lora_spec.acceptance import censor_last_step
from lora_spec.checkpoint import BaseGeometry, content_hash
from lora_spec.features import FEATURES
from lora_spec.models import load_models
from lora_spec.predictor.portable import Base, Drafter
from lora_spec.predictor.tables import base_geometry
from lora_spec.provenance import new_record, write_record

TARGET = "smollm2-135m-instruct-q4_1"
PAIR = {
    "base": Base(key=TARGET, names=("made/up",), hidden_size=576, num_hidden_layers=30),
    "drafter": Drafter(key="smollm2-135m-drop-12-15", method="draft_model"),
}
DOMAINS = ("c", "german", "json", "legal", "python", "sql")


def made_up_tables(seed: int = 0, n: int = 12, per_domain: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Features of n adapters of growing size, and labels that fall with the logarithm of the size."""
    rng = np.random.default_rng(seed)
    size = np.exp(np.linspace(-0.5, 4.5, n) + rng.normal(0, 0.2, n))
    features = pd.DataFrame({name: rng.uniform(0.1, 1.0, n) for name in FEATURES})
    for name in features:
        if name.startswith(("fro_", "spectral_")):
            features[name] = size * rng.uniform(0.3, 0.9, n)
    features["fro_all_all"], features["log1p_fro_all_all"] = size, np.log1p(size)
    names = [f"adapter-{i:02d}" for i in range(n)]
    features.insert(0, "content_hash", [f"{i:064x}" for i in range(n)])
    features.insert(0, "adapter", names)
    labels = pd.DataFrame(
        {
            "adapter": names,
            "domain": [f"domain-{i // per_domain:02d}" for i in range(n)],
            "family": "made_up",
            "delta_alpha": 0.02 - 0.05 * np.log1p(size) + rng.normal(0, 0.02, n),
            "delta_alpha_se": 0.015,
        }
    )
    return features, labels


def pocket_geometry() -> BaseGeometry:
    """Shapes of the pocket target."""
    return base_geometry(load_models().model(TARGET))


def pocket_adapter(directory: Path, seed: int = 0, size: float = 1.0, **changes: object) -> Path:
    """A rank-2 adapter of the pocket target on q and v; ``size`` multiplies B."""
    base = pocket_geometry()
    pairs = random_pairs(seed, rank=2, types=("q", "v"), layers=range(0, 30, 6), base=base)
    pairs = {name: (a, size * b) for name, (a, b) in pairs.items()}
    options = {
        "r": 2,
        "lora_alpha": 4,
        "base_model_name_or_path": base.name,
        "target_modules": ["q_proj", "v_proj"],
    }
    return write_adapter(directory, pairs, **(options | changes))


def requests(alpha: float, seed: int, prompts: int = 8, tokens: int = 24, **columns: object) -> pd.DataFrame:
    """Requests with independent acceptance ``alpha`` at k = 4."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(prompts):
        steps: list[int] = []
        while 1 + sum(steps) + len(steps) < tokens:
            misses = rng.random(4) >= alpha
            steps.append(int(misses.argmax()) if misses.any() else 4)
        counts = censor_last_step(steps, tokens, 4)
        rows.append(
            {
                "prompt_index": index,
                "k": 4,
                "steps_accepted": steps,
                "drafted": 4 * len(steps),
                "output_tokens": tokens,
                "accepted_emitted": counts.accepted_emitted,
                "rejections": counts.rejections,
            }
            | columns
        )
    return pd.DataFrame(rows)


def write_screen(directory: Path, adapters: Path, evidence_class: str = "smoke", k: int = 4) -> list[Path]:
    """A screen of one adapter a domain (written to ``adapters``); returns the adapter folders."""
    design = {
        "target": TARGET,
        "drafter": "smollm2-135m-drop-12-15",
        "num_speculative_tokens": k,
        "controls": {},
    }
    folders = []

    def record(name: str, table: pd.DataFrame, covers: dict[str, list[str]]) -> None:
        made = new_record(
            experiment="made_up",
            tier="pocket",
            phase="phase2",
            evidence_class=evidence_class,
            config={"design": design, "unit": name},
            seed=0,
            revisions={},
            covers=covers,
        )
        write_record(directory / "screen" / f"{name}.json", made, {"requests": table})

    for index, domain in enumerate(DOMAINS):
        where = {"prompt_set": domain, "decoding": "t08"}
        record(
            f"base--{domain}", requests(0.6, index, arm="base", adapter="", **where), {"domains": [domain]}
        )
        name = f"{domain}-made-up"
        folders.append(pocket_adapter(adapters / name, seed=index, size=2.0**index))
        table = requests(0.6 - 0.06 * index, 100 + index, arm="adapted", adapter=name, **where)
        record(name, table, {"adapters": [content_hash(folders[-1])], "domains": [domain]})
    return folders
