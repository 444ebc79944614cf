"""Train LoRA adapters from their declared recipes, bit for bit the same on machines whose CPU flags agree.

One thread, seeded initialisation and data order, no dropout, deterministic kernels, a fixed number of steps.
The base stays in bfloat16 and frozen; the adapter's weights, gradients and optimiser state are float32.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.errors import CheckpointError, ParamsError, exit_status
from lora_spec.files import atomic_dir, atomic_write_json, sha256_file
from lora_spec.models import load_models
from lora_spec.paths import rel
from lora_spec.pool import POOL_FILE, Pool, Recipe, Training, load_pool_file
from lora_spec.queue import Say
from lora_spec.substrate.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    SIDE_FILE,
    SIDE_SCHEMA,
    corpora_missing,
    corpus_path,
    find_adapter_problem,
    trained_dir,
)
from lora_spec.substrate.corpora import read_documents
from lora_spec.substrate.model_folders import TOKENIZER, require_model
from lora_spec.substrate.torch_tier import import_torch

_LOSS_WINDOW = 5


@dataclass(frozen=True)
class Trained:
    """Result of a training run.

    Attributes:
        tensors: PEFT state dict, name to float32 tensor.
        config: PEFT configuration as JSON values, without local paths.
        losses: mean cross-entropy in nats per token of each step's batch, before the step; none at 0 steps.
    """

    tensors: dict[str, Any]
    config: dict[str, Any]
    losses: list[float]

    @property
    def final_loss(self) -> float | None:
        """Mean loss of the last five steps; None at 0 steps."""
        last = self.losses[-_LOSS_WINDOW:]
        return sum(last) / len(last) if last else None


def pack_blocks(tokenizer_file: Path, texts: Sequence[str], eos: int, length: int) -> list[list[int]]:
    """Token ids of ``texts``, each followed by ``eos``, cut into blocks of ``length``; a rest is dropped."""
    from tokenizers import Tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        stream.extend(encoding.ids)
        stream.append(eos)
    return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]


def block_order(blocks: int, wanted: int, seed: int) -> Iterator[int]:
    """``wanted`` block numbers: shuffled passes over all blocks, the order fixed by ``seed`` alone.

    Raises:
        CheckpointError: there is no block.
    """
    if blocks == 0:
        raise CheckpointError("the corpus is shorter than one training block")
    shuffler = random.Random(seed)
    given = 0
    while given < wanted:
        order = list(range(blocks))
        shuffler.shuffle(order)
        yield from order[: wanted - given]
        given += min(blocks, wanted - given)


def learning_rate_factor(step: int, steps: int, warmup_fraction: float) -> float:
    """Factor on the learning rate at 0-based ``step``: linear warm-up, then linear decay towards zero."""
    warmup = max(1, round(steps * warmup_fraction))
    if step < warmup:
        return (step + 1) / warmup
    return (steps - step) / (steps - warmup + 1)


def train(
    recipe: Recipe,
    training: Training,
    base: Path,
    texts: Sequence[str],
    *,
    base_name: str,
    say: Say = lambda line: None,
) -> Trained:
    """Train ``recipe`` on ``texts``: the last of `train_run` with no other stop."""
    (trained,) = train_run(recipe, [recipe.steps], training, base, texts, base_name=base_name, say=say)
    return trained


def train_run(
    recipe: Recipe,
    stops: Sequence[int],
    training: Training,
    base: Path,
    texts: Sequence[str],
    *,
    base_name: str,
    say: Say = lambda line: None,
) -> Iterator[Trained]:
    """Train the run of ``recipe`` on ``texts`` and give what it is at each of ``stops``.

    Args:
        recipe: recipe of any adapter of the run.
        stops: numbers of steps, rising, none above the schedule; training ends at the last.
        training: shared settings.
        base: directory of the frozen base model with its tokenizer.
        texts: documents, in an order that is part of the recipe's identity.
        base_name: written to the adapter as ``base_model_name_or_path``.
        say: receives a line every few steps.

    Raises:
        ParamsError: a layer that the base does not have.
        CheckpointError: the corpus is too short, or the loss is not finite.
        MissingTierError: torch, transformers or peft is not installed.
    """
    model = load_frozen(base, recipe.seed)
    import peft

    check_layers(recipe, model.config.num_hidden_layers)
    blocks = pack_blocks(base / TOKENIZER, texts, model.config.eos_token_id, training.block_tokens)
    steps = stops[-1]
    order = list(block_order(len(blocks), steps * training.batch, recipe.seed))
    say(f"{len(texts)} documents, {len(blocks)} blocks of {training.block_tokens}, {steps} steps")
    lora = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.rslora,
        target_modules=list(recipe.target_modules),
        layers_to_transform=None if recipe.layers is None else list(recipe.layers),
        rank_pattern=dict(recipe.rank_pattern),
        alpha_pattern=dict(recipe.alpha_pattern),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, lora)
    losses: list[float] = []
    if 0 in stops:
        yield snapshot(model, base_name, losses)
    for loss in optimise(
        model,
        [blocks[number] for number in order],
        lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
        training,
        learning_rate=recipe.learning_rate,
        schedule=recipe.schedule,
        where=recipe.name,
        say=say,
    ):
        losses.append(loss)
        if len(losses) in stops:
            yield snapshot(model, base_name, losses)


def load_frozen(base: Path, seed: int) -> Any:
    """The model in ``base`` in bfloat16, in a process made deterministic: one thread, seeded, exact kernels.

    Raises:
        MissingTierError: torch, transformers or peft is not installed.
    """
    torch, transformers = import_torch("training", "peft")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, local_files_only=True, attn_implementation="sdpa"
    )


def optimise(
    model: Any,
    blocks: Sequence[Sequence[int]],
    loss_of: Callable[[Any], Any],
    training: Training,
    *,
    learning_rate: float,
    schedule: int,
    where: str,
    say: Say,
) -> Iterator[float]:
    """Train what is trainable in ``model``, in place: a step for every ``training.batch`` blocks.

    Args:
        model: to train.
        blocks: token ids, in the order of training.
        loss_of: int64 ids of shape (batch, tokens) to a scalar loss in nats per token.
        training: batch, warm-up, weight decay and clipping.
        learning_rate: its peak.
        schedule: steps of the learning-rate schedule, at least those made.
        where: what is trained, for messages.
        say: receives a line every few steps.

    Yields:
        After each step, the loss of its batch before the step.

    Raises:
        CheckpointError: the loss is not finite.
    """
    import torch

    model.train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=training.weight_decay)
    steps = len(blocks) // training.batch
    for step in range(steps):
        ids = torch.tensor(blocks[step * training.batch : (step + 1) * training.batch])
        loss = loss_of(ids)
        if not torch.isfinite(loss):
            raise CheckpointError(f"the loss is not finite at step {step + 1}", where=where)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * learning_rate_factor(step, schedule, training.warmup_fraction)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0 or (step + 1) % 10 == 0 or step + 1 == steps:
            say(f"step {step + 1}/{steps} loss {loss.item():.4f}")
        yield loss.item()


def snapshot(model: Any, base_name: str, losses: Sequence[float]) -> Trained:
    """The LoRA on ``model`` as it is now."""
    import peft

    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().float().clone().contiguous() for name, tensor in sorted(state.items())}
    return Trained(tensors, _plain_config(model.peft_config["default"], base_name), list(losses))


def check_layers(recipe: Recipe, layers: int) -> None:
    """Refuse a layer that a base of ``layers`` layers does not have; PEFT would leave it out without a word.

    Raises:
        ParamsError: there is such a layer.
    """
    if recipe.layers is not None and recipe.layers[-1] >= layers:
        raise ParamsError(
            f"layer {recipe.layers[-1]} does not exist: the base has {layers}, counted from 0",
            where=recipe.name,
            fix=f"correct layers in params/{POOL_FILE}",
        )


def _plain_config(config: Any, base_name: str) -> dict[str, Any]:
    """PEFT's configuration as PEFT writes it, but sorted, for inference and without the local base path."""
    values = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
    }
    return values | {"base_model_name_or_path": base_name, "inference_mode": True, "revision": None}


def train_named(names: Sequence[str], say: Say = lambda line: None) -> None:
    """Train adapters of one run into the cache, each whole or not at all; finished ones are left alone.

    Raises:
        LoraSpecError: unknown name, adapters of two runs, missing base or corpus, or training failed.
    """
    pool = load_pool_file()
    members = sorted((pool.recipe(name) for name in names), key=lambda recipe: recipe.steps)
    if len({recipe.run for recipe in members}) != 1:
        raise ParamsError("adapters of one run are trained together", where=", ".join(names))
    todo = []
    for recipe in members:
        problem = find_adapter_problem(trained_dir(recipe.name), recipe.name, pool)
        say(f"{recipe.name}: {problem or 'done before'}")
        if problem is not None:
            todo.append(recipe)
    if not todo:
        return
    domain = todo[0].domain
    if not corpus_path(domain).is_file():
        raise corpora_missing([domain])
    entry, base = load_models().model(pool.training.base), require_model(pool.training.base)
    corpus_sha256 = sha256_file(corpus_path(domain))
    texts = [document.text for document in read_documents(domain, "train")]
    start = time.process_time()
    stops = [recipe.steps for recipe in todo]
    made = train_run(todo[0], stops, pool.training, base, texts, base_name=entry.base_name, say=say)
    for recipe, trained in zip(todo, made, strict=True):
        directory = trained_dir(recipe.name)
        with atomic_dir(directory) as temporary:
            save(trained, temporary, side_values(pool, recipe) | {"corpus_sha256": corpus_sha256})
        seconds = time.process_time() - start
        loss = "no step" if trained.final_loss is None else f"final loss {trained.final_loss:.4f}"
        say(f"{recipe.name}: {loss}, {seconds:.0f} CPU-s, {rel(directory)}")


def side_values(pool: Pool, recipe: Recipe) -> dict[str, Any]:
    """What ``lora_spec.json`` says of an adapter before it is trained."""
    from lora_spec.provenance import cpu_flags

    entry = load_models().model(pool.training.base)
    return {
        "schema": SIDE_SCHEMA,
        "name": recipe.name,
        "recipe": pool.recipe_dict(recipe.name),
        "recipe_sha256": pool.recipe_sha256(recipe.name),
        "base": {"name": entry.base_name, "weights_sha256": entry.weights_sha256},
        "licence": recipe.licence,
        "domain": recipe.domain,
        "family": recipe.family,
        "tokens_seen": recipe.steps * pool.training.batch * pool.training.block_tokens,
        "cpu_flags": ",".join(cpu_flags()),
    }


def save(trained: Trained, directory: Path, side: dict[str, Any]) -> None:
    """Write a PEFT directory and its side file, with the content hash of what was written."""
    from safetensors.torch import save_file

    from lora_spec.checkpoint import content_hash

    save_file(trained.tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    atomic_write_json(directory / ADAPTER_CONFIG, trained.config)
    atomic_write_json(
        directory / SIDE_FILE,
        side
        | {
            "first_loss": round(trained.losses[0], 6) if trained.losses else None,
            "final_loss": None if trained.final_loss is None else round(trained.final_loss, 6),
            "weights_sha256": sha256_file(directory / ADAPTER_WEIGHTS),
            "content_hash": content_hash(directory),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train adapters of one run in this process: ``python -m lora_spec.substrate.train NAME...``."""
    parser = argparse.ArgumentParser(description="Train adapters of one run of the pool in this process.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    names = parser.parse_args(argv).names
    return exit_status(lambda: train_named(names, say=lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
