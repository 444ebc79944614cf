"""vLLM's acceptance metrics of one sequence, with what was decided about its request beside them.

Imported only where vLLM runs: the class has to be one of a module, so that outputs can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from lora_spec.serving.stamp import Stamp


@dataclass
class StampedSpecDecodeMetrics(RequestSpecDecodeMetrics):
    """Counts as vLLM defines them (drafts accepted beyond the end of the output included).

    Attributes:
        draft_adapter: the drafter's adapter, None for the base drafter.
        draft_depth: most drafts a step, None for the engine's own number (`num_spec_tokens`).
    """

    draft_adapter: str | None = None
    draft_depth: int | None = None

    @classmethod
    def of(cls, metrics: RequestSpecDecodeMetrics, stamp: Stamp) -> StampedSpecDecodeMetrics:
        """The same counts (shared, not copied) with the stamp's answer."""
        adapter = stamp.draft_adapter
        return cls(
            num_spec_tokens=metrics.num_spec_tokens,
            histogram=metrics.histogram,
            num_draft_tokens=metrics.num_draft_tokens,
            per_step_accepted=metrics.per_step_accepted,
            per_step_drafted=metrics.per_step_drafted,
            draft_adapter=None if adapter is None else adapter.name,
            draft_depth=stamp.depth,
        )

    def to_dict(self) -> dict[str, Any]:
        """vLLM's payload and the two fields, which its response model passes through."""
        decided = {"draft_adapter": self.draft_adapter, "draft_depth": self.draft_depth}
        return super().to_dict() | decided


def summary(metrics: RequestSpecDecodeMetrics) -> RequestSpecDecodeMetrics:
    """A copy of the counts so far, without the lists that grow with every step."""
    return RequestSpecDecodeMetrics(
        num_spec_tokens=metrics.num_spec_tokens,
        histogram=list(metrics.histogram),
        num_draft_tokens=metrics.num_draft_tokens,
    )
