"""What a cell's answers say about it: right, wrong, or nothing."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lora_spec.measure.composability.cells import Cell, Limits
from lora_spec.measure.composability.compare import first_difference, two_share_z, worst_variation
from lora_spec.measure.composability.engine import Answer, Outcome
from lora_spec.measure.composability.workload import Arm, CellRequest


class Status(enum.StrEnum):
    """Verdict on one cell in one column."""

    WORKS = "works"
    WRONG = "wrong"
    ERROR = "error"
    UNSUPPORTED = "unsupported"
    NOT_EXERCISED = "not exercised"


class Expected(Protocol):
    """What the merged full models answer; nothing of it comes from an engine with LoRA."""

    def greedy(self, variant: str) -> tuple[list[list[int]], np.ndarray]:
        """Tokens per prompt and their top-2 gaps."""

    def joint(self, variant: str) -> np.ndarray:
        """Distribution of the first tokens after the first prompt."""

    def greedy_accepted(self, method: str, arm: Arm) -> list[list[int]] | None:
        """Accepted drafts of each draft step, per prompt; None where no reference exists."""

    def sampled_first(self, method: str, arm: Arm) -> tuple[int, int] | None:
        """First draft steps with an accepted draft, and all first draft steps; None without reference."""


@dataclass
class Verdict:
    """One cell's verdict.

    Attributes:
        status: see :class:`Status`.
        how: what is wrong, missing or refused, one sentence each.
        silent: nothing that vLLM printed hints at it; None where the answers are not wrong.
        checks: the numbers behind it.
    """

    status: Status
    how: list[str] = field(default_factory=list)
    silent: bool | None = None
    checks: dict[str, Any] = field(default_factory=dict)


def judge(
    cell: Cell, calls: Sequence[Sequence[CellRequest]], outcome: Outcome, expected: Expected, limits: Limits
) -> Verdict:
    """Verdict on what an engine answered to a cell's calls."""
    if outcome.error is not None:
        return _failed(outcome)
    checks: dict[str, Any] = {}
    if cell.sampling == "greedy":
        faults = _outputs(calls, outcome.answers, expected, limits, checks)
        faults += _greedy_acceptance(cell, calls, outcome.answers, expected, checks)
    else:
        faults = _distribution(calls[0], outcome.answers[0], expected, limits, checks)
        faults += _sampled_acceptance(cell, calls[0], outcome.answers[0], expected, limits, checks)
    if faults:
        return Verdict(Status.WRONG, faults, _silent(outcome.warnings), checks)
    if refused := _not_done(cell, outcome.facts):
        return Verdict(Status.UNSUPPORTED, [refused], None, checks)
    if missing := _not_exercised(cell, outcome, limits, checks):
        return Verdict(Status.NOT_EXERCISED, missing, None, checks)
    return Verdict(Status.WORKS, [], None, checks)


def _failed(outcome: Outcome) -> Verdict:
    error = outcome.error or {}
    text = f"{error['type']}: {error['message']}"
    if error["where"]:
        text += f" ({error['where']})"
    return Verdict(Status.UNSUPPORTED if is_refusal(outcome.stage, error) else Status.ERROR, [text])


def is_refusal(stage: str, error: Mapping[str, str]) -> bool:
    """Whether an exception says that something is not supported, rather than that something broke.

    Only before the engine is up: a missing optional package, an unknown configuration key, a named refusal of
    the plugin, or a message that says "support".
    """
    if stage != "start":
        return False
    if error["type"] in ("ImportError", "ModuleNotFoundError", "NotImplementedError"):
        return True
    if "lora_spec/serving/" in error["where"] and error["type"] in ("EngineError", "ParamsError"):
        return True
    known = ("not support", "unsupported", "only support", "Unexpected keyword argument")
    return error["type"] in ("ValueError", "ValidationError") and any(k in error["message"] for k in known)


def _silent(warnings: Sequence[str]) -> bool:
    """Nothing printed speaks of adapters, temperatures or acceptance."""
    hints = ("lora", "adapter", "temperature", "rejection sampl", "accept")
    lines = [line.lower().replace("lora_spec", "") for line in warnings]  # the plugin's modules say nothing
    return not any(hint in line for line in lines for hint in hints)


def _outputs(
    calls: Sequence[Sequence[CellRequest]],
    answers: Sequence[Sequence[Answer]],
    expected: Expected,
    limits: Limits,
    checks: dict[str, Any],
) -> list[str]:
    """Greedy tokens against the merged full targets', request by request."""
    by_target: dict[str, dict[str, int]] = defaultdict(
        lambda: {"requests": 0, "identical": 0, "near_ties": 0}
    )
    for call, given in zip(calls, answers, strict=True):
        for request, answer in zip(call, given, strict=True):
            tokens, gaps = expected.greedy(request.arm.target)
            counts = by_target[request.arm.target]
            counts["requests"] += 1
            at = first_difference(answer.tokens, tokens[request.prompt])
            if at is None:
                counts["identical"] += 1
            elif at < gaps.shape[1] and gaps[request.prompt, at] <= limits.near_tie_nats:
                counts["near_ties"] += 1
    checks["outputs"] = {name: dict(counts) for name, counts in by_target.items()}
    faults = []
    for target, counts in by_target.items():
        wrong = counts["requests"] - counts["identical"] - counts["near_ties"]
        if wrong:
            faults.append(f"{wrong} of {counts['requests']} outputs of {_rows(target)} differ")
    return faults


def _rows(target: str) -> str:
    return "base requests" if target == "base" else f"requests with {target}"


def _greedy_acceptance(
    cell: Cell,
    calls: Sequence[Sequence[CellRequest]],
    answers: Sequence[Sequence[Answer]],
    expected: Expected,
    checks: dict[str, Any],
) -> list[str]:
    """Accepted drafts step by step against an engine of merged full models."""
    equal: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    seen: dict[Arm, list[list[int]]] = {}
    for call, given in zip(calls, answers, strict=True):
        for request, answer in zip(call, given, strict=True):
            reference = expected.greedy_accepted(cell.method, request.arm)
            if reference is None:
                return []
            seen[request.arm] = reference
            counts = equal[request.arm.name]
            counts[0] += answer.accepted == reference[request.prompt]
            counts[1] += 1
    checks["acceptance"] = {arm: {"requests": n, "equal": same} for arm, (same, n) in equal.items()}
    if cell.drafter_lora == "dynamic":
        checks["drafters_differ"] = _drafters_differ(seen)
    return [
        f"accepted drafts of {n - same} of {n} requests of {arm} differ from the merged models'"
        for arm, (same, n) in equal.items()
        if same < n
    ]


def _drafters_differ(seen: Mapping[Arm, list[list[int]]]) -> bool:
    """Whether, for every target, each two of its drafters differ in what is accepted on most prompts."""
    arms = sorted(seen)
    for i, a in enumerate(arms):
        for b in arms[i + 1 :]:
            if a.target == b.target:
                differ = [x != y for x, y in zip(seen[a], seen[b], strict=True)]
                if np.mean(differ) < 0.5:
                    return False
    return True


def _distribution(
    call: Sequence[CellRequest],
    answers: Sequence[Answer],
    expected: Expected,
    limits: Limits,
    checks: dict[str, Any],
) -> list[str]:
    """Total variation of sampled tokens from the target's exact distribution, against its sampling floor."""
    faults = []
    found = checks.setdefault("distribution", {})
    for target in dict.fromkeys(request.arm.target for request in call):
        pairs = zip(call, answers, strict=True)
        tokens = np.array([answer.tokens for request, answer in pairs if request.arm.target == target])
        tv, limit, where = worst_variation(tokens, expected.joint(target), limits.deviations)
        found[target] = {"requests": len(tokens), "tv": tv, "limit": limit, "at": where}
        if tv > limit:
            faults.append(f"{where} of {_rows(target)}: total variation {tv:.3f}, limit {limit:.3f}")
    return faults


def _sampled_acceptance(
    cell: Cell,
    call: Sequence[CellRequest],
    answers: Sequence[Answer],
    expected: Expected,
    limits: Limits,
    checks: dict[str, Any],
) -> list[str]:
    """How often a request's first draft is accepted, against an engine of merged full models."""
    faults = []
    found = checks.setdefault("first_draft", {})
    for arm in dict.fromkeys(request.arm for request in call):
        reference = expected.sampled_first(cell.method, arm)
        if reference is None:
            continue
        firsts = [
            a.accepted[0] > 0 for r, a in zip(call, answers, strict=True) if r.arm == arm and a.accepted
        ]
        z = two_share_z(sum(firsts), len(firsts), *reference)
        found[arm.name] = {"accepted": sum(firsts), "requests": len(firsts), "z": z}
        if not abs(z) <= limits.deviations:
            faults.append(
                f"first drafts of {arm.name} accepted in {sum(firsts)} of {len(firsts)} requests, "
                f"of the merged models in {reference[0]} of {reference[1]}"
            )
    return faults


def _not_done(cell: Cell, facts: Mapping[str, Any]) -> str | None:
    """What the engine was asked for and quietly did not do."""
    if cell.execution == "compiled" and facts["compilation"] == "NONE":
        return "ran eagerly: this engine turned compilation off"
    if cell.prefix_cache == "on" and not facts["prefix_caching"]:
        return "ran without a prefix cache: this engine turned it off"
    return None


def _not_exercised(cell: Cell, outcome: Outcome, limits: Limits, checks: dict[str, Any]) -> list[str]:
    """Why right answers prove nothing here."""
    missing = []
    accepted = sum(sum(a.accepted) for given in outcome.answers for a in given)
    cached = sum(a.cached for given in outcome.answers for a in given)
    checks |= {"accepted": accepted, "cached_tokens": cached}
    if cell.method != "none" and accepted < limits.accepted:
        missing.append(f"only {accepted} drafts were accepted")
    if cell.prefix_cache == "on" and not cached:
        missing.append("no prompt token came from the cache")
    if checks.get("drafters_differ") is False:
        missing.append("the drafters accept alike, so a mix-up could not be seen")
    return missing
