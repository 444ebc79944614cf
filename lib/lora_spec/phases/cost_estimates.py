"""Estimates of Δα̂ by every way of getting evidence, their errors, and the compute each needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from lora_spec.acceptance import ratio_units
from lora_spec.errors import EvidenceError
from lora_spec.measure.evidence_cost import TIMINGS, VALUES, EvidenceCostParams, load_evidence_cost
from lora_spec.paths import results_dir
from lora_spec.phases.evidence import domain_families
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.pool import load_pool
from lora_spec.provenance import Record, load_records, load_table

COUNTED, RESCORED = "counted", "rescored"
PARTS: dict[str, tuple[str, ...]] = {
    COUNTED: ("counted",),
    RESCORED: ("counted", "rescored"),
    "sampled": ("plain", "sampled"),
    "sampled_uniform": ("plain", "sampled"),
    "lockstep": ("lockstep",),
    "text": ("text",),
}
"""Estimator to the timed parts that it needs for every prompt, in the order shown."""
_ONCE: dict[str, tuple[str, ...]] = {
    COUNTED: ("counted start",),
    RESCORED: ("counted start", "load"),
    "sampled": ("plain start", "load"),
    "sampled_uniform": ("plain start", "load"),
    "lockstep": ("load",),
    "text": ("load",),
}
"""Estimator to the parts that it needs once an adapter: starting engines, loading models."""
LEVEL = 0.95
_DRAWS = 2000


@dataclass(frozen=True)
class CostEvidence:
    """Records of the measurement and their rows.

    Attributes:
        params: the measurement as declared.
        records: by adapter.
        values: columns adapter, estimator, arm, prompt_index, numerator, denominator.
        timings: columns adapter, part, arm, cpu_s, prompts.
    """

    params: EvidenceCostParams
    records: dict[str, Record]
    values: pd.DataFrame
    timings: pd.DataFrame

    @cached_property
    def effects(self) -> dict[tuple[str, str], tuple[float, np.ndarray]]:
        """By (adapter, estimator): see `linearised`."""
        grouped = self.values.groupby(["adapter", "estimator"], sort=False)
        return {key: _effect(rows, ", ".join(key)) for key, rows in grouped}


def load_cost(parameters: NotebookParameters) -> CostEvidence | None:
    """The records of the tier, or None where nothing of it was measured yet.

    Raises:
        EvidenceError: damaged, of another class or tier, or of an adapter that is not declared.
    """
    params = load_evidence_cost()
    folder = results_dir(parameters.tier, "phase2") / params.output
    if not any(folder.glob("*.json")):
        return None
    records = load_records(folder, allow={parameters.evidence_class})
    for name, record in records.items():
        if record.tier != parameters.tier:
            raise EvidenceError(
                f"record of tier {record.tier} among those of tier {parameters.tier}", where=name, code="tier"
            )
    if foreign := sorted(set(records) - set(params.adapters)):
        raise EvidenceError(f"adapter {foreign[0]} is not declared", where="params/evidence_cost.yaml")
    frames = {
        table: pd.concat(
            [load_table(folder / f"{name}.json", table).assign(adapter=name) for name in records],
            ignore_index=True,
        )
        for table in (VALUES, TIMINGS)
    }
    return CostEvidence(params, records, frames[VALUES], frames[TIMINGS])


def estimate_table(cost: CostEvidence) -> pd.DataFrame:
    """Every adapter by every estimator.

    Columns: adapter, family, estimator, delta, se, unit_sd (of a prompt's linearised difference),
    cpu_per_prompt (both arms, what they share counted once), prompts (needed for the target standard error),
    cpu_to_target (without what is paid once), cpu_once.
    """
    families, pool = domain_families(), load_pool()
    rows = []
    for adapter in cost.records:
        for estimator in PARTS:
            delta, units = linearised(cost, adapter, estimator)
            sd = float(units.std(ddof=1))
            per_prompt = cpu_per_prompt(cost, adapter, estimator)
            needed = prompts_needed(sd, cost.params)
            rows.append(
                {
                    "adapter": adapter,
                    "family": families.get(pool[adapter].domain, "") if adapter in pool else "",
                    "estimator": estimator,
                    "delta": delta,
                    "se": sd / math.sqrt(len(units)),
                    "unit_sd": sd,
                    "cpu_per_prompt": per_prompt,
                    "prompts": math.ceil(needed),
                    "cpu_to_target": needed * per_prompt,
                    "cpu_once": cpu_once(cost, adapter, estimator),
                }
            )
    return pd.DataFrame(rows)


def linearised(cost: CostEvidence, adapter: str, estimator: str) -> tuple[float, np.ndarray]:
    """Δ of one adapter, and its linearised value of each prompt (see `acceptance.ratio_units`).

    Raises:
        EvidenceError: its arms have different prompts.
    """
    return cost.effects[adapter, estimator]


def _effect(rows: pd.DataFrame, where: str) -> tuple[float, np.ndarray]:
    arms = {arm: own.set_index("prompt_index").sort_index() for arm, own in rows.groupby("arm")}
    if set(arms) != {"base", "adapted"} or not arms["base"].index.equals(arms["adapted"].index):
        raise EvidenceError("arms have different prompts", where=where, code="unpaired")
    ratios, units = {}, {}
    for arm, own in arms.items():
        numerator, denominator = (own[name].to_numpy() for name in ("numerator", "denominator"))
        ratios[arm] = numerator.sum() / denominator.sum()
        units[arm] = ratio_units(numerator, denominator)
    return float(ratios["adapted"] - ratios["base"]), units["adapted"] - units["base"]


def cpu_per_prompt(cost: CostEvidence, adapter: str, estimator: str) -> float:
    """CPU seconds that a further prompt takes, both arms."""
    timings = cost.timings
    own = timings[(timings["adapter"] == adapter) & timings["part"].isin(PARTS[estimator])]
    return float((own["cpu_s"] / own["prompts"]).sum())


def cpu_once(cost: CostEvidence, adapter: str, estimator: str) -> float:
    """CPU seconds before the first prompt: engines started, models loaded."""
    timings = cost.timings
    return float(
        timings.loc[(timings["adapter"] == adapter) & timings["part"].isin(_ONCE[estimator]), "cpu_s"].sum()
    )


def prompts_needed(sd: float | np.ndarray, params: EvidenceCostParams) -> float | np.ndarray:
    """Prompts for the target standard error, (sd / se)², and at least the declared minimum."""
    return np.maximum(params.minimum, (sd / params.target_se) ** 2)


def difference(cost: CostEvidence, adapter: str, estimator: str, reference: str) -> tuple[float, np.ndarray]:
    """What two estimators of one adapter differ by, and its linearised value of each prompt."""
    (delta, units), (other, others) = (linearised(cost, adapter, name) for name in (estimator, reference))
    return delta - other, units - others


class Draws:
    """Resampled adapters and, within each, prompts: the same draws for every estimator."""

    def __init__(self, cost: CostEvidence, seed: int) -> None:
        self.cost, self.adapters = cost, list(cost.records)
        generator = np.random.default_rng(seed)
        count = len(self.adapters)
        self._adapters = generator.multinomial(count, np.full(count, 1 / count), size=_DRAWS)
        sizes = [len(linearised(cost, adapter, COUNTED)[1]) for adapter in self.adapters]
        self._prompts = [generator.multinomial(n, np.full(n, 1 / n), size=_DRAWS) for n in sizes]

    def cpu_to_target(self, estimator: str) -> np.ndarray:
        """CPU seconds to the target over the drawn adapters, shape (draws,)."""
        total = np.zeros(_DRAWS)
        for number, adapter in enumerate(self.adapters):
            _, units = linearised(self.cost, adapter, estimator)
            n, weights = len(units), self._prompts[number]
            variance = (weights @ units**2 - (weights @ units) ** 2 / n) / (n - 1)
            needed = prompts_needed(np.sqrt(variance), self.cost.params)
            total += self._adapters[:, number] * needed * cpu_per_prompt(self.cost, adapter, estimator)
        return total

    def mean_of(self, deltas: Sequence[float], units: Sequence[np.ndarray]) -> np.ndarray:
        """Mean over the drawn adapters of a difference with linearised units, shape (draws,)."""
        total = np.zeros(_DRAWS)
        for number, (delta, own) in enumerate(zip(deltas, units, strict=True)):
            total += self._adapters[:, number] * (delta + self._prompts[number] @ own / len(own))
        return total / len(self.adapters)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Percentile interval at :data:`LEVEL`."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
