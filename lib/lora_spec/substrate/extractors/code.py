"""Source files, whole or cut into passages at blank lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_spec.substrate.archives import Member
from lora_spec.substrate.extractors.common import Document, decode, pack


def source_files(
    members: Sequence[Member], *, passage: int = 0, min_chars: int = 400, max_line: int = 400
) -> Iterator[Document]:
    """One document a file, or passages of about ``passage`` characters where that is not 0.

    Files shorter than ``min_chars``, not UTF-8, or with a line over ``max_line`` characters (minified code,
    embedded data) are left out.
    """
    for member in members:
        text = decode(member)
        if text is None or len(text) < min_chars or max(map(len, text.split("\n"))) > max_line:
            continue
        if not passage:
            yield Document(f"{member.source}:{member.name}", text)
            continue
        for index, piece in enumerate(pack(text.split("\n\n"), passage, "\n\n")):
            yield Document(f"{member.source}:{member.name}#{index:03d}", piece)
