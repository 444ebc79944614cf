"""A frozen measurement design and the units of work it stands for."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from lora_spec.params import StrictModel, load_params
from lora_spec.paths import results_dir

_NAME = r"^[a-z0-9][a-z0-9_-]*$"  # becomes a folder under results/

GENERAL = "general"
"""Name of the prompt set that every adapter shares."""


class Decoding(StrictModel):
    """How tokens are drawn. Drafts are sampled at the same temperature (probabilistic) or are greedy."""

    temperature: float = Field(ge=0.0, le=2.0)


class PromptRange(StrictModel):
    """A contiguous range of a prompt set's frozen windows, and of which split."""

    start: int = Field(ge=0)
    count: int = Field(ge=1)


class EngineParams(StrictModel):
    """What the engine is started with; all of it enters the record's config."""

    dtype: Literal["bfloat16", "float32"]
    max_num_seqs: int = Field(ge=1)
    max_model_len: int = Field(ge=64)
    kv_cache_gib: int = Field(ge=1)
    threads: int = Field(ge=1, description="OpenMP threads of one engine process")


class Controls(StrictModel):
    """Limits that disqualify numbers, fixed before the run."""

    self_draft_tolerance: float = Field(gt=0, lt=1)
    self_draft_prompts: int = Field(ge=4)
    overlap_tolerance: float = Field(gt=0, lt=1)
    base_alpha_floor: float = Field(ge=0, lt=1)
    near_tie_nats: float = Field(
        ge=0, description="largest top-2 gap, log-probability, at a first divergence"
    )
    fp32_prompts: int = Field(ge=1)
    fp32_adapters: list[str] = Field(min_length=1)


class Design(StrictModel):
    """``params/*.yaml`` of one screen: which adapters, on which prompts, decoded how, with which limits."""

    schema_: Literal["lora-spec-design/1"] = Field(alias="schema")
    experiment: str
    tier: str = Field(pattern=_NAME)
    phase: str = Field(pattern=r"^phase[0-6]$")
    output: str = Field(pattern=_NAME)
    seed: int
    target: str
    drafter: str
    method: Literal["draft_model"]
    num_speculative_tokens: int = Field(ge=1, le=16)
    max_tokens: int = Field(ge=1, le=4096)
    decodings: dict[str, Decoding] = Field(min_length=1)
    adapters: list[str] = Field(min_length=1)
    own: PromptRange
    general: PromptRange
    overlap_temperature: float = Field(gt=0, le=2.0)
    engine: EngineParams
    controls: Controls

    @model_validator(mode="after")
    def _consistent(self) -> Design:
        if len(set(self.adapters)) != len(self.adapters):
            raise ValueError("an adapter is named twice")
        unknown = set(self.controls.fp32_adapters) - set(self.adapters)
        if unknown:
            raise ValueError(f"fp32_adapters not among adapters: {', '.join(sorted(unknown))}")
        return self

    def config(self) -> dict[str, Any]:
        """The design as a record's config (JSON types, names of the file)."""
        return self.model_dump(mode="json", by_alias=True)

    def directory(self) -> Path:
        """Where the units' records go."""
        return results_dir(self.tier, self.phase) / self.output

    def range_of(self, prompt_set: str) -> PromptRange:
        """Which windows of ``prompt_set`` are used."""
        return self.general if prompt_set == GENERAL else self.own


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
    units = [
        MeasureUnit(UnitKind.CONTROL, SELF_DRAFT, None, None, (GENERAL,)),
        MeasureUnit(UnitKind.CONTROL, FP32, None, None, (GENERAL,)),
    ]
    units += [
        MeasureUnit(UnitKind.BASE, base_unit_name(prompt_set), None, prompt_set, (prompt_set,))
        for prompt_set in [*domains, GENERAL]
    ]
    units += [
        MeasureUnit(UnitKind.ADAPTER, name, name, domain_of[name], (domain_of[name], GENERAL))
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
