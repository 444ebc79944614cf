"""Fetch pinned wheels with the running interpreter's pip, so that the user's own configuration applies."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from lora_spec.errors import IntegrityError, MissingTierError, NetworkError
from lora_spec.files import atomic_write_text
from lora_spec.paths import cache_dir, rel
from lora_spec.substrate.archives import verify_sha256

_TIMEOUT_S = 900


class Pin(Protocol):
    """What identifies one wheel."""

    package: str
    version: str
    filename: str
    sha256: str


def archive_path(pin: Pin) -> Path:
    """Where the wheel lies in the cache, fetched or not."""
    return cache_dir() / "archives" / pin.filename


def is_cached(pin: Pin) -> bool:
    """Whether the wheel lies in the cache with its pinned hash."""
    path = archive_path(pin)
    if not path.is_file():
        return False
    try:
        verify_sha256(path, pin.sha256)
    except IntegrityError:
        return False
    return True


def fetch(pin: Pin) -> Path:
    """Return the verified wheel, downloading it first where it is not cached.

    Wheels only and no dependencies: pip runs no code of the package. pip itself checks the hash too.

    Raises:
        IntegrityError: what lies in the cache or came over the network has another hash.
        MissingTierError: this interpreter has no pip.
        NetworkError: pip could not fetch it.
    """
    path = archive_path(pin)
    if path.is_file():
        verify_sha256(path, pin.sha256)
        return path
    directory = path.parent
    directory.mkdir(parents=True, exist_ok=True)
    requirement = directory / f"{pin.filename}.requirement.txt"
    atomic_write_text(requirement, f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n")
    # A pure wheel is the same file everywhere: asking for platform "any" on a fixed Python keeps pip from
    # weighing what this interpreter could run.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--platform", "any", "--python-version", "3.12"]
    command += ["--require-hashes", "--dest", str(directory), "--requirement", str(requirement)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise _unreachable(pin, path) from error
    finally:
        requirement.unlink(missing_ok=True)
    if "No module named pip" in done.stderr:
        raise MissingTierError(
            f"this interpreter has no pip to fetch {pin.package}=={pin.version} with",
            fix=f"Run `python -m ensurepip`, or put {pin.filename} into {rel(directory)}",
        )
    if "do not match" in done.stderr and "hash" in done.stderr.lower():
        raise IntegrityError(
            f"the registry's {pin.package}=={pin.version} does not have the pinned sha256",
            where=pin.filename,
            fix="It was changed upstream, or your index serves another file",
        )
    if done.returncode != 0 or not path.is_file():
        raise _unreachable(pin, path)
    verify_sha256(path, pin.sha256)
    return path


def fetch_all(pins: list[Pin], workers: int = 2) -> None:
    """Fetch several wheels at a time; the first failure is raised after the others have ended."""
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        for future in [pool.submit(fetch, pin) for pin in pins]:
            future.result()


def _unreachable(pin: Pin, path: Path) -> NetworkError:
    return NetworkError(
        f"pip could not fetch {pin.package}=={pin.version}",
        where=pin.filename,
        fix=f"Connect to a package index, or copy the wheel to {rel(path.parent)} "
        f"(sha256 {pin.sha256}), and run it again",
    )
