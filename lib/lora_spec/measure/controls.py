"""Controls that a run must pass before its numbers count: self-draft, fp32 losslessness, base acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lora_spec.acceptance import alpha_hat
from lora_spec.errors import EngineError, LoraSpecError
from lora_spec.measure.design import FP32, SELF_DRAFT, MeasureUnit, UnitKind
from lora_spec.measure.engine import Completion
from lora_spec.measure.rows import request_rows
from lora_spec.measure.scorer import attempted_overlap, attempted_positions, load_model, next_token_logits
from lora_spec.measure.session import run_session
from lora_spec.measure.units import ArmRunner, UnitOutcome, measure_unit, refuse_lossy


def run_unit(runner: ArmRunner, unit: MeasureUnit, base: pd.DataFrame | None = None) -> UnitOutcome:
    """Run a unit of any kind with all the controls that belong to it.

    Args:
        runner, unit: what to run. base: the base arm's ``requests`` table, for an adapter's stopping rule.

    Raises:
        EngineError: a control fails; nothing of the unit is evidence.
    """
    if unit.kind is UnitKind.CONTROL:
        return {SELF_DRAFT: self_draft, FP32: fp32_lossless}[unit.name](runner, unit)
    outcome = measure_unit(runner, unit, base)
    if unit.kind is UnitKind.BASE:
        outcome.results["base_controls"] = base_alpha_controls(runner, unit, outcome.tables["requests"])
    return outcome


def self_draft(runner: ArmRunner, unit: MeasureUnit) -> UnitOutcome:
    """A drafter equal to the target: all its drafts must be accepted, in each mode, at the primary depth.

    With greedy drafts at T > 0 the accepted share must be the mean probability of the target's most likely
    token, taken teacher-forced over the judged positions.

    Raises:
        EngineError: a mode misses by more than the design's tolerance.
    """
    design, (prompt_set,) = runner.design, unit.prompt_sets
    if design.controls.self_draft_prompts is None or design.controls.self_draft_tolerance is None:
        raise LoraSpecError(f"method {design.method} has no self-draft control", where=design.experiment)
    chosen = design.indices(prompt_set)[: design.controls.self_draft_prompts]
    modes: dict[str, dict[str, float]] = {}
    fixes: dict[str, str] = {}
    for drafts in ("probabilistic", "greedy"):
        spec = runner.engine_spec(
            None, speculative=True, drafter=runner.inputs.target_path, draft_sampling=drafts
        )
        # Probabilistic drafts are greedy ones under greedy decoding, so one of the two suffices there.
        names = [n for n, d in design.decodings.items() if drafts == "probabilistic" or d.temperature > 0]
        requests = {n: runner.requests(prompt_set, n, None, chosen) for n in names}
        done = run_session(spec, [runner.call(requests[n], n) for n in names])
        fixes = done.fixes
        for name, completions in zip(names, done.completions, strict=True):
            expected = 1.0
            if drafts == "greedy":
                prompts = [r.prompt for r in requests[name]]
                expected = _mean_top_probability(
                    runner, prompts, completions, design.decodings[name].temperature
                )
            modes[f"{name}/{drafts}"] = {"alpha": _alpha(runner, completions), "expected": expected}
    tolerance = design.controls.self_draft_tolerance
    refuse_self_draft(modes, tolerance)
    return UnitOutcome({"self_draft": modes, "tolerance": tolerance}, fixes=fixes)


def refuse_self_draft(modes: dict[str, dict[str, float]], tolerance: float) -> None:
    """Refuse decoding modes whose self-draft acceptance is not the expected one.

    Raises:
        EngineError: code ``self_draft``, naming the mode.
    """
    for mode, value in modes.items():
        if not abs(value["alpha"] - value["expected"]) <= tolerance:
            raise EngineError(
                f"self-draft accepts {value['alpha']:.3f} of drafts where {value['expected']:.3f} is right",
                where=mode,
                fix="the engine's sampler is wrong in this mode; nothing measured in it is evidence",
                code="self_draft",
            )


def _alpha(runner: ArmRunner, completions: list[Completion]) -> float:
    rows = request_rows(
        completions,
        arm="base",
        adapter="",
        prompt_set="",
        prompt_indices=range(len(completions)),
        decoding="",
        k=runner.design.num_speculative_tokens,
    )
    return alpha_hat(rows["accepted_emitted"].sum(), rows["rejections"].sum())


def _mean_top_probability(
    runner: ArmRunner, prompts: Sequence[Any], completions: list[Completion], temperature: float
) -> float:
    import torch

    model = load_model(runner.inputs.target_path)
    values: list[float] = []
    for prompt, done in zip(prompts, completions, strict=True):
        at = attempted_positions(done.steps_accepted, runner.design.num_speculative_tokens, len(done.tokens))
        logits = next_token_logits(model, torch.tensor([[*prompt, *done.tokens]]), len(prompt))
        values += torch.softmax(logits[0, at] / temperature, -1).amax(-1).tolist()
    return float(np.mean(values))


def fp32_lossless(runner: ArmRunner, unit: MeasureUnit) -> UnitOutcome:
    """Plain and speculative greedy outputs in fp32, base and adapted: no divergence at all.

    Raises:
        EngineError: any output differs.
    """
    controls, (prompt_set,) = runner.design.controls, unit.prompt_sets
    checks: dict[str, Any] = {}
    fixes: dict[str, str] = {}
    for name in [None, *controls.fp32_adapters]:
        adapter = runner.inputs.adapter(name) if name else None
        chosen = runner.design.indices(prompt_set)[: controls.fp32_prompts]
        depth = runner.design.num_speculative_tokens
        checks[name or "base"], fixes = runner.lossless_in_float32(adapter, prompt_set, chosen, depth)
        refuse_lossy(f"fp32, {name or 'base'}", checks[name or "base"])
    return UnitOutcome({"fp32_lossless": checks}, fixes=fixes)


def base_alpha_controls(runner: ArmRunner, unit: MeasureUnit, requests: pd.DataFrame) -> dict[str, Any]:
    """Base α̂ of every decoding and depth against the floor; of a draft model's sampled ones also against
    overlap on the same tokens.

    Raises:
        EngineError: under the floor, or further from the overlap than the design's tolerance.
    """
    design, (prompt_set,) = runner.design, unit.prompt_sets
    prompts = runner.inputs.prompts(prompt_set)
    models = (
        {
            "target": load_model(runner.inputs.target_path),
            "drafter": load_model(runner.inputs.drafter_path),
        }
        if design.has_overlap
        else None
    )
    out: dict[str, Any] = {}
    for (decoding, k), group in requests.groupby(["decoding", "k"]):
        alpha = alpha_hat(group["accepted_emitted"].sum(), group["rejections"].sum())
        check = {"alpha": alpha, "floor": design.controls.base_alpha_floor}
        temperature = design.decodings[decoding].temperature
        if temperature > 0 and models is not None:
            overlap = attempted_overlap(
                [prompts.eval[i][: prompts.prompt] for i in group["prompt_index"]],
                [list(t) for t in group["tokens"]],
                [list(s) for s in group["steps_accepted"]],
                int(k),
                temperature,
                **models,
            )
            check |= {"overlap_same_tokens": overlap, "tolerance": design.controls.overlap_tolerance}
        out[design.at_depth(decoding, k)] = check
    refuse_base(unit.name, out)
    return out


def refuse_base(unit: str, controls: dict[str, dict[str, float]]) -> None:
    """Refuse a base arm that accepts too little, or other than its overlap says.

    Raises:
        EngineError: codes ``base_floor`` and ``overlap_mismatch``.
    """
    for decoding, value in controls.items():
        where, alpha = f"{unit}, {decoding}", value["alpha"]
        if not alpha >= value["floor"]:
            raise EngineError(
                f"base acceptance {alpha:.3f} is under its floor {value['floor']}",
                where=where,
                fix="drafter or engine is at fault, not an adapter; nothing measured against it is evidence",
                code="base_floor",
            )
        overlap = value.get("overlap_same_tokens", alpha)
        if not abs(alpha - overlap) <= value.get("tolerance", 0.0):
            raise EngineError(
                f"base acceptance {alpha:.3f} is not the teacher-forced overlap {overlap:.3f}",
                where=where,
                fix="the engine's sampler is wrong; nothing measured with it is evidence",
                code="overlap_mismatch",
            )
