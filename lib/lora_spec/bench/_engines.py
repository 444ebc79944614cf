"""vLLM engines for benchmarks, each in a process of its own, that stay up and take work in turn.

Only one of them works at a time, so that several sides can be timed in turn in one run: they wait for the
next order asleep.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.errors import EngineError
from lora_spec.measure.design import EngineParams
from lora_spec.measure.engine import prepare_process

ANSWER_S = 600.0


@dataclass(frozen=True)
class Order:
    """One request: token ids, and the drafter adapter it names (None where the engine has none)."""

    prompt: Sequence[int]
    draft_lora: str | None = None


@dataclass(frozen=True)
class Answer:
    """One `generate` over a batch.

    Attributes:
        seconds: wall time of the call in the engine's process.
        tokens: output token ids of each request.
        accepted: accepted drafts of each draft step of each request; empty without speculation.
        drafted: drafts of each draft step of each request.
    """

    seconds: float
    tokens: list[list[int]]
    accepted: list[list[int]]
    drafted: list[list[int]]

    @property
    def count(self) -> int:
        """Output tokens of all requests."""
        return sum(len(t) for t in self.tokens)

    @property
    def work(self) -> tuple[int, int, int]:
        """Draft steps, drafts and accepted drafts of all requests."""
        flat = [step for request in self.drafted for step in request]
        return len(flat), sum(flat), sum(step for request in self.accepted for step in request)

    @property
    def histograms(self) -> list[list[int]]:
        """How many draft steps of each request accepted 0, 1, ... drafts."""
        return [[steps.count(n) for n in range(max(steps, default=0) + 1)] for steps in self.accepted]


class EngineProcess:
    """An engine in a fresh process.

    Args:
        name: for error messages.
        options: keywords of `vllm.LLM`.
        params: dtype, sizes and threads.
        log: file that gets what the engine prints.

    Attributes:
        start_s: seconds from starting the process to the first token of one short request, after `wait`.
    """

    def __init__(self, name: str, options: Mapping[str, Any], params: EngineParams, log: Path) -> None:
        self.name = name
        prepare_process(params)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(options), params, log), daemon=True)
        self._begun = time.perf_counter()
        self._process.start()
        theirs.close()
        self.start_s = 0.0

    def wait(self) -> None:
        """Until the engine has started; once.

        Raises:
            EngineError: it does not.
        """
        self._receive()
        self.start_s = time.perf_counter() - self._begun

    def generate(self, orders: Sequence[Order], max_tokens: int) -> Answer:
        """Continue all prompts greedily and past any end of sequence, in one batch.

        Raises:
            EngineError: the engine failed.
        """
        return self.call(_generate, list(orders), max_tokens)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(llm, *args)` in the engine's process; both must be picklable.

        Raises:
            EngineError: it failed there.
        """
        self._connection.send((function, args))
        return self._receive()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            if not self._connection.poll(ANSWER_S):
                raise EngineError(f"no answer in {ANSWER_S:g} s", where=f"engine {self.name!r}")
            failed, answer = self._connection.recv()
        except EOFError:
            failed, answer = True, "its process ended"
        if failed:
            raise EngineError(f"the engine failed: {answer}", where=f"engine {self.name!r}")
        return answer


@contextlib.contextmanager
def engines(
    sides: Mapping[str, Mapping[str, Any]], params: EngineParams, logs: Path, *, at_once: bool = False
) -> Iterator[dict[str, EngineProcess]]:
    """Start engines, one after the other unless `at_once`; all are ended at the end, whatever happens.

    Raises:
        EngineError: one does not start.
    """
    running: dict[str, EngineProcess] = {}
    try:
        for name, options in sides.items():
            running[name] = EngineProcess(name, options, params, logs / f"{name}.log")
            if not at_once:
                running[name].wait()
        if at_once:
            for engine in running.values():
                engine.wait()
        yield running
    finally:
        for engine in running.values():
            engine.close()


def _serve(connection: Any, options: dict[str, Any], params: EngineParams, log: Path) -> None:
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(printed, 1), os.dup2(printed, 2)
    try:
        llm = _start(options, params)
        _generate(llm, [Order([1, 2, 3, 4])], 1)
        connection.send((False, None))
    except BaseException as error:
        connection.send((True, _short(error)))
        raise
    while (order := connection.recv()) is not None:
        function, args = order
        try:
            connection.send((False, function(llm, *args)))
        except Exception as error:
            connection.send((True, _short(error)))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _start(options: dict[str, Any], params: EngineParams) -> Any:
    import torch
    from vllm import LLM

    from lora_spec.serving import amx_permission

    torch.set_num_threads(params.threads)
    amx_permission.install()  # stock engines need it too, and it changes no number
    return LLM(
        **{
            "skip_tokenizer_init": True,
            "dtype": params.dtype,
            "seed": 0,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "generation_config": "vllm",
            "max_model_len": params.max_model_len,
            "max_num_seqs": params.max_num_seqs,
            "max_num_batched_tokens": params.max_num_seqs * params.max_model_len,
            **options,
        }
    )


def _generate(llm: Any, orders: list[Order], max_tokens: int) -> Answer:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if order.draft_lora is None else {"draft_lora": order.draft_lora},
        )
        for order in orders
    ]
    prompts = [{"prompt_token_ids": list(order.prompt)} for order in orders]
    begun = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    completions = [output.outputs[0] for output in outputs]
    metrics = [completion.spec_decode_metrics for completion in completions]
    return Answer(
        seconds,
        [list(completion.token_ids) for completion in completions],
        [[] if m is None else list(m.per_step_accepted) for m in metrics],
        [[] if m is None else list(m.per_step_drafted) for m in metrics],
    )
