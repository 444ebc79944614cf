"""The weight files of an adapter folder as one set of tensors, and one pass over their bytes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from lora_spec.checkpoint.folder import AdapterFolder
from lora_spec.checkpoint.reasons import Reason, reason, shown
from lora_spec.checkpoint.tensors import SafetensorsFile, TensorInfo, all_finite, any_nonzero
from lora_spec.errors import CheckpointError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = WEIGHTS_NAME + ".index.json"
_PICKLE = re.compile(r"adapter_model.*\.(?:bin|pt|pth|ckpt|pkl)")
_SHARD = re.compile(r"adapter_model.*\.safetensors")


@dataclass(frozen=True)
class Weights:
    """Every stored tensor of an adapter.

    Attributes:
        files: tensor name → the file that holds it.
        reasons: remarks on the files.
    """

    files: dict[str, SafetensorsFile]
    reasons: tuple[Reason, ...]

    def info(self, name: str) -> TensorInfo:
        """Place, dtype and shape of one tensor."""
        return self.files[name].tensors[name]


@dataclass(frozen=True)
class TensorScan:
    """What one pass over a tensor's bytes tells."""

    sha256: str
    is_zero: bool


def open_weights(folder: AdapterFolder) -> Weights:
    """Find and check the weight files; only headers are read.

    Raises:
        CheckpointError: ``not_an_adapter``, ``pickle_refused``, ``bad_index``, and those of
            :class:`SafetensorsFile`.
    """
    names = folder.names()
    pickles = [name for name in names if _PICKLE.fullmatch(name)]
    reasons = [reason("pickle_ignored", name) for name in pickles]
    if WEIGHTS_NAME in names:
        only = SafetensorsFile(folder, WEIGHTS_NAME)
        return Weights({name: only for name in only.tensors}, tuple(reasons))
    if INDEX_NAME in names:
        files = _open_shards(folder)
        shards = len({file.file_name for file in files.values()})
        return Weights(files, (*reasons, reason("sharded", shards)))
    if any(_SHARD.fullmatch(name) for name in names):
        raise CheckpointError(
            f"weights are in several files but {INDEX_NAME} is missing", where=folder.label, code="bad_index"
        )
    if pickles:
        raise CheckpointError(
            "the weights are a pickle, and unpickling an untrusted file runs its code",
            where=folder.where(pickles[0]),
            code="pickle_refused",
            fix="Convert it to adapter_model.safetensors where you trust it.",
        )
    raise CheckpointError(
        f"no {WEIGHTS_NAME} in the folder",
        where=folder.label,
        code="not_an_adapter",
        fix="Give the folder of a saved PEFT adapter.",
    )


def _open_shards(folder: AdapterFolder) -> dict[str, SafetensorsFile]:
    def fail(what: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(what, where=folder.where(INDEX_NAME, tensor), code="bad_index")

    mapping = folder.read_json(INDEX_NAME).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise fail("weight_map is missing or empty")
    for tensor, shard in mapping.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise fail(f"shard {shown(shard)!r} is no safetensors file", tensor)
    shards = {shard: SafetensorsFile(folder, shard) for shard in sorted(set(mapping.values()))}
    for shard, file in shards.items():
        for tensor in file.tensors:
            if mapping.get(tensor) != shard:
                raise fail(f"{shown(shard)} holds a tensor that the index places elsewhere", tensor)
    for tensor, shard in mapping.items():
        if tensor not in shards[shard].tensors:
            raise fail(f"{shown(shard)} does not hold the tensor", tensor)
    return {tensor: shards[shard] for tensor, shard in sorted(mapping.items())}


def scan(weights: Weights) -> dict[str, TensorScan]:
    """Hash every tensor in pieces, refuse NaN and infinity, note which are all zero.

    Raises:
        CheckpointError: ``non_finite``, naming file and tensor; ``truncated``; ``unreadable``.
    """
    found = {}
    for name, file in weights.files.items():
        digest, zero, dtype = hashlib.sha256(), True, file.tensors[name].dtype
        for piece in file.chunks(name):
            if not all_finite(piece, dtype):
                raise CheckpointError(
                    "tensor holds NaN or infinity", where=file.where(name), code="non_finite"
                )
            digest.update(piece)
            zero = zero and not any_nonzero(piece, dtype)
        found[name] = TensorScan(digest.hexdigest(), zero)
    return found
