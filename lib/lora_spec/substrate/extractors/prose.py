"""Registers of English: plays, scripture, dialogue, licences, wiki pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import yaml

from lora_spec.errors import IntegrityError
from lora_spec.substrate.archives import Member
from lora_spec.substrate.extractors.common import Document, decode, normalise

_SCENE = re.compile(r"^### ", re.MULTILINE)
_ACT = re.compile(r"^##? .*$", re.MULTILINE)
_SPEAKER = re.compile(r"^\*\*(.+?)\*\*$")
_DIRECTION = re.compile(r"_([^_]+)_")
_VERSE = re.compile(r"^\s+(\d{7,8}): (\d+),$", re.MULTILINE)
_SECTION = re.compile(r"^(?==+ )", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def plays(members: Sequence[Member]) -> Iterator[Document]:
    """One document a scene of a Markdown play: speaker lines end in a colon, directions stand in brackets."""
    for member in members:
        text = decode(member) or ""
        for index, scene in enumerate(_SCENE.split(text)[1:]):
            lines = []
            for line in _ACT.sub("", scene).split("\n"):
                speaker = _SPEAKER.match(line)
                lines.append(f"{speaker[1]}:" if speaker else _DIRECTION.sub(r"[\1]", line))
            yield Document(f"{member.source}:{member.name}#{index:02d}", normalise("\n".join(lines)))


def scripture(members: Sequence[Member]) -> Iterator[Document]:
    """One document a chapter of a pythonbible module, read as text (it is never imported).

    The module holds one triple-quoted text and a table of verse number (book, chapter, verse as BBCCCVVV)
    to character offset. The square brackets around words added by the translators are removed.
    """
    for member in members:
        module = member.data.decode("utf-8")
        body = module.split('"""', 2)[1]
        starts: dict[int, int] = {}
        for verse, offset in _VERSE.findall(module.split('"""', 2)[2]):
            starts.setdefault(int(verse) // 1000, int(offset))
        if len(starts) < 2:
            raise IntegrityError("no table of verses", where=member.name)
        chapters = sorted(starts.items())
        ends = [offset for _, offset in chapters[1:]] + [len(body)]
        for (chapter, start), end in zip(chapters, ends, strict=True):
            text = normalise(body[start:end].replace("[", "").replace("]", ""))
            yield Document(f"{member.source}:{chapter // 1000:02d}.{chapter % 1000:03d}", text)


def dialogue(members: Sequence[Member]) -> Iterator[Document]:
    """One document a conversation of a ChatterBot YAML file, turns alternating between User and Assistant."""
    seen: set[str] = set()
    for member in members:
        loaded = yaml.safe_load(member.data.decode("utf-8"))
        for index, turns in enumerate(loaded["conversations"]):
            roles = ("User", "Assistant")
            text = normalise("\n".join(f"{roles[i % 2]}: {turn}" for i, turn in enumerate(turns)))
            if len(turns) > 1 and text not in seen:
                seen.add(text)
                yield Document(f"{member.source}:{member.name}#{index:04d}", text)


def licences(members: Sequence[Member], *, categories: Sequence[str]) -> Iterator[Document]:
    """One document a licence text whose front matter names one of ``categories``."""
    for member in members:
        text = decode(member) or ""
        front = _FRONT_MATTER.match(text)
        if front is None:
            continue
        category = re.search(r"^category: (.+)$", front[1], re.MULTILINE)
        if category is not None and category[1] in categories:
            yield Document(f"{member.source}:{member.name}", normalise(text[front.end() :]))


def wiki_pages(members: Sequence[Member], *, min_chars: int = 200) -> Iterator[Document]:
    """One document a section (heading and what follows) of a wiki page."""
    for member in members:
        text = decode(member) or ""
        for index, section in enumerate(_SECTION.split(text)):
            section = normalise(section)
            if len(section) >= min_chars:
                yield Document(f"{member.source}:{member.name}#{index:02d}", section)
