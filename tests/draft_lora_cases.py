"""Tiny targets, drafters and adapters of both, and the engines that the drafter LoRA tests compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from serving_engine import run_engine

from lora_spec import serving
from lora_spec.measure.tiny_models import (
    merged_llama,
    merged_state,
    perturbed,
    prompts,
    save,
    save_random_adapter,
    tiny_dflash,
    tiny_llama,
)

METHODS = ("draft_model", "dflash")
K = 4
TOKENS = 72
PROMPTS = prompts(24, 72)
ADAPTERS = "abcde"
TARGETS = ("one", "two")
# Adapters of a part of the drafter, as what the names of their weights contain.
PARTS = {
    ("draft_model", "c"): "layers.0.self_attn.",
    ("draft_model", "d"): "layers.1.mlp.down_proj",
    ("dflash", "b"): "self_attn.",
}

Answers = list[dict[str, Any]]


def ask(
    prompt: list[int],
    draft_lora: Any = None,
    *,
    lora: str | None = None,
    tokens: int = TOKENS,
    seed: int | None = None,
    **params: Any,
) -> dict[str, Any]:
    """A request: greedy, or with a seed at T = 0.8."""
    made: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens}
    if seed is not None:
        made |= {"temperature": 0.8, "seed": seed}
    if draft_lora is not None:
        made["extra_args"] = {"draft_lora": draft_lora}
    return {"prompt": prompt, "params": made | params, "lora": lora}


def drafters(names: str) -> list[str]:
    """The base drafter and the named adapters in turn, one for each prompt."""
    kinds = ["none", *names]
    return [kinds[i % len(kinds)] for i in range(len(PROMPTS))]


def accepted(answers: Answers) -> int:
    return sum(sum(a["accepted"]) for a in answers)


def steps(answers: Answers) -> list[list[int]]:
    return [a["accepted"] for a in answers]


def tokens(answers: Answers) -> list[list[int]]:
    return [a["tokens"] for a in answers]


class Cases:
    """Models in one folder, and engines that are started when somebody asks for their answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[Any, Any] = {}
        self.target = tiny_llama()
        save(self.target, folder / "target")
        self.draft_model = perturbed(self.target, 0.15)
        save(self.draft_model, folder / "draft_model-base")
        dflash = tiny_dflash(1)
        dflash.save(folder / "dflash-base")
        for seed, name in enumerate(TARGETS):
            adapter = save_random_adapter(
                self.target.state_dict(), folder / "targets" / name, seed=seed, size=0.3
            )
            save(merged_llama(self.target, adapter), folder / f"target-{name}")
        self.merged: dict[str, Any] = {"base": self.draft_model}
        for name in ADAPTERS:
            path = folder / f"draft_model-{name}"
            if name == "a":
                self._save_peft(path)
            else:
                self._save_random("draft_model", self.draft_model.state_dict(), path)
            self.merged[name] = self._merge_peft(path)
            path = folder / f"dflash-{name}"
            merged = self._save_random("dflash", dflash.state, path)
            if name in "ab":
                save(self.merged[name], folder / f"draft_model-merged-{name}")
                dflash.with_state(merged).save(folder / f"dflash-merged-{name}")

    def _save_random(self, method: str, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        """A random adapter, on all modules or on some; returns the merged weights."""
        name = folder.name[-1]
        part = PARTS.get((method, name), "")
        size = 0.6 if part and method == "draft_model" else 0.3
        some = {key: weight for key, weight in state.items() if part in key}
        rank = 4 if name == "e" else 8
        path = save_random_adapter(some, folder, seed=20 + ord(name), rank=rank, size=size)
        return state | merged_state(some, path)

    def _save_peft(self, folder: Path) -> None:
        """PEFT's own files, with rank-stabilised scale and patterns of ranks and scales."""
        import copy

        import torch
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(
            r=8,
            lora_alpha=4,
            use_rslora=True,
            rank_pattern={"down_proj": 4},
            alpha_pattern={"o_proj": 8},
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            init_lora_weights=False,
        )
        get_peft_model(copy.deepcopy(self.draft_model), config).save_pretrained(folder)

    def _merge_peft(self, path: Path) -> Any:
        import copy
        import warnings

        from peft import PeftModel

        with warnings.catch_warnings(action="ignore"):  # some adapters leave layers out
            return PeftModel.from_pretrained(copy.deepcopy(self.draft_model), path).merge_and_unload()

    def lora(self, name: str) -> str:
        """Folder of a target adapter."""
        return str(self.folder / "targets" / name)

    def adapter(self, method: str, name: str) -> str:
        """Folder of a drafter adapter."""
        return str(self.folder / f"{method}-{name}")

    # ------------------------------------------------------------------ engines

    def run(
        self,
        name: str,
        operations: list[dict[str, Any]],
        *,
        method: str | None = None,
        drafter: str = "base",
        target: str = "target",
        draft_lora: dict[str, Any] | None = None,
        hooks: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        plugin: str | None = None,
        serving_keys: dict[str, Any] | None = None,
        **engine: Any,
    ) -> dict[str, Any]:
        """Operations of `draft_lora_script` in an engine of its own.

        With `draft_lora` the plugin is configured and has to see to everything itself; without, vLLM has the
        repairs that make its own answers right.
        """
        keys: dict[str, Any] = {
            "model": str(self.folder / target),
            "block_size": 32,
            "num_gpu_blocks_override": 2048,
            **engine,
        }
        if method is not None:
            keys["speculative_config"] = {
                "method": method,
                "model": str(self.folder / f"{method}-{drafter}"),
                "num_speculative_tokens": K,
                "draft_sample_method": "probabilistic",
            }
            keys["per_request_spec_decode_metrics"] = "detailed"
        if draft_lora is not None:
            adapters = {n: self.adapter(method or "", n) for n in draft_lora.pop("names", "ab")}
            draft_lora = {"adapters": adapters, "max_rank": 8, **draft_lora}
            keys["speculative_config"] |= {"draft_lora": draft_lora, **(serving_keys or {})}
        return run_engine(
            self.folder / "engines" / name,
            engine=keys,
            fixes=serving.FIXES if draft_lora is None else (),
            hooks=["draft_lora_script:watch", *(f"draft_lora_script:{hook}" for hook in hooks)],
            script="draft_lora_script:operations",
            args=operations,
            env=env,
            plugin=plugin,
        )["script"]

    def _once(self, make: Callable[..., Any], *key: Any) -> Any:
        if (make.__name__, key) not in self._made:
            self._made[make.__name__, key] = make(*key)
        return self._made[make.__name__, key]

    def oracle(self, method: str, drafter: str = "base", target: str = "target") -> dict[str, Answers]:
        """A full drafter, merged where it is adapted, on a full target: greedy and sampled."""
        return self._once(self._oracle, method, drafter, target)

    def _oracle(self, method: str, drafter: str, target: str) -> dict[str, Answers]:
        name = drafter if drafter == "base" else f"merged-{drafter}"
        greedy = [ask(prompt) for prompt in PROMPTS]
        sampled = [ask(prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
        calls = [greedy, sampled] if target == "target" else [greedy]
        operations = [{"op": "call", "requests": call} for call in calls]
        done = self.run(
            f"oracle-{method}-{drafter}-{target}", operations, method=method, drafter=name, target=target
        )
        return dict(zip(("greedy", "sampled"), done["answers"], strict=False))

    def at_positions(self, method: str, drafter: str, target: str = "target") -> list[dict[int, int]]:
        """For each prompt, accepted drafts of the oracle's draft steps by the output tokens before them."""
        answers = self.oracle(method, drafter, target)["greedy"]
        return [{before: n for before, drafts, n in a["steps"] if drafts == K} for a in answers]

    def torch_at_positions(self, drafter: str, index: int, starts: Iterable[int]) -> dict[int, int]:
        """What `at_positions` would say of the draft model, counted in transformers.

        Args:
            starts: output tokens before the draft step; the last K positions are left out, as their drafts
                reach beyond the tokens that are known.
        """
        import torch

        prompt, said = PROMPTS[index], self.oracle("draft_model")["greedy"][index]["tokens"]
        starts = [start for start in starts if start <= TOKENS - K]
        rows = torch.zeros(len(starts), len(prompt) + TOKENS, dtype=torch.long)
        for row, start in zip(rows, starts, strict=True):
            row[: len(prompt) + start] = torch.tensor(prompt + said[:start])
        lengths = torch.tensor([len(prompt) + start for start in starts])
        every = torch.arange(len(starts))
        with torch.no_grad():
            for _ in range(K):
                logits = self.merged[drafter](rows).logits
                rows[every, lengths] = logits[every, lengths - 1].argmax(-1)
                lengths += 1
        found = {}
        for row, start in zip(rows.tolist(), starts, strict=True):
            drafts = row[len(prompt) + start : len(prompt) + start + K]
            equal = [a == b for a, b in zip(drafts, said[start : start + K], strict=True)]
            found[start] = equal.index(False) if False in equal else K
        return found


@functools.cache
def cases(folder: Path) -> Cases:
    """The one set of models of a test run."""
    made = folder / "draft_lora"
    made.mkdir(exist_ok=True)
    return Cases(made)
