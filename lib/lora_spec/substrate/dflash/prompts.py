"""Which prompts the target continues for the drafter, in which order, at which temperature; no torch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lora_spec.errors import IntegrityError, ParamsError
from lora_spec.files import atomic_path, canonical_sha256, sha256_file
from lora_spec.substrate.corpora import domain_dir, load_corpora, read_documents
from lora_spec.substrate.dflash.config import DataParams, DflashParams, work_dir
from lora_spec.substrate.freeze import Unit, deal, load_encoder, take, units
from lora_spec.substrate.model_folders import TOKENIZER, require_model
from lora_spec.substrate.prompts import load_prompt_params, load_prompts

TRAIN_SPLIT = "train"


@dataclass(frozen=True)
class Prompt:
    """A prompt to continue: its domain (or prompt set), token ids and sampling temperature (0: greedy)."""

    domain: str
    ids: tuple[int, ...]
    temperature: float


def schedule(data: DataParams) -> Iterator[tuple[str, float]]:
    """(domain, temperature) of every training sequence, in order.

    Temperatures go by how many sequences the domain has had, so that no domain meets one of them only.
    """
    turns: Counter[str] = Counter()
    drawn: Counter[bool] = Counter()
    for number in range(data.sequences):
        mixed = number % data.mixture_every == data.mixture_every - 1
        names = data.mixture if mixed else data.domains
        domain = names[drawn[mixed] % len(names)]
        yield domain, data.temperatures[turns[domain] % len(data.temperatures)]
        drawn[mixed] += 1
        turns[domain] += 1


def corpora_sha256(data: DataParams) -> dict[str, str]:
    """Recorded sha256 of each domain's training documents.

    Raises:
        ParamsError: a domain is unknown, or its corpus was never recorded.
    """
    recorded = load_corpora().output_sha256
    found = {}
    for name in sorted({*data.domains, *data.mixture}):
        if name not in recorded:
            raise ParamsError("no recorded corpus of this domain", where=f"params/dflash.yaml: {name}")
        found[name] = recorded[name].train
    return found


def training_prompts(params: DflashParams) -> list[Prompt]:
    """The prompts of all training sequences, in order. Cut once, then read from the cache.

    Windows come from training documents alone, and none is the prompt of a frozen window.

    Raises:
        MissingTierError: a corpus or the tokenizer is not there.
        IntegrityError: a corpus is not the recorded one.
        ParamsError: a domain gives too few windows.
    """
    plan = list(schedule(params.data))
    key = canonical_sha256(
        {
            "data": params.data.model_dump(mode="json"),
            "corpora": corpora_sha256(params.data),
            "tokenizer": load_prompt_params().tokenizer_sha256,
        }
    )
    path = work_dir() / f"prompts-{key[:16]}.npy"
    if path.is_file():
        ids = np.load(path, allow_pickle=False)
    else:
        ids = _cut(params, [domain for domain, _ in plan])
        with atomic_path(path) as temporary, open(temporary, "wb") as handle:
            np.save(handle, ids, allow_pickle=False)
    return [
        Prompt(domain, tuple(row), temperature)
        for (domain, temperature), row in zip(plan, ids.tolist(), strict=True)
    ]


def _cut(params: DflashParams, domains: list[str]) -> np.ndarray:
    """Token ids of the prompts of ``domains`` in order: [sequences, prompt], uint16."""
    data, corpora = params.data, load_corpora()
    encode = load_encoder(require_model(params.target) / TOKENIZER)
    recorded = corpora_sha256(data)
    windows: dict[str, Iterator[list[int]]] = {}
    for name, count in Counter(domains).items():
        documents = read_documents(name, TRAIN_SPLIT)
        _check_corpus(name, recorded[name])
        taken = _frozen_prompts(name, corpora.domains[name].family == "controlled", data.prompt)
        made = units(documents, encode, data.prompt)
        # A small corpus gives its windows again, shifted by half of one.
        shifted = [Unit(unit.name, unit.ids[data.prompt // 2 :]) for unit in made]
        dealt = chain(deal(made, data.prompt, taken), deal(shifted, data.prompt, taken))
        windows[name] = iter(take(dealt, count, f"{name}: {TRAIN_SPLIT}"))
    return np.asarray([next(windows[name]) for name in domains], dtype=np.uint16)


def _check_corpus(name: str, recorded: str) -> None:
    if sha256_file(domain_dir(name) / f"{TRAIN_SPLIT}.jsonl") != recorded:
        raise IntegrityError("the corpus is not the recorded one", where=name, fix="Build it again")


def _frozen_prompts(name: str, controlled: bool, length: int) -> set[tuple[int, ...]]:
    """Beginnings of the frozen windows that a domain's documents might repeat."""
    sets = [name] if controlled else [name, "general"]
    loaded = [load_prompts(which) for which in sets]
    return {tuple(ids[:length]) for one in loaded for ids in [*one.eval, *one.calibration]}


def heldout_prompts(params: DflashParams) -> list[Prompt]:
    """Prompts of the frozen windows whose greedy continuations measure progress; every set in turn.

    Raises:
        ParamsError: a set has fewer windows, or they are shorter than a prompt.
    """
    wanted, prompt = params.heldout, params.data.prompt
    prompts = []
    for name in [*params.data.domains, "general"]:
        loaded = load_prompts(name)
        if len(loaded.eval) < wanted.start + wanted.count or loaded.window < prompt:
            raise ParamsError(f"{len(loaded.eval)} windows are too few for heldout", where=name)
        prompts += [
            Prompt(name, tuple(ids[:prompt]), 0.0)
            for ids in loaded.eval[wanted.start : wanted.start + wanted.count]
        ]
    return prompts


def unit_seed(seed: int, name: str) -> int:
    """63 bits that depend on the declared seed and the unit's name alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1
