"""The healed drafter from the choice of its layers to its record: choose, train, compare, remember.

What is measured here is teacher-forced on calibration windows, which no screen uses: how much each block of
layers is worth, and how far the drafter follows its target before and after it is healed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lora_spec.errors import ParamsError
from lora_spec.files import canonical_sha256, sha256_file
from lora_spec.measure.scorer import load_model, next_token_logits, overlap, score_windows
from lora_spec.models import HealedSource
from lora_spec.paths import rel, results_dir
from lora_spec.provenance import EvidenceClass, Record, load_record, new_record, write_record
from lora_spec.queue import Say
from lora_spec.substrate.adapters import ADAPTER_WEIGHTS, read_side_file
from lora_spec.substrate.heal import (
    PARAMS_FILE,
    HealingParams,
    find_lora_problem,
    heal,
    load_healing,
    save_lora,
    training_texts,
)
from lora_spec.substrate.model_folders import (
    DRAFTER,
    TOKENIZER,
    WEIGHTS,
    healing_dir,
    model_dir,
    require_model,
)
from lora_spec.substrate.prompts import load_prompt_params, load_prompts
from lora_spec.substrate.writing import build_healed, drop_layers

EXPERIMENT = "healed_drafter"
UNTRAINED, HEALED, OTHER = "untrained", "healed", "layer-drop"
"""Drafters that are compared: this one before and after training, and that of the screen."""
SCORES = ("overlap", "top1", "entropy_target", "entropy_drafter")
_BATCH = 8


def record_path(model: str) -> Path:
    """Where the record of a healed drafter lies."""
    return results_dir("pocket", "phase2") / "healing" / f"{model}.json"


def plan_healing() -> list[tuple[str, str]]:
    """What there is to do, and its state: the LoRA, its record, and the pins in models.yaml."""
    params = load_healing()
    directory = healing_dir(params.model)
    lora = find_lora_problem(directory, params)
    return [
        (f"LoRA, {params.steps} steps", lora or "done"),
        ("record", _record_problem(params, directory) or "done"),
        ("pins in params/models.yaml", "done" if params.entry.status == "frozen" else "to do"),
    ]


def _record_problem(params: HealingParams, directory: Path) -> str | None:
    path = record_path(params.model)
    if not path.is_file():
        return "to do"
    found = load_record(path)
    side = read_side_file(directory) or {}
    same = found.revisions.get("adapter") == side.get("weights_sha256") and found.config == _config(params)
    return None if same else "of another drafter"


def _config(params: HealingParams) -> dict[str, Any]:
    choice = {name: getattr(params, name).model_dump(mode="json") for name in ("choice", "check")}
    return {"recipe": params.recipe(), **choice}


def run_healing(say: Say = lambda line: None) -> dict[str, Any]:
    """Train the LoRA if it is not there, measure what it is worth, and write its record.

    Returns:
        What ``params/models.yaml`` must pin: adapter_sha256, files and bytes.

    Raises:
        ParamsError: other layers would have been better to leave out than the declared ones.
        MissingTierError: the target or a corpus is not built.
    """
    params = load_healing()
    source, directory = params.source, healing_dir(params.model)
    parent = require_model(source.parent)
    require_model(DRAFTER)
    with tempfile.TemporaryDirectory() as folder:
        base, merged = Path(folder, "base"), Path(folder, "merged")
        base.mkdir()
        drop_layers(parent, base, source.dropped_layers)
        candidates = None
        if _record_problem(params, directory) or find_lora_problem(directory, params):
            candidates = choose_layers(params, parent, say)
        if find_lora_problem(directory, params):
            start = time.process_time()
            trained = heal(params, parent, base, training_texts(params), say)
            save_lora(trained, directory, params)
            say(f"trained: {time.process_time() - start:.0f} CPU-s, {rel(directory)}")
        adapter_sha256 = sha256_file(directory / ADAPTER_WEIGHTS)
        merged.mkdir()
        pinned = source.model_copy(update={"adapter_sha256": adapter_sha256})
        build_healed(params.model, params.entry, pinned, merged)
        pins = {
            "adapter_sha256": adapter_sha256,
            "files": {name: sha256_file(merged / name) for name in (WEIGHTS, TOKENIZER)},
            "bytes": (merged / WEIGHTS).stat().st_size,
        }
        if candidates is not None:
            drafters = {UNTRAINED: base, HEALED: merged, OTHER: model_dir(DRAFTER)}
            check = compare(params, parent, drafters, say)
            _write(params, candidates, check, pins)
    return pins


def calibration_windows(params: HealingParams, count: int) -> tuple[dict[str, list[list[int]]], int]:
    """The first ``count`` calibration windows of every domain, and the length of their prompt."""
    settings = load_prompt_params()
    sets = {name: load_prompts(name, settings).calibration[:count] for name in params.domains}
    return sets, settings.prompt


def choose_layers(params: HealingParams, parent: Path, say: Say) -> pd.DataFrame:
    """Overlap with the whole target of the target without each block of layers, best first.

    Raises:
        ParamsError: the declared block is not among the best.
    """
    windows, first = calibration_windows(params, params.choice.windows)
    flat = [window for some in windows.values() for window in some]
    table = score_blocks(parent, len(params.source.dropped_layers), flat, first, params.check.temperature)
    say(f"best blocks of layers to leave out:\n{table.head(3).to_string(index=False)}")
    check_choice(table, params.source, params.choice.tolerance)
    return table


def check_choice(table: pd.DataFrame, source: HealedSource, tolerance: float) -> None:
    """Refuse a declared block that is worse than the best by more than ``tolerance``.

    Args:
        table: from :func:`score_blocks`. source: declares the block.

    Raises:
        ParamsError: it is worse, or no block of neighbours.
    """
    dropped = sorted(source.dropped_layers)
    own = table[table["first"] == dropped[0]]
    if dropped != list(range(dropped[0], dropped[0] + len(dropped))) or own.empty:
        raise ParamsError("dropped_layers are no block of neighbours", where="params/models.yaml")
    best = table.iloc[0]
    if own["overlap"].iloc[0] < best["overlap"] - tolerance:
        raise ParamsError(
            f"layers {best['first']:.0f} to {best['last']:.0f} are the better ones to leave out: overlap "
            f"{best['overlap']:.3f} against {own['overlap'].iloc[0]:.3f}",
            where="params/models.yaml",
            fix=f"declare them, as the rule in params/{PARAMS_FILE} says",
        )


def score_blocks(
    parent: Path, size: int, windows: Sequence[Sequence[int]], prompt: int, temperature: float
) -> pd.DataFrame:
    """Overlap and top-1 agreement of a model with itself less ``size`` neighbouring layers, for each place.

    Returns:
        Columns first, last (layers left out, counted from 0), overlap, top1; best overlap first.
    """
    import torch

    torch.set_num_threads(1)
    model = load_model(parent)
    layers = list(model.model.layers)
    places = range(len(layers) - size + 1)
    sums = {place: [0.0, 0.0] for place in places}
    for start in range(0, len(windows), _BATCH):
        tokens = torch.tensor(windows[start : start + _BATCH], dtype=torch.long)
        model.model.layers = torch.nn.ModuleList(layers)
        whole = next_token_logits(model, tokens, prompt)
        log_p = torch.log_softmax(whole / temperature, -1)
        for place in places:
            model.model.layers = torch.nn.ModuleList(layers[:place] + layers[place + size :])
            logits = next_token_logits(model, tokens, prompt)
            log_q = torch.log_softmax(logits / temperature, -1)
            sums[place][0] += float(overlap(log_p, log_q).mean(1).sum())
            sums[place][1] += float((whole.argmax(-1) == logits.argmax(-1)).float().mean(1).sum())
    rows = [
        {"first": p, "last": p + size - 1, "overlap": o / len(windows), "top1": t / len(windows)}
        for p, (o, t) in sums.items()
    ]
    return pd.DataFrame(rows).sort_values(["overlap", "first"], ascending=[False, True], ignore_index=True)


def compare(params: HealingParams, parent: Path, drafters: Mapping[str, Path], say: Say) -> pd.DataFrame:
    """Teacher-forced agreement of each drafter with the target, one row a drafter and domain.

    Columns: drafter, domain, windows, overlap, top1, entropy_target, entropy_drafter (nats).
    """
    windows, first = calibration_windows(params, params.check.windows)
    target, rows = load_model(parent), []
    for name, path in drafters.items():
        drafter = load_model(path)
        for domain, some in windows.items():
            scores = score_windows(some, first, params.check.temperature, target=target, drafter=drafter)
            means = pd.DataFrame([vars(score) for score in scores]).mean(numeric_only=True)
            rows.append(
                {"drafter": name, "domain": domain, "windows": len(some)}
                | {score: float(means[score]) for score in SCORES}
            )
        mean = pd.DataFrame(rows).query("drafter == @name")[["overlap", "top1"]].mean()
        say(f"{name}: overlap {mean['overlap']:.3f}, top-1 {mean['top1']:.3f}")
    return pd.DataFrame(rows)


def _write(
    params: HealingParams, candidates: pd.DataFrame, check: pd.DataFrame, pins: Mapping[str, Any]
) -> Record:
    side = read_side_file(healing_dir(params.model)) or {}
    windows, _ = calibration_windows(params, max(params.choice.windows, params.check.windows))
    means = check.groupby("drafter", sort=False)[list(SCORES)].mean()
    record = new_record(
        experiment=EXPERIMENT,
        tier="pocket",
        phase="phase2",
        evidence_class=EvidenceClass.MEASURED,
        config=_config(params),
        seed=params.seed,
        revisions={
            "target": params.recipe()["parent_sha256"],
            "adapter": pins["adapter_sha256"],
            "drafter": pins["files"][WEIGHTS],
            "windows": canonical_sha256(windows),
        },
        covers={"domains": sorted(windows)},
        results={
            "means": means.to_dict("index"),
            "first_loss": side.get("first_loss"),
            "final_loss": side.get("final_loss"),
            "tokens_seen": side.get("tokens_seen"),
        },
    )
    return write_record(record_path(params.model), record, {"blocks": candidates, "calibration": check})
