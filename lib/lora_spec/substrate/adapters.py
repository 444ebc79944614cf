"""The trained adapters on disk: which are done, what is left, and the queue that trains them; no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lora_spec.errors import MissingTierError
from lora_spec.files import atomic_write_text, remove_stale_temporaries, sha256_file
from lora_spec.models import load_models
from lora_spec.paths import cache_dir, params_dir, rel
from lora_spec.pool import (
    HASHES_FILE,
    AdapterHashes,
    Pool,
    Recipe,
    load_pool_file,
    load_recorded_hashes,
    runs_of,
)
from lora_spec.queue import QueueReport, Unit, run_queue
from lora_spec.substrate.corpora import domain_dir

SIDE_FILE = "lora_spec.json"
SIDE_SCHEMA = "lora-spec-adapter/1"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# Measured on one core with AVX-512; only the plan's estimate uses them.
_TOKENS_PER_CPU_S = {"attention": 170.0, "mlp": 170.0, "all": 145.0}
_TOKENS_PER_CPU_S_FEW = 190.0
_START_CPU_S = 14.0


@dataclass(frozen=True)
class AdapterState:
    """One line of the plan.

    Attributes:
        recipe: what is declared.
        note: what it is among the others: a checkpoint, one of several seeds, a control; else empty.
        cpu_seconds: estimate for training it; 0 for a checkpoint that is saved on the way to another.
        problem: why it must be trained, or None when it is done.
        reproduced: whether its weights are the recorded ones; None when nothing is recorded for its recipe.
    """

    recipe: Recipe
    note: str
    cpu_seconds: float
    problem: str | None
    reproduced: bool | None


def trained_dir(name: str) -> Path:
    """Where adapter ``name`` is trained to."""
    return cache_dir() / "adapters" / name


def corpus_path(domain: str) -> Path:
    """File of the training split of ``domain``."""
    return domain_dir(domain) / "train.jsonl"


def corpora_missing(domains: Sequence[str]) -> MissingTierError:
    """The error of adapters whose corpora are not built."""
    only = "".join(f" --only {domain}" for domain in domains)
    return MissingTierError(
        f"the corpus of {', '.join(domains)} is not built",
        where=rel(corpus_path(domains[0])),
        fix=f"run: lora-spec corpora --execute{only}",
        code="corpus_missing",
    )


def read_side_file(directory: Path) -> dict[str, Any] | None:
    """``lora_spec.json`` of an adapter directory, or None when there is none that can be read."""
    try:
        side = json.loads((directory / SIDE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return side if isinstance(side, dict) else None


def find_adapter_problem(directory: Path, name: str, pool: Pool) -> str | None:
    """Why ``directory`` does not hold adapter ``name`` as declared, or None when it does.

    It must come from this recipe, this base and (where it is built) this corpus, with its weights unchanged.
    """
    if not directory.is_dir():
        return "not trained"
    side = read_side_file(directory)
    if side is None or side.get("schema") != SIDE_SCHEMA:
        return f"no readable {SIDE_FILE}"
    if side.get("recipe_sha256") != pool.recipe_sha256(name):
        return "trained from another recipe"
    base = side.get("base")
    if not isinstance(base, dict) or base.get("weights_sha256") != base_weights_sha256(pool):
        return "trained on another base"
    weights = directory / ADAPTER_WEIGHTS
    if not (directory / ADAPTER_CONFIG).is_file() or not weights.is_file():
        return "incomplete"
    if sha256_file(weights) != side.get("weights_sha256"):
        return "its weights were changed"
    corpus = corpus_path(pool.recipe(name).domain)
    if corpus.is_file() and sha256_file(corpus) != side.get("corpus_sha256"):
        return "trained on another corpus"
    return None


def base_weights_sha256(pool: Pool) -> str | None:
    """Pinned sha256 of the weights that the pool's adapters belong to."""
    return load_models().model(pool.training.base).weights_sha256


def estimated_cpu_seconds(recipe: Recipe, pool: Pool) -> float:
    """CPU-seconds to train ``recipe`` on one core, from measured rates; a guide, not a promise."""
    tokens = recipe.steps * pool.training.batch * pool.training.block_tokens
    return _START_CPU_S + tokens / _TOKENS_PER_CPU_S.get(recipe.modules, _TOKENS_PER_CPU_S_FEW)


def plan_adapters(only: Sequence[str] = ()) -> list[AdapterState]:
    """State of the declared adapters, or of those named in ``only``; trains and writes nothing.

    Raises:
        ParamsError: an unknown name, or a damaged parameter file.
    """
    pool, recorded = load_pool_file(), load_recorded_hashes()
    selected = _selected(pool, only)
    problems = {r.name: find_adapter_problem(trained_dir(r.name), r.name, pool) for r in selected}
    todo = runs_of(recipe for recipe in selected if problems[recipe.name])
    states = []
    for recipe in selected:
        directory, problem = trained_dir(recipe.name), problems[recipe.name]
        known, side = recorded.get(recipe.name), read_side_file(directory)
        reproduced = None
        if problem is None and side and known and known.recipe_sha256 == pool.recipe_sha256(recipe.name):
            reproduced = known.weights_sha256 == side["weights_sha256"]
        on_the_way = problem is not None and todo[recipe.run][-1] != recipe
        seconds = 0.0 if on_the_way else estimated_cpu_seconds(recipe, pool)
        states.append(AdapterState(recipe, _note(recipe, pool), seconds, problem, reproduced))
    return states


def _note(recipe: Recipe, pool: Pool) -> str:
    if recipe.steps == 0:
        return "control: no update"
    if recipe.schedule_steps is not None:
        return f"checkpoint of {recipe.run}"
    own = {"name", "seed"}
    alike = [other.model_dump(exclude=own) for other in pool.adapters].count(recipe.model_dump(exclude=own))
    return f"one of {alike} seeds" if alike > 1 else ""


def _selected(pool: Pool, only: Sequence[str]) -> list[Recipe]:
    return [pool.recipe(name) for name in only] if only else list(pool.adapters)


def train_adapters(only: Sequence[str] = (), *, workers: int = 2) -> QueueReport:
    """Train what is not done, longest first, ``workers`` runs at a time with one thread each.

    Checkpoints of a run are saved on the way to its end, so they cost nothing more.

    Raises:
        QueueError: some could not be trained; the others are kept.
        MissingTierError: a corpus is not built.
        ParamsError: an unknown name, or a damaged parameter file.
    """
    pool = load_pool_file()
    recipes = _selected(pool, only)
    todo = [r for r in recipes if find_adapter_problem(trained_dir(r.name), r.name, pool)]
    missing = sorted({r.domain for r in todo if not corpus_path(r.domain).is_file()})
    if missing:
        raise corpora_missing(missing)
    remove_stale_temporaries(cache_dir() / "adapters")
    units = [
        Unit(
            name=run,
            argv=[sys.executable, "-m", "lora_spec.substrate.train", *(recipe.name for recipe in members)],
            is_done=lambda members=members: all(
                find_adapter_problem(trained_dir(recipe.name), recipe.name, pool) is None
                for recipe in members
            ),
        )
        for run, members in sorted(
            runs_of(recipes).items(), key=lambda item: -estimated_cpu_seconds(item[1][-1], pool)
        )
    ]
    return run_queue(units, workers=workers, threads_per_worker=1, log_dir=cache_dir() / "logs" / "adapters")


def record_hashes_file() -> int:
    """Write the trained adapters' hashes to ``params/adapter_hashes.yaml``; others keep what was recorded.

    Returns:
        How many trained adapters were recorded.
    """
    pool, hashes = load_pool_file(), load_recorded_hashes()
    count = 0
    for recipe in pool.adapters:
        directory = trained_dir(recipe.name)
        side = read_side_file(directory)
        if side is None or find_adapter_problem(directory, recipe.name, pool):
            continue
        hashes[recipe.name] = AdapterHashes.model_validate(
            {name: side[name] for name in AdapterHashes.model_fields}
        )
        count += 1
    entries = {name: hashes[name].model_dump() for name in sorted(hashes)}
    text = "# From `lora-spec adapters --record-hashes`. Weights come out equal where the CPU flags are.\n"
    atomic_write_text(
        params_dir() / HASHES_FILE, text + yaml.safe_dump({"adapters": entries}, sort_keys=True, width=110)
    )
    return count
