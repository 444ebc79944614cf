"""Where things live, relative to one checkout. Nothing here creates a directory."""

from __future__ import annotations

import os
from pathlib import Path

from lora_spec.errors import LoraSpecError

_MARKERS = ("pyproject.toml", "params")


def repo_root() -> Path:
    """Root of the checkout: ``LORA_SPEC_ROOT`` where set, else the editable install's or a parent of the cwd.

    Raises:
        LoraSpecError: no such directory is found.
    """
    override = os.environ.get("LORA_SPEC_ROOT")
    if override:  # what was asked for by name is not quietly replaced by another checkout
        candidates = [Path(override)]
    else:
        candidates = [Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents]
    for candidate in candidates:
        if all((candidate / marker).exists() for marker in _MARKERS):
            return candidate.resolve()
    raise LoraSpecError(
        "cannot find the LoRA-Spec checkout",
        where=override,
        fix="run inside a clone, or set LORA_SPEC_ROOT to one",
    )


def params_dir() -> Path:
    """``params/`` of the checkout."""
    return repo_root() / "params"


def results_dir(tier: str | None = None, phase: str | None = None) -> Path:
    """``results/[tier/[phase]]``; ``LORA_SPEC_RESULTS`` moves the root (the smoke tier writes elsewhere)."""
    override = os.environ.get("LORA_SPEC_RESULTS")
    base = Path(override) if override else repo_root() / "results"
    for part in (tier, phase):
        if part is not None:
            base = base / part
    return base


def figures_dir() -> Path:
    """``figures/`` of the checkout, or ``LORA_SPEC_FIGURES``."""
    override = os.environ.get("LORA_SPEC_FIGURES")
    return Path(override) if override else repo_root() / "figures"


def cache_dir() -> Path:
    """Rebuildable inputs (weights, corpora, adapters): ``build/cache``, or ``LORA_SPEC_CACHE``."""
    override = os.environ.get("LORA_SPEC_CACHE")
    return Path(override) if override else repo_root() / "build" / "cache"


def examples_dir() -> Path:
    """The two adapters that are committed."""
    return repo_root() / "examples" / "adapters"


def drafters_dir() -> Path:
    """Drafters, and parts of drafters, that were trained here and are committed."""
    return repo_root() / "examples" / "drafters"


def adapter_dir(name: str) -> Path:
    """Directory of a pool adapter: the trained one in the cache, else the committed example."""
    trained = cache_dir() / "adapters" / name
    example = examples_dir() / name
    return example if example.is_dir() and not trained.is_dir() else trained


def rel(path: Path | str) -> str:
    """``path`` relative to the checkout (for messages and records), or its name when it lies outside."""
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, or a name that no file can have
        return Path(path).name
    try:
        return resolved.relative_to(repo_root()).as_posix()
    except (LoraSpecError, ValueError):  # outside, or there is no checkout
        return resolved.name
