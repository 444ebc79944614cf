"""Cached blocks of tokens know which drafter adapter wrote their drafter K/V.

A block of vLLM's prefix cache holds the K/V of target and drafter alike, but its hash names the target's
adapter only: a request would reuse drafter K/V that another drafter adapter wrote, or that nobody wrote
because its drafter was switched off, and draft from them without a word. Both become part of the hash. The
price is that requests with different drafter adapters do not share the target's K/V either.
"""

from __future__ import annotations

from typing import Any

from lora_spec.serving._patching import Fix
from lora_spec.serving.stamp import read_stamp

_HOOK = Fix("prefix_cache")

UNDRAFTED = "undrafted"


def extra_keys(request: Any) -> list[tuple[str, str]]:
    """What the stamp of an engine `Request` adds to the hash of its blocks; nothing for the base drafter."""
    stamp = read_stamp(request.sampling_params)
    if stamp is None:
        return []
    keys = []
    if stamp.draft_adapter is not None:
        keys.append(("lora_spec", stamp.draft_adapter.content_hash))
    if stamp.depth == 0:
        keys.append(("lora_spec", UNDRAFTED))
    return keys


def install() -> None:
    """Add the keys; doing it again changes nothing."""
    from vllm.v1.core import kv_cache_utils

    stock = _HOOK.original(kv_cache_utils, "_gen_lora_extra_hash_keys")

    def _gen_lora_extra_hash_keys(request: Any) -> list[tuple[str, ...]]:
        return stock(request) + extra_keys(request)

    _HOOK.replace_once(kv_cache_utils, "_gen_lora_extra_hash_keys", _gen_lora_extra_hash_keys)
