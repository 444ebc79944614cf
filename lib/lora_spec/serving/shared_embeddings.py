"""Drafters that share the target's embedding must share the layer itself, not its LoRA wrapper.

vLLM 0.32 wraps the target's `embed_tokens` when LoRA is enabled, and then hands the wrapper to drafters
without an embedding of their own (DFlash, EAGLE). The wrapper asks for the rows of the *target's* forward and
fails on the drafter's (`RuntimeError` in an einsum). `install` hands over the wrapped layer; where vLLM
does so itself, nothing changes.
"""

from __future__ import annotations

from typing import Any

from lora_spec.serving._patching import Fix


def unwrap(layer: Any) -> Any:
    """The layer below a LoRA wrapper, or the layer itself."""
    return getattr(layer, "base_layer", layer)


def _put() -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    stock = _FIX.original(SpecDecodeBaseProposer, "_maybe_share_embeddings")

    def _maybe_share_embeddings(self: Any, target_language_model: Any) -> None:
        stock(self, target_language_model)
        inner = getattr(self.model, "model", None)
        if inner is not None and hasattr(inner, "embed_tokens"):
            inner.embed_tokens = unwrap(inner.embed_tokens)

    _FIX.replace(SpecDecodeBaseProposer, "_maybe_share_embeddings", _maybe_share_embeddings)


_FIX = Fix("shared_embeddings", _put)
install, uninstall, status = _FIX.install, _FIX.uninstall, _FIX.status
