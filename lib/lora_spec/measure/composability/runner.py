"""Plan, run and resume phase 0: engines in batches, one record each, references and controls first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from lora_spec.errors import EngineError, LoraSpecError, exit_status
from lora_spec.measure.composability.cells import PARAMS, Cell, Phase0Params, load_phase0
from lora_spec.measure.composability.compare import first_difference, worst_variation
from lora_spec.measure.composability.engine import Outcome
from lora_spec.measure.composability.inputs import Inputs
from lora_spec.measure.composability.units import SELF_DRAFT, Kind, Unit, all_units
from lora_spec.measure.composability.verdict import Status, judge
from lora_spec.measure.composability.workload import Arm, ReferencePair, reference_pairs
from lora_spec.paths import cache_dir
from lora_spec.provenance import (
    EvidenceClass,
    Record,
    cpu_flags,
    load_record,
    new_record,
    record_state,
    write_record,
)

State = Literal["done", "to do", "stale"]
INPUTS = "inputs"
"""Name of the queue's first unit, which builds the models."""


class Runner:
    """Phase 0 of one parameter file."""

    def __init__(self, path: str = PARAMS) -> None:
        self.path = path
        self.params: Phase0Params = load_phase0(path)
        self.inputs = Inputs(self.params)
        self.units = all_units(self.params)
        self._digest: str | None = None
        self._references: dict[ReferencePair, Record] = {}

    def select(self, only: Sequence[str] = (), column: str | None = None) -> list[Unit]:
        """The units of one column, or of the named cells with the references they need and no controls.

        Raises:
            LoraSpecError: no cell is called so.
        """
        names = {unit.name for unit in self.units if unit.kind is Kind.CELL}
        for name in only:
            if name not in names:
                raise LoraSpecError(f"no cell {name} in this matrix", where=self.path, fix="run the plan")
        cells = [u.cell for u in self.units if u.kind is Kind.CELL and u.cell and u.name in only]
        pairs = set(reference_pairs(cells)) if only else None
        chosen = []
        for unit in self.units:
            if unit.kind is Kind.REFERENCE:
                wanted = pairs is None or unit.pair in pairs
            else:
                wanted = column in (None, unit.column) and (not only or unit.name in only)
            if wanted:
                chosen.append(unit)
        return chosen

    def state(self, unit: Unit) -> State:
        """``done`` only if the record is whole, of these parameters and of these models.

        The models are known by the parameters they are built from, and by their bytes where those could have
        come out the same: where they are built here and the record's CPU had the same flags.
        """

        def current(record: Record) -> bool:
            known = self.inputs.built and list(record.runtime.get("cpu_flags", ())) == list(cpu_flags())
            return self._is_of(unit, record) if known else self._is_declared(unit, record)

        return record_state(unit.path(self.params), current)

    def to_do(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that are left; a cell that is left needs its references of the very models built here."""
        cells = [unit.cell for unit in units if unit.cell is not None and self.state(unit) != "done"]
        needed = set(reference_pairs(cells))
        return [
            unit
            for unit in units
            if self.state(unit) != "done" or (unit.pair in needed and not self._measured_here(unit))
        ]

    def _is_declared(self, unit: Unit, record: Record) -> bool:
        return record.config == unit.config(self.params) and record.revisions["vllm"] == self.params.vllm

    def _is_of(self, unit: Unit, record: Record) -> bool:
        return self._is_declared(unit, record) and record.revisions == self.revisions()

    def _measured_here(self, unit: Unit) -> bool:
        state = record_state(unit.path(self.params), lambda record: self._is_of(unit, record))
        return self.inputs.built and state == "done"

    def revisions(self) -> dict[str, Any]:
        """Identity of what was run: the version of vLLM, and all models and answers together."""
        if self._digest is None:
            self._digest = self.inputs.digest()
        return {"inputs": self._digest, "vllm": self.params.vllm}

    # ------------------------------------------------------------------ what the merged models answer

    def greedy(self, variant: str) -> tuple[list[list[int]], np.ndarray]:
        """See :class:`~lora_spec.measure.composability.verdict.Expected`."""
        return self.inputs.greedy(variant)

    def joint(self, variant: str) -> np.ndarray:
        """See :class:`~lora_spec.measure.composability.verdict.Expected`."""
        return self.inputs.joint(variant)

    def greedy_accepted(self, method: str, arm: Arm) -> list[list[int]] | None:
        """Accepted drafts per prompt and step, None for methods without references."""
        record = self._reference(method, arm)
        return None if record is None else record.results["greedy_accepted"]

    def sampled_first(self, method: str, arm: Arm) -> tuple[int, int] | None:
        """First draft steps with an accepted draft, and all."""
        record = self._reference(method, arm)
        return None if record is None else tuple(record.results["sampled_first"])

    def _reference(self, method: str, arm: Arm) -> Record | None:
        if method in ("none", "suffix"):
            return None
        pair = ReferencePair(method, arm)
        if pair not in self._references:
            unit = next((u for u in self.units if u.pair == pair), None)
            if unit is None or not self._measured_here(unit):
                raise EngineError(
                    f"the reference {pair.name} must be measured first", fix="run it all; units come in order"
                )
            self._references[pair] = load_record(unit.path(self.params))
        return self._references[pair]

    # ------------------------------------------------------------------ running

    def record(self, unit: Unit, outcome: Outcome) -> Record:
        """Judge what a unit's engine answered, and write its record.

        Raises:
            EngineError: a reference is wrong, so that nothing may be compared with it.
        """
        results = self._reference_results(unit, outcome) if unit.pair else self._verdict(unit, outcome)
        results |= {"seconds": round(outcome.seconds, 1), "warnings": outcome.warnings}
        cells = [f"{unit.column}/{unit.name}"] if unit.kind is Kind.CELL else []
        record = new_record(
            experiment=self.params.experiment,
            tier=self.params.tier,
            phase=self.params.phase,
            evidence_class=EvidenceClass.MEASURED,
            config=unit.config(self.params),
            seed=self.params.seed,
            revisions=self.revisions(),
            covers={"cells": cells},
            results=results,
            runtime_extra={"engine": outcome.facts},
        )
        return write_record(unit.path(self.params), record)

    def _verdict(self, unit: Unit, outcome: Outcome) -> dict[str, Any]:
        assert isinstance(unit.cell, Cell)
        calls = unit.job(self.inputs).calls
        verdict = judge(unit.cell, calls, outcome, self, self.params.limits)
        if unit.kind is Kind.CONTROL and verdict.status is not Status.WRONG:
            raise EngineError(
                f"the planted fault was not seen: {unit.fault}",
                where=f"{unit.name}: {verdict.status} {' '.join(verdict.how)}",
                code="planted_fault",
            )
        return {
            "status": verdict.status.value,
            "how": verdict.how,
            "silent": verdict.silent,
            "checks": verdict.checks,
            "stage": outcome.stage,
            "error": outcome.error,
        }

    def _reference_results(self, unit: Unit, outcome: Outcome) -> dict[str, Any]:
        assert unit.pair is not None
        if outcome.error is not None:
            raise EngineError(
                f"{outcome.error['type']}: {outcome.error['message']}",
                where=outcome.error["where"] or unit.name,
            )
        target, limits = unit.pair.arm.target, self.params.limits
        greedy, sampled = outcome.answers
        wanted = self.inputs.greedy(target)[0]
        lossy = [i for i, a in enumerate(greedy) if first_difference(a.tokens, wanted[i]) is not None]
        tokens = np.array([answer.tokens for answer in sampled])
        tv, limit, where = worst_variation(tokens, self.inputs.joint(target), limits.deviations)
        if lossy or tv > limit:
            raise EngineError(
                f"{len(lossy)} greedy outputs differ, TV {tv:.3f} of {where} (limit {limit:.3f})",
                where=f"reference {unit.name}",
                code="reference",
            )
        accepted = [answer.accepted for answer in greedy]
        firsts = [answer.accepted[0] > 0 for answer in sampled if answer.accepted]
        if unit.pair == SELF_DRAFT:
            self._refuse_self_draft(accepted, sum(firsts), len(firsts))
        return {
            "greedy_accepted": accepted,
            "sampled_first": [sum(firsts), len(firsts)],
            "distribution": {"tv": tv, "limit": limit, "at": where},
            "models": self.inputs.manifest() if unit.pair == SELF_DRAFT else {},
        }

    def _refuse_self_draft(self, accepted: list[list[int]], hits: int, count: int) -> None:
        full = self.params.workload.num_speculative_tokens
        if any(step != full for steps in accepted for step in steps[:-1]) or hits < count:
            raise EngineError(
                f"a drafter equal to the target: {hits} of {count} first drafts accepted when sampling",
                where="reference self",
                code="self_draft",
            )

    def _is_done(self, unit: Unit) -> bool:
        return self._measured_here(unit) if unit.pair else self.state(unit) == "done"

    def run_batch(self, names: Sequence[str]) -> None:
        """Run units of one batch, each engine in a fork of this process's server; done ones are skipped.

        Raises:
            EngineError: another vLLM is installed than the parameters pin.
        """
        from lora_spec.measure.composability.process import EngineProcesses

        self.check_vllm()
        wanted = set(names)
        units = [u for u in self.units if f"{u.kind.value}/{u.column}/{u.name}" in wanted]
        processes = EngineProcesses(units[0].column)
        for unit in units:
            if self._is_done(unit):
                continue
            outcome = processes.run(unit.job(self.inputs), self.params.limits.seconds)
            record = self.record(unit, outcome)
            print(f"{unit.column}/{unit.name}: {record.results.get('status', 'reference')}", flush=True)

    def check_vllm(self) -> None:
        """Refuse another vLLM than the pinned one.

        Raises:
            EngineError: by name.
        """
        from lora_spec.serving._patching import vllm_version

        found = vllm_version()
        if found.split("+")[0] != self.params.vllm:
            raise EngineError(
                f"vLLM {found} is installed, and this matrix is of {self.params.vllm}", where=self.path
            )

    def execute(
        self,
        *,
        workers: int = 2,
        only: Sequence[str] = (),
        column: str | None = None,
        replace_stale: bool = False,
    ) -> None:
        """Build the models, then run every unit that is not done, stage by stage.

        Raises:
            LoraSpecError: another vLLM, stale records without ``replace_stale``, or failed batches.
        """
        from lora_spec.queue import Unit as Job
        from lora_spec.queue import run_queue

        self.check_vllm()
        logs = cache_dir().parent / "logs" / "phase0"
        command = [sys.executable, "-m", "lora_spec.measure.composability.runner", self.path]
        built = Job(INPUTS, [*command, INPUTS], is_done=lambda: self.inputs.built)
        run_queue([built], workers=1, log_dir=logs, progress=False)
        units = self.select(only, column)
        stale = [unit for unit in units if self.state(unit) == "stale"]
        if stale and not replace_stale:
            raise LoraSpecError(
                f"{len(stale)} records are of other parameters, of other models or damaged",
                where=stale[0].name,
                fix="move them away, or pass --replace-stale to measure again",
                code="stale",
            )
        for kind in Kind:
            batches: dict[str, list[Unit]] = {}
            for unit in self.to_do(units):
                if unit.kind is kind:
                    batches.setdefault(unit.batch, []).append(unit)
            jobs = [
                Job(
                    name,
                    [*command, *(f"{u.kind.value}/{u.column}/{u.name}" for u in members)],
                    is_done=lambda members=members: all(self._is_done(u) for u in members),
                )
                for name, members in batches.items()
            ]
            if jobs:
                run_queue(jobs, workers=workers, threads_per_worker=1, log_dir=logs)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m lora_spec.measure.composability.runner PARAMS UNIT...``: run units in this process."""
    parser = argparse.ArgumentParser(description="Run units of one batch of phase 0.")
    parser.add_argument("params")
    parser.add_argument("units", nargs="+", help=f"{INPUTS}, or KIND/COLUMN/NAME")
    args = parser.parse_args(argv)

    def run() -> None:
        runner = Runner(args.params)
        if args.units == [INPUTS]:
            runner.inputs.build()
        else:
            runner.run_batch(args.units)

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
