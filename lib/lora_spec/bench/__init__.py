"""Benchmarks: ratios of two sides timed in the same run, each with a goal, recorded as any measurement is.

A benchmark is a module of this package with `run() -> dict`: "ratios" maps a name to {"value", "goal",
"sense"} (sense ">=" or "<="; goal None where the ratio is reported as it is), and every other key goes into
the record's results. It imports what its tier needs inside `run`, so that it can be listed anywhere. Modules
whose names begin with an underscore are parts of benchmarks.
"""

from __future__ import annotations

import importlib
import operator
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.errors import LoraSpecError, MissingTierError
from lora_spec.paths import results_dir

_SENSES = {">=": operator.ge, "<=": operator.le}
_CPU_TIER = ("torch", "transformers", "peft", "gguf", "vllm")


@dataclass(frozen=True)
class Ratio:
    """One measured ratio and its goal, None where it has none."""

    name: str
    value: float
    goal: float | None
    sense: str

    @property
    def met(self) -> bool | None:
        """Whether the value reaches the goal; None without one."""
        return None if self.goal is None else bool(_SENSES[self.sense](self.value, self.goal))


def bench_names() -> list[str]:
    """Names of the benchmarks, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def run_bench(name: str, folder: Path | None = None) -> list[Ratio]:
    """Run one benchmark and write its record to `folder` (default `results/bench/`).

    Raises:
        LoraSpecError: no benchmark has that name, or it returned something else than finite ratios.
        MissingTierError: it needs packages of the cpu tier.
    """
    from lora_spec.provenance import EvidenceClass, new_record, write_record

    if name not in bench_names():
        raise LoraSpecError("no such benchmark", where=name, fix=f"Known: {', '.join(bench_names())}")
    try:
        outcome = importlib.import_module(f"{__name__}.{name}").run()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _CPU_TIER:
            raise
        raise MissingTierError(
            "the benchmark needs the cpu tier", where=name, fix="Run `make bench`, or install `.[cpu]`"
        ) from error
    ratios = _ratios(name, outcome)
    record = new_record(
        experiment=f"bench_{name}",
        tier="pocket",
        phase="bench",
        evidence_class=EvidenceClass.MEASURED,
        config={"bench": name, "goals": {r.name: {"goal": r.goal, "sense": r.sense} for r in ratios}},
        seed=0,
        revisions={},
        results={key: value for key, value in outcome.items() if key != "ratios"},
    )
    stored = {r.name: {"value": r.value, "goal": r.goal, "sense": r.sense, "met": r.met} for r in ratios}
    record = record.model_copy(update={"ratios": stored})
    write_record((folder or results_dir("bench")) / f"{name}.json", record)
    return ratios


def _ratios(name: str, outcome: dict[str, Any]) -> list[Ratio]:
    found = [Ratio(key, **given) for key, given in outcome.get("ratios", {}).items()]
    if not found or not all(r.sense in _SENSES and 0 < r.value < float("inf") for r in found):
        raise LoraSpecError("the benchmark gave no finite positive ratio", where=name)
    return found
