"""Each engine in a process of its own, with a time limit, forked from one process that has vLLM imported.

Importing vLLM takes most of the time of a tiny engine, and engines leave global state behind: so a server
process imports it once and never runs anything, and every engine runs in a fork of it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from lora_spec.measure.composability.engine import EngineJob, Outcome, environment, run

_PRELOAD = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "lora_spec.measure.composability.engine",
)


def _child(connection: Any, job: EngineJob) -> None:
    os.setsid()  # what the engine starts ends with it
    connection.send(run(job))


class EngineProcesses:
    """Runs jobs one after the other; all of one column, since the environment is read at import."""

    def __init__(self, column: str) -> None:
        os.environ.update(environment(column))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))

    def run(self, job: EngineJob, seconds: float) -> Outcome:
        """Run one job; a crash or the time limit is an outcome too."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(sender, job))
        process.start()
        sender.close()
        try:
            if not receiver.poll(seconds):
                return _lost("TimeoutError", f"no answer within {seconds:g} s", seconds)
            return receiver.recv()
        except EOFError:
            process.join()
            return _lost("ProcessDied", _death(process.exitcode), 0.0)
        finally:
            receiver.close()
            _end(process)


def _lost(kind: str, message: str, seconds: float) -> Outcome:
    return Outcome(error={"type": kind, "message": message, "where": ""}, seconds=seconds)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the engine's process was ended by {signal.Signals(-code).name}"
    return f"the engine's process ended with exit code {code} and no answer"


def _end(process: Any) -> None:
    process.join(5.0)
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()
