"""torch and transformers, imported where the cpu tier is installed, and quiet."""

from __future__ import annotations

import importlib
from typing import Any

from lora_spec.errors import MissingTierError


def import_torch(purpose: str, *needed: str) -> tuple[Any, Any]:
    """torch and transformers.

    Args:
        purpose: what needs them, as the subject of the error.
        needed: further modules that must be importable.

    Raises:
        MissingTierError: one of them is not installed.
    """
    try:
        import torch
        import transformers

        for name in needed:
            importlib.import_module(name)
    except ImportError as error:
        raise MissingTierError(
            f"{purpose} needs {error.name}", fix="install the cpu tier: pip install -e '.[cpu]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers
