"""What evidence a checkout holds, and whether its bytes are the ones that were recorded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_spec.errors import EvidenceError
from lora_spec.files import parse_json, sha256_file
from lora_spec.paths import rel, results_dir
from lora_spec.provenance import SCHEMA, EvidenceClass, Record, load_record, record_problems

_COUNTED = ("adapters", "domains", "prompts", "cells")


@dataclass
class EvidenceReport:
    """Records by (tier, phase, class), and everything that does not match its hash.

    Attributes:
        groups: one mapping a group with its counts of distinct things.
        problems: ``(file, what)`` pairs; empty when every hash holds.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    @property
    def hashes_ok(self) -> bool:
        """Whether every record and table matches its hash."""
        return not self.problems

    def payload(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "hashes_ok": self.hashes_ok,
            "groups": self.groups,
            "problems": [{"file": name, "problem": text} for name, text in self.problems],
        }


def _is_record(path: Path) -> bool:
    """Whether a JSON file claims to be a record (other JSON, such as a predictor, lies beside them)."""
    try:
        head = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return True  # unreadable: let the loader say so
    return not isinstance(head, dict) or str(head.get("schema", SCHEMA)).startswith("lora-spec-record/")


def collect_evidence(root: Path | None = None) -> EvidenceReport:
    """Read and verify every record under ``root`` (default: the checkout's ``results/``).

    A damaged file becomes a problem in the report; it never hides the others. So does a table or other JSON
    file, such as a predictor, that no record claims.

    Raises:
        EvidenceError: there is no such folder.
    """
    folder = results_dir() if root is None else root
    if not folder.is_dir():
        raise EvidenceError("no folder of results", where=rel(folder), fix="restore it, or measure first")
    report = EvidenceReport()
    grouped: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    claimed: set[Path] = set()
    others = sorted(folder.rglob("*.parquet"))
    for path in sorted(folder.rglob("*.json")):
        if not _is_record(path):
            others.append(path)
            continue
        try:
            record = load_record(path, allow=set(EvidenceClass), verify=False)
        except EvidenceError as error:
            report.problems.append((rel(path), error.what))
            continue
        claimed.update(path.parent / name for name in record.files)
        if name := record.results.get("predictor"):
            predictor = path.parent / Path(str(name)).name
            claimed.add(predictor)
            if not predictor.is_file() or sha256_file(predictor) != record.results.get("predictor_sha256"):
                report.problems.append((rel(predictor), f"not the predictor that {path.name} records"))
        report.problems.extend((rel(path), text) for text in record_problems(path, record))
        grouped[record.tier, record.phase, record.evidence_class.value].append(record)
    for path in others:
        if path not in claimed:
            report.problems.append((rel(path), "no record claims this file"))
    for (tier, phase, evidence_class), records in sorted(grouped.items()):
        distinct = {name: {x for r in records for x in getattr(r.covers, name)} for name in _COUNTED}
        report.groups.append(
            {"tier": tier, "phase": phase, "class": evidence_class, "records": len(records)}
            | {name: len(values) for name, values in distinct.items()}
        )
    return report
