"""What every extractor shares: documents, whitespace, cutting."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lora_spec.substrate.archives import Member

_BLANK_RUN = re.compile(r"\n{3,}")
_LINE_END = re.compile("\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)


class Document(NamedTuple):
    """One text that never straddles two splits; ``doc`` is unique within a domain."""

    doc: str
    text: str


def normalise(text: str) -> str:
    """Unix line ends, NFC, no trailing blanks, at most one empty line in a row, no outer empty lines."""
    text = unicodedata.normalize("NFC", _LINE_END.sub("\n", text.lstrip("\ufeff")))
    return _BLANK_RUN.sub("\n\n", _TRAILING.sub("", text)).strip("\n").rstrip()


def decode(member: Member) -> str | None:
    """Normalised UTF-8 text of a member, or None where it is not UTF-8 text."""
    try:
        text = member.data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else normalise(text)


def cut(text: str, limit: int) -> str:
    """The leading part of ``text`` within ``limit`` characters, cut at the last line end (else hard)."""
    if len(text) <= limit:
        return text
    head = text[:limit]
    at = head.rfind("\n")
    return head[:at] if at > limit // 2 else head


def pack(pieces: Iterable[str], size: int, separator: str) -> Iterator[str]:
    """Join consecutive pieces until a joined text has at least ``size`` characters; the rest comes last."""
    held: list[str] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece) + len(separator)
        if length >= size:
            yield separator.join(held)
            held, length = [], 0
    if held:
        yield separator.join(held)
