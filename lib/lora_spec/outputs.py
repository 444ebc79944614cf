"""Where figures and tables go, and the stamp that says what they rest on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lora_spec.errors import EvidenceError
from lora_spec.paths import figures_dir
from lora_spec.provenance import EvidenceClass


@dataclass(frozen=True)
class Stamp:
    """What a figure or table rests on. ``evidence_class`` may join several classes by "+"."""

    tier: str
    evidence_class: str

    @property
    def text(self) -> str:
        """The line printed in the corner."""
        return f"evidence: {self.evidence_class} · tier: {self.tier}"

    @property
    def is_smoke(self) -> bool:
        """Whether any part is synthetic."""
        return EvidenceClass.SMOKE.value in {self.tier, *self.evidence_class.split("+")}

    def joined(self, evidence_class: str) -> Stamp:
        """The stamp of what also rests on ``evidence_class``."""
        classes = dict.fromkeys([*self.evidence_class.split("+"), evidence_class])
        return Stamp(self.tier, "+".join(classes))


def output_dir(stamp: Stamp) -> Path:
    """Directory that the outputs of one run go to.

    Raises:
        EvidenceError: synthetic numbers on their way into the checkout's own ``figures/``.
    """
    if stamp.is_smoke and not os.environ.get("LORA_SPEC_FIGURES"):
        raise EvidenceError(
            "smoke outputs may not be written to figures/",
            fix="run `make smoke`, or set LORA_SPEC_FIGURES to another directory",
            code="evidence_class",
        )
    return figures_dir()
