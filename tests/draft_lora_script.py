"""What the engine process of a drafter LoRA test does, and the faults that tests put back.

Every request comes back with its tokens, vLLM's per-step acceptance, how many prompt tokens came from the
prefix cache, and its draft steps as [output tokens before the step, drafts, accepted drafts]: in greedy
decoding the last follows from the first, whatever the batch, the schedule or a preemption did.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from typing import Any

from serving_engine import answer, generate, make_request

STEPS: dict[str, list[list[int]]] = defaultdict(list)
PREEMPTED: list[str] = []
ADAPTERS: list[int] = []  # drafter adapters in the running batch, step by step
LORAS: dict[str, Any] = {}


def watch(spec: dict[str, Any]) -> None:
    """Write down draft steps, adapters in the batch, and preemptions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from lora_spec.serving.stamp import BASE, read_stamp

    stats, preempt, schedule = (
        Scheduler.make_spec_decoding_stats,
        Scheduler._preempt_request,
        Scheduler.schedule,
    )

    def watched_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        id_ = kwargs["request_id"]
        before = self.requests[id_].num_output_tokens
        STEPS[id_].append([before, kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"]])
        return stats(self, *args, **kwargs)

    def watched_preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        PREEMPTED.append(request.request_id)
        preempt(self, request, *args, **kwargs)

    def watched_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        stamps = [read_stamp(r.sampling_params) or BASE for r in self.running]
        ADAPTERS.append(len({s.draft_adapter.name for s in stamps if s.draft_adapter}))
        return output

    Scheduler.make_spec_decoding_stats = watched_stats
    Scheduler._preempt_request = watched_preempt
    Scheduler.schedule = watched_schedule


# --- what is done with the engine ---


def operations(llm: Any, args: list[dict[str, Any]]) -> dict[str, Any]:
    """Operations in order, each {"op": name, ...}; an error of the last three is an answer too.

    call (requests): one call of `generate`. shared (request, prompts): two calls with one object of sampling
    parameters. delete (path): a folder. start (requests, steps): add requests and let the engine take
    some steps. finish: until all started requests are done. submit (requests): `call` that may fail.
    load (name, path, replace), unload (name): drafter adapters.
    """
    from lora_spec import serving
    from lora_spec.serving.frontend import load_draft_adapter, unload_draft_adapter

    started: list[str] = []
    ended: dict[str, Any] = {}

    def start(requests: list[Any], steps: int) -> None:
        for request in requests:
            prompt, params, lora = make_request(request, LORAS)
            started.append(f"s{len(started)}")
            llm.llm_engine.add_request(started[-1], prompt, params, lora_request=lora)
        for _ in range(steps):
            step()

    def step() -> None:
        ended.update({o.request_id: o for o in llm.llm_engine.step() if o.finished})

    def finish() -> list[Any]:
        while llm.llm_engine.has_unfinished_requests():
            step()
        done = [_seen(ended[id_]) for id_ in started]
        started.clear(), ended.clear()
        return done

    def call(requests: list[Any]) -> list[Any]:
        STEPS.clear()
        return generate(llm, requests, LORAS, see=_seen)

    def shared(request: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
        _, params, _ = make_request(request, LORAS)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [[_seen(o) for o in llm.generate(asked, params, use_tqdm=False)] for _ in range(2)]

    def load(name: str, path: str, replace: bool = False) -> None:
        load_draft_adapter(llm, name, path, replace=replace)

    def unload(name: str) -> None:
        unload_draft_adapter(llm, name)

    known = {"call": call, "shared": shared, "delete": shutil.rmtree, "start": start, "finish": finish}
    may_fail = {"submit": call, "load": load, "unload": unload}
    answers = []
    for operation in args:
        name = operation.pop("op")
        if name in known:
            answers.append(known[name](**operation))
            continue
        try:
            answers.append(may_fail[name](**operation))
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answers.append({"kinds": kinds, "error": str(error), "code": getattr(error, "code", None)})
    return {
        "answers": answers,
        "preempted": len(PREEMPTED),
        "most_adapters": max(ADAPTERS, default=0),
        "compilation": int(llm.llm_engine.vllm_config.compilation_config.mode),
        "status": serving.status(),
    }


def _seen(output: Any) -> dict[str, Any]:
    # vLLM appends something of its own to the ids it is given.
    steps = [steps for id_, steps in STEPS.items() if id_.split("-")[0] == output.request_id]
    return {
        **answer(output.outputs[0]),
        "cached": output.num_cached_tokens,
        "steps": steps[0] if steps else [],
    }


# --- faults: what the plugin does about each trap, undone ---


def one_key_for_all(spec: dict[str, Any]) -> None:
    """Cached blocks do not know which drafter adapter wrote them."""
    from lora_spec.serving import prefix_cache

    prefix_cache.extra_keys = lambda request: []


def fused_context(spec: dict[str, Any]) -> None:
    """DFlash writes its context K/V through the fused base weight, as in stock."""
    from lora_spec.serving import draft_lora

    draft_lora.use_wrapped_context_projections = lambda inner: None


def compiled_drafter(spec: dict[str, Any]) -> None:
    """The drafter is compiled like the target."""
    from lora_spec.serving import draft_lora

    draft_lora.keep_eager = lambda inner: None


def model_prefix(spec: dict[str, Any]) -> None:
    """Keys of a DFlash adapter are taken for vLLM's names of the modules."""
    from lora_spec.serving.draft_lora import DraftLoRA

    def _prepare(self: Any, model: Any) -> None:
        model.embedding_modules = {}

    DraftLoRA._prepare = _prepare


def model_prefix_unchecked(spec: dict[str, Any]) -> None:
    """The same, and nobody asks whether every weight of an adapter found its module."""
    from lora_spec.serving import draft_lora

    model_prefix(spec)
    stock = draft_lora._manager

    def _manager(*args: Any) -> Any:
        manager = stock(*args)
        type(manager)._refuse_lost = lambda self, lora, name: None
        return manager

    draft_lora._manager = _manager
