"""Structured formats: JSON examples, statements, markup and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from lora_spec.substrate.archives import Member
from lora_spec.substrate.extractors.common import Document, decode, pack


def json_examples(members: Sequence[Member], *, min_chars: int = 150) -> Iterator[Document]:
    """One document an operation of a botocore ``examples-1.json``: its examples' input and output.

    Written again with an indent of two and the file's own key order, without comments, ids and prose.
    """
    for member in members:
        for operation, examples in json.loads(member.data)["examples"].items():
            kept = [{key: e[key] for key in ("title", "input", "output") if e.get(key)} for e in examples]
            text = json.dumps({operation: kept}, indent=2, ensure_ascii=False)
            if len(text) >= min_chars:
                yield Document(f"{member.source}:{member.name}:{operation}", text)


def whole_files(members: Sequence[Member], *, min_chars: int = 60) -> Iterator[Document]:
    """One document a file (SQL statements, templates)."""
    for member in members:
        text = decode(member)
        if text is not None and len(text) >= min_chars:
            yield Document(f"{member.source}:{member.name}", text)


def line_passages(members: Sequence[Member], *, passage: int = 2500) -> Iterator[Document]:
    """Passages of whole lines of about ``passage`` characters (large XML files)."""
    for member in members:
        text = decode(member) or ""
        for index, piece in enumerate(pack(text.split("\n"), passage, "\n")):
            yield Document(f"{member.source}:{member.name}#{index:04d}", piece)


def tables(members: Sequence[Member], *, rows: int = 30) -> Iterator[Document]:
    """Each ``rows`` consecutive rows of a CSV file with its header line."""
    for member in members:
        lines = (decode(member) or "").split("\n")
        header, body = lines[0], lines[1:]
        for start in range(0, len(body), rows):
            text = "\n".join([header, *body[start : start + rows]])
            yield Document(f"{member.source}:{member.name}#{start // rows:04d}", text)
