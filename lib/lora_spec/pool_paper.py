"""The adapters of the paper tier (``params/adapter_pool_paper.yaml``): declared, not executed here.

A slot is one adapter of one pair. Own slots are complete recipes that a GPU would train on our own corpora.
Hub slots are public adapters: named where the repository is known to exist, open (``repo: null``) where
somebody has yet to choose one by the slot's criteria. No commit stands here; see `lora_spec.frozen`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from lora_spec.errors import ParamsError
from lora_spec.files import canonical_sha256
from lora_spec.frozen import FrozenRepo, Repo, load_lock
from lora_spec.models import Key
from lora_spec.params import StrictModel, load_params
from lora_spec.pool import Family, Name, Recipe

POOL_FILE = "adapter_pool_paper.yaml"
Role = Literal["screen", "confirm", "block_drafter", "appendix"]


class PaperTraining(StrictModel):
    """What all own recipes of the tier share; the base is the target of a slot's pair."""

    dtype: Literal["bfloat16"]
    batch: PositiveInt
    block_tokens: Annotated[int, Field(ge=8, le=8192)]
    warmup_fraction: Annotated[float, Field(ge=0, le=1)]
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat


class Assumed(StrictModel):
    """What the plan's estimate rests on: assumptions, nothing measured.

    Attributes:
        gpus: how many the pair needs.
        gpu: which.
        generated_tokens_per_s: over a full batch, with speculation and an adapter.
        trained_tokens_per_s: of LoRA training.
        engine_start_s: load and warm up one engine.
    """

    gpus: PositiveInt
    gpu: str
    generated_tokens_per_s: PositiveFloat
    trained_tokens_per_s: PositiveFloat
    engine_start_s: PositiveFloat


class PaperPair(StrictModel):
    """A pair of ``models.yaml`` in the tier.

    Attributes:
        role: what it is for.
        design: design file of its screen, relative to ``params/``.
        assumed: for the estimate.
        open: what else must be settled before it can run, one sentence each.
    """

    role: Role
    design: str
    assumed: Assumed
    open: tuple[str, ...] = ()


class OwnSlot(Recipe):
    """An adapter that our recipe makes."""

    kind: Literal["own"]
    pair: Key


class Wanted(StrictModel):
    """What a public adapter must be like to fill a slot.

    Attributes:
        rank: smallest and largest rank.
        modules: name of a set of modules (see `lora_spec.pool.MODULES`), or "any" of those.
        criteria: the rest, for a person.
    """

    rank: Annotated[tuple[PositiveInt, ...], Field(min_length=2, max_length=2)]
    modules: Literal["any", "qv", "attention", "mlp", "all"]
    criteria: Annotated[str, Field(min_length=20)]


class HubSlot(StrictModel):
    """A public adapter, or the place for one.

    Attributes:
        repo: repository on the hub; None while nobody has chosen one.
        licence: None while nobody has read it.
    """

    kind: Literal["hub"]
    name: Name
    pair: Key
    domain: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    family: Family
    wanted: Wanted
    repo: Repo | None = None
    licence: str | None = None


Slot = Annotated[OwnSlot | HubSlot, Field(discriminator="kind")]


class PaperPool(StrictModel):
    """``params/adapter_pool_paper.yaml``."""

    schema_: Literal["lora-spec-pool-paper/1"] = Field(alias="schema")
    tier: Literal["paper"]
    pairs: dict[Key, PaperPair]
    training: PaperTraining
    slots: Annotated[tuple[Slot, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> PaperPool:
        seen: set[str] = set()
        for slot in self.slots:
            if slot.name in seen:
                raise ValueError(f"slot {slot.name} is declared twice")
            seen.add(slot.name)
            if slot.pair not in self.pairs:
                raise ValueError(f"slot {slot.name} belongs to the undeclared pair {slot.pair}")
            if isinstance(slot, HubSlot) and slot.wanted.rank[0] > slot.wanted.rank[1]:
                raise ValueError(f"slot {slot.name} wants a rank from {slot.wanted.rank[0]} down")
        repos = [(slot.pair, slot.repo) for slot in self.slots if isinstance(slot, HubSlot) and slot.repo]
        for pair, repo in repos:
            if repos.count((pair, repo)) > 1:
                raise ValueError(f"{repo} fills two slots of {pair}")
        return self

    def of_pair(self, pair: str) -> list[OwnSlot | HubSlot]:
        """Slots of one pair, in the order of the file."""
        return [slot for slot in self.slots if slot.pair == pair]

    def slot(self, name: str) -> OwnSlot | HubSlot:
        """Slot ``name``.

        Raises:
            ParamsError: there is none.
        """
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise ParamsError(f"unknown adapter {name!r}", where=f"params/{POOL_FILE}")

    def recipe_sha256(self, name: str) -> str:
        """Identity of an own slot's recipe, the shared settings and the pair included.

        Raises:
            ParamsError: no own slot of that name.
        """
        slot = self.slot(name)
        if not isinstance(slot, OwnSlot):
            raise ParamsError(f"{name} is a public adapter: it has no recipe", where=f"params/{POOL_FILE}")
        return canonical_sha256(slot.model_dump(mode="json") | {"training": self.training.model_dump()})


def load_paper_pool() -> tuple[PaperPool, dict[str, FrozenRepo]]:
    """The declared slots, and what is frozen of the public ones by name.

    Raises:
        ParamsError: a damaged file, or a lock that freezes what is not declared.
    """
    pool, frozen = load_params(PaperPool, POOL_FILE), load_lock().adapters
    for name, entry in frozen.items():
        slot = pool.slot(name)
        if not isinstance(slot, HubSlot) or slot.repo != entry.repo:
            raise ParamsError(
                f"frozen {name} is {entry.repo}, which is not what is declared",
                where=f"params/{POOL_FILE}",
                fix="freeze again: lora-spec freeze --execute",
            )
    return pool, dict(frozen)
