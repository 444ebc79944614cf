"""Cached blocks of tokens know which drafter adapter wrote their drafter K/V.

A block of vLLM's prefix cache holds the K/V of target and drafter alike, but its hash names the target's
adapter only: a request would reuse drafter K/V that another drafter adapter wrote, or that nobody wrote
because its drafter was switched off, and draft from them without a word. Both become part of the hash. The
price is that requests with different drafter adapters do not share the target's K/V either.

The same goes for the target's own adapters: vLLM 0.32 knows them by name and path, so an adapter that was
loaded again from changed files would meet the K/V of its old weights (it warns). Each loading is part of the
hash here.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from lora_spec.serving._patching import Replacements
from lora_spec.serving.stamp import read_stamp

_HOOK = Replacements("prefix_cache")

UNDRAFTED = "undrafted"

# How often a target adapter (name, path) was loaded by request, in the process that hashes blocks.
_loadings: Counter[tuple[str, str]] = Counter()


def extra_keys(request: Any) -> list[tuple[str, str]]:
    """What is added to the hash of an engine `Request`'s blocks; nothing for plain requests."""
    keys = []
    lora = request.lora_request
    if lora is not None and (times := _loadings[lora.lora_name, lora.lora_path]):
        keys.append(("lora_spec", f"loading {times}"))
    stamp = read_stamp(request.sampling_params)
    if stamp is None:
        return keys
    if stamp.draft_adapter is not None:
        adapter = stamp.draft_adapter
        keys.append(("lora_spec", f"{adapter.content_hash} {adapter.loading}"))
    if stamp.depth == 0:
        keys.append(("lora_spec", UNDRAFTED))
    return keys


def install() -> None:
    """Add the keys; doing it again changes nothing."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    stock_add = _HOOK.original(EngineCore, "add_lora")
    stock = _HOOK.original(kv_cache_utils, "_gen_lora_extra_hash_keys")

    def _gen_lora_extra_hash_keys(request: Any) -> list[tuple[str, ...]]:
        return stock(request) + extra_keys(request)

    @functools.wraps(stock_add)  # its signature too: vLLM decodes the argument by its annotation
    def add_lora(self: Any, lora_request: Any) -> bool:
        added = stock_add(self, lora_request)
        _loadings[lora_request.lora_name, lora_request.lora_path] += 1
        return added

    _HOOK.replace_once(kv_cache_utils, "_gen_lora_extra_hash_keys", _gen_lora_extra_hash_keys)
    _HOOK.replace_once(EngineCore, "add_lora", add_lora)
