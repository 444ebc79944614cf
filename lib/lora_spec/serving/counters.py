"""Prometheus counters of acceptance, by target adapter, drafter adapter and depth.

vLLM's own `vllm:spec_decode_*` counters are sums over all requests. These are the same counts, split by
what was decided about a request when it arrived. Label values come from names that operators loaded; their
number is bounded all the same, because loading and unloading may go on for months.

Importing this needs neither torch nor vllm, and prometheus_client (which vLLM brings) only when counters
are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lora_spec.errors import printable

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "lora_spec_"
BASE = "base"
OTHER = "other"
ENGINE_DEPTH = "engine"

# Combinations of labels that get series of their own; later ones are counted together under OTHER.
MAX_COMBINATIONS = 500
_MAX_NAME = 128

_STEPS = "draft_steps"
_DRAFTED = "drafted_tokens"
_ACCEPTED = "accepted_tokens"
_POSITIONS = "accepted_tokens_per_position"
_REQUESTS = "requests"
_HELP = {
    _STEPS: "Draft steps (one drafting and its verification) of finished and aborted requests.",
    _DRAFTED: "Tokens drafted for finished and aborted requests.",
    _ACCEPTED: "Drafted tokens that the target accepted.",
    _POSITIONS: "Draft steps whose draft at this position (from 0) was accepted.",
    _REQUESTS: "Sequences finished or aborted, those that drafted nothing included.",
}


@dataclass(frozen=True)
class Labels:
    """What a request was served with, as label values.

    Attributes:
        target_adapter: name of the target's LoRA adapter, BASE for none.
        draft_adapter: name of the drafter's LoRA adapter, BASE for none.
        depth: most drafts a step, ENGINE_DEPTH for the engine's own number.
        model: served model name.
    """

    target_adapter: str = BASE
    draft_adapter: str = BASE
    depth: str = ENGINE_DEPTH
    model: str = ""

    @classmethod
    def of(
        cls, target_adapter: str | None, draft_adapter: str | None, depth: int | None, model: str
    ) -> Labels:
        """From names as they are; None and "" mean the base, a depth of None the engine's."""
        return cls(
            _adapter(target_adapter),
            _adapter(draft_adapter),
            ENGINE_DEPTH if depth is None else str(depth),
            _value(model),
        )


def _adapter(name: str | None) -> str:
    """An adapter's label; one that is called as no adapter is (or after nothing) is told from it."""
    value = _value(name) if name else BASE
    return f"{value} (adapter)" if name and value in (BASE, OTHER, "") else value


def _value(name: str) -> str:
    """A label value that can always be written out: one line, no halves of surrogate pairs, bounded."""
    return printable(name)[:_MAX_NAME]


_LABELS = tuple(field.name for field in fields(Labels))


class AcceptanceCounters:
    """The counters of one process.

    Args:
        registry: where to register them; prometheus_client's default, as vLLM does, when None. With
            PROMETHEUS_MULTIPROC_DIR set their values lie in files there, again as vLLM's.
        max_combinations: see MAX_COMBINATIONS.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, max_combinations: int = MAX_COMBINATIONS
    ) -> None:
        from prometheus_client import REGISTRY, Counter

        self._max = max_combinations
        self._known: set[Labels] = set()
        self._counters: dict[str, Any] = {}
        for name, text in _HELP.items():
            labels = (*_LABELS, "position") if name == _POSITIONS else _LABELS
            self._counters[name] = Counter(
                f"{PREFIX}{name}_total", text, labels, registry=registry or REGISTRY
            )

    def observe(self, labels: Labels, histogram: Sequence[int], drafted: int) -> None:
        """Count one sequence.

        Args:
            labels: what it was served with.
            histogram: draft steps by number of accepted drafts, from 0 to the engine's depth; empty where
                nothing was drafted.
            drafted: drafted tokens.
        """
        if labels not in self._known:
            if len(self._known) >= self._max:
                labels = Labels(OTHER, OTHER, labels.depth, labels.model)
            else:
                self._known.add(labels)
        values = astuple(labels)
        # survivors[i] = steps that accepted more than i drafts.
        survivors = list(accumulate(reversed(histogram)))[::-1][1:]
        self._counters[_REQUESTS].labels(*values).inc()
        self._counters[_STEPS].labels(*values).inc(sum(histogram))
        self._counters[_DRAFTED].labels(*values).inc(drafted)
        self._counters[_ACCEPTED].labels(*values).inc(sum(survivors))
        for position, count in enumerate(survivors):
            self._counters[_POSITIONS].labels(*values, str(position)).inc(count)


@dataclass
class AcceptanceRow:
    """Counts of one combination of labels. See the counters' help texts."""

    labels: Labels
    requests: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_tokens_per_position: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain form, labels first."""
        values = asdict(self)
        return values.pop("labels") | values


def acceptance_rows(families: Iterable[Any]) -> list[AcceptanceRow]:
    """Rows of these counters among Prometheus metric families.

    Args:
        families: what a registry's `collect()` gives, or `prometheus_client.parser` for the text of
            `GET /metrics`.
    """
    rows: dict[Labels, AcceptanceRow] = {}
    positions: dict[Labels, dict[int, int]] = {}
    for family in families:
        name = family.name.removeprefix(PREFIX)
        if not family.name.startswith(PREFIX) or name not in _HELP:
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue  # creation times
            given = dict(sample.labels)
            position = given.pop("position", None)
            labels = Labels(**given)
            row = rows.setdefault(labels, AcceptanceRow(labels))
            if position is None:
                setattr(row, name, int(sample.value))
            else:
                positions.setdefault(labels, {})[int(position)] = int(sample.value)
    for labels, counts in positions.items():
        rows[labels].accepted_tokens_per_position = tuple(counts[i] for i in sorted(counts))
    return sorted(rows.values(), key=lambda row: astuple(row.labels))
