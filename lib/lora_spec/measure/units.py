"""What one unit of a screen does: run the arms, check them, return results and tables for its record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from lora_spec.acceptance import pooled_rates
from lora_spec.errors import EngineError
from lora_spec.measure.design import MeasureUnit
from lora_spec.measure.engine import Completion, EngineSpec, Request, lora_slot_rank
from lora_spec.measure.inputs import AdapterInput, Inputs
from lora_spec.measure.lossless import losslessness
from lora_spec.measure.rows import request_rows
from lora_spec.measure.session import Call, run_session
from lora_spec.serving import derive_draft_seed, derive_target_seed


@dataclass(frozen=True)
class UnitOutcome:
    """What goes into the record of one unit."""

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    fixes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arms:
    """Completions of one unit.

    Attributes:
        plain: greedy without speculation, by prompt set, with top-2 log-probabilities.
        speculative: by (prompt set, decoding).
        first_base, first_adapted: one greedy token on the own prompts without and with the adapter.
        fixes: mendings of the engine.
        session_s: seconds of the speculative session, start-up included.
    """

    plain: dict[str, list[Completion]]
    speculative: dict[tuple[str, str], list[Completion]]
    first_base: list[Completion]
    first_adapted: list[Completion]
    fixes: dict[str, str]
    session_s: float


class ArmRunner:
    """Builds the requests and engine sessions of one design."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.design = inputs.design
        self.greedy = next(name for name, d in self.design.decodings.items() if d.temperature == 0)

    def engine_spec(self, adapter: AdapterInput | None, *, speculative: bool, **changes: Any) -> EngineSpec:
        """The engine of one arm; ``changes`` replace attributes (drafter, dtype, draft sampling)."""
        options = {
            "target": self.inputs.target_path,
            "params": self.design.engine,
            "seed": self.design.seed,
            "drafter": self.inputs.drafter_path if speculative else None,
            "num_speculative_tokens": self.design.num_speculative_tokens if speculative else 0,
            "adapter": None if adapter is None else adapter.path,
            "max_lora_rank": None if adapter is None else lora_slot_rank(adapter.rank),
        }
        return EngineSpec(**(options | changes))

    def requests(
        self, prompt_set: str, decoding: str, adapter: AdapterInput | None, count: int | None = None
    ) -> list[Request]:
        """Requests of one arm; seeds differ by (design seed, adapter, prompt, arm and decoding)."""
        prompts = self.inputs.prompts(prompt_set)
        sampled = self.design.decodings[decoding].temperature > 0
        name = adapter.name if adapter else ""
        arm = f"{'adapted' if adapter else 'base'}/{decoding}"
        made = []
        for index in self.inputs.indices(prompt_set)[:count]:
            key = (self.design.seed, name, f"{prompt_set}/{index}", arm)
            made.append(
                Request(
                    prompt=prompts.eval[index][: prompts.prompt],
                    target_seed=derive_target_seed(*key) if sampled else None,
                    draft_seed=derive_draft_seed(*key) if sampled else None,
                    adapted=adapter is not None,
                )
            )
        return made

    def call(self, requests: Sequence[Request], decoding: str, **changes: Any) -> Call:
        """One ``generate`` at the decoding's temperature; ``changes`` as for :class:`Call`."""
        options = {"max_tokens": self.design.max_tokens, "logprobs": None} | changes
        return Call(requests, self.design.decodings[decoding].temperature, **options)

    def run_arms(self, unit: MeasureUnit, adapter: AdapterInput | None) -> Arms:
        """Serve a unit's prompts plain and speculatively, each in an engine of its own."""
        sets = unit.prompt_sets
        calls = [self.call(self.requests(s, self.greedy, adapter), self.greedy, logprobs=2) for s in sets]
        if adapter is not None:
            adapted = self.requests(sets[0], self.greedy, adapter)
            base = [Request(prompt=r.prompt) for r in adapted]
            calls += [self.call(r, self.greedy, max_tokens=1, logprobs=2) for r in (base, adapted)]
        plain = run_session(self.engine_spec(adapter, speculative=False), calls).completions
        first = plain[len(sets) :] or [[], []]

        keys = [(s, decoding) for s in sets for decoding in self.design.decodings]
        calls = [self.call(self.requests(s, decoding, adapter), decoding) for s, decoding in keys]
        begun = time.perf_counter()
        done = run_session(self.engine_spec(adapter, speculative=True), calls)
        return Arms(
            plain=dict(zip(sets, plain[: len(sets)], strict=True)),
            speculative=dict(zip(keys, done.completions, strict=True)),
            first_base=first[0],
            first_adapted=first[1],
            fixes=done.fixes,
            session_s=time.perf_counter() - begun,
        )


def measure_unit(runner: ArmRunner, unit: MeasureUnit) -> UnitOutcome:
    """Measure the base or one adapter on the unit's prompt sets.

    Raises:
        EngineError: the adapter is not applied, or speculation is not lossless; nothing of it is evidence.
    """
    adapter = runner.inputs.adapter(unit.adapter) if unit.adapter else None
    arms = runner.run_arms(unit, adapter)
    results: dict[str, Any] = {"session_s": round(arms.session_s, 1)}
    if adapter is not None:
        changed = [a.top2 != b.top2 for a, b in zip(arms.first_base, arms.first_adapted, strict=True)]
        results |= {"frobenius": adapter.frobenius, "first_token_changed": changed}
        refuse_unapplied(unit.name, adapter.frobenius, changed)
    checks = {
        prompt_set: losslessness(
            plain, arms.speculative[prompt_set, runner.greedy], runner.design.controls.near_tie_nats
        )
        for prompt_set, plain in arms.plain.items()
    }
    for prompt_set, check in checks.items():
        refuse_lossy(f"{unit.name}, {prompt_set}", check)
    requests = pd.concat(
        [
            request_rows(
                completions,
                arm="adapted" if adapter else "base",
                adapter=unit.adapter or "",
                prompt_set=prompt_set,
                prompt_indices=runner.inputs.indices(prompt_set),
                decoding=decoding,
                k=runner.design.num_speculative_tokens,
            )
            for (prompt_set, decoding), completions in arms.speculative.items()
        ],
        ignore_index=True,
    )
    results |= {"lossless": checks, "arms": summarise(requests)}
    return UnitOutcome(results, {"requests": requests}, arms.fixes)


def refuse_unapplied(unit: str, frobenius: float, changed: Sequence[bool]) -> None:
    """Refuse an adapter with ‖ΔW‖ > 0 that changes no first-token log-probability on any prompt.

    Raises:
        EngineError: code ``adapter_not_applied``.
    """
    if frobenius > 0 and not any(changed):
        raise EngineError(
            "the adapter's logits equal the base's bit for bit on every prompt though its update is not zero",
            where=unit,
            fix="the engine does not apply it; such numbers are no evidence",
            code="adapter_not_applied",
        )


def refuse_lossy(where: str, check: dict[str, Any]) -> None:
    """Refuse a run whose speculative greedy output leaves the plain one other than at a near-tie.

    Raises:
        EngineError: code ``not_lossless``.
    """
    if not check["lossless"]:
        raise EngineError(
            "speculative greedy output is not the plain one: a first divergence has a gap of "
            f"{check['max_gap_nats']:.3f} nats",
            where=where,
            fix="such numbers are no evidence",
            code="not_lossless",
        )


def summarise(requests: pd.DataFrame) -> dict[str, Any]:
    """Pooled rates by prompt set and decoding, for reading; claims recompute them from the table."""
    summary: dict[str, Any] = {}
    for (prompt_set, decoding), group in requests.groupby(["prompt_set", "decoding"], sort=True):
        rates = pooled_rates(group)
        summary[f"{prompt_set}/{decoding}"] = {
            "requests": rates.requests,
            "alpha": rates.alpha,
            "al_emitted": rates.al_emitted,
            "al_vllm": rates.al_vllm,
            "output_tokens": int(group["output_tokens"].sum()),
        }
    return summary
