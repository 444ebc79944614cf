"""Telling from a greedy output which adapter made it.

Each adapter answers a prompt in its own way. Reference answers come from runs in which one adapter is served
alone; an output whose longest common beginning is with *another* adapter's reference is a suspect. Numerics
depend on the composition of a batch, so a right output may leave its reference at a near-tie; how often that
makes a suspect is measured on further runs of one adapter alone, and is the error rate of the method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    """What an output says about its adapter.

    Attributes:
        agreement: share of the own reference that the output repeats from its beginning, 0 to 1.
        suspect: whether another adapter's reference shares a longer beginning.
        copied: the other adapter whose whole reference it is, None mostly: numerics do not do that.
    """

    agreement: float
    suspect: bool
    copied: str | None


@dataclass(frozen=True)
class References:
    """Outputs of each adapter served alone.

    Attributes:
        texts: adapter -> its output for each prompt, in the order of the prompts.
    """

    texts: Mapping[str, Sequence[str]]

    def telling_prompts(self, window: int) -> list[int]:
        """Prompts at which any two adapters' references differ within ``window`` characters."""
        arms = list(self.texts)
        count = len(self.texts[arms[0]])
        return [
            prompt
            for prompt in range(count)
            if all(
                common_length(self.texts[a][prompt], self.texts[b][prompt]) < window
                for i, a in enumerate(arms)
                for b in arms[:i]
            )
        ]

    def judge(self, arm: str, prompt: int, text: str) -> Verdict:
        """Compare an output of ``arm`` with every adapter's reference for that prompt."""
        own = self.texts[arm][prompt]
        shared = {name: common_length(text, texts[prompt]) for name, texts in self.texts.items()}
        others = {name: length for name, length in shared.items() if name != arm}
        copied = next((name for name in others if text and text == self.texts[name][prompt] != own), None)
        suspect = max(others.values(), default=0) > shared[arm]
        return Verdict(shared[arm] / len(own) if own else float(not text), suspect, copied)


@dataclass
class Tally:
    """Verdicts counted, by adapter."""

    outputs: dict[str, int] = field(default_factory=dict)
    suspects: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, verdicts: Iterable[tuple[str, Verdict]]) -> Tally:
        """Count (adapter, verdict) pairs; ``agreement`` is the mean."""
        by_arm: dict[str, list[Verdict]] = {}
        for arm, verdict in verdicts:
            by_arm.setdefault(arm, []).append(verdict)
        made = cls()
        for arm, found in sorted(by_arm.items()):
            made.outputs[arm] = len(found)
            made.suspects[arm] = sum(v.suspect for v in found)
            made.copied[arm] = sum(v.copied is not None for v in found)
            made.agreement[arm] = sum(v.agreement for v in found) / len(found)
        return made

    @property
    def total(self) -> int:
        """All outputs."""
        return sum(self.outputs.values())

    @property
    def total_suspects(self) -> int:
        """All suspects."""
        return sum(self.suspects.values())


def common_length(first: str, second: str) -> int:
    """Length of the longest common beginning, in characters."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def excess_probability(suspects: int, outputs: int, before: int, of: int) -> float:
    """How likely at least this many suspects are, were the rate that of the runs of one adapter alone.

    The one-sided hypergeometric (Fisher) test: all suspects of both runs, shared out at random.

    Args:
        suspects, outputs: of the run in question.
        before, of: of the runs of one adapter alone.
    """
    everything, marked = outputs + of, suspects + before
    whole = math.comb(everything, outputs)
    ways = sum(
        math.comb(marked, k) * math.comb(everything - marked, outputs - k)
        for k in range(suspects, min(marked, outputs) + 1)
    )
    return ways / whole
