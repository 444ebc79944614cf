"""The scale s of ΔW = s·BA for each module, as PEFT resolves it and as an engine would.

PEFT 0.21 (``peft.utils.other.get_pattern_key``): the first pattern ``p`` for which ``(.*\\.)?(p)$`` matches
the module name wins; s = α/r, or α/√r with rsLoRA (Kalajdzievski, arXiv 2312.03732). vLLM 0.32 does the same
(``vllm.lora.peft_helper.PEFTHelper.get_rank_and_scaling``); engines without it apply the global α and r.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lora_spec.checkpoint.config import AdapterConfig
from lora_spec.checkpoint.reasons import shown
from lora_spec.errors import CheckpointError

_LITERAL = re.compile(r"[\w.\-]+")
_MAX_PATTERNS = 16_384
_MAX_EXPRESSIONS = 64
_MAX_NAME = 200
_BUDGET_S = 10.0


class EngineRule(StrEnum):
    """How an engine scales: by PEFT's patterns (vLLM 0.32) or by the global values alone (older ones)."""

    PATTERNS = "patterns"
    GLOBAL = "global"


@dataclass(frozen=True)
class Scale:
    """Resolved values of one module: rank, α and s."""

    rank: int
    alpha: float
    value: float


class ScaleResolver:
    """Resolves ranks and scales of modules from a checked configuration.

    Args:
        config: a LoRA configuration.
        where: file named in errors.

    Raises:
        CheckpointError: ``unsafe_pattern`` for a pattern that is no regular expression, or whose matching
            cannot be bounded (patterns come from untrusted files, and Python's matcher backtracks).
    """

    def __init__(self, config: AdapterConfig, where: str) -> None:
        self._config = config
        self._where = where
        self._ranks = self._compile(config.rank_pattern)
        self._alphas = self._compile(config.alpha_pattern)
        self._spent = 0.0
        self._found: dict[str, tuple[int | None, float | None]] = {}

    @property
    def has_patterns(self) -> bool:
        """Whether any module may differ from the global values."""
        return bool(self._ranks or self._alphas)

    def peft(self, module: str) -> Scale:
        """Rank, α and scale that PEFT uses for ``module`` (name without ``base_model.model.``)."""
        config, (rank, alpha) = self._config, self._matches(module)
        # PEFT looks up the name itself where no pattern matches it.
        return self._scale(
            config.rank_pattern.get(module, config.r) if rank is None else rank,
            config.alpha_pattern.get(module, config.lora_alpha) if alpha is None else alpha,
        )

    def engine(self, module: str, rule: EngineRule) -> Scale:
        """The same for an engine, which never takes a pattern that equals the name without matching it."""
        rank, alpha = (None, None) if rule is EngineRule.GLOBAL else self._matches(module)
        return self._scale(
            self._config.r if rank is None else rank, self._config.lora_alpha if alpha is None else alpha
        )

    def _matches(self, module: str) -> tuple[int | None, float | None]:
        """Values of the first matching patterns."""
        if module not in self._found:
            self._found[module] = self._find(self._ranks, module), self._find(self._alphas, module)
        return self._found[module]

    def _scale(self, rank: int, alpha: float) -> Scale:
        return Scale(rank, float(alpha), alpha / (math.sqrt(rank) if self._config.use_rslora else rank))

    def _find(self, compiled: list[tuple[re.Pattern[str], Any]], module: str) -> Any:
        if compiled and len(module) > _MAX_NAME:
            raise self._unsafe("module name too long to match against patterns", module)
        begin = time.monotonic()
        for pattern, value in compiled:
            if pattern.match(module):
                return value
            if self._spent + time.monotonic() - begin > _BUDGET_S:
                raise self._unsafe("matching takes too long", pattern.pattern)
        self._spent += time.monotonic() - begin
        return None

    def _compile(self, patterns: Mapping[str, Any]) -> list[tuple[re.Pattern[str], Any]]:
        expressions = [key for key in patterns if not _LITERAL.fullmatch(key)]
        if len(patterns) > _MAX_PATTERNS or len(expressions) > _MAX_EXPRESSIONS:
            raise self._unsafe("too many patterns", f"{len(patterns)}")
        for key in expressions:
            if not _bounded(key):
                raise self._unsafe("a pattern may take for ever to match", key)
        try:
            return [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in patterns.items()]
        except (re.error, OverflowError, RecursionError) as error:
            what = f"a pattern is no regular expression ({shown(error)})"
            raise self._unsafe(what, _first_bad(patterns)) from error

    def _unsafe(self, what: str, detail: str) -> CheckpointError:
        return CheckpointError(f"{what}: {shown(detail)}", where=self._where, code="unsafe_pattern")


def _first_bad(patterns: Mapping[str, Any]) -> str:
    """The first pattern that does not compile."""
    for key in patterns:
        try:
            re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError, RecursionError):
            return key
    return ""


def _bounded(pattern: str) -> bool:
    """No repeated group, few repetitions and few groups: matching is then polynomial of low degree."""
    repeats = len(re.findall(r"[*+?{]", pattern.replace("(?:", "(")))
    return (
        len(pattern) <= 512
        and repeats <= 3
        and pattern.count("(") <= 2
        and pattern.count("|") <= 128
        and not re.search(r"\)[*+{]", pattern)
    )
