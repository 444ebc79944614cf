"""Opening files of an untrusted folder: bounded, regular files only, never out of the folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from lora_spec.checkpoint.reasons import shown
from lora_spec.errors import CheckpointError
from lora_spec.files import parse_json

MAX_JSON_BYTES = 4 << 20


class AdapterFolder:
    """A folder whose files are opened by bare name.

    Args:
        directory: the adapter folder (it may be a link itself; its files may not lead out of it).

    Raises:
        CheckpointError: ``not_found`` or ``not_a_folder``.
    """

    def __init__(self, directory: Path | str) -> None:
        path = Path(directory)
        if not os.path.exists(path):
            raise CheckpointError("adapter folder not found", where=path, code="not_found")
        if not os.path.isdir(path):
            raise CheckpointError(
                "expected an adapter folder, got a file",
                where=path,
                code="not_a_folder",
                fix="Give the folder that holds adapter_config.json.",
            )
        self.label = path
        self.root = os.path.realpath(path)

    def names(self) -> list[str]:
        """Sorted names of the entries of the folder.

        Raises:
            CheckpointError: ``unreadable``.
        """
        try:
            return sorted(os.listdir(self.root))
        except OSError as error:
            raise CheckpointError(
                f"cannot list the folder: {error.strerror}", where=self.label, code="unreadable"
            ) from error

    def where(self, name: str, tensor: str | None = None) -> str:
        """How messages name a file, or a tensor of it."""
        text = str(self.label / shown(name))
        return text if tensor is None else f"{text}: {shown(tensor)}"

    def open(self, name: str) -> int:
        """Open a regular file of the folder for reading; the caller closes the descriptor.

        Raises:
            CheckpointError: ``outside_folder`` (a path, or a link out of the folder) or ``unreadable``.
        """
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError("a file name is a path", where=self.where(name), code="outside_folder")
        real = os.path.realpath(os.path.join(self.root, name))
        if os.path.dirname(real) != self.root:
            raise CheckpointError(
                "a link leads out of the adapter folder",
                where=self.where(name),
                code="outside_folder",
                fix="Copy the files themselves into the folder (cp -L).",
            )
        try:
            # O_NONBLOCK: opening a named pipe must not wait for a writer.
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"cannot open the file: {error.strerror}", where=self.where(name), code="unreadable"
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError("not a regular file", where=self.where(name), code="unreadable")
        return descriptor

    def read_json(self, name: str, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
        """Parse a JSON object of at most ``limit`` bytes.

        Raises:
            CheckpointError: ``too_large``, ``bad_json``, ``outside_folder`` or ``unreadable``.
        """
        with os.fdopen(self.open(name), "rb") as handle:
            data = handle.read(limit + 1)
        if len(data) > limit:
            raise CheckpointError(
                f"JSON file is larger than {limit} bytes", where=self.where(name), code="too_large"
            )
        return parse_json_object(data, self.where(name))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Strict JSON object: no name twice, no NaN or Infinity.

    Raises:
        CheckpointError: ``bad_json``.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"not valid JSON: {shown(error)}", where=where, code="bad_json") from error
    if not isinstance(value, dict):
        raise CheckpointError("expected a JSON object", where=where, code="bad_json")
    return value
