"""Merge a LoRA into a model's weights so that the bytes are the same on every machine.

ΔW = s·BA is summed in float64, one rank after the other, by element-wise operations alone: a matrix product
would sum in an order that depends on the machine, and now and then round another way to bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lora_spec.checkpoint import BaseGeometry, read_adapter
from lora_spec.errors import CheckpointError
from lora_spec.paths import rel


def merge_adapter(state: dict[str, Any], adapter: Path, geometry: BaseGeometry) -> dict[str, Any]:
    """``state`` with the LoRA of the folder ``adapter`` added to its weights.

    Args:
        state: parameter name to torch tensor; not changed.
        adapter: PEFT folder.
        geometry: shapes of the model in ``state``.

    Raises:
        CheckpointError: the adapter is not readable, not a plain LoRA of this model, or names a weight that
            ``state`` lacks.
    """
    import torch

    read = read_adapter(adapter, geometry)
    if read.abstains:
        raise CheckpointError(f"cannot be merged: {read.reasons[0].sentence}", where=rel(adapter))
    merged = dict(state)
    for module in read.modules:
        name = f"{module.name}.weight"
        if name not in state:
            raise CheckpointError(f"the model has no {name}", where=rel(adapter))
        a, b = module.read_a().astype(np.float64), module.read_b().astype(np.float64)
        total = np.zeros((b.shape[0], a.shape[1]))
        for rank in range(module.rank):
            total += b[:, rank, None] * a[rank]
        weight = state[name].to(torch.float64) + torch.from_numpy(module.scale * total)
        merged[name] = weight.to(state[name].dtype)
    return merged
