"""Format-forcing transforms: the same words in a form that an adapter has to keep up."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w[\w'’-]*")
_PREFIX = "un"
_STRETCH = 12
_KEPT = 6


def upper_case(text: str) -> str:
    """Every letter in upper case."""
    return text.upper()


def word_prefix(text: str) -> str:
    """``un`` before every word."""
    return _WORD.sub(lambda match: _PREFIX + match[0], text)


def word_per_line(text: str) -> str:
    """Every word (with its punctuation) on a line of its own."""
    return "\n".join(text.split())


def word_repeat(text: str) -> str:
    """Of every twelve words the first six, then the last of them, without signs, six times more.

    Half of each stretch stays prose: an adapter learns to fall into the loop, not only to copy one.
    """
    words = text.split()
    made: list[str] = []
    for start in range(0, len(words), _STRETCH):
        kept = words[start : start + _KEPT]
        found = _WORD.search(kept[-1])
        made += kept + [found[0] if found else kept[-1]] * (_STRETCH - _KEPT)
    return " ".join(made)
