"""LoRA kernels for vLLM's CPU backend that multiply once per adapter instead of once per row.

The stock kernels (`vllm/lora/ops/torch_ops/lora_ops.py`, 0.32) gather a copy of the adapter's weights for
every row, and index the stack of adapters with -1 for rows of the base model, which is the *last* adapter:
base requests beside LoRA requests are silently wrong. Here rows are grouped by adapter, each group is one
matrix product, and base rows are left as they are. Dtypes are stock's: everything is computed in the dtype of
the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from lora_spec.serving._patching import Fix

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=64)
def _groups(indices: bytes) -> tuple[tuple[int, slice | torch.Tensor], ...]:
    """Adapters and their rows, for int64 indices as bytes: a slice where contiguous, else an index tensor."""
    import numpy as np
    import torch

    adapters = np.frombuffer(indices, dtype=np.int64)
    groups: list[tuple[int, slice | torch.Tensor]] = []
    for adapter in np.unique(adapters):
        if adapter < 0:
            continue
        rows = np.flatnonzero(adapters == adapter)
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            groups.append((int(adapter), slice(first, last + 1)))
        else:
            groups.append((int(adapter), torch.from_numpy(rows)))
    return tuple(groups)


def _apply(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    columns: slice,
    scale: float | None,
    add: bool,
) -> None:
    """output[rows, columns] (+)= scale * inputs[rows] @ weights[adapter].T for each adapter's rows.

    Args:
        inputs: [rows, in].
        weights: [adapters, out, in] or [adapters, 1, out, in].
        output: [rows, >= columns.stop], changed in place; its dtype is the dtype of the computation.
        indices: int64 [rows], -1 for the base model.
        columns: columns of output, as many as out, or fewer (padding of the adapter is dropped).
        scale: factor of the product, None for one.
        add: add to the output or overwrite it.

    Raises:
        ValueError: the indices are of other rows than the inputs (stock's einsum fails then, too).
    """
    import torch

    if len(indices) != len(inputs):
        raise ValueError(f"LoRA indices of {len(indices)} rows for {len(inputs)} rows")
    if weights.dim() == 4:
        weights = weights.squeeze(1)
    width = columns.stop - columns.start
    for adapter, rows in _groups(indices.to(torch.int64).contiguous().numpy().tobytes()):
        product = torch.nn.functional.linear(
            inputs[rows].to(output.dtype), weights[adapter, :width].to(output.dtype)
        )
        if scale is not None:
            product = product.mul_(scale)
        if isinstance(rows, slice):
            target = output[rows, columns]
            if add:
                target += product
            else:
                target.copy_(product)
        elif add:
            output[:, columns].index_add_(0, rows, product)
        else:
            output[:, columns].index_copy_(0, rows, product)


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """output[:, :r] = scaling * inputs @ A.T for rows with an adapter (the first LoRA product)."""
    columns = slice(0, lora_b_weights.shape[-2])
    scale = None if scaling == 1.0 else scaling
    _apply(inputs, lora_b_weights, output_tensor, lora_indices_tensor, columns, scale, add=False)


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """output (+)= inputs @ B.T for rows with an adapter; columns that only one side pads are left alone."""
    columns = slice(0, min(lora_b_weights.shape[-2], output_tensor.shape[1]))
    _apply(inputs, lora_b_weights, output_tensor, lora_indices_tensor, columns, None, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """output[:, offset:offset+size] (+)= inputs @ B.T for rows with an adapter."""
    columns = slice(slice_offset, slice_offset + slice_size)
    _apply(inputs, lora_b_weights, output_tensor, lora_indices_tensor, columns, None, add_inputs)


KERNELS = (bgmv_shrink, bgmv_expand, bgmv_expand_slice)


def stock_kernels() -> dict[str, Callable[..., None]]:
    """vLLM's own kernels by name, installed or not (for comparisons)."""
    from vllm.lora.ops.torch_ops import lora_ops

    return {kernel.__name__: _FIX.original(lora_ops, kernel.__name__) for kernel in KERNELS}


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _put() -> None:
    # The segmented `sgmv_*` kernels of the same module call the `bgmv_*` ones through its globals and follow.
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for kernel in KERNELS:
        for module in (lora_ops, punica_cpu):
            _FIX.replace(module, kernel.__name__, kernel)


_FIX = Fix("grouped_lora", _put, needed=_on_cpu)
install, uninstall, status = _FIX.install, _FIX.uninstall, _FIX.status
