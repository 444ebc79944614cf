"""The conceptual matrix of phase 0, and the part of it that is measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from lora_spec.params import StrictModel, load_params

PARAMS = "phase0_runtime.yaml"
MAX_CELLS = 120
"""More cells would not run in an hour on two cores, both columns together."""

Method = Literal["none", "ngram", "suffix", "draft_model", "eagle3", "dflash"]
TargetLora = Literal["none", "one", "mixed"]
DrafterLora = Literal["none", "merged", "dynamic"]
Sampling = Literal["greedy", "sampled"]
Switch = Literal["off", "on"]
Execution = Literal["eager", "compiled"]
Slots = Literal["warm", "limited"]
Column = Literal["stock", "plugin"]

COLUMNS: tuple[Column, ...] = ("stock", "plugin")
AXES: dict[str, tuple[str, ...]] = {
    "method": ("none", "ngram", "suffix", "draft_model", "eagle3", "dflash"),
    "target_lora": ("none", "one", "mixed"),
    "drafter_lora": ("none", "merged", "dynamic"),
    "sampling": ("greedy", "sampled"),
    "prefix_cache": ("off", "on"),
    "execution": ("eager", "compiled"),
    "slots": ("warm", "limited"),
}
"""Every axis and its values, the plainest first."""
DRAFTER_METHODS = ("draft_model", "eagle3", "dflash")
"""Methods whose drafts come from a model, to which an adapter could belong."""


@dataclass(frozen=True, order=True)
class Cell:
    """One combination.

    Attributes:
        method: where drafts come from; ``none`` is plain decoding.
        target_lora: ``one`` adapter for all requests, or two adapters and base requests ``mixed`` in a batch.
        drafter_lora: an adapter ``merged`` into the drafter, or chosen per request (``dynamic``).
        sampling: ``greedy``, or ``sampled`` at a temperature with drafts sampled too.
        prefix_cache: whether blocks of equal prefixes are reused.
        execution: ``eager`` or ``compiled`` graphs.
        slots: as many adapter slots as adapters (``warm``), or one slot for two (``limited``).
    """

    method: str
    target_lora: str = "none"
    drafter_lora: str = "none"
    sampling: str = "greedy"
    prefix_cache: str = "off"
    execution: str = "eager"
    slots: str = "warm"

    @property
    def name(self) -> str:
        """File stem; options at their plainest are left out."""
        parts = [self.method, self.target_lora, self.drafter_lora, self.sampling]
        parts += ["prefix"] * (self.prefix_cache == "on")
        parts += [v for v in (self.execution, self.slots) if v not in ("eager", "warm")]
        return "-".join(parts)

    @property
    def meaningful(self) -> bool:
        """Whether the combination can exist at all.

        An adapter of the drafter needs a drafter, and limited slots need adapters that compete for them.
        """
        if self.drafter_lora != "none" and self.method not in DRAFTER_METHODS:
            return False
        return self.slots == "warm" or self.target_lora == "mixed" or self.drafter_lora == "dynamic"

    def values(self) -> dict[str, str]:
        """Axis to value."""
        return asdict(self)


class Block(StrictModel):
    """Cells that are measured: all combinations of the listed values, meaningless ones left out."""

    why: str
    method: list[Method] = Field(min_length=1)
    target_lora: list[TargetLora] = Field(default=["none"], min_length=1)
    drafter_lora: list[DrafterLora] = Field(default=["none"], min_length=1)
    sampling: list[Sampling] = Field(default=["greedy"], min_length=1)
    prefix_cache: list[Switch] = Field(default=["off"], min_length=1)
    execution: list[Execution] = Field(default=["eager"], min_length=1)
    slots: list[Slots] = Field(default=["warm"], min_length=1)

    def cells(self) -> Iterator[Cell]:
        """In the order of the axes."""
        for values in itertools.product(*(getattr(self, axis) for axis in AXES)):
            cell = Cell(*values)
            if cell.meaningful:
                yield cell


class Models(StrictModel):
    """How the tiny models differ from each other."""

    drafter_noise: float = Field(gt=0)
    dflash_steps: PositiveInt
    adapter_rank: Literal[8, 16]
    target_adapter_size: float = Field(gt=0)
    drafter_adapter_size: float = Field(gt=0)


class Workload(StrictModel):
    """What every cell is asked."""

    num_speculative_tokens: int = Field(ge=1, le=8)
    prompts: PositiveInt
    prompt_tokens: PositiveInt
    block_size: Literal[32, 64, 128]
    requests: PositiveInt
    max_tokens: PositiveInt
    temperature: float = Field(gt=0, le=2.0)
    samples: int = Field(ge=200)
    sample_tokens: int = Field(ge=2, le=4)


class Limits(StrictModel):
    """What decides a verdict, fixed before the run."""

    accepted: PositiveInt
    near_tie_nats: float = Field(ge=0)
    deviations: float = Field(gt=0)
    seconds: float = Field(gt=0, description="of one cell in one column")


class Phase0Params(StrictModel):
    """``params/phase0_runtime.yaml``."""

    schema_: Literal["lora-spec-phase0/1"] = Field(alias="schema")
    experiment: str
    tier: Literal["pocket"]
    phase: Literal["phase0"]
    seed: int
    vllm: str
    models: Models
    workload: Workload
    limits: Limits
    blocks: list[Block] = Field(min_length=1)

    @model_validator(mode="after")
    def _bounded(self) -> Phase0Params:
        count = len(self.cells())
        if not 1 <= count <= MAX_CELLS:
            raise ValueError(f"the blocks hold {count} cells; at most {MAX_CELLS} run in an hour")
        return self

    def cells(self) -> list[Cell]:
        """The measured cells, each once, in the order of the blocks."""
        return list(dict.fromkeys(cell for block in self.blocks for cell in block.cells()))

    def settings(self) -> dict[str, Any]:
        """All that decides a cell's numbers: which other cells are measured does not."""
        config = self.model_dump(mode="json", by_alias=True)
        del config["blocks"]
        return config


def full_matrix() -> list[Cell]:
    """Every combination of the axes, meaningful or not."""
    return [Cell(*values) for values in itertools.product(*AXES.values())]


def load_phase0(path: str = PARAMS) -> Phase0Params:
    """Read and check the parameter file, relative to ``params/``."""
    return load_params(Phase0Params, path)
