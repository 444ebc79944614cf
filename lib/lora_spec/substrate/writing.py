"""Write model folders: a GGUF file as a bfloat16 checkpoint, a model without some layers, a healed one."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_spec.checkpoint import BaseGeometry
from lora_spec.errors import IntegrityError
from lora_spec.files import sha256_file
from lora_spec.models import HealedSource, ModelEntry
from lora_spec.paths import rel
from lora_spec.substrate.merging import merge_adapter
from lora_spec.substrate.model_folders import WEIGHTS, healing_dir, model_dir
from lora_spec.substrate.torch_tier import import_torch

_CONTEXT = 8192


def dequantise(gguf: Path, out: Path, entry: ModelEntry) -> None:
    """Turn a GGUF file into a plain bfloat16 checkpoint with its tokenizer and chat template in ``out``.

    The configuration is written from the geometry in ``params/models.yaml``: the one the loader derives keeps
    a quantisation section and the names of local files. The GGUF form of the tokenizer loses the upstream
    rule that digits are single tokens; it is put back.

    Raises:
        IntegrityError: the file does not have the declared geometry or no chat template.
    """
    torch, _ = import_torch("the pocket pair", "gguf")
    from transformers import AutoTokenizer, GgufConfig, LlamaForCausalLM

    with contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        loaded = LlamaForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
    config = _clean_config(loaded.config, entry)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    del loaded
    _save_model(config, state, out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    _save_tokenizer(tokenizer, out)


def _clean_config(loaded: Any, entry: ModelEntry) -> Any:
    from transformers import LlamaConfig

    for name, value in entry.geometry.model_dump().items():
        if getattr(loaded, name) != value:
            raise IntegrityError(
                f"{name} is {getattr(loaded, name)} in the file, {value} in params/models.yaml"
            )
    return LlamaConfig(
        **entry.geometry.model_dump(),
        hidden_act=loaded.hidden_act,
        max_position_embeddings=_CONTEXT,
        rms_norm_eps=float(f"{loaded.rms_norm_eps:.6g}"),
        rope_parameters=dict(loaded.rope_parameters),
        attention_bias=loaded.attention_bias,
        mlp_bias=loaded.mlp_bias,
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
        dtype="bfloat16",
    )


def _save_model(config: Any, state: dict[str, Any], out: Path) -> None:
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.to(torch.bfloat16)
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if left:
        raise IntegrityError(f"the weights lack {len(left)} tensors, the first is {left[0]}")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)


def _save_tokenizer(tokenizer: Any, out: Path) -> None:
    from tokenizers import pre_tokenizers

    if not tokenizer.chat_template:
        raise IntegrityError("the file carries no chat template")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _CONTEXT
    for name in ("is_local", "local_files_only", "name_or_path"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(out)


def build_healed(key: str, entry: ModelEntry, source: HealedSource, out: Path) -> None:
    """Write to ``out`` the parent without the dropped layers, the committed LoRA merged, and its tokenizer.

    Raises:
        IntegrityError: the LoRA is not the pinned one, or a layer to drop does not exist.
        CheckpointError: it is no LoRA of this model.
    """
    weights = healing_dir(key) / "adapter_model.safetensors"
    if not weights.is_file() or sha256_file(weights) != source.adapter_sha256:
        raise IntegrityError(
            "the LoRA that heals this drafter is missing or was changed", where=rel(weights), fix="restore it"
        )
    geometry = BaseGeometry.from_hf_config(entry.geometry.model_dump(), name=key)
    drop_layers(
        model_dir(source.parent),
        out,
        source.dropped_layers,
        change=lambda state: merge_adapter(state, weights.parent, geometry),
    )


def drop_layers(
    parent: Path,
    out: Path,
    dropped: tuple[int, ...],
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> None:
    """Write to ``out`` the model in ``parent`` without the layers ``dropped`` (0-based), and its tokenizer.

    The rest is copied bit for bit; remaining layers are renumbered, then ``change`` is done to the weights.

    Raises:
        IntegrityError: a layer to drop does not exist.
    """
    import_torch("the pocket pair")
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(parent, local_files_only=True)
    kept = [layer for layer in range(config.num_hidden_layers) if layer not in set(dropped)]
    if len(kept) != config.num_hidden_layers - len(dropped):
        raise IntegrityError(
            f"layers {sorted(dropped)} are not all among {config.num_hidden_layers}", where=rel(parent)
        )
    number = {old: new for new, old in enumerate(kept)}
    state = {}
    for name, tensor in load_file(parent / WEIGHTS).items():
        head, layers, rest = name.partition("layers.")
        if not layers:
            state[name] = tensor
            continue
        index, _, tail = rest.partition(".")
        if int(index) in number:
            state[f"{head}layers.{number[int(index)]}.{tail}"] = tensor
    config.num_hidden_layers = len(kept)
    _save_model(config, change(state), out)
    for path in parent.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copyfile(path, out / path.name)
