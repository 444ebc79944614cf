"""One vLLM engine in this process, on fixed prompts: tokens, acceptance by draft step, log-probabilities."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_spec.errors import EngineError, MissingTierError
from lora_spec.measure.design import EngineParams

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        prompt: token ids.
        target_seed: seed of the target's sampler; ``None`` under greedy decoding.
        draft_seed: seed of this request's own draft generator; ``None`` under greedy decoding.
        adapted: whether the engine's adapter applies.
    """

    prompt: Sequence[int]
    target_seed: int | None = None
    draft_seed: int | None = None
    adapted: bool = False


@dataclass(frozen=True)
class Completion:
    """What the engine returned for one request.

    Attributes:
        tokens: output token ids.
        finish_reason: ``length`` or ``stop``.
        steps_accepted: accepted drafts of each draft step, in order; empty without speculation.
        steps_drafted: proposed drafts of each draft step.
        top2: per output token the two largest log-probabilities of the target, nats; empty unless asked for.
        latency_s: seconds from arrival to the last token.
    """

    tokens: list[int]
    finish_reason: str
    steps_accepted: list[int]
    steps_drafted: list[int]
    top2: list[tuple[float, float]]
    latency_s: float


@dataclass
class EngineSpec:
    """How to start an engine.

    Attributes:
        target: model directory.
        drafter: drafter directory, or ``None`` for no speculation.
        method: how vLLM drafts with it, ``draft_model`` or ``dflash``.
        adapter: PEFT directory, or ``None``; LoRA support is on either way when ``max_lora_rank`` is set.
        max_lora_rank: rank slots of the engine, or ``None`` to run without LoRA support.
        draft_sampling: ``probabilistic`` or ``greedy`` drafts at T > 0.
    """

    target: Path
    params: EngineParams
    seed: int
    drafter: Path | None = None
    method: str = "draft_model"
    num_speculative_tokens: int = 0
    draft_sampling: str = "probabilistic"
    adapter: Path | None = None
    max_lora_rank: int | None = None
    dtype: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def lora_slot_rank(rank: int) -> int:
    """Smallest rank slot of the engine that holds ``rank``.

    Raises:
        EngineError: above what the engine supports.
    """
    for slot in _LORA_RANKS:
        if rank <= slot:
            return slot
    raise EngineError(f"rank {rank} is above the engine's largest slot {_LORA_RANKS[-1]}")


def prepare_process(params: EngineParams) -> None:
    """Set what vLLM reads from the environment; call before anything imports it."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(params.kv_cache_gib),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        OMP_NUM_THREADS=str(params.threads),
        TOKENIZERS_PARALLELISM="false",
    )


class Engine:
    """A running engine; made by :func:`running_engine`."""

    def __init__(self, llm: Any, spec: EngineSpec, stop_token: int) -> None:
        self._llm = llm
        self._spec = spec
        self._stop_token = stop_token

    def generate(
        self, requests: Sequence[Request], *, temperature: float, max_tokens: int, logprobs: int | None = None
    ) -> list[Completion]:
        """Continue every prompt; batches are as large as the engine's ``max_num_seqs`` allows.

        Requests are sent in chunks of ``max_num_seqs`` that finish together, so that a plain and a
        speculative run of the same list see the same companions in each batch.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        adapter = None
        if self._spec.adapter is not None:
            adapter = LoRARequest("adapter", 1, str(self._spec.adapter))
        size = self._spec.params.max_num_seqs
        done: list[Completion] = []
        for start in range(0, len(requests), size):
            chunk = requests[start : start + size]
            sampling = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=r.target_seed,
                    logprobs=logprobs,
                    detokenize=False,
                    stop_token_ids=[self._stop_token],
                    extra_args=None if r.draft_seed is None else {"draft_seed": r.draft_seed},
                )
                for r in chunk
            ]
            begun = time.perf_counter()
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(r.prompt)} for r in chunk],
                sampling,
                lora_request=[adapter if r.adapted else None for r in chunk],
                use_tqdm=False,
            )
            elapsed = time.perf_counter() - begun
            done.extend(_completion(o, elapsed, logprobs) for o in outputs)
        return done


def _completion(output: Any, elapsed: float, logprobs: int | None) -> Completion:
    sequence = output.outputs[0]
    metrics = sequence.spec_decode_metrics
    stats = output.metrics
    latency = elapsed
    if stats is not None and stats.last_token_ts and stats.queued_ts:
        latency = stats.last_token_ts - stats.queued_ts
    return Completion(
        tokens=list(sequence.token_ids),
        finish_reason=str(sequence.finish_reason),
        steps_accepted=[] if metrics is None else list(metrics.per_step_accepted),
        steps_drafted=[] if metrics is None else list(metrics.per_step_drafted),
        top2=[] if not logprobs else [_top2(entry) for entry in sequence.logprobs],
        latency_s=latency,
    )


def _top2(entry: dict[int, Any]) -> tuple[float, float]:
    ranked = sorted((value.logprob for value in entry.values()), reverse=True)
    return ranked[0], ranked[1]


@contextlib.contextmanager
def running_engine(spec: EngineSpec) -> Iterator[Engine]:
    """Start an engine with all repairs and the per-request draft seeds in place, and free it afterwards.

    Raises:
        MissingTierError: vLLM is not installed.
    """
    prepare_process(spec.params)
    try:
        import torch
        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    except ImportError as error:
        raise MissingTierError(
            "vLLM is not importable here", where=str(error), fix="make the cpu tier with `make cpu`"
        ) from error
    from transformers import AutoConfig

    from lora_spec.serving import install_all

    install_all()
    torch.set_num_threads(spec.params.threads)
    options: dict[str, Any] = {
        "model": str(spec.target),
        "skip_tokenizer_init": True,
        "dtype": spec.dtype or spec.params.dtype,
        "seed": spec.seed % (1 << 31),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "max_num_batched_tokens": spec.params.max_num_seqs * spec.params.max_model_len,
        "max_num_seqs": spec.params.max_num_seqs,
        "max_model_len": spec.params.max_model_len,
        "disable_log_stats": False,
    }
    if spec.max_lora_rank is not None:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": spec.max_lora_rank}
    if spec.drafter is not None:
        options["speculative_config"] = {
            "method": spec.method,
            "model": str(spec.drafter),
            "num_speculative_tokens": spec.num_speculative_tokens,
            "draft_sample_method": spec.draft_sampling,
        }
        options["per_request_spec_decode_metrics"] = "detailed"
    stop_token = AutoConfig.from_pretrained(spec.target).eos_token_id
    llm = LLM(**options, **spec.extra)
    try:
        yield Engine(llm, spec, stop_token)
    finally:
        with contextlib.suppress(AttributeError):
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
