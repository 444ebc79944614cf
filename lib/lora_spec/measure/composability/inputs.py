"""The tiny models of phase 0, and what they must answer, computed exactly in torch without any engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lora_spec.errors import EngineError, EvidenceError
from lora_spec.files import atomic_dir, atomic_write_json, canonical_sha256, sha256_file
from lora_spec.measure.composability.cells import DRAFTER_METHODS, Phase0Params
from lora_spec.measure.composability.workload import BASE, DRAFTER_ADAPTERS, SELF, TARGET_ADAPTERS
from lora_spec.paths import cache_dir, rel

MANIFEST = "manifest.json"
_CHUNK = 512
"""Contexts in one forward pass of the exact distribution."""


class Inputs:
    """Folder of one parameter file's models: built once, verified on every use."""

    def __init__(self, params: Phase0Params) -> None:
        self.params = params
        key = {
            "seed": params.seed,
            "models": params.models.model_dump(),
            "work": params.workload.model_dump(),
        }
        self.root = cache_dir() / "phase0" / canonical_sha256(key)[:12]

    def target(self, variant: str) -> str:
        """Folder of the target, or of the target with the adapter ``variant`` merged."""
        return str(self.root / f"target-{variant}")

    def drafter(self, method: str, variant: str) -> str:
        """Folder of a drafter, or of it with the adapter ``variant`` merged; ``self`` is the target."""
        if variant == SELF:
            return self.target(BASE)
        return str(self.root / f"{method}-{variant}")

    def target_adapter(self, name: str) -> str:
        """PEFT folder."""
        return str(self.root / f"adapter-{name}")

    def drafter_adapter(self, method: str, name: str) -> str:
        """PEFT folder."""
        return str(self.root / f"adapter-{method}-{name}")

    def prompts(self) -> list[list[int]]:
        """Token ids of every prompt."""
        return json.loads((self.root / "prompts.json").read_text())

    def greedy(self, variant: str) -> tuple[list[list[int]], np.ndarray]:
        """A target's greedy tokens per prompt, and their top-2 gaps, [prompts, tokens], nats."""
        held = json.loads((self.root / f"greedy-{variant}.json").read_text())
        return held["tokens"], np.asarray(held["gaps"])

    def joint(self, variant: str) -> np.ndarray:
        """P(x1 … xn | first prompt) of a target at the temperature, [vocabulary] * ``sample_tokens``."""
        return np.load(self.root / f"joint-{variant}.npy")

    @property
    def built(self) -> bool:
        """Whether the folder is there and whole."""
        return (self.root / MANIFEST).is_file()

    def manifest(self) -> dict[str, str]:
        """File to sha256.

        Raises:
            EvidenceError: a file is missing or changed.
        """
        listed: dict[str, str] = json.loads((self.root / MANIFEST).read_text())
        for name, digest in listed.items():
            path = self.root / name
            if not path.is_file() or sha256_file(path) != digest:
                raise EvidenceError(
                    "a tiny model changed after it was built", where=rel(path), fix="delete the folder"
                )
        return listed

    def digest(self) -> str:
        """Identity of all inputs together."""
        return canonical_sha256(self.manifest())

    def build(self) -> None:
        """Make everything that is not there yet: seconds, needs torch, transformers and safetensors.

        Raises:
            EngineError: the adapters change too little to be told apart.
        """
        if self.built:
            return
        self.root.parent.mkdir(parents=True, exist_ok=True)
        with atomic_dir(self.root) as folder:
            _build(self.params, folder)
            files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
            atomic_write_json(folder / MANIFEST, {name: sha256_file(folder / name) for name in files})


def _build(params: Phase0Params, folder: Path) -> None:
    import torch
    from transformers.utils import logging

    from lora_spec.measure import tiny_models as tiny

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    work, models, seed = params.workload, params.models, params.seed

    target = tiny.tiny_llama(seed)
    variants = {BASE: target}
    for number, name in enumerate(TARGET_ADAPTERS, 1):
        path = tiny.save_random_adapter(
            target.state_dict(),
            folder / f"adapter-{name}",
            seed=seed + number,
            rank=models.adapter_rank,
            size=models.target_adapter_size,
        )
        variants[name] = tiny.merged_llama(target, path)
    for name, model in variants.items():
        tiny.save(model, folder / f"target-{name}")
    for method in DRAFTER_METHODS:
        _build_drafters(params, folder, method, target)

    prompts = tiny.prompts(work.prompts, work.prompt_tokens, seed=seed)
    atomic_write_json(folder / "prompts.json", prompts)
    answers = {}
    for name, model in variants.items():
        answers[name], gaps = greedy_continuation(model, prompts, work.max_tokens)
        atomic_write_json(folder / f"greedy-{name}.json", {"tokens": answers[name], "gaps": gaps.tolist()})
        joint = exact_joint(model, prompts[0], work.sample_tokens, work.temperature)
        np.save(folder / f"joint-{name}.npy", joint)
    refuse_weak_adapters(answers)


def _build_drafters(params: Phase0Params, folder: Path, method: str, target: Any) -> None:
    from lora_spec.measure import tiny_models as tiny

    models, seed = params.models, params.seed
    if method == "draft_model":
        drafter = tiny.perturbed(target, models.drafter_noise, seed)
        state = drafter.state_dict()
        tiny.save(drafter, folder / f"{method}-{BASE}")
    else:
        drafter = tiny.tiny_eagle3(seed) if method == "eagle3" else _fitted_dflash(params, target)
        state = drafter.state
        drafter.save(folder / f"{method}-{BASE}")
    for number, name in enumerate(DRAFTER_ADAPTERS, 1):
        path = tiny.save_random_adapter(
            state,
            folder / f"adapter-{method}-{name}",
            seed=seed + 10 * number,
            rank=models.adapter_rank,
            size=models.drafter_adapter_size,
        )
        merged = f"{method}-{name}"
        if method == "draft_model":
            tiny.save(tiny.merged_llama(drafter, path), folder / merged)
        else:
            drafter.with_state(tiny.merged_state(state, path)).save(folder / merged)


def _fitted_dflash(params: Phase0Params, target: Any) -> Any:
    from lora_spec.measure.tiny_dflash import fitted
    from lora_spec.measure.tiny_models import tiny_dflash

    work = params.workload
    return fitted(
        tiny_dflash(params.seed),
        target,
        drafts=work.num_speculative_tokens,
        length=work.prompt_tokens,
        generated=work.max_tokens,
        steps=params.models.dflash_steps,
        seed=params.seed,
    )


def refuse_weak_adapters(answers: dict[str, list[list[int]]]) -> None:
    """Adapters whose outputs equal another arm's could be mixed up unseen.

    Raises:
        EngineError: two arms agree on more than a tenth of the prompts.
    """
    names = list(answers)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            equal = [x == y for x, y in zip(answers[a], answers[b], strict=True)]
            if np.mean(equal) > 0.1:
                raise EngineError(
                    f"the arms {a} and {b} answer {sum(equal)} of {len(equal)} prompts alike",
                    fix="make models.target_adapter_size larger",
                    code="adapter_not_applied",
                )


def greedy_continuation(
    model: Any, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens of each prompt, and the gap between the two best log-probabilities at each.

    Args:
        prompts: of equal length.

    Returns:
        tokens [prompts][count] and gaps [prompts, count], nats.
    """
    import torch

    ids = torch.tensor(prompts)
    gaps = []
    with torch.no_grad():
        for _ in range(count):
            best = model(ids).logits[:, -1].log_softmax(-1).topk(2)
            gaps.append((best.values[:, 0] - best.values[:, 1]).numpy())
            ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, -count:].tolist(), np.stack(gaps, axis=1)


def exact_joint(model: Any, prompt: list[int], length: int, temperature: float) -> np.ndarray:
    """P(x1 … x_length | prompt) by enumeration, [vocabulary] * length."""
    contexts, joint = np.array([prompt]), np.ones(1)
    for position in range(length):
        following = np.concatenate(list(_next_token(model, contexts, temperature)))
        joint = (joint[:, None] * following).reshape(-1)
        vocabulary = following.shape[1]
        if position < length - 1:
            tokens = np.tile(np.arange(vocabulary), len(contexts))[:, None]
            contexts = np.hstack([np.repeat(contexts, vocabulary, axis=0), tokens])
    return joint.reshape((vocabulary,) * length)


def _next_token(model: Any, contexts: np.ndarray, temperature: float) -> Iterator[np.ndarray]:
    import torch

    with torch.no_grad():
        for start in range(0, len(contexts), _CHUNK):
            logits = model(torch.from_numpy(contexts[start : start + _CHUNK])).logits[:, -1]
            yield (logits / temperature).softmax(-1).double().numpy()
