"""What the engine process of a depth test does: hooks in place, and every scheduling step written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serving_engine import answer, generate

# What each scheduling step decided, and each run of a drafter.
STEPS: list[dict[str, Any]] = []
DRAFTER_RUNS: list[int] = []
PREEMPTED: list[str] = []


def hook(spec: dict[str, Any]) -> None:
    """The hooks of a configured engine that act on stamps, and the watching."""
    from lora_spec.serving import drafting, prefix_cache

    drafting.install()
    prefix_cache.install()
    watch(spec)


def hook_without_key(spec: dict[str, Any]) -> None:
    """The same, but blocks that nobody drafted for look like any others."""
    from lora_spec.serving import drafting

    drafting.install()
    watch(spec)


def watch(spec: dict[str, Any]) -> None:
    """Write down steps, drafter runs and preemptions."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from lora_spec.serving.drafting import is_without_drafting
    from lora_spec.serving.scheduler import ServingScheduler
    from lora_spec.serving.stamp import BASE, read_stamp

    schedule, preempt = ServingScheduler.schedule, Scheduler._preempt_request

    def watched_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        stamps = [read_stamp(r.sampling_params) or BASE for r in self.running]
        STEPS.append(
            {
                "requests": list(output.num_scheduled_tokens),
                "new": [request.req_id for request in output.scheduled_new_reqs],
                "drafts": {id_: list(t) for id_, t in output.scheduled_spec_decode_tokens.items()},
                "depth": output.num_spec_tokens_to_schedule,
                "skipped": is_without_drafting(output),
                "adapters": sorted({s.draft_adapter.name for s in stamps if s.draft_adapter}),
            }
        )
        return output

    def watched_preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        PREEMPTED.append(request.request_id)
        preempt(self, request, *args, **kwargs)

    ServingScheduler.schedule = watched_schedule
    Scheduler._preempt_request = watched_preempt
    _watch_propose(SpecDecodeBaseProposer)


def _watch_ngram() -> None:
    """Only in a running engine: it imports numba, and vLLM 0.32 cannot start a CPU engine after that."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    _watch_propose(NgramProposer)


def _watch_propose(proposer: Any) -> None:
    propose = proposer.propose

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        DRAFTER_RUNS.append(args[0] if args else kwargs["num_speculative_tokens"])
        return propose(self, *args, **kwargs)

    proposer.propose = watched


def _forget() -> None:
    STEPS.clear(), DRAFTER_RUNS.clear(), PREEMPTED.clear()


def _seen() -> dict[str, Any]:
    return {
        "steps": [step for step in STEPS if step["requests"]],
        "drafter_runs": list(DRAFTER_RUNS),
        "preempted": list(PREEMPTED),
    }


def calls(llm: Any, args: list[Any]) -> list[dict[str, Any]]:
    """Calls of `generate` one after the other, each with what was seen meanwhile."""
    _watch_ngram()
    done, loras = [], {}
    for call in args:
        _forget()
        done.append({"answers": generate(llm, call, loras), **_seen()})
    return done


def with_priorities(llm: Any, args: dict[str, Any]) -> dict[str, Any]:
    """One call with a priority for each request; the seen steps name requests by their place in the call."""
    from vllm import SamplingParams

    _forget()
    outputs = llm.generate(
        [{"prompt_token_ids": r["prompt"]} for r in args["requests"]],
        [SamplingParams(detokenize=False, ignore_eos=True, **r["params"]) for r in args["requests"]],
        priority=args["priorities"],
        use_tqdm=False,
    )
    return {"answers": [answer(output.outputs[0]) for output in outputs], **_seen()}


def reload(llm: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Replace the policy file while requests run: one request more under each text in turn."""
    from vllm import SamplingParams

    from lora_spec.serving.frontend import FrontDoor

    engine = llm.llm_engine
    front = FrontDoor.of(llm)
    path = Path(front.config.depth_policy)
    answers: dict[str, Any] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = answer(output.outputs[0])

    for number, text in enumerate([None, *args["texts"]]):
        if text is not None:
            path.write_text(text)
            front.policy.reload()
        params = SamplingParams(detokenize=False, ignore_eos=True, temperature=0.0, max_tokens=40)
        engine.add_request(str(number), {"prompt_token_ids": args["prompts"][number]}, params)
        step(), step()
    while engine.has_unfinished_requests():
        step()
    return answers
