"""Train the declared drafter: taps, loop, held-out accuracy, export, record."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_spec.errors import EvidenceError, exit_status
from lora_spec.files import canonical_sha256, remove_stale_temporaries
from lora_spec.models import load_models
from lora_spec.paths import rel
from lora_spec.provenance import EvidenceClass, Record, load_record, new_record, write_record
from lora_spec.queue import QueueReport, Say, Unit, run_queue
from lora_spec.substrate.dflash.config import (
    PHASE,
    TIER,
    DflashParams,
    load_dflash,
    records_dir,
    work_dir,
)
from lora_spec.substrate.dflash.data import HELDOUT, load_sequences, unit_names, unit_path
from lora_spec.substrate.dflash.export import drafter_weights_sha256, export_drafter
from lora_spec.substrate.dflash.generate import compute_alike
from lora_spec.substrate.dflash.heldout import heldout_accuracy
from lora_spec.substrate.dflash.optimise import Material, Reader, Trainer
from lora_spec.substrate.dflash.prompts import unit_seed
from lora_spec.substrate.dflash.taps import TapStore, run_taps
from lora_spec.substrate.dflash.weights import (
    checkpoint_weights,
    drafter_shape,
    initial_parameters,
    tap_scale,
)
from lora_spec.substrate.model_folders import WEIGHTS, model_dir, require_model

if TYPE_CHECKING:
    import torch

EXPERIMENT = "dflash_training"
_SCALE_ROWS = 256


def training_path() -> Path:
    """Record of the training."""
    return records_dir() / "training.json"


def training_config(params: DflashParams) -> dict[str, Any]:
    """What decides the drafter, apart from the sequences' bytes."""
    return {
        "target": params.target,
        "drafter": params.drafter,
        "geometry": load_models().model(params.drafter).geometry.model_dump(),
        "seed": params.seed,
        "prompt": params.data.prompt,
        "model": params.model.model_dump(mode="json"),
        "train": params.train.model_dump(mode="json"),
    }


def training_revisions(params: DflashParams) -> dict[str, Any]:
    """Immutable identities of what training reads."""
    tables = {name: sorted(load_record(unit_path(name)).files.values()) for name in unit_names(params)}
    target = {"key": params.target, "sha256": load_models().model(params.target).weights_sha256}
    return {"target": target, "sequences": canonical_sha256(tables)}


def find_training_problem(params: DflashParams) -> str | None:
    """Why the drafter's folder is not the declared training's result, or None when it is."""
    if not training_path().exists():
        return "to do"
    try:
        record = load_record(training_path())
        current = record.config == training_config(params)
        current = current and record.revisions == training_revisions(params)
    except EvidenceError as error:
        return error.what
    if not current:
        return "made from other parameters"
    if drafter_weights_sha256(params) != record.results["weights_sha256"]:
        return "the drafter's folder does not hold the recorded weights"
    return None


def run_training(params: DflashParams, *, workers: int = 2) -> QueueReport:
    """Compute the taps, ``workers`` shards at a time, then train, in one process of one thread.

    Raises:
        QueueError: a step failed; what was done is kept.
        EvidenceError: the sequences are not there.
    """
    if find_training_problem(params) is not None:
        run_taps(params, workers=workers)
    unit = Unit(
        name="train",
        argv=[sys.executable, "-m", __name__],
        is_done=lambda: find_training_problem(params) is None,
    )
    return run_queue([unit], workers=1, threads_per_worker=1, log_dir=work_dir() / "logs")


def load_material(params: DflashParams, names: Sequence[str]) -> Material:
    """Sequences of ``names`` with their taps, which must be there."""
    import torch

    sequences = load_sequences(params, names)
    return Material(
        tokens=torch.from_numpy(sequences.tokens.astype(np.int64)),
        lengths=torch.from_numpy(sequences.lengths.astype(np.int64)),
        rows=TapStore(params, names).rows,
        first=params.data.prompt,
    )


def load_reader(params: DflashParams) -> tuple[Reader, torch.Tensor]:
    """Embeddings and head of the target in bfloat16, and its final norm's weight."""
    from safetensors import safe_open

    with safe_open(require_model(params.target) / WEIGHTS, framework="pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
        head = file.get_tensor("lm_head.weight") if "lm_head.weight" in file.keys() else embedding  # noqa: SIM118
        norm = file.get_tensor("model.norm.weight")
    return Reader(drafter_shape(params), embedding, head, params.model.mask_token_id), norm


def make_trainer(params: DflashParams, material: Material, reader: Reader, norm: torch.Tensor) -> Trainer:
    """A run at its first step, with one thread and deterministic kernels."""
    import torch

    compute_alike()
    generator = torch.Generator().manual_seed(unit_seed(params.seed, "parameters"))
    parameters = initial_parameters(
        reader.shape,
        norm.float() * params.train.final_norm_scale,
        std=params.train.initial_std,
        generator=generator,
    )
    rows = range(min(_SCALE_ROWS, len(material.tokens)))
    scale = tap_scale(material.rows(rows)[0], material.lengths[: len(rows)])

    def weights_of(trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return checkpoint_weights(trained, reader.shape, scale, reader.head.dtype)

    return Trainer(parameters, weights_of, reader, material, params.train, params.seed)


def train_drafter(params: DflashParams, say: Say = lambda line: None) -> Record:
    """Train in this process, continuing from the last checkpoint, and write folder and record.

    Raises:
        EvidenceError: the sequences are not there.
        CheckpointError: the loss is not finite.
    """
    config, revisions = training_config(params), training_revisions(params)
    reader, norm = load_reader(params)
    names = unit_names(params)
    heldout = load_material(params, [HELDOUT])
    trainer = make_trainer(params, load_material(params, names[:-1]), reader, norm)
    folder = work_dir() / "training"
    remove_stale_temporaries(folder)
    checkpoint = folder / f"{canonical_sha256({'config': config, 'revisions': revisions})[:16]}.safetensors"
    if checkpoint.is_file():
        trainer.load(checkpoint)
        say(f"continued from step {trainer.step}")

    def report(run: Trainer) -> dict[str, Any]:
        weights = run.weights_of(run.parameters)
        found = heldout_accuracy(weights, reader, heldout, drafts=min(params.train.drafts))
        say(f"step {run.step} of {params.train.steps}, {run.seconds:.0f} CPU-s, held-out {found}")
        return found

    trainer.run(checkpoint, report)
    digest = export_drafter(params, trainer.weights_of(trainer.parameters), model_dir(params.drafter))
    record = new_record(
        experiment=EXPERIMENT,
        tier=TIER,
        phase=PHASE,
        evidence_class=EvidenceClass.MEASURED,
        config=config,
        seed=params.seed,
        revisions=revisions,
        results={
            "weights_sha256": digest,
            "parameters": sum(p.numel() for p in trainer.parameters.values()),
            "cpu_seconds": round(trainer.seconds, 1),
            "history": trainer.history,
        },
    )
    say(f"written: {rel(model_dir(params.drafter))}")
    return write_record(training_path(), record)


def main(argv: Sequence[str] | None = None) -> int:
    """Train in this process: ``python -m lora_spec.substrate.dflash.train``."""
    argparse.ArgumentParser(description="Train the DFlash drafter in this process.").parse_args(argv)
    return exit_status(lambda: train_drafter(load_dflash(), say=lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
