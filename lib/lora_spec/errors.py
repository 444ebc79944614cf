"""Errors a user can act on: each says what went wrong, where, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable


def printable(text: object) -> str:
    """``text`` on one line and without control characters: names of files and models come from strangers."""
    line = " ".join(str(text).split())
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


class LoraSpecError(Exception):
    """Base of every expected failure; the command line prints it as one line and exits with 2.

    Args:
        what: what went wrong, in one sentence without a final stop.
        where: file, tensor, key or unit it concerns.
        fix: what the reader can do about it.
        code: machine-readable name of the failure.
    """

    default_code = "error"

    def __init__(
        self, what: str, *, where: object = None, fix: str | None = None, code: str | None = None
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.fix = fix
        self.code = code or self.default_code
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what if self.where is None else f"{self.what} ({self.where})"
        return f"{text}. {self.fix}" if self.fix else text


class ParamsError(LoraSpecError):
    """A parameter file or an injected parameter is not valid."""

    default_code = "params"


class CheckpointError(LoraSpecError):
    """An adapter directory cannot be read safely."""

    default_code = "checkpoint"


class EvidenceError(LoraSpecError):
    """A record or table is damaged, of another class, or does not match its hash."""

    default_code = "evidence"


class NetworkError(LoraSpecError):
    """A pinned package could not be fetched."""

    default_code = "network"


class IntegrityError(LoraSpecError):
    """Bytes do not have the pinned hash."""

    default_code = "integrity"


class MissingTierError(LoraSpecError):
    """A package or input of another tier is needed and absent."""

    default_code = "missing_tier"


class EngineError(LoraSpecError):
    """The engine did something that disqualifies its numbers."""

    default_code = "engine"


def exit_status(action: Callable[[], object]) -> int:
    """Do it; 0, or 2 after one line on stderr where it is expected to fail (for ``python -m`` modules)."""
    try:
        action()
    except LoraSpecError as error:
        print(f"lora-spec: error: {printable(error)}", file=sys.stderr)
        return 2
    return 0
