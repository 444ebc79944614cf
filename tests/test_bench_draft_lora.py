"""The drafter-LoRA benchmark: what it writes, how it compares, and a tiny run of all of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lora_spec.bench import draft_lora
from lora_spec.bench._engines import Answer, Order
from lora_spec.bench._pairs import Pair, dflash_geometry, pocket_pairs, read_config
from lora_spec.bench._throughput import Side, faster, interval, run_in_turn, same_tokens, speed
from lora_spec.checkpoint import BaseGeometry
from lora_spec.errors import EngineError, MissingTierError


def answer(seconds: float = 1.0, tokens=((1, 2), (3,)), accepted=((1, 0), (2,)), drafted=((2, 2), (2,))):
    return Answer(seconds, *([list(row) for row in rows] for rows in (tokens, accepted, drafted)))


class FakeEngine:
    """Answers at once, and remembers what it was asked."""

    def __init__(self, name: str, log: list[tuple[str, int, tuple[str | None, ...]]]) -> None:
        self.name, self.log, self.extra = name, log, 0

    def generate(self, orders: list[Order], max_tokens: int) -> Answer:
        self.log.append((self.name, max_tokens, tuple(order.draft_lora for order in orders)))
        return Answer(1.0, [[max_tokens + self.extra] * max_tokens for _ in orders], [], [])


SIDES = {
    "plain": Side("plain"),
    "one": Side("plugin", lambda number: "a0"),
    "mixed": Side("plugin", lambda number: f"a{number % 2}", smallest=4),
}


def test_sides_take_turns_and_none_always_comes_first():
    log: list = []
    running = {name: FakeEngine(name, log) for name in ("plain", "plugin")}
    found = run_in_turn(running, SIDES, [[1]] * 4, batches=(1, 4), tokens=20, repetitions=3)
    assert {cell: len(answers) for cell, answers in found.items()} == {
        ("plain", 1): 3, ("one", 1): 3, ("plain", 4): 3, ("one", 4): 3, ("mixed", 4): 3,
    }  # fmt: skip
    warm, counted = log[:5], log[5:]
    assert {entry[1] for entry in warm} == {8} and {entry[1] for entry in counted} == {20}
    rounds = [counted[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(map(str, r)) == sorted(map(str, rounds[0])) for r in rounds)
    assert len({str(r[0]) for r in rounds}) == 3
    assert ("plugin", 20, ("a0", "a1", "a0", "a1")) in counted and ("plain", 20, (None,) * 4) in counted


def test_a_side_that_changes_its_answer_is_no_side_to_time():
    running = {name: FakeEngine(name, []) for name in ("plain", "plugin")}

    def generate(orders, max_tokens, stock=running["plain"].generate):
        running["plain"].extra += 1
        return stock(orders, max_tokens)

    running["plain"].generate = generate
    with pytest.raises(EngineError, match="other tokens"):
        run_in_turn(running, SIDES, [[1]], batches=(1,), tokens=4, repetitions=2)


def test_ratios_are_paired_by_repetition():
    # The machine is half as fast in the second repetition: the ratio must not see it.
    ours, theirs = [answer(1.0), answer(2.0), answer(4.0)], [answer(2.0), answer(4.0), answer(8.0)]
    assert faster(ours, theirs) == {"median": 2.0, "low": 2.0, "high": 2.0, "confidence": 0.75}
    assert interval([5.0, 1.0, 2.0, 3.0, 9.0]) == {
        "median": 3.0,
        "low": 1.0,
        "high": 9.0,
        "confidence": 0.9375,
    }


def test_what_an_answer_counts():
    given = answer(0.5)
    assert given.count == 3 and given.work == (3, 6, 3)
    assert given.histograms == [[1, 1], [0, 0, 1]]
    row = speed([given])
    assert row["tokens_per_s"]["median"] == 6.0 and row["al_vllm"] == 2.0 and row["drafted"] == 6
    assert speed([Answer(1.0, [[1]], [[]], [[]])])["al_vllm"] is None
    assert same_tokens(answer(), answer(tokens=((1, 2), (4,)))) == 0.5


@pytest.mark.parametrize(
    ("trained", "accepted", "refused"),
    [
        (False, ((1, 0), (2,)), False),
        (False, ((1, 0), (1,)), True),
        (True, ((1, 0), (2,)), False),
        (True, ((0, 0), (0,)), True),
    ],
)
def test_speeds_are_compared_at_equal_acceptance_only(trained, accepted, refused):
    geometry = BaseGeometry(1, 8, 2, 1, 4, 8, 16)
    pair = Pair("dflash", Path(), Path(), geometry, trained)
    answers = {("adapter", 1): [answer(accepted=accepted)], ("merged", 1): [answer()]}
    if refused:
        with pytest.raises(EngineError, match="batch 1"):
            draft_lora.check_work(pair, answers, (1,))
    else:
        draft_lora.check_work(pair, answers, (1,))


def test_without_the_models_the_benchmark_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path))
    with pytest.raises(MissingTierError, match="not built"):
        pocket_pairs(tmp_path)


@pytest.mark.torch
def test_an_untrained_drafter_has_the_pocket_shapes_and_its_adapters_the_formula_s_size(tmp_path):
    pytest.importorskip("torch")
    from safetensors.torch import load_file

    from lora_spec.bench._pairs import write_adapters, write_untrained_dflash

    target = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(target))
    folder = write_untrained_dflash(tmp_path / "target", tmp_path / "dflash")
    config = read_config(folder)
    assert config["head_dim"] == 64 and config["dflash_config"]["target_layer_ids"] == [5, 13, 21, 26, 29]
    state = load_file(folder / "model.safetensors")
    assert sum(w.numel() for w in state.values() if w.dim() == 2) == 8_736_768
    pair = Pair("dflash", tmp_path / "target", folder, dflash_geometry(folder), trained=False)
    made = write_adapters(pair, tmp_path / "files", count=2, rank=16, ranks=(8, 64))
    assert made.linear_parameters == 8_736_768
    for row, wanted in zip(made.by_rank, (45.9, 5.7), strict=True):
        assert row["formula"] == pytest.approx(wanted, abs=0.05)
        assert 0.98 * row["formula"] < row["ratio"] < row["formula"]  # the file has a header
    adapter = load_file(made.adapters["a0"] / "adapter_model.safetensors")
    merged = load_file(made.merged / "model.safetensors")
    a, b = (adapter[f"base_model.model.fc.lora_{side}.weight"].float() for side in "AB")
    delta = merged["fc.weight"] - state["fc.weight"].float()
    assert float((delta - b @ a).norm()) < 1e-5 * float(delta.norm())
    assert float(delta.norm()) == pytest.approx(0.1 * float(state["fc.weight"].float().norm()), rel=0.01)
    other = load_file(made.adapters["a1"] / "adapter_model.safetensors")
    assert not (
        other["base_model.model.fc.lora_A.weight"] == adapter["base_model.model.fc.lora_A.weight"]
    ).all()


SETTINGS = draft_lora.Settings(
    batches={"dflash": (2,), "draft_model": (2,)},
    tokens={"dflash": 12, "draft_model": 12},
    repetitions={"dflash": 1, "draft_model": 1},
    rank=8,
    ranks=(8,),
    mixed=2,
    counts=(1, 3),
    copies_limit=1 << 40,
    swaps=2,
    exact_requests=6,
    threads=1,
)


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["dflash", "draft_model"])
def test_a_tiny_run_of_everything(tmp_path, monkeypatch, method):
    pytest.importorskip("vllm")
    from lora_spec.measure import tiny_models

    target = tiny_models.tiny_llama()
    tiny_models.save(target, tmp_path / "target")
    folder = tmp_path / "drafter"
    if method == "dflash":
        tiny_models.tiny_dflash().save(folder)
        geometry = dflash_geometry(folder)
    else:
        tiny_models.save(tiny_models.perturbed(target, 0.1), folder)
        geometry = BaseGeometry.from_hf_config(read_config(folder))
    # A DFlash drafter of a tiny vocabulary accepts by chance, so it is none whose acceptance must be equal.
    pair = Pair(method, tmp_path / "target", folder, geometry, trained=True)
    monkeypatch.setattr(draft_lora, "ACCEPTANCE_TOLERANCE", 0.5)  # bfloat16 and 24 tokens
    outcome = draft_lora.measure([pair], tiny_models.prompts(8), SETTINGS, tmp_path)
    found = outcome[method]
    assert {row["side"] for row in found["throughput"]} == {
        "plain", "base", "idle_plugin", "adapter", "merged", "mixed_adapters",
    }  # fmt: skip
    assert all(row["tokens"] == 24 for row in found["throughput"])
    # nothing is fitted here, and a random DFlash drafter accepts by chance only
    assert found["exact"]["equal_histograms"]
    assert found["exact"]["accepted"] > (20 if method == "draft_model" else 0)
    kept = found["memory"]["adapters"]
    assert kept[1]["tensor_bytes"] == 3 * kept[0]["tensor_bytes"]
    assert found["memory"]["ratio"] == pytest.approx(found["memory"]["formula"])
    assert all(row["measured"] for row in found["memory"]["drafters"])
    seconds = found["seconds"]
    assert seconds["adapter_into_slot"]["median"] < seconds["engine_start_to_first_token"]["low"]
    # Goals are those of DFlash, and no benchmark without them.
    goals = {name: ratio["goal"] for name, ratio in outcome["ratios"].items()}
    assert (goals[f"{method}_adapter_vs_merged_batch_2"] == 0.95) == (method == "dflash")
    assert (goals[f"{method}_mixed_adapters_vs_merged_batch_2"] == 0.85) == (method == "dflash")
    json.dumps(outcome)
    assert "engine_start_to_first_token" in draft_lora.table(outcome)


def test_settings_say_what_the_goals_need():
    assert min(max(sizes) for sizes in draft_lora.FULL.batches.values()) >= draft_lora.FULL.mixed == 8
    assert draft_lora.FULL.counts == (1, 4, 16, 32)
    assert dataclasses.asdict(draft_lora.FULL)["drafts"] == 4
