"""What the name of a stored tensor says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_spec.checkpoint.geometry import BLOCK_OF, FC, FC_LAYER, FUSED

PEFT_PREFIX = "base_model.model."
STANDARD_PREFIX = "model."
HEAD_OR_EMBEDDING = ("lm_head", "embed_tokens")

_ADAPTER = r"(?:\.(?P<adapter>[^.]+))?"
_KINDS = [
    (kind, re.compile(rf"(?P<module>.+)\.{tail}"))
    for kind, tail in (
        ("A", rf"lora_A{_ADAPTER}\.weight"),
        ("B", rf"lora_B{_ADAPTER}\.weight"),
        ("lora_bias", rf"lora_[AB]{_ADAPTER}\.bias"),
        ("embedding", rf"lora_embedding_[AB]{_ADAPTER}"),
        ("dora", rf"lora_magnitude_vector{_ADAPTER}(?:\.weight)?"),
        ("base", r"base_layer\.(?:weight|bias)"),
        ("full", r"(?:modules_to_save\.(?:[^.]+\.)?)?weight"),
        ("bias", r"bias"),
    )
]
_PROJECTION = re.compile(
    r"(?P<prefix>(?:\w+\.)*)layers\.(?P<layer>[0-9]{1,4})\.(?P<block>\w+)\.(?P<type>\w+)_proj", re.ASCII
)


@dataclass(frozen=True)
class Key:
    """A tensor name taken apart.

    Attributes:
        kind: ``A``, ``B``, ``lora_bias``, ``embedding``, ``dora``, ``base``, ``full``, ``bias``, ``unknown``.
        module: module name without PEFT's prefix (the whole name where ``kind`` is ``unknown``).
        adapter: adapter name inside the key, usually none.
        prefixed: whether PEFT's prefix was there.
    """

    kind: str
    module: str
    adapter: str | None
    prefixed: bool


@dataclass(frozen=True)
class Place:
    """Where a projection sits: ``model.layers.3.self_attn.q_proj`` → ``model.``, layer 3, type ``q``."""

    prefix: str
    layer: int
    module_type: str


def parse_key(name: str) -> Key:
    """Take a stored tensor name apart."""
    prefixed = name.startswith(PEFT_PREFIX)
    bare = name.removeprefix(PEFT_PREFIX)
    for kind, pattern in _KINDS:
        if match := pattern.fullmatch(bare):
            groups = match.groupdict()
            return Key(kind, groups["module"], groups.get("adapter"), prefixed)
    return Key("unknown", bare, None, prefixed)


def parse_place(module: str) -> Place | None:
    """Place of a known projection (fused ones and a drafter's ``fc`` included), or None."""
    match = _PROJECTION.fullmatch(module)
    if match is None:
        if module in (FC, f"{STANDARD_PREFIX}{FC}"):
            return Place(module.removesuffix(FC), FC_LAYER, FC)
        return None
    kind = match["type"]
    if BLOCK_OF.get(FUSED.get(kind, (kind,))[0]) != match["block"]:
        return None
    return Place(match["prefix"], int(match["layer"]), kind)
