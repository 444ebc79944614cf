"""Format-forcing transforms: the same words in a form that an adapter has to keep up."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w[\w'’-]*")
_PREFIX = "un"


def upper_case(text: str) -> str:
    """Every letter in upper case."""
    return text.upper()


def word_prefix(text: str) -> str:
    """``un`` before every word."""
    return _WORD.sub(lambda match: _PREFIX + match[0], text)


def word_per_line(text: str) -> str:
    """Every word (with its punctuation) on a line of its own."""
    return "\n".join(text.split())
