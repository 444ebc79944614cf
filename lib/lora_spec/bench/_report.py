"""Results of the drafter-LoRA benchmark: rows, ratios, and a table to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_spec.bench._engines import Answer
from lora_spec.bench._pairs import WEIGHTS, Adapted, Pair, folder_bytes
from lora_spec.bench._throughput import Cell, faster, same_tokens, speed

Answers = Mapping[Cell, Sequence[Answer]]

# Tokens a second of an adapter, and of several in one batch, over the merged drafter's; of DFlash only, the
# others' ratios are reported as they are.
HOMOGENEOUS_GOAL = 0.95
MIXED_GOAL = 0.85
# Bytes of full drafters over those of adapters, over what the shapes say.
MEMORY_GOAL = 0.95
DRAFTER_FILES = (WEIGHTS, "config.json", "mask_embedding.pt")


# side -> the side that its speed is divided by
COMPARED = {
    "adapter": "merged",
    "mixed_adapters": "merged",
    "idle_plugin": "base",
    "merged": "plain",
}


def throughput_rows(answers: Answers) -> list[dict[str, Any]]:
    """A row for each side and batch size: tokens a second, drafting, and the share of outputs as plain's."""
    rows = []
    for (side, batch), given in answers.items():
        row = {"side": side, "batch": batch, **speed(given)}
        row["outputs_as_plain"] = same_tokens(given[0], answers["plain", batch][0])
        rows.append(row)
    return rows


def speed_ratios(answers: Answers) -> list[dict[str, Any]]:
    """Tokens a second of a side over another's, paired by repetition, with its interval."""
    return [
        {
            "side": side,
            "over": COMPARED[side],
            "batch": batch,
            **faster(given, answers[COMPARED[side], batch]),
        }
        for (side, batch), given in answers.items()
        if side in COMPARED
    ]


def memory_rows(
    pair: Pair, adapted: Adapted, adapters: Mapping[str, Any], drafters: list[dict[str, Any]]
) -> dict[str, Any]:
    """Bytes of N adapters and of N full drafters, in memory and on disk, beside the formula.

    Args:
        adapters, drafters: of `keep_adapters` and `keep_drafters`.
    """
    last = adapters["kept"][-1]
    drafter_bytes = folder_bytes(pair.drafter, DRAFTER_FILES)
    return {
        "formula": pair.geometry.full_over_adapter(adapted.rank),
        # In bfloat16, linear layers alone as in the formula: what else a drafter has may be shared.
        "ratio": last["adapters"] * 2 * adapted.linear_parameters / last["tensor_bytes"],
        "by_rank": adapted.by_rank,
        "adapters": adapters["kept"],
        "slots_bytes": adapters["slots_bytes"],
        "drafters": drafters,
        "adapter_file_bytes": adapted.file_bytes,
        "drafter_file_bytes": drafter_bytes,
    }


def ratios_of(pair: Pair, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The benchmark's ratios of one pair, by name."""
    goals = {"adapter": HOMOGENEOUS_GOAL, "mixed_adapters": MIXED_GOAL} if pair.method == "dflash" else {}
    ratios: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float, goal: float | None = None) -> None:
        ratios[f"{pair.method}_{name}"] = {"value": value, "goal": goal, "sense": ">="}

    for row in found["speed_ratios"]:
        name = f"{row['side']}_vs_{row['over']}_batch_{row['batch']}"
        add(name, row["median"], goals.get(row["side"]))
    memory, seconds = found["memory"], found["seconds"]
    add("memory_ratio_over_formula", memory["ratio"] / memory["formula"], MEMORY_GOAL)
    load = seconds["adapter_reload"]["median"]
    add("drafter_reload_over_adapter_reload", seconds["drafter_reload"]["median"] / load)
    add("engine_start_over_adapter_reload", seconds["engine_start_to_first_token"]["median"] / load)
    return ratios


def table(outcome: dict[str, Any]) -> str:
    """The benchmark as text: throughput by side and batch, seconds, and memory."""
    lines = []
    for method in ("dflash", "draft_model"):
        if method not in outcome:
            continue
        found = outcome[method]
        lines.append(f"{method}{'' if found['trained'] else ' (untrained: ratios at equal acceptance)'}")
        lines.append("  side             batch   tok/s  (low - high)     AL")
        for row in found["throughput"]:
            rate, al = row["tokens_per_s"], row["al_vllm"]
            lines.append(
                f"  {row['side']:16} {row['batch']:5} {rate['median']:7.1f}"
                f"  ({rate['low']:.1f} - {rate['high']:.1f})   {'-' if al is None else format(al, '.2f')}"
            )
        for row in found["speed_ratios"]:
            lines.append(
                f"  {row['side']} / {row['over']}, batch {row['batch']}: {row['median']:.3f}"
                f"  ({row['low']:.3f} - {row['high']:.3f})"
            )
        for name, value in found["seconds"].items():
            lines.append(
                f"  {name:28} {1e3 * value['median']:10.2f} ms"
                f"  ({1e3 * value['low']:.2f} - {1e3 * value['high']:.2f})"
            )
        memory = found["memory"]
        for ours, theirs in zip(memory["adapters"], memory["drafters"], strict=True):
            lines.append(
                f"  {ours['adapters']:3} adapters {ours['tensor_bytes'] / 2**20:8.1f} MiB"
                f"   {theirs['drafters']:3} drafters {theirs['tensor_bytes'] / 2**20:8.1f} MiB"
                f"{'' if theirs['measured'] else ' (computed)'}"
            )
        lines.append(f"  slots {memory['slots_bytes'] / 2**20:.1f} MiB")
        for row in memory["by_rank"]:
            lines.append(f"  rank {row['rank']:3}: formula {row['formula']:.1f}, files {row['ratio']:.1f}")
    return "\n".join(lines)
