"""Drafter adapters where everything is short: tokens a step, K/V blocks, slots, memory for adapters.

Draft steps are compared by where they start (see `draft_lora_script`): preemption and split prompts change
which steps there are, and in greedy decoding never what a step accepts.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from draft_lora_cases import (
    ADAPTERS,
    METHODS,
    PROMPTS,
    Cases,
    K,
    accepted,
    ask,
    cases,
    drafters,
    steps,
    tokens,
)

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

SHORT: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 56, "num_gpu_blocks_override": 20}
# Five adapters for two slots, and two for one; ranks for which all slots are multiplied at once, or not.
NAMES = {"draft_model": ADAPTERS, "dflash": "ab"}
CONFIG: dict[str, dict[str, Any]] = {
    "draft_model": {"max_slots": 2, "max_cached": 2, "max_rank": 320},
    "dflash": {"max_slots": 1, "max_cached": 1},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return cases(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("method", METHODS)
def test_split_prompts_preemption_and_too_few_slots_change_nothing(made, method):
    kinds = drafters(NAMES[method])
    requests = [ask(p, kind) for p, kind in zip(PROMPTS, kinds, strict=True)]
    config = {"names": NAMES[method], **CONFIG[method]}
    operations = [{"op": "call", "requests": requests}]
    done = made.run(f"tight-{method}", operations, method=method, draft_lora=config, **SHORT)
    (answers,) = done["answers"]
    assert tokens(answers) == tokens(made.oracle(method)["greedy"])
    assert accepted(answers) >= 50
    assert done["preempted"] > 0
    assert done["most_adapters"] == CONFIG[method]["max_slots"]
    seen, changed = 0, set()
    for i, kind in enumerate(kinds):
        name = kind.replace("none", "base")
        have = {before: count for before, drafts, count in answers[i]["steps"] if drafts == K}
        if name in ("base", "a", "b"):
            want = made.at_positions(method, name)[i]
        else:
            want = made.torch_at_positions(name, i, have)
        both = have.keys() & want.keys()
        seen += len(both)
        assert {n: have[n] for n in both} == {n: want[n] for n in both}, f"{name}, prompt {i}"
        base = made.at_positions(method, "base")[i]
        if any(want[n] != base[n] for n in both & base.keys()):
            changed.add(name)
    assert seen > 0.5 * sum(len(a["steps"]) for a in answers)
    assert changed == set(NAMES[method])


def test_an_adapter_whose_files_are_gone_costs_acceptance_and_is_an_error_in_the_log(made):
    method = "draft_model"
    gone, kept = made.folder / "gone", made.adapter(method, "b")
    shutil.copytree(kept, gone)
    ask_gone = {"op": "call", "requests": [ask(p, "gone") for p in PROMPTS]}
    operations = [
        {"op": "load", "name": "gone", "path": str(gone)},
        {"op": "call", "requests": [ask(p, "a") for p in PROMPTS]},  # takes the only place in memory
        {"op": "delete", "path": str(gone)},
        dict(ask_gone),
        {"op": "load", "name": "gone", "path": kept},
        dict(ask_gone),
    ]
    config = {"names": "a", "max_slots": 1, "max_cached": 1}
    done = made.run("gone", operations, method=method, draft_lora=config, enable_prefix_caching=True)
    _, other, _, without, _, restored = done["answers"]
    # the restored adapter does not read what the base drafter wrote in its place
    for name, answers in (("a", other), ("base", without), ("b", restored)):
        assert steps(answers) == steps(made.oracle(method, name)["greedy"]), name
        assert tokens(answers) == tokens(made.oracle(method)["greedy"])
        assert accepted(answers) >= 50
    log = (made.folder / "engines" / "gone" / "log.txt").read_text()
    assert log.count("drafter adapter 'gone' cannot be loaded, base drafter instead") == 1


def test_the_oracles_agree(made):
    """Acceptance of vLLM's merged drafters, counted in transformers: PEFT's adapter and a plain one."""
    for name in ("base", "a", "b"):
        for i in range(3):
            have = made.at_positions("draft_model", name)[i]
            want = made.torch_at_positions(name, i, have)
            assert len(want) > 10
            assert want == {n: have[n] for n in want}
