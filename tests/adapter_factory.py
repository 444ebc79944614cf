"""Small made-up PEFT adapters, well formed or broken on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lora_spec.checkpoint import BaseGeometry

BASE_NAME = "made-up/tiny-llama"
BASE = BaseGeometry(
    num_layers=6,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    vocab_size=40,
    name=BASE_NAME,
)
BLOCKS = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}
ALL_TYPES = ("q", "k", "v", "o", "gate", "up", "down")

Pair = tuple[np.ndarray, np.ndarray]


def module_name(module_type: str, layer: int) -> str:
    """Name of a projection of the made-up base."""
    return f"model.layers.{layer}.{BLOCKS.get(module_type, 'mlp')}.{module_type}_proj"


def random_pairs(
    seed: int = 0,
    rank: int = 4,
    types: tuple[str, ...] = ALL_TYPES,
    layers: range = range(6),
    base: BaseGeometry = BASE,
) -> dict[str, Pair]:
    """Module name → (A, B) in float64, B not zero."""
    rng = np.random.default_rng(seed)
    made = {}
    for layer in layers:
        for module_type in types:
            out, into = base.shapes[module_type]
            made[module_name(module_type, layer)] = (
                rng.normal(size=(rank, into)) / np.sqrt(into),
                rng.normal(size=(out, rank)) * 0.05,
            )
    return made


def encode(array: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes in a safetensors dtype; bf16 rounds to nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, dtype="<f4").view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "<i1"}
    return np.ascontiguousarray(array, dtype=kinds[dtype]).tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """Write tensors in the given order, all in one dtype."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        piece = encode(array, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file from its parts; ``length`` overrides the length field."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def tensors_of(
    pairs: Mapping[str, Pair], prefix: str = "base_model.model.", adapter: str = ""
) -> dict[str, np.ndarray]:
    """Stored names → arrays, as PEFT names them."""
    dot = f".{adapter}" if adapter else ""
    made = {}
    for name, (a, b) in pairs.items():
        made[f"{prefix}{name}.lora_A{dot}.weight"] = a
        made[f"{prefix}{name}.lora_B{dot}.weight"] = b
    return made


def config_of(**changes: Any) -> dict[str, Any]:
    """An ``adapter_config.json`` object; None removes a key."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_NAME,
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": [f"{kind}_proj" for kind in ALL_TYPES],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def write_adapter(
    directory: Path,
    pairs: Mapping[str, Pair] | None = None,
    *,
    dtype: str = "F32",
    prefix: str = "base_model.model.",
    adapter: str = "",
    extra: Mapping[str, np.ndarray] | None = None,
    shards: int = 1,
    **config: Any,
) -> Path:
    """Write a whole adapter folder and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config_of(**config)))
    pairs = random_pairs() if pairs is None else pairs
    tensors = {**tensors_of(pairs, prefix, adapter), **(extra or {})}
    if shards == 1:
        write_safetensors(directory / "adapter_model.safetensors", tensors, dtype)
        return directory
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"adapter_model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        write_safetensors(directory / file_name, {name: tensors[name] for name in mine}, dtype)
        weight_map.update(dict.fromkeys(mine, file_name))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def dense_delta(pair: Pair, scale: float) -> np.ndarray:
    """ΔW formed in full: the slow oracle."""
    return scale * pair[1] @ pair[0]
