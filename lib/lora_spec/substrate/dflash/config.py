"""``params/dflash.yaml``: what the drafter is trained on, its shape, its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lora_spec.models import Key
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import cache_dir, results_dir

PARAMS_FILE = "dflash.yaml"
TIER, PHASE = "pocket", "phase2"
Share = Annotated[float, Field(ge=0, lt=1)]
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


class ModelParams(StrictModel):
    """Shape of the drafter beside its geometry in ``params/models.yaml``.

    Attributes:
        taps: layers of the target whose outputs it reads, counted from 0.
        mask_token_id: token at positions to draft; its embedding is the target's.
        rms_norm_eps, rope_theta, max_position_embeddings: as in the target's config.
    """

    taps: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    mask_token_id: NonNegativeInt
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    max_position_embeddings: PositiveInt

    @model_validator(mode="after")
    def _taps_ascend(self) -> ModelParams:
        if list(self.taps) != sorted(set(self.taps)):
            raise ValueError("taps must ascend")
        return self


class Distill(StrictModel):
    """The target's ``top`` most probable tokens as soft labels; their loss counts ``weight``."""

    top: Annotated[int, Field(ge=1, le=256)]
    weight: Annotated[float, Field(ge=0)]


class TrainParams(StrictModel):
    """Training of the drafter.

    Attributes:
        steps: optimiser steps, which alone end it.
        batch: sequences a step. anchors: blocks of each sequence.
        drafts: drafted tokens of a block, by turns of steps.
        position_decay: weight of position i of a block is its i-th power.
        learning_rate, warmup_steps, final_rate: AdamW's rate rises linearly, then falls as a cosine to
            ``final_rate`` of it.
        initial_std: of matrices at the start; those of ``fc`` have 1/√inputs.
        final_norm_scale: the final norm starts at this times the target's.
        hot, random: tokens of the sampled softmax (see :mod:`loss`).
        save_every: steps between checkpoints, at each of which the held-out accuracy is taken.
    """

    steps: PositiveInt
    batch: PositiveInt
    anchors: PositiveInt
    drafts: Annotated[tuple[Annotated[int, Field(ge=1, le=32)], ...], Field(min_length=1)]
    position_decay: Annotated[float, Field(gt=0, le=1)]
    learning_rate: PositiveFloat
    warmup_steps: PositiveInt
    final_rate: Annotated[float, Field(ge=0, le=1)]
    betas: tuple[Share, Share]
    weight_decay: Annotated[float, Field(ge=0)]
    max_grad_norm: PositiveFloat
    initial_std: PositiveFloat
    final_norm_scale: PositiveFloat
    hot: NonNegativeInt
    random: PositiveInt
    distill: Distill
    save_every: PositiveInt


class DflashParams(StrictModel):
    """``params/dflash.yaml``."""

    schema_: Annotated[str, Field(alias="schema", pattern=r"^lora-spec-dflash/1$")]
    target: Key
    drafter: Key
    seed: NonNegativeInt
    data: DataParams
    heldout: Heldout
    model: ModelParams
    train: TrainParams

    @model_validator(mode="after")
    def _blocks_fit(self) -> DflashParams:
        if max(self.train.drafts) + self.train.anchors > self.data.generated:
            raise ValueError(
                "a continuation must hold as many anchors as a step takes, and a block after each"
            )
        return self


def load_dflash(path: Path | str = PARAMS_FILE) -> DflashParams:
    """Read and check ``params/dflash.yaml``."""
    return load_params(DflashParams, path)


def records_dir() -> Path:
    """Where the records of data, training and evaluation go."""
    return results_dir(TIER, PHASE) / "dflash"


def work_dir() -> Path:
    """What can be made again: cut prompts, taps, checkpoints, logs."""
    return cache_dir() / "dflash"
