"""A tiny pair with a tokenizer and adapters for both sides: what a real server needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_spec.checkpoint import content_hash
from lora_spec.measure.tiny_models import VOCAB, perturbed, save, save_random_adapter, tiny_llama

LETTERS = "abcdefghijklmnop"


def save_tokenizer(folder: Path) -> None:
    """One letter a token; decoding joins them with spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert len(LETTERS) == VOCAB
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def make_pair(folder: Path) -> dict[str, Any]:
    """Folders of target and drafter, their adapters t0..t2 and d0..d3, and an adapter of another size."""
    target = tiny_llama(0)
    drafter = perturbed(target, 0.15)
    made: dict[str, Any] = {
        "target": save(target, folder / "target"),
        "drafter": save(drafter, folder / "drafter"),
        "target_adapters": {},
        "drafter_adapters": {},
    }
    save_tokenizer(folder / "target")
    for i in range(3):
        made["target_adapters"][f"t{i}"] = save_random_adapter(
            target.state_dict(), folder / f"t{i}", seed=10 + i, size=0.15
        )
    for i in range(4):
        made["drafter_adapters"][f"d{i}"] = save_random_adapter(
            drafter.state_dict(), folder / f"d{i}", seed=20 + i, size=0.15
        )
    wrong = {name: weight[:, : weight.shape[-1] // 2] for name, weight in drafter.state_dict().items()
             if weight.dim() == 2}  # fmt: skip
    made["wrong_shape"] = save_random_adapter(wrong, folder / "wrong", seed=30)
    return made


def policy(pair: dict[str, Any], depths: dict[str, int | None], drafters: dict[str, str]) -> dict[str, Any]:
    """A policy file's content, set by hand; None is the engine's depth."""
    reasons = [{"code": "set_by_hand", "sentence": "For the test."}]
    adapters = {
        name: {
            "content_hash": content_hash(pair["target_adapters"][name]),
            "action": "red" if depth == 0 else "green" if depth is None else "amber",
            "depth": depth,
            "drafter_adapter": drafters.get(name),
            "reasons": reasons,
        }
        for name, depth in depths.items()
    }
    return {
        "schema": "lora-spec-policy/1",
        "base_model": "tiny",
        "default": {"depth": None, "drafter_adapter": None},
        "adapters": adapters,
    }


def speculative_config(pair: dict[str, Any], policy_file: Path, names: list[str], k: int = 4) -> str:
    """`--speculative-config` with drafter adapters `names` and a policy."""
    return json.dumps(
        {
            "method": "draft_model",
            "model": pair["drafter"],
            "num_speculative_tokens": k,
            "draft_lora": {"adapters": {name: pair["drafter_adapters"][name] for name in names}},
            "depth_policy": str(policy_file),
        }
    )
