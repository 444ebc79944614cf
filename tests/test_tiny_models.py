"""The tiny models, and the exact answers computed from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from lora_spec.errors import EngineError  # noqa: E402
from lora_spec.measure import tiny_models as tiny  # noqa: E402
from lora_spec.measure.composability.inputs import (  # noqa: E402
    exact_joint,
    greedy_continuation,
    refuse_weak_adapters,
)
from lora_spec.measure.tiny_dflash import fitted  # noqa: E402

PROMPTS = tiny.prompts(4, 12)


def test_greedy_answers_are_those_of_transformers() -> None:
    model = tiny.tiny_llama()
    tokens, gaps = greedy_continuation(model, PROMPTS, 6)
    ids = torch.tensor(PROMPTS)
    mask = torch.ones_like(ids)  # no token is padding
    want = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokens == want[:, 12:].tolist()
    assert gaps.shape == (4, 6) and (gaps > 0).all()


def test_the_exact_distribution_is_one_and_starts_with_the_model_s_own() -> None:
    model = tiny.tiny_llama()
    joint = exact_joint(model, PROMPTS[0], 3, 0.8)
    with torch.no_grad():
        first = (model(torch.tensor(PROMPTS[:1])).logits[0, -1] / 0.8).softmax(-1).numpy()
    assert joint.shape == (tiny.VOCAB,) * 3
    np.testing.assert_allclose(joint.sum(axis=(1, 2)), first, atol=1e-6)


def test_a_merged_model_is_what_peft_merges(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny.tiny_llama()
    adapter = tiny.save_random_adapter(model.state_dict(), tmp_path / "adapter", seed=1, size=0.6)
    want = peft.PeftModel.from_pretrained(tiny.tiny_llama(), adapter).merge_and_unload()
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        ours = tiny.merged_llama(model, adapter)(ids).logits
        torch.testing.assert_close(ours, want(ids).logits, atol=1e-4, rtol=1e-4)
        assert (ours - model(ids).logits).abs().max() > 1


def test_arms_that_answer_alike_are_refused() -> None:
    refuse_weak_adapters({"base": [[1], [2]], "t1": [[3], [4]]})
    with pytest.raises(EngineError, match="base and t1 answer 1 of 2"):
        refuse_weak_adapters({"base": [[1], [2]], "t1": [[1], [4]]})


def test_a_fit_follows_from_its_seed() -> None:
    target, start = tiny.tiny_llama(), tiny.tiny_dflash()
    twice = [fitted(start, target, drafts=3, length=12, generated=8, steps=3) for _ in range(2)]
    assert all(torch.equal(twice[0].state[name], twice[1].state[name]) for name in start.state)
    assert not torch.equal(twice[0].state["fc.weight"], start.state["fc.weight"])
