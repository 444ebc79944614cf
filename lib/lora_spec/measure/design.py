"""A frozen measurement design and the units of work it stands for."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lora_spec.acceptance import PRIMARY_DECODING
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import results_dir
from lora_spec.pool import load_pool

_NAME = r"^[a-z0-9][a-z0-9_-]*$"  # becomes a folder under results/

GENERAL = "general"
"""Name of the prompt set that every adapter shares."""
POOL = "pool"
"""Stands for every adapter of the pool in a design's ``adapters``."""
UNSELECTED = "unselected"
"""Stands for adapters that are still to be chosen: planned as the whole pool, and never measured."""


class Decoding(StrictModel):
    """How tokens are drawn, and on how many prompts. Drafts are drawn at the same temperature.

    Attributes:
        temperature: 0 is greedy.
        own: leading prompts of the design's own range; None for all of it.
        general: leading prompts of the general range, 0 for none of it; None for all.
    """

    temperature: float = Field(ge=0.0, le=2.0)
    own: int | None = Field(default=None, ge=1)
    general: int | None = Field(default=None, ge=0)


class PromptRange(StrictModel):
    """A contiguous range of a prompt set's frozen windows."""

    start: int = Field(ge=0)
    count: int = Field(ge=1)


class Precision(StrictModel):
    """When an adapter's prompts suffice; see :mod:`lora_spec.measure.precision`.

    Attributes:
        se: standard error of the own-domain delta_alpha at which to stop.
        chunk: prompts served between two looks.
        minimum: prompts before the first stop.
    """

    se: float = Field(gt=0, lt=1)
    chunk: int = Field(ge=1)
    minimum: int = Field(ge=2)


class EngineParams(StrictModel):
    """What the engine is started with; all of it enters the record's config."""

    dtype: Literal["bfloat16", "float32"]
    max_num_seqs: int = Field(ge=1)
    max_model_len: int = Field(ge=64)
    kv_cache_gib: int = Field(ge=1)
    threads: int = Field(ge=1, description="OpenMP threads of one engine process")


class Controls(StrictModel):
    """Limits that disqualify numbers, fixed before the run.

    The self-draft and overlap limits belong to drafters that are language models of their own; a DFlash pair
    has neither (its mask positions are no next-token distribution) and is labelled by counted α̂ alone.
    """

    self_draft_tolerance: float | None = Field(default=None, gt=0, lt=1)
    self_draft_prompts: int | None = Field(default=None, ge=4)
    overlap_tolerance: float | None = Field(default=None, gt=0, lt=1)
    base_alpha_floor: float = Field(ge=0, lt=1)
    near_tie_nats: float = Field(
        ge=0, description="largest top-2 gap, log-probability, at a first divergence"
    )
    fp32_prompts: int = Field(ge=1)
    fp32_adapters: list[str] = Field(min_length=1)


class Design(StrictModel):
    """``params/*.yaml`` of one screen: which adapters, on which prompts, decoded how, with which limits.

    Attributes:
        num_speculative_tokens: the primary depth k.
        depths: depths measured beside the primary one; see :attr:`all_depths`.
        draft_sampling: how drafts are drawn at T > 0. vLLM's own default is ``greedy``; labels are of
            ``probabilistic`` drafts: a draft model's are drawn one after the other, DFlash's independently,
            each from the distribution of its mask position.
        adapters: names of the pool, ``pool`` for all of it, or ``unselected``.
        selected: False while the adapters are ``unselected``; no part of :meth:`config`.
    """

    schema_: Literal["lora-spec-design/2"] = Field(alias="schema")
    experiment: str
    tier: str = Field(pattern=_NAME)
    phase: str = Field(pattern=r"^phase[0-6]$")
    output: str = Field(pattern=_NAME)
    seed: int
    target: str
    drafter: str
    method: Literal["draft_model", "dflash"]
    draft_sampling: Literal["probabilistic"] = "probabilistic"
    num_speculative_tokens: int = Field(ge=1, le=16)
    depths: list[Annotated[int, Field(ge=1, le=16)]] = Field(default_factory=list)
    max_tokens: int = Field(ge=1, le=4096)
    decodings: dict[str, Decoding] = Field(min_length=1)
    adapters: list[str] = Field(min_length=1)
    selected: bool = Field(default=True, exclude=True)
    own: PromptRange
    general: PromptRange
    overlap_temperature: float | None = Field(default=None, gt=0, le=2.0)
    precision: Precision | None = None
    engine: EngineParams
    controls: Controls

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, data: Any) -> Any:
        named = data.get("adapters") if isinstance(data, dict) else None
        if named not in (POOL, UNSELECTED):
            return data
        return data | {"adapters": list(load_pool()), "selected": named == POOL}

    @model_validator(mode="after")
    def _consistent(self) -> Design:
        if len(set(self.adapters)) != len(self.adapters):
            raise ValueError("an adapter is named twice")
        unknown = set(self.controls.fp32_adapters) - set(self.adapters)
        if unknown:
            raise ValueError(f"fp32_adapters not among adapters: {', '.join(sorted(unknown))}")
        self._check_decodings()
        self._check_method()
        return self

    def _check_decodings(self) -> None:
        if [d.temperature for d in self.decodings.values()].count(0.0) != 1:
            raise ValueError("decodings hold exactly one greedy one: losslessness is checked in it")
        for name, decoding in self.decodings.items():
            for what, wanted in (("own", decoding.own), ("general", decoding.general)):
                if wanted is not None and wanted > self.range_of(what).count:
                    raise ValueError(f"decoding {name} wants more {what} prompts than the range holds")
        if self.precision is not None:
            if PRIMARY_DECODING not in self.decodings:
                raise ValueError(f"precision needs the decoding {PRIMARY_DECODING}")
            if self.precision.chunk % self.engine.max_num_seqs:
                raise ValueError("precision.chunk is a multiple of max_num_seqs: looking changes no batch")

    def _check_method(self) -> None:
        limits = {
            "self_draft_tolerance": self.controls.self_draft_tolerance,
            "self_draft_prompts": self.controls.self_draft_prompts,
            "overlap_tolerance": self.controls.overlap_tolerance,
            "overlap_temperature": self.overlap_temperature,
        }
        for name, value in limits.items():
            if self.has_overlap and value is None:
                raise ValueError(f"{name} is needed for method {self.method}")
            if not self.has_overlap and value is not None:
                raise ValueError(f"{name} means nothing for method {self.method}")

    @property
    def all_depths(self) -> list[int]:
        """Every depth measured, each in an engine of its own on the same prompts with the same seeds.

        The primary one comes first: where an adapter stops there decides the prompts of the others.
        """
        primary = self.num_speculative_tokens
        return [primary, *sorted(set(self.depths) - {primary})]

    @property
    def has_overlap(self) -> bool:
        """Whether the drafter's distributions can be scored teacher-forced (and the target be its own)."""
        return self.method == "draft_model"

    @property
    def greedy(self) -> str:
        """Name of the greedy decoding."""
        return next(name for name, decoding in self.decodings.items() if decoding.temperature == 0)

    def config(self) -> dict[str, Any]:
        """The design as a record's config (JSON types, names of the file)."""
        return self.model_dump(mode="json", by_alias=True)

    def directory(self) -> Path:
        """Where the units' records go."""
        return results_dir(self.tier, self.phase) / self.output

    def range_of(self, prompt_set: str) -> PromptRange:
        """Which windows of ``prompt_set`` are used."""
        return self.general if prompt_set == GENERAL else self.own

    def indices(self, prompt_set: str, decoding: str | None = None) -> range:
        """Window numbers of the range, or of its leading part that ``decoding`` is measured on."""
        chosen = self.range_of(prompt_set)
        count = chosen.count
        if decoding is not None:
            given = self.decodings[decoding]
            wanted = given.general if prompt_set == GENERAL else given.own
            count = count if wanted is None else wanted
        return range(chosen.start, chosen.start + count)

    def requests(self, prompt_set: str) -> int:
        """Speculative requests of one arm on ``prompt_set``, all decodings and depths."""
        return len(self.all_depths) * sum(len(self.indices(prompt_set, name)) for name in self.decodings)

    def at_depth(self, label: str, k: int) -> str:
        """``label`` in a record's results: alone at the primary depth, ``label/k2`` at another."""
        return label if k == self.num_speculative_tokens else f"{label}/k{k}"


class UnitKind(enum.StrEnum):
    """Controls come before bases, bases before adapters."""

    CONTROL = "control"
    BASE = "base"
    ADAPTER = "adapter"


@dataclass(frozen=True)
class MeasureUnit:
    """One engine session and one record. ``name`` is the record's file stem."""

    kind: UnitKind
    name: str
    adapter: str | None
    domain: str | None
    prompt_sets: tuple[str, ...]


SELF_DRAFT = "control--self-draft"
FP32 = "control--fp32-lossless"


def base_unit_name(prompt_set: str) -> str:
    """Record stem of the base arm on ``prompt_set``."""
    return f"base--{prompt_set}"


def design_units(design: Design, domain_of: dict[str, str]) -> list[MeasureUnit]:
    """Units in the order they must run.

    Args:
        design: the frozen design.
        domain_of: adapter name to its own domain.
    """
    domains = list(dict.fromkeys(domain_of[name] for name in design.adapters))
    shared = (GENERAL,) if design.requests(GENERAL) else ()
    controls = (SELF_DRAFT, FP32) if design.has_overlap else (FP32,)
    units = [MeasureUnit(UnitKind.CONTROL, name, None, None, (GENERAL,)) for name in controls]
    units += [
        MeasureUnit(UnitKind.BASE, base_unit_name(prompt_set), None, prompt_set, (prompt_set,))
        for prompt_set in [*domains, *shared]
    ]
    units += [
        MeasureUnit(UnitKind.ADAPTER, name, name, domain_of[name], (domain_of[name], *shared))
        for name in design.adapters
    ]
    return units


def load_design(path: Path | str) -> Design:
    """Read and check a design file."""
    return load_params(Design, path)


def find_unit(units: Sequence[MeasureUnit], name: str) -> MeasureUnit:
    """The unit called ``name``.

    Raises:
        KeyError: there is none.
    """
    for unit in units:
        if unit.name == name:
            return unit
    raise KeyError(name)
