"""The soak: a real server under mixed load for minutes, while an operator changes what it serves.

Checked are (`soak_checks`): no crash, no wrong adapter (`mixups`), bounded memory, answers that agree with
their depth and adapter, refusals that are the right ones, and counters that agree with the responses. What
was seen is recorded whether or not the checks pass.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_spec.errors import EngineError
from lora_spec.files import atomic_dir
from lora_spec.measure.mixups import References, Tally
from lora_spec.measure.server import Server
from lora_spec.measure.soak_checks import Check, Seen, SoakParams, judge, log_errors
from lora_spec.measure.soak_load import ABORT_FACTOR, Findings, Load
from lora_spec.measure.soak_world import DEPTH, World
from lora_spec.paths import cache_dir, results_dir
from lora_spec.policy import write_policy
from lora_spec.queue import Say
from lora_spec.serving.counters import AcceptanceRow, acceptance_rows

ENVIRONMENT = {"VLLM_PLUGINS": "lora_spec", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@dataclass(frozen=True)
class SoakResult:
    """Everything a record needs; ``memory`` has rows (seconds, bytes)."""

    checks: list[Check]
    numbers: dict[str, Any]
    memory: list[tuple[float, int]]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def run_soak(
    world: World, params: SoakParams, log: Path, folder: Path, say: Say = lambda line: None
) -> SoakResult:
    """Serve ``world``, soak it, judge it.

    Args:
        world: what to serve.
        params: how long and how hard.
        log: file for the server's output.
        folder: where the policy file goes.
        say: receives lines of progress.

    Raises:
        EngineError: the server did not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    policy_file = folder / "policy.json"
    policies = world.policies()
    write_policy(policy_file, policies[0])
    arguments = world.server_arguments(policy_file.resolve(), params.clients)
    begin = time.monotonic()
    with Server(arguments, log, environment=ENVIRONMENT, timeout_s=900) as server:
        started = time.monotonic() - begin
        say(f"server up after {started:.0f} s")
        load = Load(server.client, world, policies, policy_file)
        alone, found = _alone(load, params, say)
        setup, load.findings = load.findings, Findings()
        before = _rows(server)
        begin = time.monotonic()
        memory = _mixed(load, server, params, say)
        seconds = time.monotonic() - begin
        alive = _answers(server)
        counted = _difference(before, _rows(server)) if alive else {}
        errors = log_errors(log)
    seen = Seen(alone, setup, load.findings, memory, alive, counted, errors)
    checks, numbers = judge(seen, params, most_drafts_of_an_abort=ABORT_FACTOR * world.max_tokens * DEPTH)
    numbers |= {
        "seconds": seconds,
        "start_seconds": started,
        "telling_prompts": len(load.prompts),
        "wrong_adapter_detected": found,
    }
    return SoakResult(checks, numbers, memory)


def _alone(load: Load, params: SoakParams, say: Say) -> tuple[Tally, float]:
    """Each adapter served alone: first its references, then runs that are judged against them.

    Returns:
        The verdicts, which give the rate of false suspects; and the share of the same outputs that are
        suspects when they are judged as every other adapter's, which is how surely a wrong adapter is seen.
    """
    texts = {arm: _one_arm(load, arm, params.clients) for arm in load.world.arms}
    load.references = References(texts)
    load.prompts = load.references.telling_prompts(params.window)
    say(f"{len(load.prompts)} of {len(load.world.prompts)} prompts tell all {len(texts)} adapters apart")
    if not load.prompts:
        raise EngineError("no prompt tells the adapters apart", fix="Give other prompts or a larger window")
    swapped: list[bool] = []
    # Other batch sizes than the first time, so that numerics differ as much as they will under load.
    for repeat in range(params.repeats):
        for arm in texts:
            again = _one_arm(load, arm, max(2, params.clients >> (1 + repeat)))
            for prompt in load.prompts:
                load.judged(arm, prompt, again[prompt])
                others = (other for other in texts if other != arm)
                swapped += [load.references.judge(o, prompt, again[prompt]).suspect for o in others]
    tally, found = Tally.of(load.findings.verdicts), sum(swapped) / len(swapped)
    say(f"served alone: {tally.total_suspects} suspects of {tally.total}; a swap is seen in {found:.1%}")
    return tally, found


def _one_arm(load: Load, arm: str, clients: int) -> list[str]:
    with ThreadPoolExecutor(clients) as pool:
        texts = list(pool.map(lambda prompt: load.complete(arm, prompt), range(len(load.world.prompts))))
    return [text or "" for text in texts]


def _mixed(load: Load, server: Server, params: SoakParams, say: Say) -> list[tuple[float, int]]:
    """The load itself, in threads; samples memory meanwhile."""
    begin = time.monotonic()
    end = begin + 60 * params.minutes

    def over() -> bool:
        return time.monotonic() >= end or not server.is_running()

    threads = [
        threading.Thread(target=load.work, args=(params.seed * 1000 + i, over)) for i in range(params.clients)
    ]
    threads.append(threading.Thread(target=load.operate, args=(over, params.pause_s)))
    for thread in threads:
        thread.start()
    memory, told = [], begin
    interval = min(2.0, params.minutes)
    while not over():
        now = time.monotonic()
        memory.append((now - begin, server.resident_bytes()))
        if now - told >= 60:
            told = now
            done, problems = load.findings.requests["completion"], load.findings.problems.total()
            size = f"{memory[-1][1] / 2**20:.0f} MiB"
            say(f"{(now - begin) / 60:.0f} min: {done} completions, {size}, {problems} problems")
        time.sleep(interval)
    for thread in threads:
        thread.join(load.client.timeout_s)
    return memory


def _answers(server: Server) -> bool:
    try:
        return server.is_running() and server.client.get("/health").status == 200
    except OSError:
        return False


def _rows(server: Server) -> dict[Any, AcceptanceRow]:
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(server.client.get("/metrics").body)
    return {row.labels: row for row in acceptance_rows(families)}


def _difference(before: dict[Any, AcceptanceRow], after: dict[Any, AcceptanceRow]) -> dict[str, int]:
    names = ("requests", "draft_steps", "drafted_tokens", "accepted_tokens")
    return {
        name: sum(getattr(row, name) for row in after.values())
        - sum(getattr(row, name) for row in before.values())
        for name in names
    }


def record_soak(world: World, params: SoakParams, result: SoakResult) -> Path:
    """Write ``results/bench/soak.json`` and its table of memory; returns the file."""
    import pandas as pd

    from lora_spec.provenance import EvidenceClass, new_record, write_record

    record = new_record(
        experiment="soak",
        tier="pocket",
        phase="bench",
        evidence_class=EvidenceClass.MEASURED,
        config=asdict(params) | {"depth": DEPTH, "max_tokens": world.max_tokens, "arms": world.arms},
        seed=params.seed,
        revisions=world.revisions,
        covers={"adapters": list(world.revisions.get("target_adapters", {}).values())},
        results={"passed": result.passed, "checks": [asdict(check) for check in result.checks]}
        | result.numbers,
    )
    path = results_dir("bench") / "soak.json"
    memory = pd.DataFrame(result.memory, columns=["seconds", "resident_bytes"])
    write_record(path, record, {"memory": memory})
    return path


def work_folder() -> Path:
    """An empty folder for a soak's server log and policy."""
    with atomic_dir(cache_dir() / "soak"):
        pass
    return cache_dir() / "soak"
