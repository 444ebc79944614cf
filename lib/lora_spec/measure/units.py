"""What one unit of a screen does: run the arms, check them, return results and tables for its record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from lora_spec.acceptance import PRIMARY_DECODING, pooled_rates
from lora_spec.errors import EngineError, LoraSpecError
from lora_spec.measure.design import Design, MeasureUnit
from lora_spec.measure.engine import Completion, EngineSpec, Request, lora_slot_rank
from lora_spec.measure.inputs import AdapterInput, Inputs
from lora_spec.measure.lossless import losslessness, settle
from lora_spec.measure.precision import EarlyStop
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
        plain: greedy without speculation, by prompt set (those with greedy prompts), with top-2
            log-probabilities.
        speculative: by (prompt set, decoding, k).
        first_base, first_adapted: one greedy token on the own prompts without and with the adapter.
        fixes: mendings of the engine.
        session_s: seconds of the speculative sessions, start-up included.
        precision: how the stopping rule ended the primary requests, where the design has one.
    """

    plain: dict[str, list[Completion]]
    speculative: dict[tuple[str, str, int], list[Completion]]
    first_base: list[Completion]
    first_adapted: list[Completion]
    fixes: dict[str, str]
    session_s: float
    precision: dict[str, Any] | None = None


class ArmRunner:
    """Builds the requests and engine sessions of one design."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.design = inputs.design
        self.greedy = self.design.greedy

    def engine_spec(self, adapter: AdapterInput | None, *, speculative: bool, **changes: Any) -> EngineSpec:
        """The engine of one arm; ``changes`` replace attributes (drafter, dtype, draft sampling)."""
        options = {
            "target": self.inputs.target_path,
            "params": self.design.engine,
            "seed": self.design.seed,
            "drafter": self.inputs.drafter_path if speculative else None,
            "method": self.design.method,
            "draft_sampling": self.design.draft_sampling,
            "num_speculative_tokens": self.design.num_speculative_tokens if speculative else 0,
            "adapter": None if adapter is None else adapter.path,
            "max_lora_rank": None if adapter is None else lora_slot_rank(adapter.rank),
        }
        return EngineSpec(**(options | changes))

    def requests(
        self, prompt_set: str, decoding: str, adapter: AdapterInput | None, indices: Sequence[int]
    ) -> list[Request]:
        """Requests of one arm; seeds differ by (design seed, adapter, prompt, arm and decoding), not by k."""
        prompts = self.inputs.prompts(prompt_set)
        sampled = self.design.decodings[decoding].temperature > 0
        name = adapter.name if adapter else ""
        arm = f"{'adapted' if adapter else 'base'}/{decoding}"
        made = []
        for index in indices:
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

    def run_arms(
        self, unit: MeasureUnit, adapter: AdapterInput | None, base: pd.DataFrame | None = None
    ) -> Arms:
        """Serve a unit's prompts plain and, per depth, speculatively, each in an engine of its own.

        Args:
            unit, adapter: what to serve. base: the base arm's ``requests`` table, for a stopping rule.
        """
        plain, first = self._run_plain(unit, adapter)
        wanted = {
            (prompt_set, decoding): self.design.indices(prompt_set, decoding)
            for prompt_set in unit.prompt_sets
            for decoding in self.design.decodings
        }
        wanted = {key: indices for key, indices in wanted.items() if indices}
        primary = (unit.prompt_sets[0], PRIMARY_DECODING)
        stop = None
        if adapter is not None and self.design.precision is not None:
            stop = self._stop(base, primary, wanted[primary])
        served: dict[tuple[str, str, int], list[Completion]] = {}
        fixes: dict[str, str] = {}
        report = None
        begun = time.perf_counter()
        for k in self.design.all_depths:
            at_primary = k == self.design.num_speculative_tokens
            calls = [
                self.call(
                    self.requests(*key, adapter, indices),
                    key[1],
                    stop=stop if at_primary and key == primary else None,
                )
                for key, indices in wanted.items()
            ]
            spec = self.engine_spec(adapter, speculative=True, num_speculative_tokens=k)
            done = run_session(spec, calls)
            fixes = done.fixes
            served |= {(*key, k): found for key, found in zip(wanted, done.completions, strict=True)}
            if stop is not None and at_primary:
                report = stop.report(served[*primary, k])
                wanted[primary] = wanted[primary][: report["prompts"]]
        return Arms(
            plain=plain,
            speculative=served,
            first_base=first[0],
            first_adapted=first[1],
            fixes=fixes,
            session_s=time.perf_counter() - begun,
            precision=report,
        )

    def _run_plain(
        self, unit: MeasureUnit, adapter: AdapterInput | None
    ) -> tuple[dict[str, list[Completion]], list[list[Completion]]]:
        """Plain greedy completions by prompt set, and the first tokens without and with the adapter."""
        sets = [s for s in unit.prompt_sets if self.design.indices(s, self.greedy)]
        if not sets:
            return {}, [[], []]
        asked = [self.requests(s, self.greedy, adapter, self.design.indices(s, self.greedy)) for s in sets]
        calls = [self.call(requests, self.greedy, logprobs=2) for requests in asked]
        if adapter is not None:
            calls += self._first_token_calls(asked[0])
        done = run_session(self.engine_spec(adapter, speculative=False), calls).completions
        return dict(zip(sets, done[: len(sets)], strict=True)), done[len(sets) :] or [[], []]

    def _first_token_calls(self, adapted: Sequence[Request]) -> list[Call]:
        base = [Request(prompt=r.prompt) for r in adapted]
        return [self.call(r, self.greedy, max_tokens=1, logprobs=2) for r in (base, adapted)]

    def first_tokens_changed(self, unit: MeasureUnit, adapter: AdapterInput, *, dtype: str) -> list[bool]:
        """Whether the adapter changes the top-2 log-probabilities of each own prompt's first token."""
        prompt_set = unit.prompt_sets[0]
        indices = self.design.indices(prompt_set, self.greedy)
        calls = self._first_token_calls(self.requests(prompt_set, self.greedy, adapter, indices))
        spec = self.engine_spec(adapter, speculative=False, dtype=dtype)
        return _changed(*run_session(spec, calls).completions)

    def lossless_in_float32(
        self, adapter: AdapterInput | None, prompt_set: str, indices: Sequence[int], k: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Whether plain and speculative greedy outputs are equal in float32, and the engine's mendings."""
        requests = self.requests(prompt_set, self.greedy, adapter, indices)
        plain, speculative = (
            run_session(
                self.engine_spec(
                    adapter, speculative=depth > 0, num_speculative_tokens=depth, dtype="float32"
                ),
                [self.call(requests, self.greedy, logprobs=None if depth else 2)],
            )
            for depth in (0, k)
        )
        check = losslessness(plain.completions[0], speculative.completions[0], near_tie=0.0)
        return check, speculative.fixes

    def settled(
        self, adapter: AdapterInput | None, prompt_set: str, k: int, check: dict[str, Any]
    ) -> dict[str, Any]:
        """``check``, with larger gaps than near-ties settled by :func:`lossless.settle`."""
        indices = self.design.indices(prompt_set, self.greedy)

        def in_float32(asked: list[int]) -> dict[str, Any]:
            return self.lossless_in_float32(adapter, prompt_set, [indices[n] for n in asked], k)[0]

        return settle(check, in_float32)

    def _stop(self, base: pd.DataFrame | None, primary: tuple[str, str], indices: Sequence[int]) -> EarlyStop:
        if base is None or self.design.precision is None:
            raise LoraSpecError("a stopping rule needs the base arm's requests", where=primary[0])
        k = self.design.num_speculative_tokens
        prompt_set, decoding = primary
        rows = base[(base["prompt_set"] == prompt_set) & (base["decoding"] == decoding) & (base["k"] == k)]
        columns = ["prompt_index", "accepted_emitted", "rejections"]
        return EarlyStop(self.design.precision, rows[columns].reset_index(drop=True), indices, k)


def measure_unit(runner: ArmRunner, unit: MeasureUnit, base: pd.DataFrame | None = None) -> UnitOutcome:
    """Measure the base or one adapter on the unit's prompt sets.

    Args:
        runner, unit: what to measure. base: the base arm's ``requests`` table, which a stopping rule needs.

    Raises:
        EngineError: the adapter is not applied, or speculation is not lossless; nothing of it is evidence.
    """
    adapter = runner.inputs.adapter(unit.adapter) if unit.adapter else None
    arms = runner.run_arms(unit, adapter, base)
    design = runner.design
    results: dict[str, Any] = {"session_s": round(arms.session_s, 1)}
    if arms.precision is not None:
        results["precision"] = arms.precision
    if adapter is not None:
        changed, dtype = _changed(arms.first_base, arms.first_adapted), design.engine.dtype
        if adapter.frobenius > 0 and not any(changed):
            # A weak update may vanish in bfloat16.
            changed, dtype = runner.first_tokens_changed(unit, adapter, dtype="float32"), "float32"
        results |= {
            "frobenius": adapter.frobenius,
            "first_token_changed": changed,
            "first_token_dtype": dtype,
        }
        refuse_unapplied(unit.name, adapter.frobenius, changed)
    checks = {
        design.at_depth(prompt_set, k): runner.settled(
            adapter,
            prompt_set,
            k,
            losslessness(
                plain, arms.speculative[prompt_set, runner.greedy, k], design.controls.near_tie_nats
            ),
        )
        for k in design.all_depths
        for prompt_set, plain in arms.plain.items()
    }
    for label, check in checks.items():
        refuse_lossy(f"{unit.name}, {label}", check)
    requests = pd.concat(
        [
            request_rows(
                completions,
                arm="adapted" if adapter else "base",
                adapter=unit.adapter or "",
                prompt_set=prompt_set,
                prompt_indices=design.indices(prompt_set, decoding)[: len(completions)],
                decoding=decoding,
                k=k,
            )
            for (prompt_set, decoding, k), completions in arms.speculative.items()
        ],
        ignore_index=True,
    )
    results |= {"lossless": checks, "arms": summarise(design, requests)}
    return UnitOutcome(results, {"requests": requests}, arms.fixes)


def _changed(base: Sequence[Completion], adapted: Sequence[Completion]) -> list[bool]:
    return [a.top2 != b.top2 for a, b in zip(base, adapted, strict=True)]


def refuse_unapplied(unit: str, frobenius: float, changed: Sequence[bool]) -> None:
    """Refuse an adapter with ‖ΔW‖ > 0 that changes no first-token log-probability on any prompt, and one with
    ‖ΔW‖ = 0 that changes some.

    Raises:
        EngineError: codes ``adapter_not_applied`` and ``null_adapter_applied``.
    """
    if frobenius > 0 and not any(changed):
        raise EngineError(
            "the adapter's logits equal the base's bit for bit on every prompt though its update is not zero",
            where=unit,
            fix="the engine does not apply it; such numbers are no evidence",
            code="adapter_not_applied",
        )
    if frobenius == 0 and any(changed):
        raise EngineError(
            "the adapter's update is zero, yet its logits are not the base's",
            where=unit,
            fix="the engine applies something else; such numbers are no evidence",
            code="null_adapter_applied",
        )


def refuse_lossy(where: str, check: dict[str, Any]) -> None:
    """Refuse a run whose speculative greedy output leaves the plain one at no near-tie, and in float32 too.

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


def summarise(design: Design, requests: pd.DataFrame) -> dict[str, Any]:
    """Pooled rates by prompt set, decoding and depth, for reading; claims recompute them from the table."""
    summary: dict[str, Any] = {}
    for (prompt_set, decoding, k), group in requests.groupby(["prompt_set", "decoding", "k"], sort=True):
        rates = pooled_rates(group)
        summary[design.at_depth(f"{prompt_set}/{decoding}", k)] = {
            "requests": rates.requests,
            "alpha": rates.alpha,
            "al_emitted": rates.al_emitted,
            "al_vllm": rates.al_vllm,
            "output_tokens": int(group["output_tokens"].sum()),
            "unique_ratio": float(group["unique_ratio"].mean()),
        }
    return summary
