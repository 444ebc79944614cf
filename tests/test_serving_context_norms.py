"""A DFlash drafter of two layers with different key norms: its drafts in vLLM against those of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving_engine import run_engine
from serving_models import prompts, save, tiny_llama

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

K, TOKENS, LENGTH = 4, 32, 24
PROMPTS = prompts(8, LENGTH, seed=3)
FIX = "context_norms"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A target and a drafter whose second layer wants its keys sixteen times as large as the first."""
    import torch

    from lora_spec.measure.tiny_dflash import fitted
    from lora_spec.measure.tiny_models import tiny_dflash

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("context-norms")
    target = tiny_llama()
    save(target, folder / "target")
    start = tiny_dflash(layers=2)
    norms = {f"layers.{i}.self_attn.k_norm.weight": size for i, size in enumerate((0.25, 4.0))}
    start = start.with_state({n: w * norms.get(n, 1.0) for n, w in start.state.items()})
    drafter = fitted(start, target, drafts=K, length=LENGTH, generated=TOKENS, steps=60)
    drafter.save(folder / "drafter")
    return folder, target, drafter


def accepted_in_vllm(folder: Path, name: str, fixes: tuple[str, ...]) -> dict[str, Any]:
    """Accepted drafts of each draft step, by prompt, and what the process says of its fixes."""
    speculative = {"method": "dflash", "model": str(folder / "drafter"), "num_speculative_tokens": K}
    engine = {
        "model": str(folder / "target"),
        "speculative_config": speculative,
        "per_request_spec_decode_metrics": "detailed",
    }
    call = [{"prompt": p, "params": {"temperature": 0.0, "max_tokens": TOKENS}} for p in PROMPTS]
    done = run_engine(folder / name, engine=engine, calls=[call], fixes=fixes)
    return {"accepted": [a["accepted"] for a in done["calls"][0]], "status": done["status"]}


def accepted_in_torch(target: Any, drafter: Any) -> list[list[int]]:
    """The same, from the drafter's own equations on the target's greedy continuations."""
    import torch

    from lora_spec.measure.tiny_dflash import _tap_states, forward

    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        for _ in range(TOKENS + K + 1):  # drafts of the last step are judged beyond the output's end
            ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
        taps = _tap_states(target, ids, drafter.config["dflash_config"]["target_layer_ids"])
        anchors = torch.arange(LENGTH, LENGTH + TOKENS).expand(len(ids), -1)
        embedded = target.model.embed_tokens(ids.gather(1, anchors)).unsqueeze(2)
        masks = drafter.mask_embedding.expand(*anchors.shape, K, -1)
        states = forward(drafter.state, taps, torch.cat([embedded, masks], dim=2), anchors)[:, :, 1:]
        drafts = target.lm_head(states).argmax(-1)
    steps = []
    for row, proposed in zip(ids.tolist(), drafts.tolist(), strict=True):
        at, mine = 1, []  # output tokens so far
        while at < TOKENS:
            said = row[LENGTH + at : LENGTH + at + K]
            right = [a == b for a, b in zip(proposed[at - 1], said, strict=True)]
            mine.append(K if all(right) else right.index(False))
            at += mine[-1] + 1
        steps.append(mine)
    return steps


def test_each_layer_norms_its_context_keys_with_its_own_weights(pair) -> None:
    folder, target, drafter = pair
    want = accepted_in_torch(target, drafter)
    assert sum(map(sum, want)) >= 50
    mended = accepted_in_vllm(folder, "mended", (FIX,))
    assert mended["status"][FIX] == "applied"
    assert mended["accepted"] == want
    stock = accepted_in_vllm(folder, "stock", ())
    wrong = sum(have != right for have, right in zip(stock["accepted"], want, strict=True))
    assert wrong > 2


def test_a_weight_a_group_norms_each_group_with_its_own() -> None:
    import torch
    from vllm import _custom_ops

    from lora_spec.serving.context_norms import grouped, stock_is_wrong

    rms_norm = grouped(_custom_ops.rms_norm)
    x, weight = torch.randn(3, 5, 2, 64), torch.randn(3, 64)
    out = torch.empty_like(x)
    rms_norm(out, x, weight, 1e-6)
    want = torch.nn.functional.rms_norm(x, (64,), eps=1e-6) * weight[:, None, None]
    torch.testing.assert_close(out, want)
    rms_norm(out, x, weight[0], 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), weight[0], 1e-6))
    assert stock_is_wrong() is True
