"""The adapter pool (``params/adapter_pool.yaml``): every adapter's recipe, declared before it is trained.

A run is one training from its first step to the end of its learning-rate schedule. Adapters saved on the way
are its checkpoints: they have the run's seed, data order and rates, so they are no independent samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lora_spec.errors import ParamsError
from lora_spec.files import canonical_sha256
from lora_spec.params import StrictModel, load_params, read_yaml, validate
from lora_spec.paths import params_dir, rel

POOL_FILE = "adapter_pool.yaml"
HASHES_FILE = "adapter_hashes.yaml"
MODULES: dict[str, tuple[str, ...]] = {
    "qv": ("q_proj", "v_proj"),
    "attention": ("k_proj", "o_proj", "q_proj", "v_proj"),
    "mlp": ("down_proj", "gate_proj", "up_proj"),
    "all": ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    "k": ("k_proj",),
    "o": ("o_proj",),
    "down": ("down_proj",),
}
# Fields that later recipes brought: at their defaults they stay out of the identity, so older ones keep it.
_LATER = ("schedule_steps", "layers", "rank_pattern", "alpha_pattern")
Family = Literal["language", "code", "structured", "register", "controlled"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=80)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Rank = Annotated[int, Field(ge=1, le=256)]


class Training(StrictModel):
    """What all recipes of the pool share."""

    base: str
    batch: PositiveInt
    block_tokens: Annotated[int, Field(ge=8, le=8192)]
    warmup_fraction: Annotated[float, Field(ge=0, le=1)]
    weight_decay: Annotated[float, Field(ge=0)]
    max_grad_norm: PositiveFloat


class Recipe(StrictModel):
    """One adapter. Everything here decides its weights, but for ``family`` and ``licence``.

    Attributes:
        modules: name of the set of adapted modules, a key of ``MODULES``.
        steps: optimiser steps; 0 leaves B at zero, so the adapter changes nothing.
        schedule_steps: steps of the run that this is a checkpoint of; None for a whole run.
        layers: adapted layers, counted from 0; None for all (PEFT's ``layers_to_transform``).
        rank_pattern, alpha_pattern: module name to its own rank or α, as in PEFT.
    """

    name: Name
    domain: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    family: Family
    modules: Literal["qv", "attention", "mlp", "all", "k", "o", "down"]
    rank: Rank
    alpha: PositiveInt
    rslora: bool = False
    learning_rate: Annotated[float, Field(gt=0, le=0.1)]
    steps: NonNegativeInt
    schedule_steps: PositiveInt | None = None
    layers: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    rank_pattern: dict[str, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    seed: NonNegativeInt
    licence: str

    @model_validator(mode="after")
    def _makes_sense(self) -> Recipe:
        if self.schedule_steps is not None:
            if not 0 < self.steps < self.schedule_steps:
                raise ValueError(
                    f"steps must be from 1 to {self.schedule_steps - 1}, below schedule_steps "
                    "(leave schedule_steps out for a whole run)"
                )
            if self._checkpoint_mark not in self.name:
                raise ValueError(f"the name of a checkpoint must contain {self._checkpoint_mark}")
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers must rise, none given twice")
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            if pattern not in self.target_modules:
                raise ValueError(f"pattern {pattern!r} matches none of {', '.join(self.target_modules)}")
        return self

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names of the adapted modules, sorted."""
        return MODULES[self.modules]

    @property
    def schedule(self) -> int:
        """Steps of the learning-rate schedule; a checkpoint has made fewer."""
        return self.steps if self.schedule_steps is None else self.schedule_steps

    @property
    def run(self) -> str:
        """Name of the training run; checkpoints of one run share it with its end."""
        return self.name.replace(self._checkpoint_mark, f"-s{self.schedule}")

    @property
    def _checkpoint_mark(self) -> str:
        return f"-s{self.steps}of{self.schedule}"


class Pool(StrictModel):
    """``params/adapter_pool.yaml``."""

    training: Training
    adapters: Annotated[tuple[Recipe, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _unique(self) -> Pool:
        seen: set[str] = set()
        families: dict[str, str] = {}
        for recipe in self.adapters:
            if recipe.name in seen:
                raise ValueError(f"adapter {recipe.name} is declared twice")
            seen.add(recipe.name)
            if families.setdefault(recipe.domain, recipe.family) != recipe.family:
                raise ValueError(f"domain {recipe.domain} is given two families")
        for run, members in runs_of(self.adapters).items():
            own = {"name", "steps", "schedule_steps"}
            first = members[0].model_dump(exclude=own)
            if any(r.schedule != members[0].schedule or r.model_dump(exclude=own) != first for r in members):
                raise ValueError(f"adapters of run {run} differ in more than steps")
        return self

    def recipe(self, name: str) -> Recipe:
        """Recipe of adapter ``name``.

        Raises:
            ParamsError: it is not in the pool.
        """
        for recipe in self.adapters:
            if recipe.name == name:
                return recipe
        known = ", ".join(recipe.name for recipe in self.adapters)
        raise ParamsError(f"unknown adapter {name!r}", where=f"params/{POOL_FILE}", fix=f"known: {known}")

    def recipe_dict(self, name: str) -> dict[str, object]:
        """Recipe and shared settings of ``name`` as plain JSON values: what the adapter was made from."""
        values = self.recipe(name).model_dump(mode="json")
        for field in _LATER:
            if values[field] in (None, {}):
                del values[field]
        return values | {"training": self.training.model_dump(mode="json")}

    def recipe_sha256(self, name: str) -> str:
        """Identity of the recipe of ``name``; a change of any of its values is another adapter."""
        return canonical_sha256(self.recipe_dict(name))


class AdapterHashes(StrictModel):
    """Hashes of one adapter as trained on a machine with ``cpu_flags``."""

    recipe_sha256: Sha256
    weights_sha256: Sha256
    content_hash: Sha256
    cpu_flags: str


class RecordedHashes(StrictModel):
    """``params/adapter_hashes.yaml``: what training gave where the evidence was measured."""

    adapters: dict[Name, AdapterHashes]


def runs_of(recipes: Iterable[Recipe]) -> dict[str, list[Recipe]]:
    """Recipes by the name of their run, each run's from the fewest steps to the most."""
    runs: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        runs.setdefault(recipe.run, []).append(recipe)
    return {run: sorted(members, key=lambda recipe: recipe.steps) for run, members in runs.items()}


def load_pool_file() -> Pool:
    """Read and check ``params/adapter_pool.yaml``."""
    return load_params(Pool, POOL_FILE)


def load_pool() -> dict[str, Recipe]:
    """The declared recipes by adapter name, in the order of the file."""
    return {recipe.name: recipe for recipe in load_pool_file().adapters}


def without_update() -> frozenset[str]:
    """Adapters that the pool declares to have no update: they are the base, and controls only."""
    return frozenset(name for name, recipe in load_pool().items() if recipe.steps == 0)


def load_recorded_hashes() -> dict[str, AdapterHashes]:
    """The recorded hashes by adapter name; empty before the first recording."""
    path = params_dir() / HASHES_FILE
    if not path.is_file():
        return {}
    return dict(validate(RecordedHashes, read_yaml(path), where=rel(path)).adapters)
