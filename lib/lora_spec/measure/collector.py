"""Plan, run and resume a screen: one record a unit, controls first, then base arms, then adapters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_spec.errors import LoraSpecError, exit_status
from lora_spec.measure.design import (
    FP32,
    GENERAL,
    SELF_DRAFT,
    Design,
    MeasureUnit,
    UnitKind,
    base_unit_name,
    find_unit,
    load_design,
)
from lora_spec.measure.inputs import Inputs, validate
from lora_spec.measure.overlap import no_overlap
from lora_spec.paths import cache_dir, rel
from lora_spec.provenance import (
    EvidenceClass,
    Record,
    load_table,
    new_record,
    record_state,
    write_record,
)

if TYPE_CHECKING:
    import pandas as pd

Task = Literal["acceptance", "overlap"]
State = Literal["done", "to do", "stale"]
_NOT_SCORED = ("decodings", "depths", "draft_sampling", "max_tokens", "precision", "general")
"""Values of a design that teacher-forced scores do not depend on."""


@dataclass(frozen=True)
class PlannedUnit:
    """One row of the plan."""

    unit: MeasureUnit
    path: Path
    state: State
    requests: int


def unit_config(design: Design, unit: MeasureUnit, task: Task) -> dict[str, Any]:
    """A record's config: what decides the numbers, and nothing else.

    Which other adapters a design lists changes no number of this unit, so the list is left out; a grown pool
    keeps its records.
    """
    config = design.config()
    del config["adapters"]
    if unit.kind is not UnitKind.CONTROL:
        del config["controls"]["fp32_adapters"]
    if task == "overlap":
        for name in _NOT_SCORED:
            del config[name]
    elif unit.kind is not UnitKind.ADAPTER:
        del config["precision"]
    return {
        "design": config,
        "unit": asdict(unit) | {"kind": unit.kind.value, "prompt_sets": list(unit.prompt_sets)},
        "task": task,
    }


class Collector:
    """One task (counted acceptance in vLLM, or teacher-forced overlap) over one design."""

    def __init__(self, design_path: str, task: Task) -> None:
        self.design_path = design_path
        self.task: Task = task
        self.design = load_design(design_path)
        if task == "overlap" and not self.design.has_overlap:
            raise no_overlap(self.design)
        self.inputs = Inputs(self.design)
        self.directory = self.design.directory()
        if task == "overlap":
            self.directory = self.directory.with_name("overlap")

    def units(self) -> list[MeasureUnit]:
        """Units of the task, in order."""
        if self.task == "acceptance":
            return self.inputs.units
        return [u for u in self.inputs.units if u.kind is not UnitKind.CONTROL and u.domain != GENERAL]

    def path(self, unit: MeasureUnit) -> Path:
        """Record of ``unit``."""
        return self.directory / f"{unit.name}.json"

    def state(self, unit: MeasureUnit) -> State:
        """``done`` only if the record is whole, of this design and of these inputs."""
        config = unit_config(self.design, unit, self.task)
        return record_state(
            self.path(unit), lambda record: config == record.config and self.inputs.matches(unit, record)
        )

    def plan(self, only: Sequence[str] = ()) -> list[PlannedUnit]:
        """Every unit, or those named, with its state.

        Raises:
            LoraSpecError: the design has no unit of that name.
        """
        units = self.units()
        for name in only:
            if name not in {unit.name for unit in units}:
                raise LoraSpecError(f"no unit {name} in this design", where=self.design_path)
        rows = []
        for unit in units:
            if only and unit.name not in only:
                continue
            rows.append(PlannedUnit(unit, self.path(unit), self.state(unit), self._requests(unit)))
        return rows

    def _requests(self, unit: MeasureUnit) -> int:
        """Speculative requests of a unit, or windows scored; a stopping rule may leave some out."""
        design, limits = self.design, self.design.controls
        if self.task == "overlap":
            return design.own.count
        if unit.name == FP32:
            return limits.fp32_prompts * (1 + len(limits.fp32_adapters))
        if unit.name == SELF_DRAFT:  # each decoding, and the sampled ones with greedy drafts too
            return (limits.self_draft_prompts or 0) * (2 * len(design.decodings) - 1)
        return sum(design.requests(prompt_set) for prompt_set in unit.prompt_sets)

    def problems(self, only: Sequence[str] = ()) -> list[str]:
        """What is wrong with the frozen inputs of the units to do, all or those named; no torch, no vLLM."""
        found = validate(self.inputs, [row.unit for row in self.plan(only) if row.state != "done"])
        if not self.design.selected:
            found.insert(0, "its adapters are to be chosen first: lora-spec select-confirm --execute")
        return found

    def covers(self, unit: MeasureUnit, tables: Mapping[str, pd.DataFrame]) -> dict[str, list[str]]:
        """What the record of ``unit`` is about; its prompts are those in its tables."""
        adapter = [] if unit.adapter is None else [self.inputs.adapter(unit.adapter).content_hash]
        domain = [] if unit.domain in (None, GENERAL) else [str(unit.domain)]
        prompts = [
            f"{prompt_set}/{index}"
            for table in tables.values()
            for prompt_set, index in zip(table["prompt_set"], table["prompt_index"], strict=True)
        ]
        return {"adapters": adapter, "domains": domain, "prompts": list(dict.fromkeys(prompts))}

    def execute_unit(self, name: str) -> Record:
        """Run one unit in this process and write its record.

        Raises:
            LoraSpecError: an input is wrong, a prerequisite missing, or a control fails; nothing is written.
        """
        unit = find_unit(self.units(), name)
        self.inputs.verify_models()
        self._require_prerequisites(unit)
        if self.task == "acceptance":
            from lora_spec.measure.controls import run_unit
            from lora_spec.measure.units import ArmRunner

            outcome = run_unit(ArmRunner(self.inputs), unit, self._base_requests(unit))
            results, tables, fixes = outcome.results, outcome.tables, outcome.fixes
        else:
            from lora_spec.measure.overlap import score_unit

            results, tables, fixes = *score_unit(self.inputs, unit), {}
        record = new_record(
            experiment=f"{self.design.experiment}/{self.task}",
            tier=self.design.tier,
            phase=self.design.phase,
            evidence_class=EvidenceClass.MEASURED,
            config=unit_config(self.design, unit, self.task),
            seed=self.design.seed,
            revisions=self.inputs.revisions(unit),
            covers=self.covers(unit, tables),
            results=results,
            runtime_extra={"engine_fixes": fixes} if fixes else {},
        )
        return write_record(self.path(unit), record, tables)

    def _base_requests(self, unit: MeasureUnit) -> pd.DataFrame | None:
        """The base arm's requests on the adapter's own prompts, where a stopping rule compares with them."""
        if unit.kind is not UnitKind.ADAPTER or self.design.precision is None:
            return None
        return load_table(self.path(find_unit(self.units(), base_unit_name(unit.prompt_sets[0]))), "requests")

    def _require_prerequisites(self, unit: MeasureUnit) -> None:
        """Controls before bases, and the base arm of each prompt set before an adapter on it."""
        if self.task == "overlap" or unit.kind is UnitKind.CONTROL:
            return
        needed = [u.name for u in self.units() if u.kind is UnitKind.CONTROL]
        if unit.kind is UnitKind.ADAPTER:
            needed += [base_unit_name(s) for s in unit.prompt_sets]
        for name in needed:
            if self.state(find_unit(self.units(), name)) != "done":
                raise LoraSpecError(
                    f"{name} must be measured and pass before {unit.name}",
                    fix="run the whole design; units come in order",
                    code="prerequisite",
                )

    def execute(self, *, workers: int = 2, only: Sequence[str] = (), replace_stale: bool = False) -> None:
        """Run every unit that is not done, in subprocesses, stage by stage.

        Raises:
            LoraSpecError: invalid inputs, stale records without ``replace_stale``, or failed units.
        """
        from lora_spec.queue import Unit, run_queue

        problems = self.problems(only)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise LoraSpecError(problems[0] + more, where=self.design.experiment)
        rows = self.plan(only)
        stale = [row for row in rows if row.state == "stale"]
        if stale and not replace_stale:
            raise LoraSpecError(
                f"{len(stale)} records are of another design, of other inputs or damaged",
                where=rel(stale[0].path),
                fix="move them away, or pass --replace-stale to measure again",
                code="stale",
            )
        for kind in UnitKind:
            todo = [row for row in rows if row.unit.kind is kind and row.state != "done"]
            units = [
                Unit(
                    name=row.unit.name,
                    argv=[
                        sys.executable,
                        "-m",
                        "lora_spec.measure.collector",
                        self.design_path,
                        self.task,
                        row.unit.name,
                    ],
                    is_done=lambda row=row: self.state(row.unit) == "done",
                )
                for row in todo
            ]
            if units:
                run_queue(
                    units,
                    workers=workers,
                    threads_per_worker=self.design.engine.threads,
                    log_dir=cache_dir().parent / "logs" / self.directory.name,
                )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one unit: ``python -m lora_spec.measure.collector DESIGN TASK UNIT``."""
    parser = argparse.ArgumentParser(description="Run one unit of a measurement design in this process.")
    parser.add_argument("design")
    parser.add_argument("task", choices=["acceptance", "overlap"])
    parser.add_argument("unit")
    args = parser.parse_args(argv)
    return exit_status(lambda: Collector(args.design, args.task).execute_unit(args.unit))


if __name__ == "__main__":
    sys.exit(main())
