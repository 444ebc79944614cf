"""Sampling that a request's seeds decide, for drafts as well as for the target.

vLLM 0.32 (Model Runner V1) draws probabilistic drafts from torch's global generator, so a request's seed does
nothing for them; and on CPU a seeded request whose prompt is split over two steps crashes the engine, because
the rollback of its generator (`set_offset`) does not exist for CPU generators. After `install`, no noise has
a history:

* the noise of a draft is a pure function of (draft seed, position of the draft step, index of the draft), and
* before each step a seeded request's own generator is seeded from (request seed, position of the step); the
  target's bonus token, acceptance tests and recovered tokens draw from it as in stock.

A position is the number of tokens a request has, so it never repeats with a result that counts: draws of
different steps are independent, and batch order, other requests, discarded prefill steps and preemption
cannot change them. There is no state to drop when a request ends. What still can change tokens (not their
distribution): a step that got fewer drafts, as after preemption or under an exhausted token budget, and
kernels whose rounding depends on the batch size, which in bf16 decides near-ties.

The draft seed is `SamplingParams.extra_args["draft_seed"]`, else it is derived from `SamplingParams.seed`,
else the request's drafts are drawn as in stock. Rows with temperature 0 draft their argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_spec.errors import EngineError
from lora_spec.serving._patching import Fix
from lora_spec.serving.seeds import (
    DRAFT_STREAM,
    TARGET_STREAM,
    as_uint64,
    draft_seed_from_request_seed,
    noise_seeds,
)

if TYPE_CHECKING:
    import torch

EXTRA_ARG = "draft_seed"


@dataclass
class _DraftStep:
    """What the draws of one draft step follow from; rows are in the order of the batch."""

    seeds: np.ndarray  # uint64 [batch]
    seeded: np.ndarray  # bool [batch]
    positions: np.ndarray | None = None  # int64 [batch]
    drawn: int = 0  # drafts per row so far


@lru_cache(maxsize=4096)
def _fallback(seed: int) -> int:
    return draft_seed_from_request_seed(seed)


def request_draft_seed(sampling_params: Any) -> int | None:
    """The draft seed of a request with these `SamplingParams`, None where it has no seed at all.

    A draft seed that is no integer is hashed: raising here would stop the engine for every request.
    """
    if sampling_params is None:
        return None
    seed = (sampling_params.extra_args or {}).get(EXTRA_ARG)
    if seed is None:
        return None if sampling_params.seed is None else _fallback(sampling_params.seed)
    return seed if isinstance(seed, int) else draft_seed_from_request_seed(seed)


def _has_fused_kernel(logits: torch.Tensor) -> bool:
    import torch

    return logits.device.type == "cpu" and hasattr(torch.ops._C, "fused_gumbel_argmax")


def sample_rows(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits), each row with its own seed (Gumbel-max).

    Args:
        logits: float32 [rows, vocabulary].
        seeds: int64 [rows] on the CPU.

    Returns:
        int64 [rows]. Equal (row of logits, seed) give equal tokens, whatever the other rows are.
    """
    import torch

    if _has_fused_kernel(logits):
        return torch.ops._C.fused_gumbel_argmax(logits.contiguous(), seeds).view(-1)
    generator = torch.Generator(device=logits.device)
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=generator.manual_seed(seed))
    return (logits - noise.log()).argmax(dim=-1)


def draw_drafts(
    logits: torch.Tensor, temperature: torch.Tensor, all_random: bool, step: _DraftStep
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft one token a row.

    Args:
        logits: [rows, vocabulary]; the batch's requests or, drafting in parallel, each one's drafts in turn.
        temperature: float [batch]; 0 drafts the argmax.
        all_random: no temperature is 0.
        step: the draft step; its count of drawn drafts advances.

    Returns:
        Tokens int64 [rows], and the drafter's probabilities float32 [rows, vocabulary].
    """
    import torch
    from vllm.v1.sample.sampler import _SAMPLING_EPS

    per_request = logits.shape[0] // temperature.shape[0]
    index = np.tile(np.arange(step.drawn, step.drawn + per_request), temperature.shape[0])
    step.drawn += per_request
    if per_request > 1:
        temperature = temperature.repeat_interleave(per_request)
    scale = temperature if all_random else torch.where(temperature < _SAMPLING_EPS, 1.0, temperature)
    scaled = logits.to(torch.float32).div(scale.unsqueeze(1))

    seeds = noise_seeds(
        step.seeds.repeat(per_request), step.positions.repeat(per_request), index, DRAFT_STREAM
    )
    unseeded = ~step.seeded.repeat(per_request)
    if unseeded.any():  # as in stock: from the global generator
        seeds[unseeded] = torch.randint(0, 2**63 - 1, (int(unseeded.sum()),)).numpy()
    tokens = sample_rows(scaled, torch.from_numpy(seeds))
    if not all_random:
        tokens = torch.where(temperature < _SAMPLING_EPS, scaled.argmax(dim=-1), tokens)
    return tokens, scaled.softmax(dim=-1)


@lru_cache(maxsize=1)
def _step_generator() -> type:
    """A generator that is seeded anew for every step, so rolling it back means nothing."""
    import torch

    class StepGenerator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            pass

    return StepGenerator


def _seed_target(runner: Any) -> None:
    """Seed the generators of a V1 model runner's seeded requests for the step that is about to be sampled."""
    batch = runner.input_batch
    if not batch.generators:
        return
    rows = list(batch.generators)
    requests = [runner.requests[batch.req_ids[row]] for row in rows]
    seeds = np.array([as_uint64(r.sampling_params.seed) for r in requests], dtype=np.uint64)
    step_seeds = noise_seeds(seeds, batch.num_tokens_no_spec[rows], 0, TARGET_STREAM)
    kind = _step_generator()
    for row, request, seed in zip(rows, requests, step_seeds.tolist(), strict=True):
        if not isinstance(batch.generators[row], kind):
            # Both places: the batch takes it from the request again after a preemption.
            batch.generators[row] = request.generator = kind(device=runner.device)
        batch.generators[row].manual_seed(seed)


def _begin_draft_step(runner: Any) -> _DraftStep:
    requests = [runner.requests[r] for r in runner.input_batch.req_ids[: runner.input_batch.num_reqs]]
    seeds = [request_draft_seed(r.sampling_params) for r in requests]
    return _DraftStep(
        seeds=np.array([as_uint64(s or 0) for s in seeds], dtype=np.uint64),
        seeded=np.array([s is not None for s in seeds], dtype=bool),
    )


def _put() -> None:
    # Model Runner V1, the CPU backend's. V2 keys drafts by the request's seed and position itself, and does
    # not read `draft_seed`.
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock_sample = _FIX.original(GPUModelRunner, "_sample")
    stock_runner_propose = _FIX.original(GPUModelRunner, "propose_draft_token_ids")
    stock_propose = _FIX.original(SpecDecodeBaseProposer, "propose")
    stock_draw = _FIX.original(SpecDecodeBaseProposer, "_sample_from_logits")

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cpu":
            _seed_target(self)
        return stock_sample(self, *args, **kwargs)

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.drafter, SpecDecodeBaseProposer):
            return stock_runner_propose(self, *args, **kwargs)
        self.drafter._lora_spec_step = _begin_draft_step(self)
        try:
            return stock_runner_propose(self, *args, **kwargs)
        finally:
            self.drafter._lora_spec_step = None

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self, "_lora_spec_step", None)
        if step is not None:
            # The last verified token of each request: the drafts continue two positions after it.
            last = kwargs["token_indices_to_sample"]
            if last is None:
                last = kwargs["common_attn_metadata"].query_start_loc[1:] - 1
            positions = kwargs["target_positions"]
            positions = positions[0] if positions.dim() > 1 else positions  # M-RoPE has three rows
            step.positions = positions[last.long()].cpu().numpy()
            if len(step.positions) != len(step.seeds):
                raise EngineError("the drafter's batch is not the runner's", where=type(self).__name__)
        return stock_propose(self, *args, **kwargs)

    def _sample_from_logits(self: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        step = getattr(self, "_lora_spec_step", None)
        stock = (
            step is None
            or step.positions is None
            or not self._enable_probabilistic_draft_probs
            or sampling_metadata.all_greedy
            or not step.seeded.any()
        )
        if stock:
            return stock_draw(self, logits, sampling_metadata)
        return draw_drafts(logits, sampling_metadata.temperature, sampling_metadata.all_random, step)

    _FIX.replace(GPUModelRunner, "_sample", _sample)
    _FIX.replace(GPUModelRunner, "propose_draft_token_ids", propose_draft_token_ids)
    _FIX.replace(SpecDecodeBaseProposer, "propose", propose)
    _FIX.replace(SpecDecodeBaseProposer, "_sample_from_logits", _sample_from_logits)


_FIX = Fix("draft_seeds", _put)
install, uninstall, status = _FIX.install, _FIX.uninstall, _FIX.status
