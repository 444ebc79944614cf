"""The trained drafter's model card, written from parameters and records: no number in it is typed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_spec.errors import EvidenceError
from lora_spec.files import atomic_write_text
from lora_spec.measure.dflash import (
    EvaluationParams,
    evaluation_path,
    find_evaluation_problem,
    trained_drafter,
)
from lora_spec.measure.lossless import largest_near_tie
from lora_spec.models import load_models
from lora_spec.paths import rel
from lora_spec.provenance import Record, load_record
from lora_spec.substrate.corpora import load_corpora
from lora_spec.substrate.dflash.config import DflashParams
from lora_spec.substrate.dflash.data import unit_names, unit_path
from lora_spec.substrate.dflash.export import drafter_weights_sha256
from lora_spec.substrate.dflash.train import find_training_problem, training_path
from lora_spec.substrate.model_folders import model_dir

CARD = "README.md"


def write_card(params: DflashParams, evaluation: EvaluationParams) -> Path:
    """Write the card beside the weights; without an evaluation it says that there is none.

    Raises:
        EvidenceError: the weights are not those of the record of the training.
        MissingTierError: there are none.
    """
    directory = trained_drafter(params)
    problem = find_training_problem(params)
    if problem:
        raise EvidenceError(f"no card for this drafter: {problem}", where=rel(training_path()))
    evaluated = None
    if find_evaluation_problem(params, evaluation) is None:
        evaluated = load_record(evaluation_path())
    atomic_write_text(directory / CARD, card_text(params, load_record(training_path()), evaluated))
    return directory / CARD


def card_text(params: DflashParams, training: Record, evaluated: Record | None) -> str:
    """The card as Markdown."""
    title = load_models().model(params.drafter).title
    parts = [
        f"# {params.drafter}",
        _paragraph(
            f"{title[0].upper()}{title[1:]}, `{params.target}`. It drafts a block of tokens in one pass,",
            "from the target's hidden states, and is of no use without that target.",
        ),
        _shape(params, training),
        "## Training",
        *_training(params, training),
        "## Acceptance",
        *_acceptance(evaluated),
        "## Use",
        *_use(params),
    ]
    return "\n\n".join(parts) + "\n"


def _paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 110, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _shape(params: DflashParams, training: Record) -> str:
    entry = load_models().model(params.drafter)
    geometry = entry.geometry
    sizes = (
        f"{geometry.num_hidden_layers} Qwen3-like layers, hidden {geometry.hidden_size}",
        f"{geometry.num_attention_heads} heads",
        f"{geometry.num_key_value_heads} key/value heads of {geometry.head_dim}",
        f"feed-forward {geometry.intermediate_size}",
    )
    rows = [
        ("Architecture", f"DFlash (block diffusion): {', '.join(sizes)}"),
        ("Reads", f"outputs of the target's layers {', '.join(map(str, params.model.taps))} (from 0)"),
        ("Shares", "the target's embedding and output matrix, which are not stored"),
        ("Parameters", f"{training.results['parameters']:,} trained; stored in bfloat16"),
        ("Weights", f"sha256 `{drafter_weights_sha256(params)}`"),
        ("Licence", f"{entry.licence} (those of the texts: `params/corpora.yaml`)"),
    ]
    return _table(("", ""), rows)


def _training(params: DflashParams, training: Record) -> list[str]:
    tokens = sum(load_record(unit_path(n)).results["generated_tokens"] for n in unit_names(params)[:-1])
    licences = sorted({source.licence for source in load_corpora().sources.values()})
    temperatures, train = params.data.temperatures, params.train
    greedy = temperatures.count(0.0) / len(temperatures)
    minutes = training.results["cpu_seconds"] / 60
    first, *_ = training.results["history"][-1]["accuracy"]
    return [
        _paragraph(
            f"On {params.data.sequences:,} continuations that the target itself wrote: {tokens:,} tokens,",
            f"{greedy:.0%} of the sequences greedy, after prompts from the training documents of",
            f"{len(params.data.domains)} domains (licences {', '.join(licences)}). No text of the held-out",
            "or calibration documents was used.",
        ),
        _paragraph(
            f"{train.steps:,} steps of {train.batch} sequences with {train.anchors} blocks each,",
            f"cross-entropy and distillation, {minutes:.0f} CPU-minutes on one core; settings in",
            "`params/dflash.yaml`. After the last step, on greedy continuations of held-out prompts, the",
            f"first token of a block was right in {first:.1%} of cases.",
        ),
        _paragraph(
            "One `k_norm` serves all layers: vLLM 0.32 norms the context's keys of all layers with the first",
            "one's on CPU.",
        ),
    ]


def _acceptance(evaluated: Record | None) -> list[str]:
    if evaluated is None:
        return ["Not measured yet."]
    declared: dict[str, Any] = evaluated.config["evaluation"]
    found: dict[str, Any] = evaluated.results["acceptance"]
    rows = []
    for name in ["all", *evaluated.config["sets"]]:
        cells = [found[decoding][name] for decoding in found]
        rows.append([name, *(f"{c['al_emitted']:.2f} [{c['low']:.2f}, {c['high']:.2f}]" for c in cells)])
    head = ["prompts", *(f"T = {declared['decodings'][decoding]:g}" for decoding in found)]
    parts = [
        _paragraph(
            f"Emitted tokens per draft step (at most {declared['num_speculative_tokens'] + 1}) in vLLM, on",
            f"{declared['prompts']['count']} held-out prompts of each set, {declared['max_tokens']} tokens",
            "each, with 95 % intervals over prompts. Greedy text of so small a target loops, which flatters",
            "the drafter.",
        ),
        _table(head, rows),
    ]
    if lossless := evaluated.results.get("lossless"):
        parts.append(
            _paragraph(
                f"Greedy output is the target's own in {lossless['identical']} of {lossless['requests']}",
                "requests. At the first difference of another, the target's two best tokens were at most",
                f"{largest_near_tie(lossless):.2f} nats apart{_in_float32(lossless)}.",
            )
        )
    return [*parts, "Speed against the target alone: `results/bench/dflash.json`."]


def _in_float32(lossless: dict[str, Any]) -> str:
    if (exact := lossless.get("float32")) is None:
        return ""
    same, asked = exact["identical"], exact["requests"]
    return f"; those with larger gaps were asked again in float32: {same} of {asked} gave the target's output"


def _use(params: DflashParams) -> list[str]:
    folder = rel(model_dir(params.drafter))
    config = {"method": "dflash", "model": folder, "num_speculative_tokens": min(params.train.drafts)}
    return [
        "In vLLM 0.32, with the target that `lora-spec pocket --execute` builds:",
        f"```\n--speculative-config '{json.dumps(config)}'\n```",
    ]
