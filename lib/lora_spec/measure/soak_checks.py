"""What a soak has to show, and how it is judged."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_spec.measure.mixups import Tally, excess_probability
from lora_spec.measure.soak_load import Findings


@dataclass(frozen=True)
class SoakParams:
    """How long and how hard.

    Attributes:
        minutes: of mixed load, after the runs of each adapter alone.
        clients: at the same time.
        repeats: further runs of each adapter alone, which give the error rate.
        window: characters within which references must differ for a prompt to be used.
        pause_s: seconds between two rounds of the operator.
        max_growth: of resident memory, last quarter over the second one, as a share.
        min_probability: below it there are too many suspects to be chance.
        agreement_slack: how far an adapter's mean agreement may fall below that of its runs alone.
    """

    minutes: float = 10.0
    clients: int = 16
    repeats: int = 2
    window: int = 24
    pause_s: float = 3.0
    max_growth: float = 0.03
    min_probability: float = 0.001
    agreement_slack: float = 0.2
    seed: int = 0


@dataclass(frozen=True)
class Check:
    """One thing that had to hold."""

    name: str
    value: float
    limit: str
    passed: bool


@dataclass(frozen=True)
class Seen:
    """Everything that is judged.

    Attributes:
        alone: verdicts of the runs of each adapter alone.
        setup, findings: what clients saw in those runs, and under load.
        memory: (seconds, bytes) of the server's processes.
        alive: whether the server answered at the end.
        counted: growth of the server's own counters under load.
        log_errors: unexpected lines of its log.
    """

    alone: Tally
    setup: Findings
    findings: Findings
    memory: list[tuple[float, int]]
    alive: bool
    counted: dict[str, int]
    log_errors: list[str]


def log_errors(log: Path) -> list[str]:
    """Lines of the server's log that tell of something nobody asked for."""
    wanted = ("Policy not taken over", "loading_error")  # the operator's own bad policy
    return [
        line[:300]
        for line in log.read_text(errors="replace").splitlines()
        if ("Traceback" in line or " ERROR " in line or "EngineDead" in line)
        and not any(text in line for text in wanted)
    ]


def memory_growth(memory: list[tuple[float, int]]) -> tuple[float, float]:
    """Growth of resident memory: last quarter's median over the second one's, and MiB a minute since half.

    The first quarter is left out: buffers are allocated when they are first needed.
    """
    quarter = len(memory) // 4
    if quarter == 0:
        return 0.0, 0.0
    sizes = [size for _, size in memory]
    early = statistics.median(sizes[quarter : 2 * quarter])
    late = statistics.median(sizes[-quarter:])
    half = memory[len(memory) // 2 :]
    slope = 0.0
    if len(half) > 1:
        slope = statistics.linear_regression([t for t, _ in half], [size for _, size in half]).slope
    return late / early - 1, slope * 60 / 2**20


def judge(
    seen: Seen, params: SoakParams, *, most_drafts_of_an_abort: int
) -> tuple[list[Check], dict[str, Any]]:
    """The checks, and the numbers behind them for a record."""
    found, alone = seen.findings, seen.alone
    mixed = Tally.of(found.verdicts)
    problems = found.problems + seen.setup.problems
    growth, slope = memory_growth(seen.memory)
    chance = excess_probability(mixed.total_suspects, mixed.total, alone.total_suspects, alone.total)
    fall = max((alone.agreement[arm] - mixed.agreement.get(arm, 0.0) for arm in alone.agreement), default=1.0)
    copied, aborted = sum(mixed.copied.values()), found.requests["aborted"]
    lost = found.requests["completion"] + aborted - seen.counted.get("requests", 0)
    unseen = seen.counted.get("drafted_tokens", -1) - found.drafted
    most = aborted * most_drafts_of_an_abort
    checks = [
        Check("server alive at the end", float(seen.alive), "= 1", seen.alive),
        Check("unexpected lines in its log", len(seen.log_errors), "= 0", not seen.log_errors),
        Check("unexpected answers", problems.total(), "= 0", not problems),
        Check("outputs that are another adapter's", copied, "= 0", not copied),
        _at_least("chance of so many suspects", chance, params.min_probability),
        _at_most("largest fall of agreement", fall, params.agreement_slack),
        _at_most("growth of memory", growth, params.max_growth),
        # An abort may come before the server has begun, or be counted after the last look.
        Check("requests not counted", lost, f"0 to {aborted}", 0 <= lost <= aborted),
        Check("drafts counted beyond the responses'", unseen, f"0 to {most}", 0 <= unseen <= most),
        _at_least("accepted drafts", found.accepted, 50),
    ]
    ordered, sizes = sorted(found.latencies), [round(size / 2**20, 1) for _, size in seen.memory]
    numbers = {
        "requests": dict(sorted(found.requests.items())),
        "problems": dict(problems),
        "examples": [*seen.setup.examples, *found.examples],
        "log_errors": seen.log_errors[:20],
        "alone": asdict(alone),
        "mixed": asdict(mixed),
        "drafted": found.drafted,
        "accepted": found.accepted,
        "counted": seen.counted,
        "latency_p50_s": ordered[len(ordered) // 2] if ordered else None,
        "latency_p99_s": ordered[int(0.99 * (len(ordered) - 1))] if ordered else None,
        "memory_mib": {"first": sizes[0], "last": sizes[-1], "largest": max(sizes)} if sizes else {},
        "memory_slope_mib_per_min": slope,
    }
    return checks, numbers


def _at_least(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f">= {limit:g}", value >= limit)


def _at_most(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f"<= {limit:g}", value <= limit)
