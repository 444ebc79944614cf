"""A part of the screen once more, live: adapters trained from their recipes again, measured, and compared.

Everything runs in ``build/reproduce``, apart from the cache and from the committed evidence, and resumes.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import pandas as pd
import yaml
from pydantic import Field

from lora_spec.acceptance import PRIMARY_DECODING
from lora_spec.errors import LoraSpecError
from lora_spec.files import atomic_write_text
from lora_spec.measure.agreement import Report, compare_effects, compare_weights
from lora_spec.measure.design import Design, load_design
from lora_spec.models import load_models
from lora_spec.params import StrictModel, load_params, validate
from lora_spec.paths import cache_dir, repo_root, results_dir
from lora_spec.pool import AdapterHashes, Recipe, load_pool, load_recorded_hashes
from lora_spec.predictor.tables import FEATURES_RECORD, TABLE, base_geometry, compute_features
from lora_spec.provenance import load_record, load_table
from lora_spec.screen import load_screen

PARAMS_FILE = "reproduce.yaml"
_SHARED = ("models", "corpora")
"""Parts of the cache that the rerun reads as they are: each is checked against its pinned hashes."""


class ReducedControls(StrictModel):
    """Limits of controls on fewer prompts than the screen's."""

    self_draft_prompts: int = Field(ge=4)
    self_draft_tolerance: float = Field(gt=0, lt=1)
    fp32_prompts: int = Field(ge=1)


class ReproduceParams(StrictModel):
    """``params/reproduce.yaml``.

    Attributes:
        design: whose evidence is tried again.
        seed: decides which adapters.
        z: largest difference of two effects, in units of their combined standard error.
        feature_tolerance: largest relative difference of whole-adapter features between kinds of CPU.
        own_prompts: own prompts of each arm at T = 0.8, the first of the design's.
        greedy_prompts: own prompts for the losslessness and first-token checks.
        controls: limits that replace the design's.
    """

    schema_: Literal["lora-spec-reproduce/1"] = Field(alias="schema")
    design: str
    seed: int
    z: float = Field(gt=0)
    feature_tolerance: float = Field(gt=0, lt=1)
    own_prompts: int = Field(ge=2)
    greedy_prompts: int = Field(ge=1)
    controls: ReducedControls


def load_reproduce_params() -> ReproduceParams:
    """Read and check ``params/reproduce.yaml``."""
    return load_params(ReproduceParams, PARAMS_FILE)


def choose(recipes: Mapping[str, Recipe], measured: Collection[str], count: int, seed: int) -> list[str]:
    """Adapters to try again: families in an order drawn from ``seed``, one adapter of each a round.

    Adapters that were not measured, and those whose recipe takes no step, are left out. The choice depends on
    names and families alone, never on a result.

    Raises:
        LoraSpecError: fewer measured adapters than ``count``.
    """
    draw = random.Random(seed)
    by_family: dict[str, list[str]] = {}
    for name in sorted(measured):
        if name in recipes and recipes[name].steps > 0:
            by_family.setdefault(recipes[name].family, []).append(name)
    found = sum(map(len, by_family.values()))
    if found < count:
        raise LoraSpecError(f"{count} adapters asked for, the committed evidence holds {found}")
    families = sorted(by_family)
    draw.shuffle(families)
    for family in families:
        draw.shuffle(by_family[family])
    rounds = zip_longest(*(by_family[family] for family in families))
    return [name for each in rounds for name in each if name is not None][:count]


def reduced_design(design: Design, names: list[str], params: ReproduceParams) -> Design:
    """``design`` for ``names`` alone: the primary depth, T = 0.8, the first own prompts, reduced controls.

    Seeds, depth and engine stay, so on an equal CPU nearly every compared request has the same tokens; all
    would, were the batches the same to their end.
    """
    config = design.config()
    decodings = {
        PRIMARY_DECODING: config["decodings"][PRIMARY_DECODING] | {"own": params.own_prompts, "general": 0},
        design.greedy: config["decodings"][design.greedy] | {"own": params.greedy_prompts, "general": 0},
    }
    controls = config["controls"] | params.controls.model_dump() | {"fp32_adapters": names[:1]}
    changes = {"adapters": names, "depths": [], "decodings": decodings, "controls": controls}
    return validate(Design, config | changes | {"output": "reproduce"}, where=PARAMS_FILE)


@dataclass(frozen=True)
class Plan:
    """What a rerun does.

    Attributes:
        params: declared limits.
        design: the reduced design.
        committed: the ``requests`` of the committed evidence.
        features: committed features by adapter; empty where there are none.
        directory: where everything of the rerun lies.
    """

    params: ReproduceParams
    design: Design
    committed: pd.DataFrame
    features: dict[str, dict[str, float]]
    directory: Path


def plan_reproduction(count: int) -> Plan:
    """Choose ``count`` adapters of the committed screen and the reduced design for them.

    Raises:
        LoraSpecError: too few adapters were measured. EvidenceError: the evidence is damaged or missing.
    """
    params = load_reproduce_params()
    design = load_design(params.design)
    _, committed = load_screen(design.directory())
    names = choose(load_pool(), set(committed["adapter"]) - {""}, count, params.seed)
    return Plan(
        params=params,
        design=reduced_design(design, names, params),
        committed=committed,
        features=_committed_features(design),
        directory=repo_root() / "build" / "reproduce",
    )


def _committed_features(design: Design) -> dict[str, dict[str, float]]:
    path = results_dir(design.tier, "phase3") / FEATURES_RECORD
    if not path.is_file():
        return {}
    load_record(path)
    return load_table(path, TABLE).set_index("adapter").to_dict("index")


def run_reproduction(plan: Plan, *, workers: int = 2) -> Report:
    """Train, measure and compare; what is done already is kept.

    Raises:
        LoraSpecError: an input is missing, a unit or a control fails.
    """
    from lora_spec.measure.collector import Collector
    from lora_spec.substrate.adapters import read_side_file, train_adapters, trained_dir

    names = plan.design.adapters
    recorded = load_recorded_hashes()
    base = base_geometry(load_models().model(plan.design.target))
    with apart(plan.directory):
        train_adapters(names, workers=workers)
        path = plan.directory / "design.yaml"
        atomic_write_text(path, yaml.safe_dump(plan.design.config(), sort_keys=False))
        Collector(str(path), "acceptance").execute(workers=workers, replace_stale=True)
        _, live = load_screen(plan.design.directory())
        weights = {}
        for name in names:
            side = read_side_file(trained_dir(name)) or {}
            found = AdapterHashes.model_validate({key: side[key] for key in AdapterHashes.model_fields})
            now = compute_features({name: trained_dir(name)}, base).iloc[0].to_dict()
            before = plan.features.get(name)
            weights[name] = compare_weights(
                recorded.get(name), found, before and (before, now), plan.params.feature_tolerance
            )
    return Report(compare_effects(plan.committed, live, names, plan.params.z), weights)


@contextlib.contextmanager
def apart(directory: Path) -> Iterator[None]:
    """Cache and results under ``directory`` while this lasts; models and corpora are the ordinary cache's."""
    cache = directory / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for name in _SHARED:
        link, source = cache / name, (cache_dir() / name).resolve()
        if not link.is_symlink() or link.readlink() != source:
            link.unlink(missing_ok=True)
            link.symlink_to(source)
    variables = {"LORA_SPEC_CACHE": str(cache), "LORA_SPEC_RESULTS": str(directory / "results")}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
