"""The target's hidden states over the training sequences: computed once, kept on disk, read by row.

One teacher-forced pass in bfloat16 per sequence. A pass in every training step would cost as much as the rest
of the step and is repeated each time a sequence comes round, so they are kept: about half a megabyte a
sequence, in the cache, and made again where they are missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_spec.errors import IntegrityError, exit_status
from lora_spec.files import atomic_path, canonical_sha256, remove_stale_temporaries
from lora_spec.models import load_models
from lora_spec.provenance import load_record
from lora_spec.queue import QueueReport, Say, Unit, run_queue
from lora_spec.substrate.dflash.config import DflashParams, load_dflash, work_dir
from lora_spec.substrate.dflash.data import load_sequences, unit_names, unit_path
from lora_spec.substrate.model_folders import require_model

if TYPE_CHECKING:
    import torch

_BATCH = 32


def row_dtype(params: DflashParams) -> np.dtype:
    """Layout of one sequence on disk. Positions go to the last but one: nothing follows the last token.

    ``taps``: bfloat16 bits, [length - 1, taps * hidden]. ``top_ids`` and ``top_logprobs``: the target's most
    probable next tokens after each position, [length - 1, top]; zeros in the prompt, where nothing is learnt.
    """
    geometry = load_models().model(params.target).geometry
    positions, top = params.data.length - 1, params.train.distill.top
    channels = len(params.model.taps) * geometry.hidden_size
    return np.dtype(
        [
            ("taps", "<u2", (positions, channels)),
            ("top_ids", "<u2", (positions, top)),
            ("top_logprobs", "<f2", (positions, top)),
        ]
    )


def taps_path(params: DflashParams, name: str) -> Path:
    """File of one shard; its name follows from all that decides its content."""
    key = canonical_sha256(
        {
            "sequences": load_record(unit_path(name)).files,
            "target": load_models().model(params.target).weights_sha256,
            "taps": list(params.model.taps),
            "top": params.train.distill.top,
        }
    )
    return work_dir() / "taps" / f"{name}-{key[:16]}.bin"


def has_taps(params: DflashParams, name: str) -> bool:
    """Whether the shard's file is there and whole."""
    path, rows = taps_path(params, name), load_record(unit_path(name)).results["sequences"]
    return path.is_file() and path.stat().st_size == rows * row_dtype(params).itemsize


def run_taps(params: DflashParams, *, workers: int = 2) -> QueueReport:
    """Compute what is not there, a shard at a time per worker, one thread each.

    Raises:
        QueueError: a shard failed; the others are kept.
        EvidenceError: the sequences are not there.
    """
    names = unit_names(params)
    load_sequences(params, names)
    remove_stale_temporaries(work_dir() / "taps")
    units = [
        Unit(
            name=f"taps-{name}",
            argv=[sys.executable, "-m", __name__, name],
            is_done=lambda name=name: has_taps(params, name),
        )
        for name in names
    ]
    return run_queue(units, workers=workers, threads_per_worker=1, log_dir=work_dir() / "logs")


def compute_taps(params: DflashParams, name: str, say: Say = lambda line: None) -> Path:
    """Compute one shard in this process; returns its file."""
    import torch

    from lora_spec.substrate.dflash.generate import load_target

    path, layout = taps_path(params, name), row_dtype(params)
    if has_taps(params, name):
        say(f"{name}: done before")
        return path
    model = load_target(require_model(params.target))
    tokens = torch.from_numpy(load_sequences(params, [name]).tokens.astype(np.int64))
    with atomic_path(path) as temporary, open(temporary, "wb") as handle:
        for start in range(0, len(tokens), _BATCH):
            batch, first = tokens[start : start + _BATCH, :-1], params.data.prompt
            taps, ids, logprobs = read_target(
                model, batch, params.model.taps, params.train.distill.top, first
            )
            rows = np.zeros(len(taps), dtype=layout)
            rows["taps"] = taps.view(torch.int16).numpy().view(np.uint16)
            rows["top_ids"][:, first:] = ids.numpy()
            rows["top_logprobs"][:, first:] = logprobs.numpy()
            handle.write(rows.tobytes())
        say(f"{name}: {len(tokens)} sequences")
    return path


def read_target(
    model: Any, tokens: torch.Tensor, layers: Sequence[int], top: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass of the target over ``tokens``, int64 [batch, length].

    Returns:
        Outputs of ``layers`` side by side, [batch, length, layers * hidden], in the target's dtype; from
        position ``first`` on the ``top`` most probable next tokens, int64, and their log-probabilities in
        nats, float32, both [batch, length - first, top].
    """
    import torch

    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [model.model.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        with torch.inference_mode():
            last = model.model(tokens, use_cache=False).last_hidden_state
            best = [_best(row @ model.lm_head.weight.T, top) for row in last[:, first:].contiguous()]
    finally:
        for hook in hooks:
            hook.remove()
    logprobs, ids = (torch.stack(parts) for parts in zip(*best, strict=True))
    return torch.cat([seen[layer] for layer in layers], dim=-1), ids, logprobs


def _best(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    values, ids = logits.topk(top, dim=-1)
    return values - logits.logsumexp(-1, keepdim=True), ids


class TapStore:
    """Rows of all shards by sequence number, read with ``pread`` so that pages do not count as memory."""

    def __init__(self, params: DflashParams, names: Sequence[str]) -> None:
        self._layout = row_dtype(params)
        self._files = [os.open(taps_path(params, name), os.O_RDONLY | os.O_CLOEXEC) for name in names]
        self._shard = params.data.shard

    def rows(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the sequences ``numbers``, in that order.

        Returns:
            Taps, bfloat16 [n, length - 1, channels]; the target's most probable tokens, int64, and their
            log-probabilities, float32, both [n, length - 1, top].

        Raises:
            IntegrityError: a file is shorter than it was.
        """
        import torch

        size = self._layout.itemsize
        data = bytearray(size * len(numbers))
        view = memoryview(data)
        for place, number in enumerate(numbers):
            shard, row = divmod(number, self._shard)
            got = os.preadv(self._files[shard], [view[place * size : (place + 1) * size]], row * size)
            if got != size:
                raise IntegrityError("the cache of taps was cut", where=f"sequence {number}", fix="delete it")
        rows = np.frombuffer(data, dtype=self._layout)
        taps = torch.from_numpy(np.ascontiguousarray(rows["taps"]).view(np.int16)).view(torch.bfloat16)
        ids = torch.from_numpy(rows["top_ids"].astype(np.int64))
        return taps, ids, torch.from_numpy(rows["top_logprobs"].astype(np.float32))

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []


def main(argv: Sequence[str] | None = None) -> int:
    """Compute one shard in this process: ``python -m lora_spec.substrate.dflash.taps NAME``."""
    parser = argparse.ArgumentParser(description="Compute the target's hidden states over one shard.")
    parser.add_argument("name", choices=unit_names(load_dflash()))
    name = parser.parse_args(argv).name
    return exit_status(lambda: compute_taps(load_dflash(), name, say=lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
