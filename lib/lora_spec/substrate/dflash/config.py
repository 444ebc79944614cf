"""``params/dflash.yaml``: what the drafter is trained on, its shape, its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lora_spec.models import Key
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import cache_dir, results_dir

PARAMS_FILE = "dflash.yaml"
TIER, PHASE = "pocket", "phase2"
Temperature = Annotated[float, Field(ge=0, le=2)]


class DataParams(StrictModel):
    """Training sequences: prompts of the training documents, continued by the target.

    Attributes:
        sequences: in all. shard: sequences a unit of work. batch: sequences generated together.
        prompt: tokens of a prompt. generated: tokens of its continuation at most.
        temperatures: by turns, each domain for itself; 0 is greedy.
        domains: by turns. mixture: domains of every ``mixture_every``-th sequence, by turns.
    """

    sequences: PositiveInt
    shard: PositiveInt
    batch: PositiveInt
    prompt: Annotated[int, Field(ge=1, le=512)]
    generated: Annotated[int, Field(ge=2, le=512)]
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)]
    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    mixture: Annotated[tuple[str, ...], Field(min_length=1)]
    mixture_every: Annotated[int, Field(ge=2)]

    @model_validator(mode="after")
    def _whole_shards(self) -> DataParams:
        if self.sequences % self.shard or self.shard % self.batch:
            raise ValueError("sequences must be whole shards, and a shard whole batches")
        return self

    @property
    def length(self) -> int:
        """Tokens of a sequence: prompt and continuation."""
        return self.prompt + self.generated


class Heldout(StrictModel):
    """Windows of every frozen prompt set whose greedy continuations training reports its accuracy on."""

    start: NonNegativeInt
    count: PositiveInt


class DflashParams(StrictModel):
    """``params/dflash.yaml``."""

    schema_: Annotated[str, Field(alias="schema", pattern=r"^lora-spec-dflash/1$")]
    target: Key
    drafter: Key
    seed: NonNegativeInt
    data: DataParams
    heldout: Heldout


def load_dflash(path: Path | str = PARAMS_FILE) -> DflashParams:
    """Read and check ``params/dflash.yaml``."""
    return load_params(DflashParams, path)


def records_dir() -> Path:
    """Where the records of data, training and evaluation go."""
    return results_dir(TIER, PHASE) / "dflash"


def work_dir() -> Path:
    """What can be made again: cut prompts, taps, checkpoints, logs."""
    return cache_dir() / "dflash"
