"""Heal a drafter that is its target without some layers: distil the target into a LoRA on the layers left.

The drafter sees training texts of all domains and is trained towards the target's next-token distribution on
the same tokens, at T = 1 (Hinton, Vinyals & Dean 2015; for drafters Zhou et al., arXiv 2310.08461). Like the
training of adapters it is deterministic, with one thread and a fixed number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lora_spec.errors import IntegrityError, ParamsError
from lora_spec.files import atomic_dir, canonical_sha256, sha256_file
from lora_spec.models import HealedSource, ModelEntry, load_models
from lora_spec.params import StrictModel, load_params
from lora_spec.pool import MODULES, Training
from lora_spec.provenance import cpu_flags
from lora_spec.queue import Say
from lora_spec.substrate.adapters import ADAPTER_WEIGHTS, corpora_missing, corpus_path, read_side_file
from lora_spec.substrate.corpora import load_corpora, read_documents
from lora_spec.substrate.model_folders import TOKENIZER
from lora_spec.substrate.train import (
    Trained,
    block_order,
    load_frozen,
    optimise,
    pack_blocks,
    save,
    snapshot,
)

PARAMS_FILE = "healed_drafter.yaml"
SIDE_SCHEMA = "lora-spec-healing-lora/1"
_CHARACTERS_PER_TOKEN = 8
"""More than any domain has, so that enough documents are read."""


class Choice(StrictModel):
    """How the layers to leave out are chosen: calibration windows a domain, and what still counts as best."""

    windows: PositiveInt
    tolerance: Annotated[float, Field(ge=0, lt=1)]


class Check(StrictModel):
    """How the healed drafter is judged: calibration windows a domain, and the temperature of the overlap."""

    windows: PositiveInt
    temperature: PositiveFloat


class HealingParams(StrictModel):
    """``params/healed_drafter.yaml``.

    Attributes:
        model: key in ``models.yaml``; its source names parent and dropped layers.
        domains: whose training texts it sees.
        blocks_per_domain: blocks that each gives, from its first documents.
        steps: of ``training.batch`` blocks each; no block is used twice.
    """

    schema_: Literal["lora-spec-healing/1"] = Field(alias="schema")
    model: str
    choice: Choice
    check: Check
    rank: PositiveInt
    alpha: PositiveInt
    learning_rate: Annotated[float, Field(gt=0, le=0.1)]
    steps: PositiveInt
    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    blocks_per_domain: PositiveInt
    seed: NonNegativeInt
    training: Training

    @model_validator(mode="after")
    def _is_of_a_healed_model(self) -> HealingParams:
        if self.training.base != self.source.parent:
            raise ValueError(f"training.base is not the parent of {self.model}")
        if unknown := sorted(set(self.domains) - set(load_corpora().output_sha256)):
            raise ValueError(f"no corpus is pinned for {', '.join(unknown)}")
        return self

    @property
    def entry(self) -> ModelEntry:
        """The model in ``models.yaml``."""
        return load_models().model(self.model)

    @property
    def source(self) -> HealedSource:
        """Its source.

        Raises:
            ParamsError: it is no healed model.
        """
        source = self.entry.source
        if not isinstance(source, HealedSource):
            raise ParamsError(f"{self.model} is no healed model", where=f"params/{PARAMS_FILE}")
        return source

    def recipe(self) -> dict[str, Any]:
        """All that decides the LoRA's weights, as JSON values."""
        values = self.model_dump(mode="json", by_alias=True, exclude={"choice", "check"})
        source, parent = self.source, load_models().model(self.source.parent)
        pinned = load_corpora().output_sha256
        return values | {
            "parent_sha256": parent.weights_sha256,
            "dropped_layers": list(source.dropped_layers),
            "corpora": {name: pinned[name].train for name in self.domains},
        }

    def recipe_sha256(self) -> str:
        """Identity of :meth:`recipe`."""
        return canonical_sha256(self.recipe())


def load_healing(path: Path | str = PARAMS_FILE) -> HealingParams:
    """Read and check ``params/healed_drafter.yaml``."""
    return load_params(HealingParams, path)


def training_texts(params: HealingParams) -> dict[str, list[str]]:
    """Leading training documents of every domain, enough of them for its blocks.

    Raises:
        MissingTierError: a corpus is not built.
        IntegrityError: one is not as pinned.
    """
    pinned = load_corpora().output_sha256
    missing = [name for name in params.domains if not corpus_path(name).is_file()]
    if missing:
        raise corpora_missing(missing)
    wanted = params.blocks_per_domain * params.training.block_tokens * _CHARACTERS_PER_TOKEN
    texts: dict[str, list[str]] = {}
    for name in params.domains:
        if sha256_file(corpus_path(name)) != pinned[name].train:
            raise IntegrityError(
                "the corpus is not the pinned one", where=name, fix="run: lora-spec corpora --execute"
            )
        texts[name], total = [], 0
        for document in read_documents(name, "train"):
            if total >= wanted:
                break
            texts[name].append(document.text)
            total += len(document.text)
    return texts


def heal(
    params: HealingParams,
    parent: Path,
    base: Path,
    texts: Mapping[str, Sequence[str]],
    say: Say = lambda line: None,
) -> Trained:
    """Train the LoRA; its losses are KL(target ‖ drafter) in nats a token.

    Args:
        params: what to train.
        parent: directory of the target.
        base: directory of the drafter as it is without training, with the tokenizer.
        texts: documents of each domain; a domain with less than ``blocks_per_domain`` gives what it has.
        say: receives a line every few steps.

    Raises:
        ParamsError: fewer blocks than the steps need.
        CheckpointError: the loss is not finite.
        MissingTierError: torch, transformers or peft is not installed.
    """
    student = load_frozen(base, params.seed)
    teacher = load_frozen(parent, params.seed).eval()
    import peft
    import torch
    from torch.nn.functional import kl_div, log_softmax

    settings, eos = params.training, student.config.eos_token_id
    blocks: list[list[int]] = []
    for documents in texts.values():
        packed = pack_blocks(base / TOKENIZER, documents, eos, settings.block_tokens)
        blocks += packed[: params.blocks_per_domain]
    needed = params.steps * settings.batch
    if len(blocks) < needed:
        raise ParamsError(f"{len(blocks)} blocks where {needed} are needed", where=f"params/{PARAMS_FILE}")
    say(f"{len(blocks)} blocks of {settings.block_tokens} from {len(texts)} domains, {params.steps} steps")
    lora = peft.LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,
        target_modules=list(MODULES["all"]),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(student, lora)

    def divergence(ids: Any) -> Any:
        with torch.no_grad():
            log_p = log_softmax(teacher(input_ids=ids, use_cache=False).logits.float(), -1)
        log_q = log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)
        return kl_div(log_q.flatten(0, 1), log_p.flatten(0, 1), log_target=True, reduction="batchmean")

    losses = optimise(
        model,
        [blocks[number] for number in block_order(len(blocks), needed, params.seed)],
        divergence,
        settings,
        learning_rate=params.learning_rate,
        schedule=params.steps,
        where=params.model,
        say=say,
    )
    return snapshot(model, params.model, list(losses))


def find_lora_problem(directory: Path, params: HealingParams) -> str | None:
    """Why ``directory`` does not hold the LoRA of ``params``, or None when it does."""
    side = read_side_file(directory)
    weights = directory / ADAPTER_WEIGHTS
    if side is None or not weights.is_file():
        return "not trained"
    if side.get("schema") != SIDE_SCHEMA or side.get("recipe_sha256") != params.recipe_sha256():
        return "trained from another recipe"
    if sha256_file(weights) != side.get("weights_sha256"):
        return "its weights were changed"
    return None


def save_lora(trained: Trained, directory: Path, params: HealingParams) -> None:
    """Write the LoRA as PEFT does, in bfloat16 (half the bytes), with its recipe and hashes, or nothing."""
    side = {
        "schema": SIDE_SCHEMA,
        "model": params.model,
        "recipe": params.recipe(),
        "recipe_sha256": params.recipe_sha256(),
        "licence": params.entry.licence,
        "tokens_seen": params.steps * params.training.batch * params.training.block_tokens,
        "cpu_flags": ",".join(cpu_flags()),
    }
    with atomic_dir(directory) as temporary:
        save(rounded(trained), temporary, side)


def rounded(trained: Trained) -> Trained:
    """The LoRA in bfloat16."""
    import torch

    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in trained.tensors.items()}
    return Trained(tensors, trained.config, trained.losses)
