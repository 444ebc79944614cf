"""A drafter adapter out of a target adapter, for drafters that are the target without some layers.

Nothing is trained. Where the drafter keeps a layer of its target bit for bit, the target adapter's ΔW of
that layer is as right for the drafter as for the target: it moves the same activations the same way, up to
what the dropped layers would have done in between. So the tensors of kept layers are copied under their new
numbers and the rest is left out. Nothing here needs torch: tensors are copied as bytes, whatever their
dtype.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from lora_spec.checkpoint import content_hash
from lora_spec.checkpoint.folder import AdapterFolder
from lora_spec.checkpoint.weights import CONFIG_NAME, WEIGHTS_NAME, Weights, open_weights
from lora_spec.errors import CheckpointError, ParamsError
from lora_spec.files import atomic_dir, atomic_write_json
from lora_spec.models import LayerDropSource, ModelEntry, load_models
from lora_spec.paths import adapter_dir, cache_dir
from lora_spec.substrate.adapters import SIDE_FILE, read_side_file

PAIR = "pocket-layer-drop"
SIDE_SCHEMA = "lora-spec-drafter-adapter/1"
_LAYER = re.compile(r"(?P<head>(?:.*\.)?layers\.)(?P<layer>[0-9]+)(?P<tail>\..+)")
# "layers.3." and "[0-4]", but not the module name "w1".
_NUMBER = re.compile(r"(?<![A-Za-z])[0-9]")
# Keys of the configuration that may speak of layers by number or by a pattern that holds one.
_PATTERNS = ("rank_pattern", "alpha_pattern")


def drafter_adapter_dir(name: str) -> Path:
    """Where the drafter's form of adapter ``name`` of the pool is kept."""
    return cache_dir() / "drafter-adapters" / name


def make_drafter_adapters(names: Iterable[str]) -> list[Path]:
    """Write the drafter's form of adapters of the pool (or committed examples); milliseconds each.

    Args:
        names: as in ``params/adapter_pool.yaml``.

    Returns:
        Their folders, in order.

    Raises:
        CheckpointError: one is not there, or speaks of layers in a way that cannot be renumbered.
        ParamsError: a name is a path, which would be read from, and written to, outside the cache.
    """
    names = list(names)
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ParamsError(f"not an adapter of the pool: {name!r}", fix="Give a name, not a path")
    models = load_models()
    drafter = models.pair(PAIR).drafter
    folders = []
    for name in names:
        folders.append(drafter_adapter_dir(name))
        _write(adapter_dir(name), folders[-1], drafter, models.model(drafter))
    return folders


def _write(source: Path, out: Path, key: str, entry: ModelEntry) -> None:
    if not isinstance(entry.source, LayerDropSource):
        raise ParamsError("the drafter is not a target without layers", where=f"params/models.yaml: {key}")
    dropped = entry.source.dropped_layers
    side = read_side_file(source) or {}
    with atomic_dir(out) as temporary:
        drop_adapter_layers(
            source, temporary, dropped, layers=entry.geometry.num_hidden_layers + len(dropped), base_name=key
        )
        values = {
            "schema": SIDE_SCHEMA,
            "made_from": {"name": side.get("name"), "content_hash": content_hash(source)},
            "dropped_layers": list(dropped),
            "base": {"name": key, "weights_sha256": entry.weights_sha256},
            "licence": side.get("licence"),
            "content_hash": content_hash(temporary),
        }
        atomic_write_json(temporary / SIDE_FILE, values)


def drop_adapter_layers(
    source: Path, out: Path, dropped: Collection[int], *, layers: int, base_name: str
) -> None:
    """Write to ``out`` the adapter in ``source`` without its layers ``dropped``, the rest renumbered.

    Args:
        source: PEFT adapter of a model with ``layers`` layers.
        out: existing folder; gets ``adapter_config.json`` and ``adapter_model.safetensors``.
        dropped: layers (0-based) that the drafter lacks.
        layers: number of layers of the adapter's own base.
        base_name: ``base_model_name_or_path`` of the result.

    Raises:
        CheckpointError: ``source`` cannot be read, names a layer outside its base, adapts dropped layers
            only, or its configuration holds layer numbers inside patterns.
    """
    folder = AdapterFolder(source)
    weights, config = open_weights(folder), folder.read_json(CONFIG_NAME)
    kept = [layer for layer in range(layers) if layer not in set(dropped)]
    number = {old: new for new, old in enumerate(kept)}
    where = folder.where(CONFIG_NAME)
    renamed = {}
    for name in weights.files:
        new = _renamed(name, number, layers, folder.where(WEIGHTS_NAME, name))
        if new is not None:
            renamed[new] = name
    if not renamed:
        raise CheckpointError("the adapter has no tensor in a layer that the drafter keeps", where=source)
    changed = _renumbered_config(config, number, where) | {"base_model_name_or_path": base_name}
    atomic_write_json(out / CONFIG_NAME, changed)
    (out / WEIGHTS_NAME).write_bytes(_safetensors(weights, renamed))


def _renamed(name: str, number: dict[int, int], layers: int, where: str) -> str | None:
    """New name of a tensor; None where its layer is dropped. Tensors outside layers keep theirs."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer = int(match["layer"])
    if layer >= layers:
        raise CheckpointError(f"layer {layer} is not among the base's {layers}", where=where)
    return f"{match['head']}{number[layer]}{match['tail']}" if layer in number else None


def _renumbered_config(config: dict[str, Any], number: dict[int, int], where: str) -> dict[str, Any]:
    targets = config.get("target_modules")
    names = [targets] if isinstance(targets, str) else list(targets or ())
    for key in _PATTERNS:
        names += list(config.get(key) or ())
    if config.get("layer_replication") or any(_NUMBER.search(str(name)) for name in names):
        raise CheckpointError(
            "the configuration names modules by layer number, which cannot be renumbered",
            where=where,
            fix="Use an adapter whose target_modules and patterns name module types only",
        )
    chosen = config.get("layers_to_transform")
    if chosen is None:
        return dict(config)
    chosen = [chosen] if isinstance(chosen, int) else chosen
    return config | {"layers_to_transform": [number[layer] for layer in chosen if layer in number]}


def _safetensors(weights: Weights, renamed: dict[str, str]) -> bytes:
    """The tensors under their new names, sorted by name, as the bytes of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, place = [], 0
    for new, old in sorted(renamed.items()):
        info = weights.info(old)
        span = [place, place + info.nbytes]
        header[new] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": span}
        pieces += weights.files[old].chunks(old)
        place += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file want aligned data
    return b"".join((struct.pack("<Q", len(text)), text, *pieces))
