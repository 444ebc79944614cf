"""Where fitted predictors lie."""

from __future__ import annotations

from pathlib import Path

from lora_spec.paths import results_dir


def predictor_path(directory: Path | None = None, mode: str = "checkpoint_only") -> Path:
    """Where the fitted predictor lies; by default the committed one of the pocket tier."""
    return (directory or results_dir("pocket", "phase3")) / f"predictor-{mode}.json"
