"""Engine sessions, each in a process of its own: an engine leaves global state behind."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lora_spec.errors import EngineError
from lora_spec.measure.engine import (
    Completion,
    Engine,
    EngineSpec,
    Request,
    prepare_process,
    running_engine,
)
from lora_spec.measure.precision import EarlyStop


@dataclass(frozen=True)
class Call:
    """One list of requests to serve; with ``stop`` in chunks, and no further than it says."""

    requests: Sequence[Request]
    temperature: float
    max_tokens: int
    logprobs: int | None = None
    stop: EarlyStop | None = None


@dataclass(frozen=True)
class SessionResult:
    """What an engine's process answers.

    Attributes:
        completions: per call.
        fixes: what it reports of its mendings.
        cpu_s: CPU seconds of each call, all threads of the process.
        start_cpu_s: CPU seconds until it served, the import of vLLM included.
    """

    completions: list[list[Completion]]
    fixes: dict[str, str]
    cpu_s: list[float] = field(default_factory=list)
    start_cpu_s: float = 0.0


def serve(engine: Engine, call: Call) -> list[Completion]:
    """Completions of the call's requests, or of as many leading ones as its stopping rule asks for."""
    size = call.stop.rule.chunk if call.stop else max(1, len(call.requests))
    done: list[Completion] = []
    for start in range(0, len(call.requests), size):
        done += engine.generate(
            call.requests[start : start + size],
            temperature=call.temperature,
            max_tokens=call.max_tokens,
            logprobs=call.logprobs,
        )
        if call.stop and call.stop.enough(done):
            break
    return done


def run_calls(spec: EngineSpec, calls: Sequence[Call]) -> SessionResult:
    """Start an engine here, serve ``calls`` in order, stop it."""
    from lora_spec.serving import status

    begun = time.process_time()
    with running_engine(spec) as engine:
        marks = [time.process_time()]
        completions = []
        for call in calls:
            completions.append(serve(engine, call))
            marks.append(time.process_time())
        spent = [after - before for before, after in pairwise(marks)]
        return SessionResult(completions, dict(status()), spent, marks[0] - begun)


def _child(connection: Any, spec: EngineSpec, calls: Sequence[Call]) -> None:
    try:
        connection.send(run_calls(spec, calls))
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        raise


def run_session(spec: EngineSpec, calls: Sequence[Call]) -> SessionResult:
    """:func:`run_calls` in a fresh process.

    Raises:
        EngineError: the engine process failed or was killed.
    """
    prepare_process(spec.params)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, spec, list(calls)))
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = "the process ended without an answer"
    finally:
        receiver.close()
        if sys.exc_info()[0] is not None and not isinstance(sys.exc_info()[1], EOFError):
            process.terminate()
        process.join()
    if isinstance(answer, str):
        raise EngineError("the engine session failed", where=answer, fix="see the unit's log")
    return answer
