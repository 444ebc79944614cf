"""Acceptance by adapter: counted in the process that takes requests in, and told with each response.

Counts are vLLM's own per-request ones (`per_request_spec_decode_metrics`), which this splits by what was
decided about the request (`stamp`). They go to Prometheus (see `counters`), and the decision goes into the
request's metrics: `metrics.speculative_decoding` over HTTP, `output.outputs[0].spec_decode_metrics` of an
`LLM`.

Every sequence counts once: each child of a request with n > 1 (whose counts the response leaves out), a
sequence that drafted nothing (depth 0, or one output token), and one that was aborted or cut at a stop
string. Stock vLLM sends counts with the last output of the engine core only, so that the last two would
have none; the scheduler's side here sends the sums with every output. An abort counts what had arrived when
it came; with counts of level "detailed" the per-step lists of a sequence cut at a stop string are missing,
its sums are not.

Nothing here may break serving: what fails is logged once and left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from lora_spec.serving._patching import Replacements
from lora_spec.serving.channels import KEY
from lora_spec.serving.counters import AcceptanceCounters, AcceptanceRow, Labels, acceptance_rows
from lora_spec.serving.stamp import BASE, Stamp, read_stamp

_HOOKS = Replacements("metrics")
# On an output processor of a configured engine: the served model's name. Others are left alone.
_MODEL = "_lora_spec_model"
# On the state of a request: its stamp, and whether it was counted.
_STAMP = "_lora_spec_stamp"
_COUNTED = "_lora_spec_counted"

_logger = logging.getLogger("vllm.lora_spec.metrics")
_logged: set[str] = set()


@cache
def counters() -> AcceptanceCounters:
    """The counters of this process, made on first use."""
    return AcceptanceCounters()


def acceptance_by_adapter() -> list[AcceptanceRow]:
    """What was counted so far, by adapters and depth: for programs that hold an `LLM`.

    A server's clients read `GET /metrics` (`counters.acceptance_rows` makes the same rows of it).
    """
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return acceptance_rows(get_prometheus_registry().collect())


def _configured(vllm_config: Any) -> bool:
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and KEY in additional


def _guarded(what: str, action: Callable[[], None]) -> None:
    """Do it; a failure is logged the first time and never raised."""
    try:
        action()
    except Exception:
        if what not in _logged:
            _logged.add(what)
            _logger.exception("acceptance by adapter: cannot %s; serving goes on without", what)


def _count(processor: Any, state: Any) -> None:
    if getattr(state, _COUNTED, False):
        return
    setattr(state, _COUNTED, True)
    stamp: Stamp = getattr(state, _STAMP, BASE)
    adapter = stamp.draft_adapter
    labels = Labels.of(
        state.lora_name, None if adapter is None else adapter.name, stamp.depth, getattr(processor, _MODEL)
    )
    metrics = state.spec_decode_metrics
    if metrics is None:
        counters().observe(labels, (), 0)
    else:
        counters().observe(labels, metrics.histogram, metrics.num_draft_tokens)


def install() -> None:
    """Count and tell, for engines that have a serving configuration. Idempotent.

    Raises:
        EngineError: vLLM lacks what this replaces.
    """
    _hook_engines()
    _hook_output_processor()
    _hook_scheduler()


def _hook_engines() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    def hook(stock: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            stock(self, *args, **kwargs)

            def open_() -> None:
                if _configured(self.vllm_config):
                    setattr(self.output_processor, _MODEL, str(self.model_config.served_model_name))
                    counters()  # so that GET /metrics names them before the first request

            _guarded("start", open_)

        return __init__

    for engine in (AsyncLLM, LLMEngine):
        _HOOKS.replace_once(engine, "__init__", hook(_HOOKS.original(engine, "__init__")))


def _hook_output_processor() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    from lora_spec.serving.request_metrics import StampedSpecDecodeMetrics

    stock_add = _HOOKS.original(OutputProcessor, "add_request")
    stock_update = _HOOKS.original(OutputProcessor, "_update_stats_from_output")
    stock_finish = _HOOKS.original(OutputProcessor, "_finish_request")
    stock_abort = _HOOKS.original(OutputProcessor, "abort_requests")

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        stock_add(self, request, *args, **kwargs)
        if hasattr(self, _MODEL):

            def keep() -> None:
                state = self.request_states.get(request.request_id)
                if state is not None and not hasattr(state, _STAMP):
                    setattr(state, _STAMP, read_stamp(request.sampling_params) or BASE)

            _guarded("read stamps", keep)

    def _update_stats_from_output(self: Any, state: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        # Called for every output, just before its counts go into the request's state.
        if output.spec_decode_metrics is not None and hasattr(self, _MODEL):

            def stamp() -> None:
                answer = getattr(state, _STAMP, BASE)
                output.spec_decode_metrics = StampedSpecDecodeMetrics.of(output.spec_decode_metrics, answer)

            _guarded("tell depth and adapter", stamp)
        stock_update(self, state, output, *args, **kwargs)

    def _finish_request(self: Any, state: Any) -> None:
        stock_finish(self, state)
        if hasattr(self, _MODEL):
            _guarded("count", lambda: _count(self, state))

    def abort_requests(self: Any, *args: Any, **kwargs: Any) -> list[str]:
        states = dict(self.request_states) if hasattr(self, _MODEL) else {}
        aborted = stock_abort(self, *args, **kwargs)
        for name in aborted:
            if name in states:
                _guarded("count", lambda state=states[name]: _count(self, state))
        return aborted

    for hook in (add_request, _update_stats_from_output, _finish_request, abort_requests):
        _HOOKS.replace_once(OutputProcessor, hook.__name__, hook)


def _hook_scheduler() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from lora_spec.serving.request_metrics import summary

    stock = _HOOKS.original(Scheduler, "update_from_output")

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_client = stock(self, *args, **kwargs)

        def send_sums() -> None:
            for outputs in by_client.values():
                for output in outputs.outputs:
                    request = self.requests.get(output.request_id)
                    if output.spec_decode_metrics is None and request is not None:
                        counts = request.spec_decode_metrics
                        output.spec_decode_metrics = None if counts is None else summary(counts)

        if _configured(self.vllm_config):
            _guarded("send counts", send_sums)
        return by_client

    _HOOKS.replace_once(Scheduler, "update_from_output", update_from_output)


def uninstall() -> None:
    """Give vLLM its own functions back; what was counted stays."""
    _HOOKS.remove()
