"""Teacher-forced overlap of one unit's own-domain windows, base or adapted."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lora_spec.errors import LoraSpecError
from lora_spec.measure.design import Design, MeasureUnit
from lora_spec.measure.inputs import Inputs
from lora_spec.measure.scorer import load_model, score_windows


def no_overlap(design: Design) -> LoraSpecError:
    """The refusal to score a pair whose drafter has no next-token distribution."""
    return LoraSpecError(
        f"a drafter of method {design.method} has no next-token distribution to score",
        where=design.experiment,
        fix="such a pair is labelled by counted acceptance alone: run `lora-spec measure`",
        code="no_overlap",
    )


def score_unit(inputs: Inputs, unit: MeasureUnit) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Score the design's range of the unit's own prompt set.

    Returns:
        The record's results, and the table ``overlap`` with one row a window.

    Raises:
        LoraSpecError: the design's drafter has no distribution to score.
    """
    design = inputs.design
    if design.overlap_temperature is None:
        raise no_overlap(design)
    import torch

    torch.set_num_threads(design.engine.threads)
    prompt_set = unit.prompt_sets[0]
    prompts = inputs.prompts(prompt_set)
    indices = design.indices(prompt_set)
    target = load_model(inputs.target_path)
    drafter = load_model(inputs.drafter_path)
    adapted = None
    if unit.adapter is not None:
        adapted = load_model(inputs.target_path, adapter=inputs.adapter(unit.adapter).path)
    scores = score_windows(
        [prompts.eval[i] for i in indices],
        prompts.prompt,
        design.overlap_temperature,
        target=target if adapted is None else adapted,
        drafter=drafter,
        reference=None if adapted is None else target,
    )
    frame = pd.DataFrame([vars(score) for score in scores])
    for position, (name, value) in enumerate(
        {
            "arm": "base" if adapted is None else "adapted",
            "adapter": unit.adapter or "",
            "prompt_set": prompt_set,
            "prompt_index": list(indices),
            "temperature": design.overlap_temperature,
        }.items()
    ):
        frame.insert(position, name, value)
    frame = frame.astype({"prompt_index": "int32", "positions": "int32"})
    numeric = frame.select_dtypes("number").drop(columns=["prompt_index", "temperature"]).dropna(axis=1)
    return {"means": numeric.mean().to_dict()}, {"overlap": frame}
