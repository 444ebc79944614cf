"""What it costs to estimate delta_alpha of an adapter, by counting and by scoring, on the same prompts.

Five ways to the same quantity, delta_alpha on the own domain at T > 0 (``params/evidence_cost.yaml``):

* ``counted``: both arms generate speculatively; accepted drafts are counted. This is the label itself: the
  ratio of expected accepted to expected judged drafts, censored at emission.
* ``rescored``: the same texts, scored teacher-forced; every position counts with the probability that its
  draft was judged (`acceptance.attempt_weights`). The same expectation without the noise of acceptance, for
  the price of scoring on top of counting.
* ``sampled``: both arms generate without a drafter, with common noise, and the texts are scored like that.
  The same expectation again, since speculation leaves the distribution of texts alone. ``sampled_uniform``
  weighs all positions alike: the mean overlap at a uniformly drawn position of the model's own text, another
  expectation, because which positions are judged depends on what was accepted before.
* ``lockstep``: the same as ``sampled``, but target and drafter decode together (`position_scores.lockstep`).
* ``text``: mean overlap on held-out reference text, both arms on the same tokens: the contexts are not the
  model's own, so the expectation is another one. The drafter is run once for both arms.

Each adapter is one record: per prompt and arm a numerator and a denominator, and the CPU seconds of each
part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lora_spec.errors import LoraSpecError, ParamsError, exit_status
from lora_spec.measure.design import MeasureUnit, PromptRange, UnitKind, load_design
from lora_spec.measure.inputs import Inputs, validate
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import cache_dir, rel, results_dir
from lora_spec.provenance import EvidenceClass, Record, new_record, record_state, write_record

PARAMS_FILE = "evidence_cost.yaml"
VALUES, TIMINGS = "values", "timings"
_OF_DESIGN = ("seed", "target", "drafter", "method", "draft_sampling", "num_speculative_tokens", "max_tokens")


class EvidenceCostParams(StrictModel):
    """``params/evidence_cost.yaml``, fixed before anything is measured.

    Attributes:
        design: the screen whose pair, seeds, depth and engine are used.
        adapters: names of the pool.
        prompts: own-domain windows.
        target_se: standard error of delta_alpha to reach.
        minimum: prompts below which no standard error is trusted, so nothing costs less than these.
        goal: how many times less compute than counting is aimed at.
        score_batch, lockstep_batch: texts at a time in scoring, and in decoding together.
        warmup: prompts served untimed before each timed part.
    """

    schema_: Literal["lora-spec-evidence-cost/1"] = Field(alias="schema")
    experiment: str
    design: str
    output: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    adapters: list[str] = Field(min_length=1)
    prompts: PromptRange
    target_se: float = Field(gt=0, lt=1)
    minimum: int = Field(ge=2)
    goal: float = Field(gt=1)
    score_batch: int = Field(ge=1)
    lockstep_batch: int = Field(ge=1)
    warmup: int = Field(ge=1)


def load_evidence_cost(path: Path | str = PARAMS_FILE) -> EvidenceCostParams:
    """Read and check the parameter file."""
    return load_params(EvidenceCostParams, path)


class EvidenceCost:
    """The measurement that a parameter file declares: its units are adapters."""

    def __init__(self, path: Path | str = PARAMS_FILE) -> None:
        self.path = path
        self.params = load_evidence_cost(path)
        design = load_design(self.params.design)
        if not design.has_overlap:
            raise ParamsError("the pair has no overlap to compare with", where=self.params.design)
        changes = {"adapters": self.params.adapters, "own": self.params.prompts}
        self.design = design.model_copy(update=changes)
        self.inputs = Inputs(self.design)
        self.directory = results_dir(self.design.tier, self.design.phase) / self.params.output

    def unit(self, adapter: str) -> MeasureUnit:
        """What stands for one adapter.

        Raises:
            LoraSpecError: the file does not name it.
        """
        if adapter not in self.params.adapters:
            raise LoraSpecError(f"no adapter {adapter} in this measurement", where=str(self.path))
        domain = self.inputs.domain_of[adapter]
        return MeasureUnit(UnitKind.ADAPTER, adapter, adapter, domain, (domain,))

    def record_path(self, adapter: str) -> Path:
        """Record of one adapter."""
        return self.directory / f"{adapter}.json"

    def config(self, adapter: str) -> dict[str, Any]:
        """What decides the numbers of one adapter; which others are measured does not."""
        design = self.design.config()
        return {
            "evidence_cost": self.params.model_dump(mode="json", by_alias=True, exclude={"adapters"}),
            "design": {name: design[name] for name in (*_OF_DESIGN, "overlap_temperature", "engine")},
            "adapter": adapter,
        }

    def state(self, adapter: str) -> Literal["done", "to do", "stale"]:
        """``done`` only if the record is whole, of these parameters and of these inputs."""
        config, unit = self.config(adapter), self.unit(adapter)
        return record_state(
            self.record_path(adapter),
            lambda record: config == record.config and self.inputs.matches(unit, record),
        )

    def problems(self) -> list[str]:
        """What is wrong with the inputs of the adapters to do; no torch, no vLLM."""
        todo = [self.unit(name) for name in self.params.adapters if self.state(name) != "done"]
        return validate(self.inputs, todo)

    def execute_unit(self, adapter: str) -> Record:
        """Measure one adapter in this process (its engines in processes of their own) and write its record.

        Raises:
            LoraSpecError: an input is wrong, or the arms fail a control; nothing is written.
        """
        unit = self.unit(adapter)
        self.inputs.verify_models()
        from lora_spec.measure.evidence_cost_arms import Measurement

        results, tables, fixes = Measurement(self.params, self.inputs, unit).run()
        record = new_record(
            experiment=self.params.experiment,
            tier=self.design.tier,
            phase=self.design.phase,
            evidence_class=EvidenceClass.MEASURED,
            config=self.config(adapter),
            seed=self.design.seed,
            revisions=self.inputs.revisions(unit),
            covers={
                "adapters": [self.inputs.adapter(adapter).content_hash],
                "domains": [str(unit.domain)],
                "prompts": [f"{unit.domain}/{i}" for i in self.design.indices(str(unit.domain))],
            },
            results=results,
            runtime_extra={"engine_fixes": fixes},
        )
        return write_record(self.record_path(adapter), record, tables)

    def execute(self, *, only: Sequence[str] = (), replace_stale: bool = False) -> None:
        """Measure every adapter that is not done, one after the other: they are timed.

        Raises:
            LoraSpecError: invalid inputs, stale records without ``replace_stale``, or a failed adapter.
        """
        from lora_spec.queue import Unit, run_queue

        names = [self.unit(name).name for name in only or self.params.adapters]
        if problems := self.problems():
            raise LoraSpecError(problems[0], where=self.params.experiment)
        stale = [name for name in names if self.state(name) == "stale"]
        if stale and not replace_stale:
            raise LoraSpecError(
                f"{len(stale)} records are of other parameters, of other inputs or damaged",
                where=rel(self.record_path(stale[0])),
                fix="move them away, or pass --replace-stale to measure again",
                code="stale",
            )
        units = [
            Unit(
                name=name,
                argv=[sys.executable, "-m", "lora_spec.measure.evidence_cost", str(self.path), name],
                is_done=lambda name=name: self.state(name) == "done",
            )
            for name in names
        ]
        log_dir = cache_dir().parent / "logs" / self.params.output
        run_queue(units, workers=1, threads_per_worker=self.design.engine.threads, log_dir=log_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one adapter: ``python -m lora_spec.measure.evidence_cost PARAMS ADAPTER``."""
    parser = argparse.ArgumentParser(description="Measure what evidence on one adapter costs.")
    parser.add_argument("params")
    parser.add_argument("adapter")
    args = parser.parse_args(argv)
    return exit_status(lambda: EvidenceCost(args.params).execute_unit(args.adapter))


if __name__ == "__main__":
    sys.exit(main())
