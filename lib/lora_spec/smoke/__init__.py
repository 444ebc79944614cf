"""The smoke tier: synthetic records with the schema of real ones, so that notebooks can be tried in seconds.

Every number is made up from a seed. Records are of class and tier ``smoke``; no loader takes them for
evidence.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lora_spec.errors import LoraSpecError, exit_status
from lora_spec.measure.design import load_design
from lora_spec.paths import repo_root
from lora_spec.smoke.acceptance import write_screen
from lora_spec.smoke.composability import write_composability
from lora_spec.smoke.confirm import write_confirm
from lora_spec.smoke.draws import TIER
from lora_spec.smoke.evidence_cost import write_evidence_cost
from lora_spec.smoke.predictor import write_predictor

__all__ = ["DESIGNS", "TIER", "main", "write_smoke"]

DESIGNS = ("phase1_measurement.yaml", "phase2_screen.yaml")


def write_smoke(results: Path) -> list[Path]:
    """Write the synthetic records of every design under ``results/smoke/``.

    Args:
        results: root that stands in for the checkout's ``results/``.

    Returns:
        The records written.

    Raises:
        LoraSpecError: ``results`` is the checkout's own evidence.
    """
    own = repo_root() / "results"
    if results.resolve() == own or own in results.resolve().parents:
        raise LoraSpecError("synthetic records may not be written among the evidence", where=results)
    written = []
    for path in DESIGNS:
        design = load_design(path)
        written += write_screen(results / TIER / design.phase, design)
    write_predictor(results, load_design(DESIGNS[-1]))
    return [
        *written,
        *write_confirm(results),
        *write_composability(results),
        *write_evidence_cost(results),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m lora_spec.smoke RESULTS``: write the synthetic records under RESULTS."""
    parser = argparse.ArgumentParser(description="Write the synthetic records of the smoke tier.")
    parser.add_argument("results", type=Path, help="directory that stands in for results/")
    args = parser.parse_args(argv)

    def write() -> None:
        print(f"{len(write_smoke(args.results))} synthetic records, class smoke: no evidence")

    return exit_status(write)
