"""The adapter pool (``params/adapter_pool.yaml``): every adapter's recipe, declared before it is trained."""

from __future__ import annotations

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
}
Family = Literal["language", "code", "structured", "register", "controlled"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=80)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Training(StrictModel):
    """What all recipes of the pool share."""

    base: str
    batch: PositiveInt
    block_tokens: Annotated[int, Field(ge=8, le=8192)]
    warmup_fraction: Annotated[float, Field(ge=0, le=1)]
    weight_decay: Annotated[float, Field(ge=0)]
    max_grad_norm: PositiveFloat


class Recipe(StrictModel):
    """One adapter. Everything here decides its weights, but for ``family`` and ``licence``."""

    name: Name
    domain: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    family: Family
    modules: Literal["qv", "attention", "mlp", "all"]
    rank: Annotated[int, Field(ge=1, le=256)]
    alpha: PositiveInt
    rslora: bool = False
    learning_rate: Annotated[float, Field(gt=0, le=0.1)]
    steps: PositiveInt
    seed: NonNegativeInt
    licence: str

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names of the adapted modules, sorted."""
        return MODULES[self.modules]


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
        return self.recipe(name).model_dump(mode="json") | {"training": self.training.model_dump(mode="json")}

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


def load_pool_file() -> Pool:
    """Read and check ``params/adapter_pool.yaml``."""
    return load_params(Pool, POOL_FILE)


def load_pool() -> dict[str, Recipe]:
    """The declared recipes by adapter name, in the order of the file."""
    return {recipe.name: recipe for recipe in load_pool_file().adapters}


def load_recorded_hashes() -> dict[str, AdapterHashes]:
    """The recorded hashes by adapter name; empty before the first recording."""
    path = params_dir() / HASHES_FILE
    if not path.is_file():
        return {}
    return dict(validate(RecordedHashes, read_yaml(path), where=rel(path)).adapters)
