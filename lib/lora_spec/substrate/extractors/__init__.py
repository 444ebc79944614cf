"""Extractors by name: pure functions from archive members to documents, and from text to text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lora_spec.substrate.extractors import catalogues, code, prose, structured, transforms
from lora_spec.substrate.extractors.common import Document

EXTRACTORS: dict[str, Callable[..., Iterator[Document]]] = {
    "catalogue": catalogues.catalogue,
    "dialogue": prose.dialogue,
    "json_examples": structured.json_examples,
    "licences": prose.licences,
    "line_passages": structured.line_passages,
    "plays": prose.plays,
    "scripture": prose.scripture,
    "source_files": code.source_files,
    "tables": structured.tables,
    "whole_files": structured.whole_files,
    "wiki_pages": prose.wiki_pages,
}

TRANSFORMS: dict[str, Callable[[str], str]] = {
    "upper_case": transforms.upper_case,
    "word_per_line": transforms.word_per_line,
    "word_prefix": transforms.word_prefix,
    "word_repeat": transforms.word_repeat,
}

__all__ = ["EXTRACTORS", "TRANSFORMS", "Document"]
