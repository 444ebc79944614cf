"""The room that touches vLLM: repairs, reproducible sampling, drafter adapters and depth per adapter.

`plugin` hooks it into engines that are configured for it. `frontend.load_draft_adapter` and
`frontend.unload_draft_adapter` change the drafter adapters of a running `LLM`.

Importing this package imports neither vllm nor torch. `install_all` is called before `LLM(...)` when the
engine runs in this process; other processes (an API server's engine core) get the same through vLLM's
`vllm.general_plugins` entry point, which does nothing unless `LORA_SPEC_SERVING` is set.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from lora_spec.errors import EngineError
from lora_spec.serving.seeds import derive_draft_seed, derive_target_seed

__all__ = [
    "FIXES",
    "derive_draft_seed",
    "derive_target_seed",
    "install_all",
    "register",
    "status",
    "uninstall_all",
]

ENV = "LORA_SPEC_SERVING"

_MODULES = {
    "expand": "lora_spec.serving.cpu_fixes",
    "grouped_lora": "lora_spec.serving.grouped_lora",
    "draft_seeds": "lora_spec.serving.draft_seeds",
    "shared_embeddings": "lora_spec.serving.shared_embeddings",
    "context_norms": "lora_spec.serving.context_norms",
    "amx_permission": "lora_spec.serving.amx_permission",
}
FIXES: tuple[str, ...] = tuple(_MODULES)

# What each mends, for people.
REPAIRS = {
    "expand": "per-request temperatures, top-p and top-k in speculative decoding on CPU",
    "grouped_lora": "base requests beside LoRA requests on CPU, and faster LoRA",
    "draft_seeds": "seeds of requests for probabilistic drafts; seeded prompts split over two steps on CPU",
    "shared_embeddings": "target LoRA with drafters that share the target's embedding (DFlash, EAGLE)",
    "context_norms": "DFlash drafters of several layers with different key norms on CPU",
    "amx_permission": "bfloat16 attention of small models on CPUs with AMX",
}


def install_all(fixes: Sequence[str] = FIXES) -> dict[str, str]:
    """Put the named fixes in place; doing it again changes nothing.

    Args:
        fixes: names out of `FIXES`.

    Returns:
        `status()` afterwards.

    Raises:
        EngineError: a name is unknown, or vLLM is absent or too different to be repaired safely.
    """
    for name in fixes:
        if name not in _MODULES:
            raise EngineError("unknown serving fix", where=name, fix=f"Use some of: {', '.join(FIXES)}")
    for name in fixes:
        importlib.import_module(_MODULES[name]).install()
    return status()


def uninstall_all() -> None:
    """Give vLLM its own functions back (for comparisons with stock behaviour)."""
    for module in _MODULES.values():
        importlib.import_module(module).uninstall()


def status() -> dict[str, str]:
    """Return fix name -> "applied" | "not needed" | "not installed" for this process."""
    return {name: importlib.import_module(module).status() for name, module in _MODULES.items()}


def register() -> None:
    """Entry point of `vllm.general_plugins`, called in every process of an engine.

    It watches for engines with a serving configuration (see `lora_spec.serving.plugin`); apart from those
    nothing changes, unless `LORA_SPEC_SERVING` names fixes: "1" or "all" for every one, or a comma-separated
    list; unset, empty or "0" for none.
    """
    from lora_spec.serving import plugin

    plugin.watch()
    if os.environ.get(plugin.ENV_ACTIVE):
        plugin.install_hooks()
    wanted = os.environ.get(ENV, "").strip()
    if wanted in ("", "0"):
        return
    install_all(FIXES if wanted in ("1", "all") else [name.strip() for name in wanted.split(",")])
