"""Named refusals: what the plugin cannot serve correctly is an error before the engine starts.

The alternative would be silence: an adapter that does not load, a hook that is never called, and requests
that run on the base drafter without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lora_spec.checkpoint import BaseGeometry, Severity, read_adapter
from lora_spec.errors import EngineError
from lora_spec.serving._patching import TESTED, vllm_version
from lora_spec.serving.config import DraftLoRAConfig, ServingConfig
from lora_spec.serving.stamp import DraftAdapter

SCHEDULER = "lora_spec.serving.scheduler.ServingScheduler"

DRAFT_LORA_METHODS = ("draft_model", "dflash")
_DFLASH_ARCHITECTURES = ("DFlashDraftModel",)

# Remarks of the reader that are harmless for a prediction, but not for serving.
_UNSERVABLE = {
    "untrained": "it would be the base drafter under another name",
    "sharded": "vLLM reads one adapter_model.safetensors only",
    "adapter_name_in_keys": "vLLM expects keys without an adapter name",
    "prefix_missing": "vLLM expects keys that start with base_model.model.",
}

# Keys of adapter_config.json that have a default in PEFT, but not in vLLM.
_NEEDED = ("r", "lora_alpha", "target_modules")

# Largest Frobenius norm of A, of the scaled B and, as a bound, of ΔW of one module. Real ones are below 100.
# A drafter that overflows has NaN for probabilities and K/V. Then the target's samples are wrong too, and so
# are those of later requests, even on the base drafter, that get the same blocks of the cache.
_MAX_NORM = 1e6


def _refuse(what: str, code: str, *, where: object = None, fix: str | None = None) -> EngineError:
    return EngineError(what, where=where, fix=fix, code=code)


def check_engine(vllm_config: Any, config: ServingConfig) -> None:
    """Refuse engines in which the plugin's hooks would not be called, or were never tried.

    Args:
        vllm_config: the finished `VllmConfig`.
        config: what the plugin was told.

    Raises:
        EngineError: with a `code` that names the refusal.
    """
    version = vllm_version()
    if not version.startswith(f"{TESTED}."):
        raise _refuse(f"this vLLM was never tried: {version}", "vllm_version", fix=f"Install vLLM {TESTED}.*")
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise _refuse(
            "a serving configuration without speculative decoding",
            "no_speculation",
            fix="Give speculative_config, or take the configuration away",
        )
    if vllm_config.use_v2_model_runner:
        raise _refuse(
            "Model Runner V2 does not call the hooks",
            "model_runner_v2",
            fix="Set VLLM_USE_V2_MODEL_RUNNER=0",
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise _refuse(
            "with async scheduling the scheduler never sees the drafts, so depths would do nothing",
            "async_scheduling",
            fix="Give async_scheduling=False (--no-async-scheduling)",
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1 or parallel.nnodes > 1:
        raise _refuse(
            "more than one worker was never tried",
            "parallel",
            where=f"world size {parallel.world_size}, data parallel {parallel.data_parallel_size}",
            fix="Serve with one worker",
        )
    if parallel.distributed_executor_backend == "ray":
        raise _refuse("workers under ray do not get the hooks", "ray", fix="Use the default executor")
    if config.draft_lora is not None:
        _check_drafter(vllm_config)


def _check_drafter(vllm_config: Any) -> None:
    speculative = vllm_config.speculative_config
    method = speculative.method
    if method not in DRAFT_LORA_METHODS:
        raise _refuse(
            f"drafter adapters do not exist for the method {method!r}",
            "method",
            fix=f"Use one of: {', '.join(DRAFT_LORA_METHODS)}",
        )
    drafter = speculative.draft_model_config
    if method == "dflash" and not set(drafter.architectures or []) & set(_DFLASH_ARCHITECTURES):
        raise _refuse(
            f"this DFlash architecture was never tried: {', '.join(drafter.architectures or ['none'])}",
            "architecture",
            where=drafter.model,
            fix=f"Tried: {', '.join(_DFLASH_ARCHITECTURES)}",
        )
    target_size = vllm_config.model_config.get_vocab_size()
    drafter_size = drafter.get_vocab_size()
    if speculative.use_heterogeneous_vocab:
        raise _refuse("drafters with another vocabulary were never tried with adapters", "vocabulary")
    if method == "draft_model" and target_size != drafter_size:
        raise _refuse(
            f"the target has {target_size} tokens, the drafter {drafter_size}: padded, or another vocabulary",
            "vocabulary",
            where=drafter.model,
            fix="Pad both to one size, or use a drafter of the same vocabulary",
        )


def check_scheduler(engine_args: Any) -> None:
    """Refuse a scheduler class of the user's own: depths and slots need `SCHEDULER`.

    Raises:
        EngineError: code `scheduler_cls`.
    """
    wanted = engine_args.scheduler_cls
    if wanted not in (None, SCHEDULER):
        raise _refuse(
            "a scheduler class is given, and the serving configuration needs its own",
            "scheduler_cls",
            where=str(wanted),
            fix="Leave scheduler_cls out",
        )


def drafter_geometry(vllm_config: Any) -> BaseGeometry:
    """Shapes of the drafter's linear layers, with `fc` where the drafter reads the target's hidden states.

    Raises:
        CheckpointError: a size is missing in the drafter's configuration.
    """
    speculative = vllm_config.speculative_config
    config = speculative.draft_model_config.hf_config
    sizes = config.to_dict()
    if speculative.method != "dflash":
        return BaseGeometry.from_hf_config(sizes, prefix="model.")
    from vllm.model_executor.models.qwen3_dflash import _get_dflash_fc_input_size

    own = getattr(config, "dflash_config", None) or {}
    reads_taps = own.get("use_aux_hidden_state", getattr(config, "use_aux_hidden_state", True))
    fc = (config.hidden_size, _get_dflash_fc_input_size(vllm_config)) if reads_taps else None
    # Checkpoints of DFlash drafters, and adapters trained on them, have no "model." prefix.
    return BaseGeometry.from_hf_config(sizes, prefix="", fc=fc)


def check_adapter(
    name: str, path: str | Path, geometry: BaseGeometry, config: DraftLoRAConfig
) -> DraftAdapter:
    """Read every byte of a drafter adapter and refuse what would not be served as trained.

    Args:
        name: as the operator calls it.
        path: folder of a PEFT adapter.
        geometry: shapes of the drafter.
        config: its largest rank.

    Raises:
        CheckpointError: the folder is no readable adapter.
        EngineError: it is one, but not of this drafter, or not of a kind that vLLM applies (code: the
            reader's reason, `rank`, `bad_config` or `too_large_update`).
    """
    where = f"drafter adapter {name!r}"
    adapter = read_adapter(path, geometry)
    for item in adapter.reasons:
        if item.severity is Severity.ABSTAIN or item.code in _UNSERVABLE:
            more = f": {_UNSERVABLE[item.code]}" if item.code in _UNSERVABLE else ""
            raise _refuse(f"{item.sentence.rstrip('.')}{more}", item.code, where=where)
    if missing := [key for key in _NEEDED if key not in adapter.config.raw]:
        raise _refuse(f"adapter_config.json has no {missing[0]}, which vLLM needs", "bad_config", where=where)
    rank = max(module.rank for module in adapter.modules)
    if rank > config.max_rank:
        raise _refuse(
            f"rank {rank} is above max_rank {config.max_rank}",
            "rank",
            where=where,
            fix="Raise draft_lora.max_rank, or train a smaller adapter",
        )
    for module in adapter.modules:
        a = float(np.linalg.norm(module.read_a().astype(np.float64)))
        b = float(np.linalg.norm(module.read_b().astype(np.float64))) * abs(module.engine_scale)
        if not max(a, b, a * b) <= _MAX_NORM:
            raise _refuse(
                f"{module.name} has factors of norms {a:.2g} and {b:.2g}, which may overflow",
                "too_large_update",
                where=where,
                fix=f"They and their product may be {_MAX_NORM:g} at most",
            )
    assert adapter.content_hash is not None
    return DraftAdapter(name, str(Path(path).resolve()), adapter.content_hash)
