"""Context keys of a DFlash drafter, each layer's normed with its own weights, on vLLM's CPU backend.

A DFlash drafter norms the context's keys of all layers in one call, `_custom_ops.rms_norm` with a weight of
[layers, head size] that the outermost index of the input selects from (0.32,
`model_executor/models/qwen3_dflash.py::_normalize_context_k`). The CPU kernel knows one weight only: it reads
the first row for every layer, silently. Drafters of one layer, and those whose layers have equal `k_norm`,
are not touched; others draft from wrong keys, so that acceptance is not theirs while the output stays right.
`install` makes one call a layer out of it. It asks the stock kernel for two rows first and steps aside where
both are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_spec.serving._patching import Fix

if TYPE_CHECKING:
    import torch

_LANES = 64  # the kernel takes whole vectors only


def grouped(stock: Callable[..., None]) -> Callable[..., None]:
    """`_custom_ops.rms_norm` that also knows one weight a group.

    Args:
        stock: vLLM's, right for one weight.
    """

    def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
        # weight: [size] or None, or [groups, size], with as many groups as the first axis of input is long.
        if weight is None or weight.dim() < 2:
            stock(out, input, weight, epsilon)
            return
        for group in range(weight.shape[0]):
            stock(out[group], input[group], weight[group], epsilon)

    return rms_norm


def stock_is_wrong() -> bool:
    """Whether this vLLM's own kernel takes the first group's weight for all (asked, not looked up)."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm import _custom_ops

    ones = torch.ones(2, 1, _LANES)
    weight = torch.tensor([[1.0], [2.0]]).expand(2, _LANES).contiguous()
    out = torch.empty_like(ones)
    _FIX.original(_custom_ops, "rms_norm")(out, ones, weight, 0.0)
    return not torch.allclose(out[:, 0], weight)


def _put() -> None:
    from vllm import _custom_ops

    _FIX.replace(_custom_ops, "rms_norm", grouped(_FIX.original(_custom_ops, "rms_norm")))


_FIX = Fix("context_norms", _put, needed=stock_is_wrong)
install, uninstall, status = _FIX.install, _FIX.uninstall, _FIX.status
