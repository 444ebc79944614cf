"""From a cell to the engine that serves it."""

from __future__ import annotations

from typing import Any

from lora_spec.measure.composability.cells import DRAFTER_METHODS, Cell, Phase0Params
from lora_spec.measure.composability.engine import EngineJob
from lora_spec.measure.composability.inputs import Inputs
from lora_spec.measure.composability.workload import (
    BASE,
    DRAFTER_ADAPTERS,
    DRAFTER_OF,
    TARGET_ADAPTERS,
    Arm,
    CellRequest,
    ReferencePair,
    calls,
)
from lora_spec.paths import repo_root

_GREEDY_SEQS, _SAMPLED_SEQS = 64, 256


def cell_job(inputs: Inputs, cell: Cell) -> EngineJob:
    """The engine of a cell; both columns give it the same, only their environments differ."""
    params = inputs.params
    carried = {"none": 0, "one": 1, "mixed": 2}[cell.target_lora]
    adapters = {name: inputs.target_adapter(name) for name in TARGET_ADAPTERS[:carried]}
    options = _common(params, inputs.target(BASE), sampled=cell.sampling == "sampled")
    options |= {
        "enforce_eager": cell.execution == "eager",
        "enable_prefix_caching": cell.prefix_cache == "on",
    }
    slots = 1 if cell.slots == "limited" else 2
    if adapters:
        options |= {
            "enable_lora": True,
            "max_lora_rank": params.models.adapter_rank,
            "max_loras": slots,
            "max_cpu_loras": slots,
        }
    variant = DRAFTER_ADAPTERS[0] if cell.drafter_lora == "merged" else BASE
    options |= _speculation(inputs, cell.method, variant, sampled=cell.sampling == "sampled")
    if cell.drafter_lora == "dynamic":
        options["speculative_config"]["draft_lora"] = {
            "adapters": {name: inputs.drafter_adapter(cell.method, name) for name in DRAFTER_ADAPTERS},
            "max_rank": params.models.adapter_rank,
            "map": {t: d for t, d in DRAFTER_OF.items() if t in adapters},
            "max_slots": slots,
            "max_cached": slots,
        }
    return EngineJob(
        options=options,
        calls=calls(cell, params.workload),
        prompts=inputs.prompts(),
        target_adapters=adapters,
        draft_fields=cell.drafter_lora == "dynamic",
        hide=_hidden(inputs),
    )


def reference_job(inputs: Inputs, pair: ReferencePair) -> EngineJob:
    """Merged full models in an engine without any LoRA, with the temperatures mended.

    Two calls: every prompt greedily, and samples of the first prompt.
    """
    work = inputs.params.workload
    options = _common(inputs.params, inputs.target(pair.arm.target), sampled=True)
    options |= {"enforce_eager": True, "enable_prefix_caching": False}
    options |= _speculation(inputs, pair.method, pair.arm.drafter, sampled=True)
    return EngineJob(
        options=options,
        calls=[
            [CellRequest(i, Arm(BASE, BASE), work.max_tokens) for i in range(work.prompts)],
            [CellRequest(0, Arm(BASE, BASE), work.sample_tokens, work.temperature)] * work.samples,
        ],
        prompts=inputs.prompts(),
        fixes=("expand",),
        hide=_hidden(inputs),
    )


def _hidden(inputs: Inputs) -> tuple[str, ...]:
    return (str(inputs.root), str(repo_root()))


def _common(params: Phase0Params, model: str, *, sampled: bool) -> dict[str, Any]:
    return {
        "model": model,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": 256,
        "max_num_seqs": _SAMPLED_SEQS if sampled else _GREEDY_SEQS,
        "max_num_batched_tokens": 8192,
        "block_size": params.workload.block_size,
        "seed": params.seed,
    }


def _speculation(inputs: Inputs, method: str, variant: str, *, sampled: bool) -> dict[str, Any]:
    if method == "none":
        return {}
    config: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": inputs.params.workload.num_speculative_tokens,
    }
    if method == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if method in DRAFTER_METHODS:
        config["model"] = inputs.drafter(method, variant)
        if sampled:
            config["draft_sample_method"] = "probabilistic"
    return {"speculative_config": config, "per_request_spec_decode_metrics": "detailed"}
