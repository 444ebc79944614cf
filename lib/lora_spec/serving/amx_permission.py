"""The kernel's permission to use AMX tiles, which vLLM's CPU attention takes for granted.

On x86 CPUs with AMX, Linux hands the tile registers out on request only. For bfloat16 vLLM picks its AMX
attention wherever the CPU has tiles (0.32, `v1/attention/backends/cpu_attn.py`) and does not ask; that works
if oneDNN has asked before, as it does on its first AMX matmul. A model whose matmuls are too small for
oneDNN's AMX kernels ends the process with an illegal instruction instead. `install` asks, once for the
process; no number changes.
"""

from __future__ import annotations

from lora_spec.errors import EngineError
from lora_spec.serving._patching import Fix


def _cpu_has_tiles() -> bool:
    import torch
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and torch.cpu._is_amx_tile_supported()


def _put() -> None:
    import torch

    if not torch.cpu._init_amx():
        raise EngineError(
            "the operating system refuses AMX tiles, which vLLM's attention would use",
            fix="run it in float32, or on a kernel that grants them (Linux 5.16 or later)",
        )


_FIX = Fix("amx_permission", _put, needed=_cpu_has_tiles)
install, uninstall, status = _FIX.install, _FIX.uninstall, _FIX.status
