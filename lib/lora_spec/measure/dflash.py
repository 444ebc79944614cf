"""Acceptance of the trained DFlash drafter in vLLM, by domain, and whether its output is the target's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt

from lora_spec.acceptance import pooled_rates
from lora_spec.errors import EvidenceError, MissingTierError
from lora_spec.measure.design import GENERAL, EngineParams, PromptRange
from lora_spec.measure.engine import Completion, EngineSpec, Request
from lora_spec.measure.lossless import losslessness, settle
from lora_spec.measure.rows import request_rows
from lora_spec.measure.session import Call, run_session
from lora_spec.models import load_models
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import rel
from lora_spec.provenance import EvidenceClass, Record, load_record, new_record, write_record
from lora_spec.queue import Say
from lora_spec.substrate.dflash.config import PHASE, TIER, DflashParams, Temperature, records_dir
from lora_spec.substrate.dflash.export import drafter_weights_sha256
from lora_spec.substrate.dflash.prompts import unit_seed
from lora_spec.substrate.model_folders import model_dir, require_model
from lora_spec.substrate.prompts import load_prompts

EXPERIMENT = "dflash_evaluation"
PARAMS_FILE = "dflash_evaluation.yaml"
TABLE = "requests"
_NO_ADAPTER = "none"


class Speed(StrictModel):
    """Timing at batch 1 against the target alone; ``goal`` is a ratio of tokens per second."""

    repetitions: Annotated[int, Field(ge=2)]
    goal: PositiveFloat


class EvaluationParams(StrictModel):
    """``params/dflash_evaluation.yaml``.

    Attributes:
        prompts: windows of every prompt set.
        decodings: name to temperature; the one at 0 is compared with the target alone.
        bootstrap: resamples of prompts behind an interval.
        goal_acceptance_length: of greedy decoding over all prompts.
    """

    schema_: Annotated[str, Field(alias="schema", pattern=r"^lora-spec-dflash-evaluation/1$")]
    seed: Annotated[int, Field(ge=0)]
    prompts: PromptRange
    max_tokens: PositiveInt
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)]
    decodings: Annotated[dict[str, Temperature], Field(min_length=1)]
    engine: EngineParams
    near_tie_nats: Annotated[float, Field(ge=0)]
    bootstrap: Annotated[int, Field(ge=100)]
    goal_acceptance_length: PositiveFloat
    speed: Speed


def load_evaluation(path: Path | str = PARAMS_FILE) -> EvaluationParams:
    """Read and check ``params/dflash_evaluation.yaml``."""
    return load_params(EvaluationParams, path)


def evaluation_path() -> Path:
    """Record of the evaluation."""
    return records_dir() / "evaluation.json"


def evaluation_config(params: DflashParams, evaluation: EvaluationParams) -> dict[str, Any]:
    """What decides the numbers, apart from the bytes of models and prompts."""
    declared = evaluation.model_dump(mode="json", by_alias=True, exclude={"speed"})
    names = {"target": params.target, "drafter": params.drafter, "prompt": params.data.prompt}
    return names | {"sets": prompt_sets(params), "evaluation": declared}


def evaluation_revisions(params: DflashParams) -> dict[str, Any]:
    """Immutable identities of what is evaluated."""
    return {
        "target": {"key": params.target, "sha256": load_models().model(params.target).weights_sha256},
        "drafter": {"key": params.drafter, "sha256": drafter_weights_sha256(params)},
        "prompts": {name: load_prompts(name).sha256 for name in prompt_sets(params)},
    }


def find_evaluation_problem(params: DflashParams, evaluation: EvaluationParams) -> str | None:
    """Why the record of the evaluation is not of this drafter and these parameters, or None when it is."""
    if not evaluation_path().exists():
        return "to do"
    try:
        record = load_record(evaluation_path())
    except EvidenceError as error:
        return error.what
    current = record.config == evaluation_config(params, evaluation)
    return None if current and record.revisions == evaluation_revisions(params) else "of another drafter"


def prompt_sets(params: DflashParams) -> list[str]:
    """Prompt sets of the evaluation: the domains that were learnt, and the general one."""
    return [*params.data.domains, GENERAL]


def evaluation_prompts(params: DflashParams, wanted: PromptRange) -> list[tuple[str, int, list[int]]]:
    """(set, window number, prompt ids) of every prompt, set by set.

    Raises:
        EvidenceError: a set has too few windows.
    """
    prompts = []
    for name in prompt_sets(params):
        windows = load_prompts(name).eval
        if len(windows) < wanted.start + wanted.count:
            raise EvidenceError(f"{len(windows)} windows are too few", where=name)
        for number in range(wanted.start, wanted.start + wanted.count):
            prompts.append((name, number, windows[number][: params.data.prompt]))
    return prompts


def trained_drafter(params: DflashParams) -> Path:
    """Folder of the drafter, pinned or not yet.

    Raises:
        MissingTierError: it is not trained.
    """
    directory = model_dir(params.drafter)
    if drafter_weights_sha256(params) is None:
        raise MissingTierError(
            "the drafter is not trained", where=rel(directory), fix="run: lora-spec dflash --execute train"
        )
    return directory


def evaluate_drafter(
    params: DflashParams, evaluation: EvaluationParams, say: Say = lambda line: None
) -> Record:
    """Serve all prompts with and without the drafter, each in an engine of its own, and write the record.

    Raises:
        MissingTierError: the target is not built, the drafter not trained, or vLLM not installed.
        EngineError: an engine failed.
    """
    target, drafter = require_model(params.target), trained_drafter(params)
    prompts = evaluation_prompts(params, evaluation.prompts)
    plain = EngineSpec(target, evaluation.engine, evaluation.seed)
    drafting = EngineSpec(
        target,
        evaluation.engine,
        evaluation.seed,
        drafter=drafter,
        method="dflash",
        num_speculative_tokens=evaluation.num_speculative_tokens,
    )
    greedy = [name for name, temperature in evaluation.decodings.items() if temperature == 0][:1]
    say(f"{len(prompts)} prompts: the target alone")
    reference = run_session(plain, [_call(evaluation, prompts, name, logprobs=2) for name in greedy])
    say(f"{len(prompts)} prompts: with the drafter, {', '.join(evaluation.decodings)}")
    served = run_session(drafting, [_call(evaluation, prompts, name) for name in evaluation.decodings])
    completions = dict(zip(evaluation.decodings, served.completions, strict=True))
    table = pd.concat(
        [_rows(evaluation, prompts, name, done) for name, done in completions.items()], ignore_index=True
    )

    def in_float32(asked: list[int]) -> dict[str, Any]:
        call = _call(evaluation, [prompts[n] for n in asked], greedy[0], logprobs=2)
        exact = (replace(spec, dtype="float32") for spec in (plain, drafting))
        return losslessness(*(run_session(spec, [call]).completions[0] for spec in exact), near_tie=0.0)

    results: dict[str, Any] = {"fixes": served.fixes, "acceptance": acceptance_rows(table, evaluation)}
    for name in greedy:
        check = losslessness(reference.completions[0], completions[name], evaluation.near_tie_nats)
        results["lossless"] = settle(check, in_float32)
        reached = results["acceptance"][name]["all"]["al_emitted"]
        results["goal_met"] = reached >= evaluation.goal_acceptance_length
    record = new_record(
        experiment=EXPERIMENT,
        tier=TIER,
        phase=PHASE,
        evidence_class=EvidenceClass.MEASURED,
        config=evaluation_config(params, evaluation),
        seed=evaluation.seed,
        revisions=evaluation_revisions(params),
        covers={
            "domains": list(params.data.domains),
            "prompts": [f"{name}/{number}" for name, number, _ in prompts],
        },
        results=results,
    )
    return write_record(evaluation_path(), record, {TABLE: table})


def _call(
    evaluation: EvaluationParams,
    prompts: Sequence[tuple[str, int, list[int]]],
    decoding: str,
    logprobs: int | None = None,
) -> Call:
    temperature = evaluation.decodings[decoding]
    requests = []
    for name, number, ids in prompts:
        seeds = [
            unit_seed(evaluation.seed, f"{decoding}/{name}/{number}/{kind}") % (1 << 31)
            for kind in ("target", "draft")
        ]
        requests.append(Request(ids, *(seeds if temperature > 0 else (None, None))))
    return Call(requests, temperature, evaluation.max_tokens, logprobs)


def _rows(
    evaluation: EvaluationParams,
    prompts: Sequence[tuple[str, int, list[int]]],
    decoding: str,
    completions: Sequence[Completion],
) -> pd.DataFrame:
    """The ``requests`` table of one decoding, sets side by side."""
    frames = []
    for name in dict.fromkeys(name for name, _, _ in prompts):
        chosen = [n for n, prompt in enumerate(prompts) if prompt[0] == name]
        frames.append(
            request_rows(
                [completions[n] for n in chosen],
                arm="base",
                adapter=_NO_ADAPTER,
                prompt_set=name,
                prompt_indices=[prompts[n][1] for n in chosen],
                decoding=decoding,
                k=evaluation.num_speculative_tokens,
            )
        )
    return pd.concat(frames, ignore_index=True)


def acceptance_rows(table: pd.DataFrame, evaluation: EvaluationParams) -> dict[str, Any]:
    """Rates by decoding, then by prompt set and over ``all`` of them."""
    found: dict[str, Any] = {}
    for decoding, rows in table.groupby("decoding", sort=False):
        groups: Mapping[str, pd.DataFrame] = dict(list(rows.groupby("prompt_set", sort=False))) | {
            "all": rows
        }
        found[str(decoding)] = {str(name): _rates(group, evaluation) for name, group in groups.items()}
    return found


def _rates(rows: pd.DataFrame, evaluation: EvaluationParams) -> dict[str, Any]:
    """Emitted AL with the percentile interval of resampled prompts (95 %), α̂ and survival as far as any draft
    step got.
    """
    rates = pooled_rates(rows)
    tokens = rows["output_tokens"].to_numpy(dtype=np.float64) - 1
    steps = rows["steps_accepted"].map(len).to_numpy(dtype=np.float64)
    generator = np.random.default_rng(evaluation.seed)
    draws = generator.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=evaluation.bootstrap)
    with np.errstate(invalid="ignore"):
        resampled = (draws @ tokens) / (draws @ steps)
    low, high = np.nanquantile(resampled, [0.025, 0.975])
    return {
        "requests": rates.requests,
        "al_emitted": round(rates.al_emitted, 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "alpha": round(rates.alpha, 4),
        "survival": [round(share, 4) for share in rates.survival if not math.isnan(share)],
        "unique_ratio": round(float(rows["unique_ratio"].mean()), 4),
    }
