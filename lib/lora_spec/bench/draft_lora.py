"""What drafter adapters cost against merged full drafters: throughput, memory, loading and swapping.

On the pocket target in vLLM, bfloat16 and eager, one process an engine. Throughput is greedy and past any
end of sequence, so that every side makes the same number of tokens; sides take turns, and ratios are taken
within a repetition. An untrained DFlash drafter accepts nothing: its time a step is real, so its ratios hold
at equal acceptance, which is checked (equal draft steps and drafts); its acceptance is not exercised.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.bench import _loading, _throughput
from lora_spec.bench._engines import EngineProcess, Order, engines
from lora_spec.bench._pairs import Adapted, Pair, pocket_pairs, write_adapters
from lora_spec.bench._report import memory_rows, ratios_of, speed_ratios, table, throughput_rows
from lora_spec.bench._throughput import Side, interval
from lora_spec.errors import EngineError
from lora_spec.measure.design import EngineParams
from lora_spec.paths import cache_dir

# Largest relative difference of the acceptance length from the merged drafter's in bfloat16, where the two
# round differently; in float32 requests are compared one by one.
ACCEPTANCE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Settings:
    """How much is run.

    Attributes:
        batches: batch sizes by method.
        tokens: output tokens a request, by method.
        repetitions: by method.
        drafts: num_speculative_tokens.
        rank: of the adapters that are served.
        ranks: of the adapters whose files are compared with the formula.
        mixed: different adapters in the mixed batch, which is the largest of a method's batches.
        counts: how many adapters, and how many full drafters, are kept in memory.
        copies_limit: bytes that copies of full drafters may take; more is computed.
        swaps: repetitions of loading and swapping.
        exact_requests, exact_tokens: the float32 comparison of acceptance with the merged drafter.
        threads: of the engine that works.
    """

    batches: dict[str, tuple[int, ...]]
    tokens: dict[str, int]
    repetitions: dict[str, int]
    drafts: int = 4
    rank: int = 16
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    mixed: int = 8
    counts: tuple[int, ...] = (1, 4, 16, 32)
    copies_limit: int = 2 << 30
    swaps: int = 9
    exact_requests: int = 8
    exact_tokens: int = 32
    threads: int = 2


FULL = Settings(
    batches={"dflash": (1, 4, 16), "draft_model": (1, 8)},
    tokens={"dflash": 32, "draft_model": 32},
    repetitions={"dflash": 5, "draft_model": 3},
)


def run() -> dict[str, Any]:
    """Run everything on the pocket target.

    Returns:
        "ratios", and "dflash" and "draft_model": throughput by side and batch, memory, seconds.

    Raises:
        MissingTierError: the pocket models are not built.
        EngineError: an engine failed, or sides that must do the same work did not.
    """
    from lora_spec.substrate.prompts import load_prompts

    german = load_prompts("german")
    prompts = [window[: german.prompt] for window in german.eval]
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="bench-") as name:
        outcome = measure(pocket_pairs(Path(name)), prompts, FULL, Path(name))
    print(table(outcome))
    return outcome


def measure(
    pairs: Sequence[Pair], prompts: Sequence[Sequence[int]], settings: Settings, workspace: Path
) -> dict[str, Any]:
    """The benchmark on any pairs; see `run`.

    Args:
        pairs: of one target.
        prompts: token ids, at least as many as the largest batch.
        workspace: existing folder for adapters, merged drafters and logs.
    """
    (target,) = {pair.target for pair in pairs}
    outcome: dict[str, Any] = {"ratios": {}, "settings": dataclasses.asdict(settings)}
    with engines({"plain": {"model": str(target)}}, _params(settings, prompts), workspace) as plain:
        for pair in pairs:
            folder = workspace / f"{pair.method}-files"
            adapted = write_adapters(
                pair, folder, count=max(settings.counts), rank=settings.rank, ranks=settings.ranks
            )
            found = _measure_pair(pair, adapted, prompts, settings, plain["plain"])
            outcome["ratios"] |= ratios_of(pair, found)
            outcome[pair.method] = found
    return outcome


def _params(settings: Settings, prompts: Sequence[Sequence[int]], **changes: Any) -> EngineParams:
    longest = max(len(prompt) for prompt in prompts) + max(settings.tokens.values()) + settings.exact_tokens
    return EngineParams(
        **{
            "dtype": "bfloat16",
            "max_num_seqs": max(max(sizes) for sizes in settings.batches.values()),
            "max_model_len": max(64, longest),
            "kv_cache_gib": 1,
            "threads": min(settings.threads, os.cpu_count() or 1),
            **changes,
        }
    )


def _speculation(pair: Pair, folder: Path, settings: Settings, **draft_lora: Any) -> dict[str, Any]:
    speculative: dict[str, Any] = {
        "method": pair.method,
        "model": str(folder),
        "num_speculative_tokens": settings.drafts,
    }
    if draft_lora:
        speculative["draft_lora"] = draft_lora
    return {
        "model": str(pair.target),
        "speculative_config": speculative,
        "per_request_spec_decode_metrics": "detailed",
    }


def _measure_pair(
    pair: Pair,
    adapted: Adapted,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    plain: EngineProcess,
) -> dict[str, Any]:
    batches = settings.batches[pair.method]
    names = list(adapted.adapters)
    plugin = {"max_rank": settings.rank, "max_slots": settings.mixed, "max_cached": len(names)}
    options = {
        "base": _speculation(pair, pair.drafter, settings),
        "plugin": _speculation(pair, pair.drafter, settings, **plugin),
        "merged": _speculation(pair, adapted.merged, settings),
    }
    sides = {
        "plain": Side("plain"),
        "base": Side("base"),
        "idle_plugin": Side("plugin"),
        "adapter": Side("plugin", lambda number: names[0]),
        "merged": Side("merged"),
        "mixed_adapters": Side("plugin", lambda number: names[number % settings.mixed], max(batches)),
    }
    with engines(options, _params(settings, prompts), adapted.merged.parent) as running:
        # First of all, while the plugin's engine has never had an adapter.
        adapter_memory = running["plugin"].call(_loading.keep_adapters, adapted.adapters, settings.counts)
        answers = _throughput.run_in_turn(
            {**running, "plain": plain},
            sides,
            prompts,
            batches=batches,
            tokens=settings.tokens[pair.method],
            repetitions=settings.repetitions[pair.method],
        )
        swaps = running["plugin"].call(_loading.swap_adapters, names, settings.mixed, settings.swaps)
        drafter_memory = running["merged"].call(
            _loading.keep_drafters, pair.drafter, settings.counts, settings.copies_limit
        )
        reloads = _reloads(running, pair, adapted, prompts, settings)
        starts = {name: engine.start_s for name, engine in running.items()}
    check_work(pair, answers, batches)
    return {
        "trained": pair.trained,
        "throughput": throughput_rows(answers),
        "memory": memory_rows(pair, adapted, adapter_memory, drafter_memory),
        "seconds": {
            "adapter_load_cold": interval(adapter_memory["load_s"]),
            "adapter_reload": interval(swaps["reload"]),
            "adapter_into_slot": interval(swaps["slot"]),
            "drafter_reload_cold": interval(reloads["cold"]),
            "drafter_reload": interval(reloads["warm"]),
            "drafter_copy": interval(reloads["copy"]),
            "engine_start_to_first_token": {**interval(list(starts.values())), "by_engine": starts},
        },
        "exact": _exact(pair, adapted, prompts, settings) if pair.trained else None,
        "speed_ratios": speed_ratios(answers),
    }


def _reloads(
    running: dict[str, EngineProcess],
    pair: Pair,
    adapted: Adapted,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
) -> dict[str, list[float]]:
    """Reload the base engine's drafter in place; that it took is seen by reloading the merged one at last."""
    base = running["base"]
    times = base.call(_loading.reload_drafter, pair.drafter, settings.swaps)
    base.call(_loading.reload_drafter, adapted.merged, 1)
    orders = [Order(prompt) for prompt in prompts[: settings.exact_requests]]
    ours, theirs = (engine.generate(orders, 16) for engine in (base, running["merged"]))
    if ours.accepted != theirs.accepted:
        raise EngineError("a drafter reloaded in place does not draft as one loaded at the start does")
    return times


def check_work(pair: Pair, answers: dict[_throughput.Cell, Any], batches: Sequence[int]) -> None:
    """An adapter and its merged drafter must accept the same, or their speeds must not be compared."""
    for batch in batches:
        ours, theirs = answers["adapter", batch][0].work, answers["merged", batch][0].work
        if pair.trained:
            lengths = [1 + accepted / steps for steps, _, accepted in (ours, theirs)]
            same = abs(lengths[0] / lengths[1] - 1) <= ACCEPTANCE_TOLERANCE
        else:
            same = ours == theirs
        if not same:
            raise EngineError(
                f"steps, drafts and accepted: {ours} with the adapter, {theirs} with the merged drafter",
                where=f"{pair.method}, batch {batch}",
            )


def _exact(
    pair: Pair, adapted: Adapted, prompts: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """In float32, where merging rounds nothing that matters: acceptance request by request."""
    name = next(iter(adapted.adapters))
    plugin = {"adapters": {name: str(adapted.adapters[name])}, "max_rank": settings.rank}
    options = {
        "plugin": _speculation(pair, pair.drafter, settings, **plugin),
        "merged": _speculation(pair, adapted.merged, settings),
    }
    params = _params(settings, prompts, dtype="float32")
    chosen = prompts[: settings.exact_requests]
    orders = [Order(prompt, name) for prompt in chosen]
    base = [Order(prompt) for prompt in chosen]
    with engines(options, params, adapted.merged.parent, at_once=True) as running:
        ours = running["plugin"].generate(orders, settings.exact_tokens)
        untouched = running["plugin"].generate(base, settings.exact_tokens)
        theirs = running["merged"].generate(base, settings.exact_tokens)
    if ours.histograms != theirs.histograms or ours.tokens != theirs.tokens:
        raise EngineError(
            f"acceptance differs from the merged drafter's: {ours.histograms} against {theirs.histograms}",
            where=f"{pair.method}, float32",
        )
    if ours.histograms == untouched.histograms:
        raise EngineError("the adapter changed nothing, so the comparison shows nothing", where=pair.method)
    steps, drafted, accepted = ours.work
    return {
        "requests": len(orders), "draft_steps": steps, "drafted": drafted, "accepted": accepted,
        "accepted_by_base": untouched.work[2], "equal_histograms": True,
    }  # fmt: skip
