"""The drafter's training sequences: tokens the target wrote, one record a shard.

Only tokens are kept (the target's hidden states follow from them, see :mod:`taps`), so the whole set is a few
megabytes and is committed: training can be repeated without generating again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_spec.errors import EvidenceError, exit_status
from lora_spec.files import canonical_sha256
from lora_spec.models import load_models
from lora_spec.paths import rel
from lora_spec.provenance import EvidenceClass, load_record, load_table, new_record, write_record
from lora_spec.queue import QueueReport, Say, Unit, run_queue
from lora_spec.substrate.dflash.config import PHASE, TIER, DflashParams, load_dflash, records_dir, work_dir
from lora_spec.substrate.dflash.prompts import (
    Prompt,
    corpora_sha256,
    heldout_prompts,
    training_prompts,
    unit_seed,
)
from lora_spec.substrate.model_folders import require_model

if TYPE_CHECKING:
    import pandas as pd

HELDOUT = "heldout"
TABLE = "sequences"
EXPERIMENT = "dflash_data"


@dataclass(frozen=True)
class Sequences:
    """Sequences in order.

    Attributes:
        tokens: uint16 [sequences, length].
        lengths: int32 [sequences], valid tokens of each row.
        domains: domain (or prompt set) of each.
        temperatures: float32 [sequences], 0 for greedy.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    domains: list[str]
    temperatures: np.ndarray


def unit_names(params: DflashParams) -> list[str]:
    """Every shard, then the held-out sequences."""
    shards = params.data.sequences // params.data.shard
    return [*(f"shard-{number:02d}" for number in range(shards)), HELDOUT]


def unit_path(name: str) -> Path:
    """Record of a shard."""
    return records_dir() / "data" / f"{name}.json"


def unit_config(params: DflashParams, name: str) -> dict[str, Any]:
    """What decides the tokens of a unit, apart from its inputs' bytes."""
    data = params.data.model_dump(mode="json")
    if name == HELDOUT:
        data = {key: data[key] for key in ("batch", "prompt", "generated", "domains")}
        data["heldout"] = params.heldout.model_dump()
    return {"unit": name, "target": params.target, "seed": params.seed, "data": data}


def unit_revisions(params: DflashParams, name: str) -> dict[str, Any]:
    """Immutable identities of what a unit reads; none of it need be built to know them."""
    weights = load_models().model(params.target).weights_sha256
    revisions: dict[str, Any] = {"target": {"key": params.target, "sha256": weights}}
    if name == HELDOUT:
        revisions["prompts"] = canonical_sha256([list(p.ids) for p in heldout_prompts(params)])
    else:
        revisions["corpora"] = corpora_sha256(params.data)
    return revisions


def find_unit_problem(params: DflashParams, name: str) -> str | None:
    """Why the record of ``name`` cannot be used, or None when it is whole and of these parameters."""
    path = unit_path(name)
    if not path.exists():
        return "to do"
    try:
        record = load_record(path)
    except EvidenceError as error:
        return error.what
    if record.config != unit_config(params, name) or record.revisions != unit_revisions(params, name):
        return "made from other parameters"
    return None


def run_data(params: DflashParams, *, workers: int = 2) -> QueueReport:
    """Generate what is not there, a shard at a time per worker, one thread each.

    Raises:
        QueueError: a shard failed; the others are kept.
        LoraSpecError: an input is missing or not as recorded.
    """
    names = unit_names(params)
    if any(find_unit_problem(params, name) for name in names):
        require_model(params.target)
        training_prompts(params)  # cut once here, not in every worker
    units = [
        Unit(
            name=name,
            argv=[sys.executable, "-m", __name__, name],
            is_done=lambda name=name: find_unit_problem(params, name) is None,
        )
        for name in names
    ]
    return run_queue(units, workers=workers, threads_per_worker=1, log_dir=work_dir() / "logs")


def unit_prompts(params: DflashParams, name: str) -> list[Prompt]:
    """Prompts of one unit, in order."""
    if name == HELDOUT:
        return heldout_prompts(params)
    number = unit_names(params).index(name)
    return training_prompts(params)[number * params.data.shard : (number + 1) * params.data.shard]


def generate_unit(params: DflashParams, name: str, say: Say = lambda line: None) -> Path:
    """Generate one unit in this process and write its record; returns the record's path."""
    import torch

    from lora_spec.substrate.dflash.generate import continue_prompts, load_target

    path = unit_path(name)
    problem = find_unit_problem(params, name)
    if problem is None:
        say(f"{name}: done before")
        return path
    prompts, data = unit_prompts(params, name), params.data
    model = load_target(require_model(params.target))
    generator = torch.Generator().manual_seed(unit_seed(params.seed, name))
    tokens, lengths = [], []
    for start in range(0, len(prompts), data.batch):
        batch = prompts[start : start + data.batch]
        rows, counts = continue_prompts(model, batch, data.generated, generator)
        tokens.append(rows.numpy().astype(np.uint16))
        lengths.append(counts.numpy().astype(np.int32))
        say(f"{name}: {start + len(batch)} of {len(prompts)} sequences")
    made = Sequences(
        np.concatenate(tokens),
        np.concatenate(lengths),
        [prompt.domain for prompt in prompts],
        np.asarray([prompt.temperature for prompt in prompts], dtype=np.float32),
    )
    record = new_record(
        experiment=EXPERIMENT,
        tier=TIER,
        phase=PHASE,
        evidence_class=EvidenceClass.MEASURED,
        config=unit_config(params, name),
        seed=params.seed,
        revisions=unit_revisions(params, name),
        covers={"domains": sorted(set(made.domains) - {"general"})},
        results=_summary(made, data.prompt),
    )
    write_record(path, record, {TABLE: _frame(made)})
    say(f"{name}: {rel(path)}")
    return path


def _frame(made: Sequences) -> pd.DataFrame:
    """Tokens cut at each row's length: what comes after is filling."""
    import pandas as pd

    return pd.DataFrame(
        {
            "domain": pd.Categorical(made.domains),
            "temperature": made.temperatures,
            "tokens": [row[:n] for row, n in zip(made.tokens, made.lengths.tolist(), strict=True)],
        }
    )


def _summary(made: Sequences, prompt: int) -> dict[str, Any]:
    """Counts for the record; ``unique_ratio`` by temperature shows how much a continuation loops."""
    ratios: dict[str, list[float]] = {}
    for row, n, t in zip(made.tokens, made.lengths.tolist(), made.temperatures.tolist(), strict=True):
        ratios.setdefault(f"{t:.2g}", []).append(len(set(row[prompt:n].tolist())) / (n - prompt))
    return {
        "sequences": len(made.lengths),
        "generated_tokens": int((made.lengths - prompt).sum()),
        "ended_early": int((made.lengths < made.tokens.shape[1]).sum()),
        "unique_ratio": {name: round(float(np.mean(values)), 4) for name, values in sorted(ratios.items())},
    }


def load_sequences(params: DflashParams, names: Sequence[str]) -> Sequences:
    """The sequences of ``names``, in that order, rows filled to the full length with zeros.

    Raises:
        EvidenceError: a shard is missing, damaged, or made from other parameters.
    """
    frames = []
    for name in names:
        problem = find_unit_problem(params, name)
        if problem:
            raise EvidenceError(
                f"sequences of {name} cannot be used: {problem}",
                where=rel(unit_path(name)),
                fix="run: lora-spec dflash --execute data",
            )
        frames.append(load_table(unit_path(name), TABLE))
    rows = [row for frame in frames for row in frame["tokens"]]
    tokens = np.zeros((len(rows), params.data.length), dtype=np.uint16)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return Sequences(
        tokens,
        np.asarray([len(row) for row in rows], dtype=np.int32),
        [str(name) for frame in frames for name in frame["domain"]],
        np.concatenate([frame["temperature"].to_numpy(dtype=np.float32) for frame in frames]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Generate one unit in this process: ``python -m lora_spec.substrate.dflash.data NAME``."""
    parser = argparse.ArgumentParser(description="Generate one shard of the drafter's data in this process.")
    parser.add_argument("name", choices=unit_names(load_dflash()))
    name = parser.parse_args(argv).name
    return exit_status(lambda: generate_unit(load_dflash(), name, say=lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
