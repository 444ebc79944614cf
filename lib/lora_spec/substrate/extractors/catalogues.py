"""Sentences of one language out of gettext catalogues, compiled (``.mo``) or not (``.po``)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

from lora_spec.errors import IntegrityError
from lora_spec.substrate.archives import Member
from lora_spec.substrate.extractors.common import Document, normalise, pack

_MAGIC = 0x950412DE
_WORD = re.compile(r"[^\W\d_]{2,}")
_PO_LINE = re.compile(r'(?:(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)\s+)?"((?:[^"\\]|\\.)*)"')
_PO_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def read_mo(data: bytes, where: str) -> list[tuple[str, list[str]]]:
    """Pairs of message and its translations (plural forms) of a little- or big-endian ``.mo`` file.

    The plural-forms expression in the header is not evaluated. Layout: GNU gettext manual, "MO Files".

    Raises:
        IntegrityError: not a catalogue, an offset beyond the file, or text that is not UTF-8.
    """
    if len(data) < 20:
        raise IntegrityError("truncated message catalogue", where=where)
    order = {_MAGIC: "<", struct.unpack("<I", struct.pack(">I", _MAGIC))[0]: ">"}.get(
        struct.unpack("<I", data[:4])[0]
    )
    if order is None:
        raise IntegrityError("not a message catalogue", where=where)
    count, originals, translations = struct.unpack(order + "4I", data[4:20])[1:4]
    if max(originals, translations) + 8 * count > len(data):
        raise IntegrityError("truncated message catalogue", where=where)

    def text(table: int, index: int) -> str:
        length, offset = struct.unpack_from(order + "2I", data, table + 8 * index)
        if offset + length > len(data):
            raise IntegrityError("truncated message catalogue", where=where)
        try:
            return data[offset : offset + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise IntegrityError("a message is not UTF-8", where=where) from error

    pairs = []
    for index in range(count):
        message = text(originals, index).rpartition("\x04")[2].split("\0")[0]
        pairs.append((message, text(translations, index).split("\0")))
    return pairs


def read_po(data: bytes, where: str) -> list[tuple[str, list[str]]]:
    """The same pairs of a ``.po`` file, without entries marked fuzzy or obsolete.

    Layout: GNU gettext manual, "PO Files".

    Raises:
        IntegrityError: a line that belongs to no entry, or text that is not UTF-8.
    """
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise IntegrityError("a message is not UTF-8", where=where) from error
    pairs: list[tuple[str, list[str]]] = []
    entry: dict[str, str] = {}
    keyword, fuzzy = "", False

    def close() -> None:
        if "msgid" in entry and not fuzzy:
            pairs.append((entry["msgid"], [text for key, text in entry.items() if key.startswith("msgstr")]))

    for number, line in enumerate([*lines, ""], 1):
        text = line.strip()
        if text.startswith("#") and not (text.startswith("#,") and "fuzzy" in text):
            continue
        starts = _PO_LINE.fullmatch(text)
        first = starts[1] if starts else None
        # An entry ends at an empty line, at a flag, and where the next one begins.
        if starts is None or (first in ("msgctxt", "msgid") and "msgid" in entry):
            if starts is None and text and not text.startswith("#"):
                raise IntegrityError("not a message catalogue", where=f"{where}, line {number}")
            close()
            entry, keyword, fuzzy = {}, "", text.startswith("#")
        if starts is not None:
            keyword = first or keyword
            if not keyword:
                raise IntegrityError("not a message catalogue", where=f"{where}, line {number}")
            piece = _PO_ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), starts[2])
            entry[keyword] = entry.get(keyword, "") + piece
    return pairs


def catalogue(members: Sequence[Member], *, min_words: int = 3, size: int = 1000) -> Iterator[Document]:
    """Documents of about ``size`` characters: runs of consecutive messages of one catalogue, one a line.

    A message counts once a domain, has at least ``min_words`` words, and is really translated: it differs
    from the English message in more than half of its words.
    """
    seen: set[str] = set()
    for member in members:
        messages = []
        read = read_po if member.name.endswith(".po") else read_mo
        for english, forms in read(member.data, member.name):
            if not english:
                continue  # the header
            for form in forms:
                text = normalise(form)
                if text in seen or not _is_translated(english, text, min_words):
                    continue
                seen.add(text)
                messages.append(text)
        for index, text in enumerate(pack(messages, size, "\n")):
            yield Document(f"{member.source}:{member.name}#{index:03d}", text)


def _is_translated(english: str, text: str, min_words: int) -> bool:
    words = [word.lower() for word in _WORD.findall(text)]
    if len(words) < min_words:
        return False
    original = {word.lower() for word in _WORD.findall(english)}
    return sum(word in original for word in words) * 2 < len(words)
