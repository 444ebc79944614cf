"""vLLM's scheduler with a speculation depth per request, and a bound on the drafter adapters of a batch.

Named to vLLM as `scheduler_cls`; only vLLM imports this module. Depths and adapters are read from the stamps
that requests carry (see `stamp`); a request without one is served as in stock.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from lora_spec.errors import EngineError
from lora_spec.serving.channels import config_of
from lora_spec.serving.drafting import mark_without_drafting
from lora_spec.serving.slots import Slots
from lora_spec.serving.stamp import BASE, Stamp, read_stamp

# One drafter pass a draft: fewer drafts cost less.
_ONE_BY_ONE = ("draft_model", "eagle", "eagle3", "mtp", "ngram")
# One pass a step, and what is drafted depends on how many are: all of them or none.
_IN_BLOCKS = ("dflash", "dspark")
# Drafters of other methods insist on their full number, or keep a history: their drafts are cut, no more.


class ServingScheduler(Scheduler):
    """Cuts each request's drafts to its depth, and drafts no further than the deepest request needs.

    Raises:
        EngineError: with async scheduling, where drafts never pass the scheduler, or without speculation.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if vllm_config.scheduler_config.async_scheduling:
            raise EngineError(
                "with async scheduling the scheduler never sees the drafts, so depths would do nothing",
                where=type(self).__name__,
                fix="Give async_scheduling=False (--no-async-scheduling)",
                code="async_scheduling",
            )
        if vllm_config.speculative_config is None:
            raise EngineError(
                "a scheduler of speculation depths without speculative decoding",
                where=type(self).__name__,
                fix="Give speculative_config, or leave scheduler_cls out",
                code="no_speculation",
            )
        super().__init__(vllm_config, *args, **kwargs)
        speculative = vllm_config.speculative_config
        in_blocks = speculative.method in _IN_BLOCKS or speculative.parallel_drafting
        self._one_by_one = speculative.method in _ONE_BY_ONE and not in_blocks
        self._may_skip = self._one_by_one or in_blocks
        config = config_of(vllm_config)
        draft_lora = None if config is None else config.draft_lora
        self._slots = None if draft_lora is None else Slots(draft_lora.max_slots)
        if self.dynamic_sd_lookup is None:
            # With a table, even one that always says k, vLLM does not pad a request that joins a decoding
            # batch with k drafts of token -1. Those would count as drafted, whatever the request's depth, and
            # as they have no draft probabilities, the whole batch would lose its own for that step.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    # ------------------------------------------------------------------ depth

    def depth_of(self, request: Request) -> int:
        """Most drafts a step of this request, at most the engine's own number."""
        depth = _stamp(request).depth
        return self.num_spec_tokens if depth is None else min(depth, self.num_spec_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Stock's batch, with the number of drafts that its requests can use."""
        if self._slots is not None:
            self._slots.begin_step(self.requests)
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens and self._may_skip:
            deepest = max(self.depth_of(self.requests[id_]) for id_ in output.num_scheduled_tokens)
            if deepest == 0:
                output.num_spec_tokens_to_schedule = 0
                mark_without_drafting(output)
            elif self._one_by_one:
                output.num_spec_tokens_to_schedule = min(output.num_spec_tokens_to_schedule, deepest)
        return output

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take each request's drafts, as many as its depth."""
        cut = []
        for id_, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=False):
            request = self.requests.get(id_)
            cut.append(tokens if request is None else tokens[: self.depth_of(request)])
        super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, cut))

    # ------------------------------------------------------------------ slots

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Asked of each waiting request in turn, right before it joins the batch; one that may not is put
        # aside for this step and goes back to where it was, as with too many target adapters.
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self._slots is None:
            return True
        running = (_adapter(other) for other in self.running)
        return self._slots.admits(request.request_id, _adapter(request), running)


def _adapter(request: Request) -> str | None:
    adapter = _stamp(request).draft_adapter
    return None if adapter is None else adapter.content_hash


def _stamp(request: Request) -> Stamp:
    """The request's stamp, read once for each of its sampling parameters (streamed input brings new ones)."""
    params, stamp = getattr(request, "_lora_spec_stamp", (None, BASE))
    if params is not request.sampling_params:
        params, stamp = request.sampling_params, read_stamp(request.sampling_params) or BASE
        request._lora_spec_stamp = params, stamp
    return stamp
