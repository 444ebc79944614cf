"""The trained DFlash drafter at batch 1: tokens a second over those of its target alone, timed in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_spec.bench._engines import Answer, engines
from lora_spec.bench._throughput import Side, faster, run_in_turn, same_tokens, speed
from lora_spec.measure.design import PromptRange
from lora_spec.measure.dflash import evaluation_prompts, load_evaluation, trained_drafter
from lora_spec.substrate.dflash.config import load_dflash
from lora_spec.substrate.dflash.export import drafter_weights_sha256
from lora_spec.substrate.model_folders import require_model


def run() -> dict[str, Any]:
    """Continue one prompt of every set greedily with both engines, one after the other, several times.

    Raises:
        MissingTierError: the target is not built, the drafter not trained, or vLLM not installed.
        EngineError: an engine failed.
    """
    import vllm  # noqa: F401 - the tier, before anything is started

    params, evaluation = load_dflash(), load_evaluation()
    drafter = trained_drafter(params)
    target = {"model": str(require_model(params.target))}
    drafting = {
        "method": "dflash",
        "model": str(drafter),
        "num_speculative_tokens": evaluation.num_speculative_tokens,
    }
    sides = {
        "plain": target,
        "dflash": target | {"speculative_config": drafting, "per_request_spec_decode_metrics": "detailed"},
    }
    chosen = PromptRange(start=evaluation.prompts.start, count=1)
    answers: dict[str, list[list[Answer]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as logs, engines(sides, evaluation.engine, Path(logs)) as running:
        for _, _, ids in evaluation_prompts(params, chosen):
            found = run_in_turn(
                running,
                {name: Side(name) for name in sides},
                [ids],
                batches=[1],
                tokens=evaluation.max_tokens,
                repetitions=evaluation.speed.repetitions,
            )
            for name in sides:
                answers[name].append(found[name, 1])
    totals = {name: [joined(turn) for turn in zip(*found, strict=True)] for name, found in answers.items()}
    ratio = faster(totals["dflash"], totals["plain"])
    return {
        "ratios": {
            "dflash_over_plain_batch_1": {
                "value": ratio["median"],
                "goal": evaluation.speed.goal,
                "sense": ">=",
            }
        },
        "speed_up": ratio,
        "sides": {name: speed(found) for name, found in totals.items()},
        "same_outputs": same_tokens(totals["dflash"][0], totals["plain"][0]),
        "drafter_sha256": drafter_weights_sha256(params),
        "prompts": len(answers["plain"]),
    }


def joined(answers: Sequence[Answer]) -> Answer:
    """The answers of several prompts, served one after the other, as one."""
    return Answer(
        sum(answer.seconds for answer in answers),
        [tokens for answer in answers for tokens in answer.tokens],
        [steps for answer in answers for steps in answer.accepted],
        [steps for answer in answers for steps in answer.drafted],
    )
