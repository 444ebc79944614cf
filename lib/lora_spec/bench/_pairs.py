"""What the drafter-LoRA benchmark runs on: drafters of the pocket target, adapters and merged drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_spec.checkpoint import BaseGeometry
from lora_spec.errors import MissingTierError
from lora_spec.models import ModelsParams, load_models
from lora_spec.paths import cache_dir, rel

if TYPE_CHECKING:
    import torch

# Layers of the pocket target whose outputs its DFlash drafter reads, and the token at undrafted positions.
TAPS = (5, 13, 21, 26, 29)
MASK_TOKEN = 3
DFLASH_LAYERS = 2
SEED = 0
# ‖ΔW‖_F over ‖W‖_F of every module: enough to change acceptance, not enough to end it.
SIZE = 0.1
WEIGHTS = "model.safetensors"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True)
class Pair:
    """A target and its drafter.

    Attributes:
        method: ``draft_model`` or ``dflash``.
        target, drafter: model directories.
        geometry: of the drafter's adapted layers.
        trained: whether its acceptance means anything.
    """

    method: str
    target: Path
    drafter: Path
    geometry: BaseGeometry
    trained: bool


@dataclass(frozen=True)
class Adapted:
    """Adapters of a drafter, and the drafter with the first of them merged.

    Attributes:
        adapters: name -> folder.
        merged: model directory, weights in float32 (the engine rounds them to its own dtype).
        rank: of the adapters.
        linear_parameters: of the weights that adapters adapt.
        file_bytes: of one adapter on disk.
        by_rank: of adapters of other ranks: file size, and how many of them the linear weights weigh.
    """

    adapters: dict[str, Path]
    merged: Path
    rank: int
    linear_parameters: int
    file_bytes: int
    by_rank: list[dict[str, Any]]


def pocket_pairs(workspace: Path) -> list[Pair]:
    """The pocket target with its DFlash and its layer-drop drafter.

    The DFlash drafter is the one that ``params/models.yaml`` declares; while it declares none, random weights
    of the same shapes are written to ``workspace``.

    Raises:
        MissingTierError: the models are not built.
    """
    models = load_models()
    pocket = [pair for pair in models.pairs.values() if pair.tier == "pocket"]
    draft_model = next(pair for pair in pocket if pair.method == "draft_model")
    target, drafter = _built(draft_model.target), _built(draft_model.drafter)
    dflash = next((pair for pair in pocket if pair.method == "dflash"), None)
    folder = (
        write_untrained_dflash(target, workspace / "dflash") if dflash is None else _built(dflash.drafter)
    )
    return [
        Pair("dflash", target, folder, dflash_geometry(folder), trained=dflash is not None),
        Pair("draft_model", target, drafter, _geometry(models, draft_model.drafter), trained=True),
    ]


def _built(key: str) -> Path:
    folder = cache_dir() / "models" / key
    if not (folder / WEIGHTS).is_file():
        raise MissingTierError("the model is not built", where=rel(folder), fix="Run `make pocket`")
    return folder


def _geometry(models: ModelsParams, key: str) -> BaseGeometry:
    return BaseGeometry.from_hf_config(models.model(key).geometry.model_dump(), name=key)


def dflash_geometry(folder: Path) -> BaseGeometry:
    """Shapes of a DFlash drafter's linear layers, ``fc`` among them."""
    config = read_config(folder)
    hidden, taps = config["hidden_size"], config["dflash_config"]["target_layer_ids"]
    return BaseGeometry.from_hf_config(config, prefix="", fc=(hidden, hidden * len(taps)))


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model directory."""
    return json.loads((folder / "config.json").read_text())


def write_untrained_dflash(target: Path, folder: Path) -> Path:
    """A DFlash drafter of the pocket geometry with random weights in bf16; returns the folder."""
    import torch

    from lora_spec.measure.tiny_models import Checkpoint

    sizes = read_config(target)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id",
            "tie_word_embeddings")  # fmt: skip
    config = {key: sizes[key] for key in kept}
    head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DFLASH_LAYERS,
        "head_dim": head,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "dtype": "bfloat16",
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(TAPS)},
    }
    hidden = config["hidden_size"]
    geometry = BaseGeometry.from_hf_config(config, prefix="", fc=(hidden, hidden * len(TAPS)))
    generator = torch.Generator().manual_seed(SEED)
    state: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in geometry.modules().items():
        state[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
    for layer in range(DFLASH_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"layers.{layer}.{norm}.weight"] = torch.ones(hidden)
        for norm in ("q_norm", "k_norm"):
            state[f"layers.{layer}.self_attn.{norm}.weight"] = torch.ones(head)
    state |= {"hidden_norm.weight": torch.ones(hidden), "norm.weight": torch.ones(hidden)}
    Checkpoint(config, {name: weight.to(torch.bfloat16) for name, weight in state.items()}).save(folder)
    return folder


def write_adapters(pair: Pair, folder: Path, *, count: int, rank: int, ranks: Sequence[int] = ()) -> Adapted:
    """Random adapters on every linear layer of a pair's drafter, and the drafter with the first one merged.

    What a step costs does not depend on the values, and whether an adapter and its merged drafter accept the
    same can be seen with any.
    """
    from safetensors.torch import load_file, save_file

    from lora_spec.measure.tiny_models import linear_weights, merged_state, save_random_adapter

    state = load_file(pair.drafter / WEIGHTS)
    linear = linear_weights(state).values()
    adapters = {}
    for number in range(count):
        adapters[f"a{number}"] = folder / f"adapter-{number}"
        save_random_adapter(state, adapters[f"a{number}"], seed=SEED + number, rank=rank, size=SIZE)
    by_rank = []
    for other in ranks:
        save_random_adapter(state, folder / f"rank-{other}", seed=SEED, rank=other, size=SIZE)
        size = folder_bytes(folder / f"rank-{other}", ADAPTER_FILES)
        formula = pair.geometry.full_over_adapter(other)
        ratio = sum(weight.nbytes for weight in linear) / size
        by_rank.append({"rank": other, "formula": formula, "file_bytes": size, "ratio": ratio})
    merged = folder / "merged"
    shutil.copytree(pair.drafter, merged, ignore=shutil.ignore_patterns(WEIGHTS))
    whole = merged_state({name: weight.float() for name, weight in state.items()}, adapters["a0"])
    save_file(whole, merged / WEIGHTS, metadata={"format": "pt"})
    return Adapted(
        adapters,
        merged,
        rank=rank,
        linear_parameters=sum(weight.numel() for weight in linear),
        file_bytes=folder_bytes(adapters["a0"], ADAPTER_FILES),
        by_rank=by_rank,
    )


def folder_bytes(folder: Path, names: Sequence[str]) -> int:
    """Bytes of the named files of a folder that exist."""
    return sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
