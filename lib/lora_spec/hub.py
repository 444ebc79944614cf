"""What the hub says of a repository: commit, licence, files, and the small JSON files in it.

Nothing is downloaded but those JSON files. The rest of the library talks to `HubClient`, which a test can
play.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_spec.errors import MissingTierError, NetworkError

_TIMEOUT_S = 20.0
# Answers of the hub that are about the one repository that was asked for.
_UNKNOWN = (
    *("RepositoryNotFoundError", "RevisionNotFoundError"),
    *("EntryNotFoundError", "RemoteEntryNotFoundError"),
)


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit.

    Attributes:
        revision: commit, 40 hex digits.
        licence: what its card names, None where it names none.
        files: name to (bytes, sha256); sha256 is None for small files, which the hub keeps by another hash.
    """

    revision: str
    licence: str | None
    files: Mapping[str, tuple[int, str | None]]


class HubClient(Protocol):
    """How the hub is asked."""

    def repo(self, name: str, revision: str | None) -> HubRepo:
        """Look one repository up, at ``revision`` or at what it has now.

        Raises:
            NetworkError: it cannot be asked; with the code ``repo`` where it does not know or show this one.
        """

    def read_json(self, name: str, file: str, revision: str) -> dict[str, Any]:
        """One JSON file of a repository.

        Raises:
            NetworkError: it cannot be had.
        """


class Hub:
    """The hub itself, by way of huggingface_hub.

    Raises:
        MissingTierError: huggingface_hub is not installed.
    """

    def __init__(self) -> None:
        try:
            import huggingface_hub
        except ImportError as error:
            raise MissingTierError(
                "huggingface_hub is needed to ask the hub", fix="make the cpu tier with `make cpu`"
            ) from error
        self._hub = huggingface_hub

    def repo(self, name: str, revision: str | None) -> HubRepo:
        """As `HubClient.repo`."""
        try:
            info = self._hub.HfApi().model_info(
                name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
            )
        except Exception as error:
            raise _refused(name, error) from error
        licence = None if info.card_data is None else info.card_data.get("license")
        files = {
            file.rfilename: (file.size or 0, None if file.lfs is None else file.lfs.sha256)
            for file in info.siblings or ()
        }
        return HubRepo(str(info.sha), None if licence is None else str(licence), files)

    def read_json(self, name: str, file: str, revision: str) -> dict[str, Any]:
        """As `HubClient.read_json`."""
        try:
            path = self._hub.hf_hub_download(name, file, revision=revision, etag_timeout=_TIMEOUT_S)
            found = json.loads(Path(path).read_bytes())
        except Exception as error:
            raise _refused(f"{name}, {file}", error) from error
        if not isinstance(found, dict):
            raise NetworkError("not a JSON object", where=f"{name}, {file}")
        return found


def _refused(where: str, error: Exception) -> NetworkError:
    """One line out of what the client and everything below it may raise; code ``repo`` where only this
    repository is at fault."""
    kind, code = type(error).__name__, "repo"
    if kind == "GatedRepoError":
        fix = "accept its licence on the hub and log in, then run it again"
    elif kind in _UNKNOWN:
        fix = "the hub has no such thing, or shows it to others only: correct the declaration"
    else:
        fix, code = "nothing was written; run it where the hub can be reached", None
    return NetworkError(f"the hub cannot be asked: {kind}", where=where, fix=fix, code=code)
