"""Speculative decoding at temperature > 0 on vLLM's CPU backend.

`vllm/utils/cpu_triton_utils.py::_expand_kernel_impl` (0.32) hands its C++ kernel `_ensure_int64(output)`.
For anything but int64 that is a copy, so the per-token temperatures, top-p and top-k that the rejection
sampler asks for remain uninitialised memory: the target is sampled at a random temperature, silently.
`install` replaces the caller, `rejection_sampler.expand_batch_to_tokens`, by a plain torch version that is
right for every dtype. It asks the stock kernel for a tiny expansion first and steps aside where the answer is
right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_spec.serving._patching import Fix

if TYPE_CHECKING:
    import torch


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Repeat each request's value over its tokens.

    Args:
        x: [batch], any dtype.
        cu_num_tokens: [batch] integers, the running total of the requests' token counts.
        num_tokens: the total.
        replace_from: values of x equal to this ...
        replace_to: ... become this.

    Returns:
        [num_tokens] of x's dtype: x = [a, b, c] with totals [2, 5, 6] gives [a, a, b, b, b, c].
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.long)
    values = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype, device=x.device), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def stock_is_wrong() -> bool:
    """Whether this vLLM's own expansion gives wrong values (asked, not looked up by version)."""
    import torch
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return False  # the fault is in the C++ stand-in for Triton
    import vllm._custom_ops  # noqa: F401  (loads the C++ kernels)
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    totals = torch.tensor([2, 5, 6], dtype=torch.int32)
    for x in (torch.tensor([0.75, 0.0, 2.5]), torch.tensor([7, 0, 9], dtype=torch.int32)):
        # Filled, not empty: recycled memory could hold the right answer.
        out = x.new_full((6,), -1)
        _expand_kernel_impl(out, x, totals, 0, 1)
        if not torch.equal(out, expand_batch_to_tokens(x, totals, 6, 0, 1)):
            return True
    return False


def _put() -> None:
    from vllm.v1.sample import rejection_sampler

    _FIX.replace(rejection_sampler, "expand_batch_to_tokens", expand_batch_to_tokens)


_FIX = Fix("expand", _put, needed=stock_is_wrong)
install, uninstall, status = _FIX.install, _FIX.uninstall, _FIX.status
