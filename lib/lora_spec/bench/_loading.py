"""Loading, swapping and keeping drafter adapters, and the same of full drafters, inside engine processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_spec.bench._pairs import WEIGHTS

if TYPE_CHECKING:
    import torch


def forget_pages(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that the next read comes from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only clean pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed(action: Any) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


# ---------------------------------------------------------------------- adapters


def _adapters(llm: Any) -> Any:
    from lora_spec.serving.draft_lora import of_proposer

    found: list[Any] = llm.collective_rpc(lambda worker: of_proposer(worker.model_runner.drafter))
    return found[0]


def keep_adapters(llm: Any, folders: Mapping[str, Path], counts: Sequence[int]) -> dict[str, Any]:
    """Load adapters into an engine that has none yet, and see what they occupy at each count.

    Returns:
        "slots_bytes": buffers of the slots, which are there from the start; "kept": per count the bytes of
        the adapters' tensors in memory and the growth of the resident set, "load_s": of each load, files
        read for the first time, checked, and ready in a slot.
    """
    from lora_spec.serving.frontend import load_draft_adapter

    adapters = _adapters(llm)
    before = resident_bytes()
    kept, load_s = [], []
    for number, (name, folder) in enumerate(list(folders.items())[: max(counts)], 1):
        forget_pages(folder)
        load_s.append(_timed(lambda name=name, folder=folder: load_draft_adapter(llm, name, folder)))
        if number in counts:
            kept.append(
                {
                    "adapters": number,
                    "tensor_bytes": adapters.cached_bytes(),
                    "resident_growth_bytes": resident_bytes() - before,
                }
            )
    return {"slots_bytes": adapters.slots_bytes(), "kept": kept, "load_s": load_s}


def swap_adapters(llm: Any, names: Sequence[str], slots: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of bringing one adapter into a slot, for adapters that `keep_adapters` loaded.

    Returns:
        "slot": from memory into the slot of the least recently used one; "reload": out of memory, and
        loaded again from its (cached) files.
    """
    from lora_spec.serving.frontend import FrontDoor

    adapters, front = _adapters(llm), FrontDoor.of(llm).adapters()
    chosen = [front[name] for name in list(names)[: slots + 1]]
    times: dict[str, list[float]] = {"slot": [], "reload": []}
    for adapter in chosen:
        adapters.load(adapter)
    for number in range(repetitions):
        # One more adapter than slots, in turn: each has lost its slot when it is wanted again.
        adapter = chosen[number % len(chosen)]
        times["slot"].append(_timed(lambda adapter=adapter: adapters.load(adapter)))
    for number in range(repetitions):
        adapter = chosen[number % len(chosen)]

        def again(adapter: Any = adapter) -> None:
            adapters.unload(adapter)
            adapters.load(adapter)

        times["reload"].append(_timed(again))
    return times


# ---------------------------------------------------------------------- full drafters


def reload_drafter(llm: Any, folder: Path, repetitions: int) -> dict[str, list[float]]:
    """Seconds of giving the running drafter other weights in place.

    vLLM's own `reload_weights` leaves a DFlash drafter broken on CPU (its fused context weight is built from
    layers whose weights are packed away already), so this does what it means to: fresh parameters, the
    model's `load_weights`, and packing for the CPU kernels.

    Returns:
        "cold": file read from the disk; "warm": from the page cache; "copy": the same bytes copied into
        tensors that are there, which no way of reloading can beat.
    """
    import torch
    from safetensors.torch import load_file

    room = {name: torch.empty_like(weight) for name, weight in load_file(folder / WEIGHTS).items()}
    times: dict[str, list[float]] = {"cold": [], "warm": [], "copy": []}

    def copy() -> None:
        for name, weight in load_file(folder / WEIGHTS).items():
            room[name].copy_(weight)

    def reload() -> None:
        llm.collective_rpc(_reload, args=(folder,))

    for _ in range(repetitions):
        forget_pages(folder)
        times["cold"].append(_timed(reload))
        times["warm"].append(_timed(reload))
        times["copy"].append(_timed(copy))
    return times


def _reload(worker: Any, folder: Path) -> None:
    from safetensors.torch import load_file
    from vllm.model_executor.layers import linear

    model = worker.model_runner.drafter.model
    state = load_file(folder / WEIGHTS)
    layers = [module for module in model.modules() if isinstance(module, linear.LinearBase)]
    for layer in layers:
        first = layer.weight_loader
        second = type(layer.quant_method).__name__ in linear.WEIGHT_LOADER_V2_SUPPORTED
        layer.quant_method.create_weights(
            layer,
            getattr(layer, "input_size_per_partition", layer.input_size),
            layer.output_partition_sizes,
            layer.input_size,
            layer.output_size,
            layer.params_dtype,
            weight_loader=getattr(layer, "weight_loader_v2", first) if second else first,
        )
    model.load_weights(state.items())
    if any("embed_tokens" in name for name in state):  # its own, and its head's with them
        layers.append(model.lm_head)
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)


def keep_drafters(llm: Any, folder: Path, counts: Sequence[int], limit: int) -> list[dict[str, Any]]:
    """Keep N copies of a full drafter's weights in memory.

    Args:
        limit: bytes; counts that need more are computed from the size of one.

    Returns:
        Per count the bytes of the tensors, the growth of the resident set, and whether it was measured.
    """
    from safetensors.torch import load_file

    def load() -> dict[str, torch.Tensor]:
        # Copies, because what the loader returns are pages of the one file.
        return {name: weight.clone() for name, weight in load_file(folder / WEIGHTS).items()}

    before, kept, drafters = resident_bytes(), [], []
    one = sum(weight.nbytes for weight in load().values())
    for count in counts:
        row = {"drafters": count, "tensor_bytes": count * one, "measured": count * one <= limit}
        if row["measured"]:
            drafters += [load() for _ in range(count - len(drafters))]
            row["resident_growth_bytes"] = resident_bytes() - before
        kept.append(row)
    return kept
