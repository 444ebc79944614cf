"""A trained drafter as the folder that vLLM serves with ``method: dflash``, and as a pinned model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_spec.errors import LoraSpecError, ParamsError
from lora_spec.files import atomic_dir, atomic_write_json, atomic_write_text, sha256_file
from lora_spec.models import load_models
from lora_spec.paths import params_dir, rel
from lora_spec.substrate.dflash.config import DflashParams
from lora_spec.substrate.model_folders import WEIGHTS, model_dir

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
MODELS_FILE = "models.yaml"


def engine_config(params: DflashParams) -> dict[str, Any]:
    """``config.json`` of the drafter: a Qwen3-like decoder that vLLM knows as ``DFlashDraftModel``.

    No ``layer_types``: full attention without causality. Embeddings and head are the target's.
    """
    models, model = load_models(), params.model
    target = models.model(params.target).geometry
    return models.model(params.drafter).geometry.model_dump() | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "max_position_embeddings": model.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
        "num_target_layers": target.num_hidden_layers,
        "block_size": 1 + max(params.train.drafts),
        "dflash_config": {"mask_token_id": model.mask_token_id, "target_layer_ids": list(model.taps)},
    }


def export_drafter(params: DflashParams, weights: Mapping[str, torch.Tensor], directory: Path) -> str:
    """Write weights (as a checkpoint stores them) and config to ``directory``, whole or not at all.

    Returns:
        sha256 of the weights' file.
    """
    from safetensors.torch import save_file

    with atomic_dir(directory) as temporary:
        stored = {name: weights[name].detach().contiguous() for name in sorted(weights)}
        save_file(stored, temporary / WEIGHTS, metadata={"format": "pt"})
        atomic_write_json(temporary / CONFIG, engine_config(params))
        return sha256_file(temporary / WEIGHTS)


def drafter_weights_sha256(params: DflashParams) -> str | None:
    """sha256 of the exported weights, or None when there are none."""
    path = model_dir(params.drafter) / WEIGHTS
    return sha256_file(path) if path.is_file() else None


def freeze_drafter(params: DflashParams) -> dict[str, str]:
    """Pin the exported files in ``params/models.yaml`` and mark the drafter frozen.

    The entry is edited as text, so that the file keeps its comments; the result is read back before it
    replaces the old one.

    Returns:
        What was pinned: file to sha256.

    Raises:
        LoraSpecError: nothing is exported.
        ParamsError: the entry is not written as expected.
    """
    directory, path = model_dir(params.drafter), params_dir() / MODELS_FILE
    if not (directory / WEIGHTS).is_file():
        raise LoraSpecError("no trained drafter to freeze", where=rel(directory), fix="train it first")
    pins = {name: sha256_file(directory / name) for name in (CONFIG, WEIGHTS)}
    size = (directory / WEIGHTS).stat().st_size
    atomic_write_text(path, pinned_text(path.read_text(encoding="utf-8"), params.drafter, pins, size))
    return pins


def pinned_text(text: str, key: str, pins: Mapping[str, str], size: int) -> str:
    """``text`` of models.yaml with the entry ``key`` frozen: its status, files and bytes written anew.

    Raises:
        ParamsError: there is no such entry, or it has no status.
    """
    entry = re.search(rf"(?m)^  {re.escape(key)}:\n(?:    .*\n)+", text)
    if entry is None or "\n    status: " not in entry[0]:
        raise ParamsError("cannot find the entry to freeze", where=f"params/{MODELS_FILE}: {key}")
    kept = re.sub(r"(?m)^    files:\n(?:      .*\n)+|^    bytes: .*\n", "", entry[0])
    kept = re.sub(r"(?m)^    status: .*$", "    status: frozen", kept)
    lines = "".join(f"      {name}: {digest}\n" for name, digest in sorted(pins.items()))
    return text.replace(entry[0], f"{kept}    files:\n{lines}    bytes: {size}\n")
