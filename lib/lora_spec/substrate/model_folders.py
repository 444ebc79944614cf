"""Where the pocket models lie, and whether what lies there is the pinned model."""

from __future__ import annotations

import json
from pathlib import Path

from lora_spec.errors import MissingTierError
from lora_spec.files import sha256_file
from lora_spec.models import ModelEntry, TrainedSource, load_models
from lora_spec.paths import cache_dir, drafters_dir, rel

TARGET = "smollm2-135m-instruct-q4_1"
DRAFTER = "smollm2-135m-drop-12-15"
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


def model_dir(key: str) -> Path:
    """Where model ``key`` is built, or committed if it was trained here; it need not exist yet."""
    entry = load_models().models.get(key)
    if entry is not None and isinstance(entry.source, TrainedSource):
        return drafters_dir() / key
    return cache_dir() / "models" / key


def healing_dir(key: str) -> Path:
    """The committed LoRA that heals model ``key``; it need not exist yet."""
    return drafters_dir() / key


def find_problem(directory: Path, entry: ModelEntry) -> str | None:
    """Why ``directory`` is not the pinned model, or None when every pinned file has its hash."""
    if not directory.is_dir():
        return "not built"
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return "config.json is missing or not JSON"
    for name, value in entry.geometry.model_dump().items():
        if config.get(name) != value:
            return f"config.json has {name} {config.get(name)!r}, declared {value!r}"
    for name, digest in entry.files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        found = sha256_file(path)
        if found != digest:
            return f"{name} has sha256 {found}, pinned {digest}"
    return None


def require_model(key: str) -> Path:
    """Directory of a built (or committed) and verified pocket model.

    Raises:
        MissingTierError: it is not there, or not as pinned.
        ParamsError: no such model.
    """
    entry, directory = load_models().model(key), model_dir(key)
    trained = isinstance(entry.source, TrainedSource)
    problem = find_problem(directory, entry)
    if problem is None and trained and entry.status != "frozen":
        problem = "its weights are not pinned in params/models.yaml"
    if problem:
        raise MissingTierError(
            f"model {key} cannot be used: {problem}",
            where=rel(directory),
            fix="restore it, or train and freeze it: lora-spec dflash"
            if trained
            else "run: lora-spec pocket --execute",
            code="model_missing",
        )
    return directory
