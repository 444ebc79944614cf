"""Read members of a wheel in memory: nothing is unpacked to disk and nothing inside is executed."""

from __future__ import annotations

import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from lora_spec.errors import IntegrityError


@dataclass(frozen=True)
class Limits:
    """Bounds on what an archive may make this process hold, in bytes and members."""

    member_bytes: int = 32 << 20
    total_bytes: int = 512 << 20
    members: int = 100_000


@dataclass(frozen=True)
class Member:
    """One file of an archive: the key of its source, its name inside the archive, its bytes."""

    source: str
    name: str
    data: bytes


def read_members(
    path: Path,
    source: str,
    include: Sequence[str],
    exclude: Sequence[str] = (),
    limits: Limits = Limits(),
) -> Iterator[Member]:
    """Yield the members whose names match a pattern of ``include`` and none of ``exclude``, sorted by name.

    Patterns are shell-style (``*`` also crosses ``/``). Every member's name is checked, wanted or not.

    Raises:
        IntegrityError: not a zip archive, truncated, a name that leaves the archive, a link, or too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            if len(infos) > limits.members:
                raise IntegrityError(
                    f"{len(infos)} members, at most {limits.members} allowed", where=path.name
                )
            for info in infos:
                _check_name(info, path.name)
            wanted = [
                info for info in infos if not info.is_dir() and _matches(info.filename, include, exclude)
            ]
            total = 0
            for info in sorted(wanted, key=lambda info: info.filename):
                total += info.file_size
                if info.file_size > limits.member_bytes or total > limits.total_bytes:
                    raise IntegrityError(
                        f"member of {info.file_size} bytes exceeds the size limit",
                        where=f"{path.name}: {info.filename}",
                    )
                # zipfile stops at the declared size and then checks the CRC, so a lying header is caught.
                yield Member(source, info.filename, archive.read(info))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise IntegrityError(
            f"damaged archive: {error}", where=path.name, fix="Delete the file and fetch it again"
        ) from error


def _matches(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in include) and not any(
        fnmatchcase(name, pattern) for pattern in exclude
    )


def _check_name(info: zipfile.ZipInfo, archive: str) -> None:
    # orig_filename, since zipfile cleans filename (it cuts at NUL and turns the platform's separators).
    name = info.orig_filename
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or ".." in parts or ":" in parts[0]:
        raise IntegrityError("a member's name leaves the archive", where=f"{archive}: {name!r}")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise IntegrityError("a member is a symbolic link", where=f"{archive}: {name!r}")
