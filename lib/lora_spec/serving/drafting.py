"""No drafter forward in steps whose requests are all served without speculation.

At a depth of 0 vLLM still runs its drafter, once a step, so that the drafter's K/V stay whole for a later
step that drafts. A request whose policy says 0 never drafts, so for a batch of such requests that forward is
waste: the scheduler marks the step, and the worker leaves the drafter out. The drafter's K/V of those
requests then have holes, which is why their cached blocks are nobody else's (see `prefix_cache`).
"""

from __future__ import annotations

from typing import Any

from lora_spec.serving._patching import Replacements

_HOOK = Replacements("drafting")

# Attribute of a `SchedulerOutput`; it travels with the object to a worker in another process.
_MARK = "lora_spec_no_drafting"


def mark_without_drafting(scheduler_output: Any) -> None:
    """Tell the worker not to run the drafter in this step."""
    setattr(scheduler_output, _MARK, True)


def is_without_drafting(scheduler_output: Any) -> bool:
    """Whether the step was marked."""
    return getattr(scheduler_output, _MARK, False)


def install() -> None:
    """Make Model Runner V1 heed the mark; doing it again changes nothing.

    Raises:
        EngineError: vLLM lacks the method this replaces.
    """
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock = _HOOK.original(GPUModelRunner, "propose_draft_token_ids")

    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_without_drafting(scheduler_output):
            return stock(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        requests = len(self.input_batch.req_ids)
        if isinstance(sampled_token_ids, list):  # drafters that work on the CPU answer in lists
            return [[] for _ in range(requests)]
        return torch.empty((requests, 0), dtype=torch.int64, device=self.device)

    _HOOK.replace_once(GPUModelRunner, "propose_draft_token_ids", propose_draft_token_ids)


def uninstall() -> None:
    """Give vLLM its own method back."""
    _HOOK.remove()
