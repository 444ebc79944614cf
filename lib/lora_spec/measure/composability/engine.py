"""One engine of phase 0: started, asked and described; runs in a process of its own (see `process`)."""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_spec.measure.composability.workload import BASE, CellRequest

_SCRUBBED = "…"
_MESSAGE = 600
_ABOUT = ("lora", "adapter", "specul", "draft", "accept", "temperature", "sampl", "prefix", "compil")
"""Warnings that concern a cell speak of one of these; the others are about this machine."""


@dataclass(frozen=True)
class EngineJob:
    """What one process does; everything in it is plain data.

    Attributes:
        options: keywords of ``LLM``.
        calls: requests of each call of ``generate``.
        prompts: token ids by prompt number.
        target_adapters: name to PEFT folder, of adapters that requests carry.
        draft_fields: whether requests say which drafter adapter they want.
        fixes: serving fixes to install before the engine is built.
        disabled: functions (``module:name``) that do nothing in this process: faults planted on purpose.
        hide: paths that may not appear in a record; the folder of the models first.
    """

    options: dict[str, Any]
    calls: list[list[CellRequest]]
    prompts: list[list[int]]
    target_adapters: dict[str, str] = field(default_factory=dict)
    draft_fields: bool = False
    fixes: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One request's output: tokens, accepted drafts of each draft step, prompt tokens from the cache."""

    tokens: list[int]
    accepted: list[int]
    cached: int


@dataclass
class Outcome:
    """What happened.

    Attributes:
        stage: how far it came: ``start``, ``generate`` or ``done``.
        answers: per finished call, one answer a request.
        error: type, message and place of the exception, if there was one.
        warnings: what vLLM warned of that concerns the cell, each once.
        facts: what the engine says it really did (compiled, prefix caching, fixes).
        seconds: of the process, from the start of the engine to its end.
    """

    stage: str = "start"
    answers: list[list[Answer]] = field(default_factory=list)
    error: dict[str, str] | None = None
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def environment(column: str) -> dict[str, str]:
    """What vLLM reads from the environment; to be set before anything imports it.

    Stock vLLM loads no plugin at all, not even this package's.
    """
    common = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if column == "plugin":
        return common | {"VLLM_PLUGINS": "lora_spec", "LORA_SPEC_SERVING": "all"}
    return common | {"VLLM_PLUGINS": "", "LORA_SPEC_SERVING": "0"}


class _Heard:
    """Keeps vLLM's warnings about the cell.

    A record factory, since vLLM replaces all handlers when an engine starts.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._make = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self)

    def __call__(self, *args: Any, **keywords: Any) -> logging.LogRecord:
        record = self._make(*args, **keywords)
        if record.levelno >= logging.WARNING and record.name.startswith("vllm"):
            line = record.getMessage()
            if line not in self.lines and any(word in line.lower() for word in _ABOUT):
                self.lines.append(line)
        return record


def run(job: EngineJob) -> Outcome:
    """Start the engine and ask it; an exception is an outcome, not a failure."""
    outcome = Outcome()
    heard = _Heard()
    begun = time.monotonic()
    try:
        _ask(job, outcome)
        outcome.stage = "done"
    except Exception as error:
        outcome.error = describe(error, job.hide)
    outcome.seconds = time.monotonic() - begun
    outcome.warnings = [scrub(line, job.hide) for line in heard.lines]
    return outcome


def _ask(job: EngineJob, outcome: Outcome) -> None:
    import torch

    torch.set_num_threads(1)
    from lora_spec import serving

    for place in job.disabled:
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, lambda: None)
    if job.fixes:
        serving.install_all(job.fixes)
    from vllm import LLM

    llm = LLM(**job.options)
    outcome.facts = _facts(llm)
    outcome.stage = "generate"
    for call in job.calls:
        outcome.answers.append(_generate(llm, job, call))
    outcome.facts["fixes"] = serving.status()


def _facts(llm: Any) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "compilation": config.compilation_config.mode.name,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "max_loras": config.lora_config.max_loras if config.lora_config else 0,
    }


def _generate(llm: Any, job: EngineJob, call: list[CellRequest]) -> list[Answer]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapters = {
        name: LoRARequest(name, number, path)
        for number, (name, path) in enumerate(job.target_adapters.items(), 1)
    }
    sampling = []
    for request in call:
        wanted = request.arm.draft_field if job.draft_fields else None
        sampling.append(
            SamplingParams(
                temperature=request.temperature,
                max_tokens=request.tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"draft_lora": wanted} if wanted else None,
            )
        )
    lora = [None if r.arm.target == BASE else adapters[r.arm.target] for r in call] if adapters else None
    outputs = llm.generate(
        [{"prompt_token_ids": job.prompts[r.prompt]} for r in call],
        sampling,
        lora_request=lora,
        use_tqdm=False,
    )
    return [_answer(output) for output in outputs]


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    metrics = completion.spec_decode_metrics
    accepted = [] if metrics is None else [int(count) for count in metrics.per_step_accepted]
    return Answer(list(completion.token_ids), accepted, int(output.num_cached_tokens or 0))


def describe(error: BaseException, hide: tuple[str, ...] = ()) -> dict[str, str]:
    """Type, message and place of an exception: of its first cause, at the last line inside vLLM."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "/vllm/" in f.filename or "/lora_spec/" in f.filename]
    place = inside[-1] if inside else (frames[-1] if frames else None)
    where = f"{_package_path(place.filename)}:{place.lineno} in {place.name}" if place else ""
    text = scrub(str(error), hide)
    return {"type": type(error).__name__, "message": text, "where": where}


def _package_path(filename: str) -> str:
    for package in ("/site-packages/", "/lib/"):
        if package in filename:
            return filename.rsplit(package, 1)[1]
    return Path(filename).name


def scrub(text: str, hide: tuple[str, ...] = ()) -> str:
    """One line of at most 600 characters, without this machine's paths (pydantic quotes them, cut short)."""
    for path in (*hide, os.path.expanduser("~"), os.getcwd()):
        text = text.replace(f"{path.rstrip('/')}/", f"{_SCRUBBED}/").replace(path.rstrip("/"), _SCRUBBED)
    line = " ".join(
        re.sub(r"input_value=.*, input_type", f"input_value={_SCRUBBED}, input_type", text).split()
    )
    return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1]}…"
