"""Evidence of one phase as a notebook needs it: tables, what they cover, and the controls they passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lora_spec.acceptance.labels import PRIMARY_DECODING
from lora_spec.errors import EvidenceError
from lora_spec.measure.design import GENERAL, load_design
from lora_spec.measure.lossless import largest_near_tie
from lora_spec.outputs import Stamp
from lora_spec.paths import results_dir
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.pool import load_pool
from lora_spec.provenance import Record
from lora_spec.screen import load_screen

PRIMARY = PRIMARY_DECODING
DECODINGS = {PRIMARY: "T = 0.8", "greedy": "greedy"}
"""Key in the tables to what readers see; the primary one first."""
TRAFFIC = {"own": "own domain", GENERAL: "general"}
"""Whose prompts: key in the tables to what readers see."""
_LISTED = 6
"""Missing adapters that are named."""
CONTROL_COLUMNS = ("control", "where", "value", "expected", "limit", "passed")


@dataclass(frozen=True)
class PhaseEvidence:
    """Records of one phase and their rows.

    Attributes:
        stamp: tier and evidence class of all of it.
        records: by folder and unit, ``screen/base--german``.
        requests: rows of all ``requests`` tables.
        overlap: rows of all ``overlap`` tables, if they were asked for.
    """

    stamp: Stamp
    records: dict[str, Record]
    requests: pd.DataFrame
    overlap: pd.DataFrame | None = None


def load_phase(
    parameters: NotebookParameters, phase: str, screen: str, *, overlap: str | None = None
) -> PhaseEvidence:
    """Read ``results/<tier>/<phase>/<screen>`` and, if named and already there, its teacher-forced scores.

    Raises:
        EvidenceError: missing or damaged, or of another class or tier than the parameters allow.
    """
    folder = results_dir(parameters.tier, phase)
    allow = {parameters.evidence_class}
    records, requests = load_screen(folder / screen, allow=allow)
    found = {f"{screen}/{name}": record for name, record in records.items()}
    scores = None
    if overlap is not None and any((folder / overlap).glob("*.json")):
        scored, scores = load_screen(folder / overlap, "overlap", allow=allow)
        found |= {f"{overlap}/{name}": record for name, record in scored.items()}
    for name, record in found.items():
        if record.tier != parameters.tier:
            raise EvidenceError(
                f"record of tier {record.tier} among those of tier {parameters.tier}", where=name, code="tier"
            )
    return PhaseEvidence(parameters.stamp, found, requests, scores)


def folder_table(
    records: Mapping[str, Record], stamp: Stamp, columns: Callable[[list[Record]], dict[str, object]]
) -> pd.DataFrame:
    """One row a folder: its records, ``columns`` of them, and how many ran uncommitted code.

    Args:
        records: by folder and name, ``folder/name``.
        stamp: of all of them.
        columns: what to say of the records of a folder.
    """
    rows = []
    for folder in dict.fromkeys(name.split("/")[0] for name in records):
        members = [record for name, record in records.items() if name.split("/")[0] == folder]
        rows.append(
            {
                "evidence": folder,
                "tier": stamp.tier,
                "class": stamp.evidence_class,
                "records": len(members),
                **columns(members),
                "uncommitted": sum(bool(record.git.get("dirty")) for record in members),
            }
        )
    return pd.DataFrame(rows)


def summary_table(evidence: PhaseEvidence) -> pd.DataFrame:
    """One row a folder: records, the distinct things they cover, and how many ran uncommitted code."""

    def covered(records: list[Record]) -> dict[str, object]:
        return {
            "adapters": _distinct(record.covers.adapters for record in records),
            "domains": _distinct(record.covers.domains for record in records),
            "prompts": _distinct(record.covers.prompts for record in records),
        }

    return folder_table(evidence.records, evidence.stamp, covered)


def declared_sentence(evidence: PhaseEvidence, design: str) -> str:
    """How many of the adapters that a design names were measured, in one sentence.

    Args:
        design: design file, relative to ``params/``.

    Raises:
        EvidenceError: an adapter that it does not declare.
    """
    declared, measured = _declared(design), measured_adapters(evidence)
    if foreign := sorted(measured - declared):
        raise EvidenceError(f"adapter {foreign[0]} is not declared in params/{design}", code="undeclared")
    missing = sorted(declared - measured)
    listed = ", ".join(missing[:_LISTED]) + (", …" if len(missing) > _LISTED else "")
    tail = f" {len(missing)} missing: {listed}." if missing else ""
    return f"{len(measured)} of the {len(declared)} adapters declared in params/{design} were measured.{tail}"


def _declared(design: str) -> set[str]:
    return set(load_design(design).adapters)


def measured_adapters(evidence: PhaseEvidence) -> set[str]:
    """Names of the adapters among the requests."""
    return set(evidence.requests["adapter"]) - {""}


def is_complete(evidence: PhaseEvidence, design: str) -> bool:
    """Whether every adapter that a design names was measured."""
    return _declared(design) <= measured_adapters(evidence)


def primary_depth(evidence: PhaseEvidence) -> int:
    """The k of the primary label, as the records' own design says.

    Raises:
        EvidenceError: records of designs with different ones.
    """
    found = {
        int(record.config["design"]["num_speculative_tokens"])
        for record in evidence.records.values()
        if "design" in record.config
    }
    if len(found) != 1:
        raise EvidenceError(
            f"records with {len(found)} primary depths instead of one",
            fix="measure all units of one design",
            code="k_mismatch",
        )
    return found.pop()


def _distinct(lists: Iterable[list[str]]) -> int:
    return len({item for items in lists for item in items})


def controls_table(evidence: PhaseEvidence) -> pd.DataFrame:
    """What the run had to pass before its numbers counted, worst case of each control.

    Columns: control, where (mode, or the unit that came closest to the limit), value, expected (NaN: none),
    limit (largest distance from expected, or the bound), passed.
    """
    rows = [
        *_self_draft(evidence.records),
        *_fp32(evidence.records),
        *_base(evidence.records),
        *_greedy_lossless(evidence.records),
        *_applied(evidence.records),
    ]
    if not rows:
        raise EvidenceError("no control among the records", fix="measure them first", code="no_controls")
    return pd.DataFrame([dict(zip(CONTROL_COLUMNS, row, strict=True)) for row in rows])


Row = tuple[str, str, float, float, float, bool]
_NAN = float("nan")


def _self_draft(records: Mapping[str, Record]) -> list[Row]:
    rows = []
    for record in records.values():
        limit = record.results.get("tolerance", _NAN)
        for mode, got in sorted(record.results.get("self_draft", {}).items()):
            decoding, drafts = mode.split("/")
            where = f"{DECODINGS.get(decoding, decoding)}, {drafts} drafts"
            passed = abs(got["alpha"] - got["expected"]) <= limit
            rows.append(("self-draft α̂", where, got["alpha"], got["expected"], limit, passed))
    return rows


def _fp32(records: Mapping[str, Record]) -> list[Row]:
    rows = []
    for record in records.values():
        for arm, check in record.results.get("fp32_lossless", {}).items():
            share = check["identical"] / check["requests"]
            rows.append(("fp32 greedy outputs identical", arm, share, 1.0, 0.0, share == 1.0))
    return rows


def _base(records: Mapping[str, Record]) -> list[Row]:
    checks = [
        (_unit_at(name, label), label.split("/k")[0], check)
        for name, record in records.items()
        for label, check in record.results.get("base_controls", {}).items()
    ]
    rows: list[Row] = []
    for decoding, label in DECODINGS.items():
        of_mode = [(unit, check) for unit, mode, check in checks if mode.split("/")[0] == decoding]
        if of_mode:
            unit, worst = min(of_mode, key=lambda item: item[1]["alpha"] - item[1]["floor"])
            passed = all(c["alpha"] >= c["floor"] for _, c in of_mode)
            where = f"{label}, lowest of {len(of_mode)}: {unit}"
            rows.append(("base α̂ over its floor", where, worst["alpha"], _NAN, worst["floor"], passed))
        scored = [(unit, check) for unit, check in of_mode if "overlap_same_tokens" in check]
        if scored:
            unit, worst = max(scored, key=lambda item: _overlap_distance(item[1]) - item[1]["tolerance"])
            passed = all(_overlap_distance(c) <= c["tolerance"] for _, c in scored)
            where = f"{label}, furthest of {len(scored)}: {unit}"
            rows.append(
                (
                    "base α̂ is the overlap",
                    where,
                    worst["alpha"],
                    worst["overlap_same_tokens"],
                    worst["tolerance"],
                    passed,
                )
            )
    return rows


def _unit_at(name: str, label: str) -> str:
    """A record's unit, and the depth that ``Design.at_depth`` put into a label of its results."""
    unit = name.split("/")[1].removeprefix("base--")
    _, apart, depth = label.partition("/k")
    return f"{unit}, k = {depth}" if apart else unit


def _overlap_distance(check: Mapping[str, Any]) -> float:
    return abs(check["alpha"] - check["overlap_same_tokens"])


def _greedy_lossless(records: Mapping[str, Record]) -> list[Row]:
    checks = [
        (_unit_at(name, label), check)
        for name, record in records.items()
        for label, check in record.results.get("lossless", {}).items()
    ]
    if not checks:
        return []
    identical, total = (sum(check[key] for _, check in checks) for key in ("identical", "requests"))
    unit, gap = max(((unit, largest_near_tie(check)) for unit, check in checks), key=lambda item: item[1])
    passed = all(check["lossless"] for _, check in checks)
    limit = max(check["near_tie_nats"] for _, check in checks)
    rows: list[Row] = [
        ("greedy outputs identical, bf16", f"{total} requests", identical / total, _NAN, _NAN, passed),
        ("gap at a first divergence, nats", f"largest: {unit}", gap, _NAN, limit, passed),
    ]
    if settled := [check["float32"] for _, check in checks if "float32" in check]:
        asked, same = (sum(check[key] for check in settled) for key in ("requests", "identical"))
        where = f"{asked} requests with larger gaps"
        rows.append(("identical in float32", where, same / asked, 1.0, 0.0, same == asked))
    return rows


def _applied(records: Mapping[str, Record]) -> list[Row]:
    """Every adapter with an update changes some logits, and one whose update is zero changes none."""
    changed: dict[bool, list[float]] = {True: [], False: []}
    for record in records.values():
        if flags := record.results.get("first_token_changed"):
            changed[record.results.get("frobenius", 0.0) > 0].append(sum(flags) / len(flags))
    rows: list[Row] = []
    if applied := changed[True]:
        where = f"prompts, fewest of {len(applied)} adapters"
        rows.append(("adapter changes the logits", where, min(applied), _NAN, 0.0, min(applied) > 0))
    if null := changed[False]:
        where = f"prompts, most of {len(null)} with ‖ΔW‖ = 0"
        rows.append(("zero update changes no logit", where, max(null), 0.0, 0.0, max(null) == 0))
    return rows


def controls_sentence(controls: pd.DataFrame) -> str:
    """Whether all controls passed, in one sentence."""
    failed = controls.loc[~controls["passed"].astype(bool), "control"].unique()
    if len(failed):
        return f"Failed controls: {', '.join(failed)}. The numbers below are no evidence."
    return f"All {len(controls)} controls passed."


def domain_families() -> dict[str, str]:
    """Shift family of each domain, as the adapter pool declares it."""
    return {recipe.domain: recipe.family for recipe in load_pool().values()}
