"""What a soak serves: a pair, adapters for both sides, prompts, and two policies to switch between."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_spec.checkpoint import content_hash
from lora_spec.errors import MissingTierError
from lora_spec.params import validate
from lora_spec.paths import adapter_dir, params_dir, rel
from lora_spec.policy import Policy

BASE = "base"
MODEL = "soak"
SPARE = "spare"
DEPTH = 4

POCKET_ADAPTERS = (
    "word-prefix-r16-attention-s40",
    "upper-case-r8-all-s40",
    "german-r16-all-s40",
    "python-r16-all-s40",
)
_DOMAINS = ("scripture", "word_prefix", "upper_case", "german", "python", "dialogue")


@dataclass(frozen=True)
class World:
    """Attributes:
    target, drafter: model folders.
    targets: target adapter's name -> folder; every one has a drafter adapter of the same name.
    drafters: drafter adapter's name -> folder.
    prompts: token ids.
    max_tokens: of a request.
    arguments: further arguments of the server.
    revisions: hashes of what is served.
    """

    target: Path
    drafter: Path
    targets: Mapping[str, Path]
    drafters: Mapping[str, Path]
    prompts: Sequence[Sequence[int]]
    max_tokens: int = 32
    max_rank: int = 16
    arguments: Sequence[str] = ()
    revisions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        """The base and every target adapter."""
        return [BASE, *self.targets]

    def server_arguments(self, policy: Path, clients: int) -> list[str]:
        """Command line of the server, after the model-independent part."""
        speculation = {
            "method": "draft_model",
            "model": str(self.drafter),
            "num_speculative_tokens": DEPTH,
            "draft_lora": {
                "adapters": {name: str(path) for name, path in self.drafters.items()},
                "max_rank": self.max_rank,
                # One slot less than there are adapters, the spare one counted: some requests have to wait.
                "max_slots": len(self.drafters),
            },
            "depth_policy": str(policy),
        }
        adapters = [f"{name}={path}" for name, path in self.targets.items()]
        return [
            *("--model", str(self.target), "--served-model-name", MODEL),
            *("--max-model-len", "512", "--max-num-seqs", str(clients)),
            *("--enable-lora", "--max-lora-rank", str(self.max_rank), "--max-loras", str(len(adapters) + 1)),
            *("--max-cpu-loras", str(2 * len(adapters) + 2), "--lora-modules", *adapters),
            *("--speculative-config", json.dumps(speculation)),
            *self.arguments,
        ]

    def policies(self) -> list[Policy]:
        """Two policies that disagree about every adapter; both use 0 and the engine's own number."""
        hashes = {name: content_hash(path) for name, path in self.targets.items()}
        return [self._policy(hashes, [None, 2, 0, 1], None), self._policy(hashes, [0, None, 3, 2], 3)]

    def _policy(self, hashes: Mapping[str, str], depths: Sequence[int | None], base: int | None) -> Policy:
        entries = {}
        for index, (name, digest) in enumerate(hashes.items()):
            depth = depths[index % len(depths)]
            entries[name] = {
                "content_hash": digest,
                "action": "red" if depth == 0 else "green" if depth in (None, DEPTH) else "amber",
                "depth": depth,
                "drafter_adapter": None if depth == 0 else name,
                "reasons": [{"code": "set_by_hand", "sentence": "Set for the soak."}],
            }
        raw = {
            "schema": "lora-spec-policy/1",
            "base_model": MODEL,
            "default": {"depth": None, "drafter_adapter": None},
            "base": {"depth": base},
            "adapters": entries,
        }
        return validate(Policy, raw, where="the soak's policy")


def pocket_world() -> World:
    """The pocket pair with four trained adapters; their drafter forms are made here (milliseconds).

    Raises:
        MissingTierError: the pair is not built, or an adapter is not trained.
    """
    from lora_spec.models import load_models
    from lora_spec.substrate.layer_drop_adapter import PAIR, make_drafter_adapters
    from lora_spec.substrate.model_folders import require_model

    pair = load_models().pair(PAIR)
    target, drafter = require_model(pair.target), require_model(pair.drafter)
    targets = {name: adapter_dir(name) for name in POCKET_ADAPTERS}
    missing = [name for name, path in targets.items() if not path.is_dir()]
    if missing:
        only = " ".join(f"--only {name}" for name in missing)
        raise MissingTierError(
            f"the adapter {missing[0]} is not trained",
            where=rel(targets[missing[0]]),
            fix=f"run: lora-spec adapters --execute {only}",
            code="adapter_missing",
        )
    drafters = dict(zip(targets, make_drafter_adapters(targets), strict=True))
    models = load_models().models
    return World(
        target=target,
        drafter=drafter,
        targets=targets,
        drafters=drafters,
        prompts=_pocket_prompts(),
        arguments=("--dtype", "bfloat16"),
        revisions={
            "target": {"key": pair.target, "weights_sha256": models[pair.target].weights_sha256},
            "drafter": {"key": pair.drafter, "weights_sha256": models[pair.drafter].weights_sha256},
            "target_adapters": {name: content_hash(path) for name, path in targets.items()},
            "drafter_adapters": {name: content_hash(path) for name, path in drafters.items()},
        },
    )


def _pocket_prompts(per_domain: int = 8, length: int = 24) -> list[list[int]]:
    """Beginnings of the frozen evaluation windows of some domains."""
    found = []
    for domain in _DOMAINS:
        windows = json.loads((params_dir() / "prompts" / f"{domain}.json").read_bytes())["eval"]
        found += [window[:length] for window in windows[:per_domain]]
    return found
