"""When the prompts of one adapter suffice: a stopping rule on the standard error of its delta_alpha.

Requests are served chunk by chunk; after each chunk the paired effect against the base arm's record is
computed, and serving ends once its standard error is small enough. The rule looks at the standard error,
never at the effect, so the estimate stays nearly unbiased: what bias there is comes from the correlation of a
ratio with its own estimated error, and from a standard error that is itself estimated on few prompts and
stops early more often where it is too small (intervals then cover a little less than they say; ``minimum``
bounds it). Chunks are whole batches of the engine, so the tokens are those of a run without the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lora_spec.acceptance import paired_alpha
from lora_spec.measure.design import Precision
from lora_spec.measure.engine import Completion
from lora_spec.measure.rows import request_rows


@dataclass(frozen=True)
class EarlyStop:
    """Decides after each chunk of one adapter's primary requests; sent to the engine's process.

    Attributes:
        rule: standard error, chunk and minimum of the design.
        base: the base arm's rows of the same prompt set, decoding and depth: columns ``prompt_index``,
            ``accepted_emitted``, ``rejections``.
        prompt_indices: window numbers of the requests, in order.
        k: depth.
    """

    rule: Precision
    base: pd.DataFrame
    prompt_indices: Sequence[int]
    k: int

    def standard_error(self, completions: Sequence[Completion]) -> float:
        """Standard error of Δα̂ over the leading prompts that ``completions`` answer.

        Raises:
            EvidenceError: the base arm lacks one of these prompts, or an arm has no trial at all.
        """
        used = self.prompt_indices[: len(completions)]
        rows = request_rows(
            completions,
            arm="adapted",
            adapter="",
            prompt_set="",
            prompt_indices=used,
            decoding="",
            k=self.k,
        )
        base = self.base[self.base["prompt_index"].isin(list(used))]
        return paired_alpha(base, rows, draws=2).se

    def enough(self, completions: Sequence[Completion]) -> bool:
        """Whether to serve no further chunk."""
        if len(completions) < self.rule.minimum:
            return False
        return self.standard_error(completions) <= self.rule.se

    def report(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """For the record: prompts used and offered, the standard error reached, and why serving ended."""
        se = self.standard_error(completions)
        reached = len(completions) >= self.rule.minimum and se <= self.rule.se
        return {
            "prompts": len(completions),
            "offered": len(self.prompt_indices),
            "se": se,
            "target_se": self.rule.se,
            "stopped": "precision reached" if reached else "range used up",
        }
