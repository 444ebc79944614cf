"""The DFlash drafter with torch: the target's continuations, taps, model, loss, training."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_dflash import params, write_unit
from tiny_llama import make_tiny_llama

from lora_spec.errors import CheckpointError, EvidenceError
from lora_spec.measure import dflash_card
from lora_spec.measure.dflash import load_evaluation
from lora_spec.params import read_yaml
from lora_spec.paths import params_dir
from lora_spec.provenance import load_record, load_table
from lora_spec.substrate.dflash import data, taps
from lora_spec.substrate.dflash import train as training
from lora_spec.substrate.dflash.config import DflashParams, TrainParams, load_dflash
from lora_spec.substrate.dflash.generate import continue_prompts, load_target
from lora_spec.substrate.dflash.heldout import heldout_accuracy
from lora_spec.substrate.dflash.loss import Wanted, block_loss, candidates, wanted_tokens
from lora_spec.substrate.dflash.model import Shape, block_hidden
from lora_spec.substrate.dflash.optimise import (
    Material,
    Reader,
    Trainer,
    batch_numbers,
    draw_anchors,
    rate_factor,
)
from lora_spec.substrate.dflash.prompts import Prompt
from lora_spec.substrate.dflash.weights import (
    checkpoint_weights,
    drafter_shape,
    initial_parameters,
    tap_scale,
)
from lora_spec.substrate.model_folders import model_dir

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def some_prompts(count: int, temperatures: tuple[float, ...] = (0.0, 0.8)) -> list[Prompt]:
    rows = np.random.default_rng(3).integers(0, 255, (count, 4)).tolist()
    return [Prompt("german", tuple(row), temperatures[n % len(temperatures)]) for n, row in enumerate(rows)]


# The target's continuations.


def test_greedy_continuations_are_the_argmax_of_a_whole_pass(tiny: Path) -> None:
    import torch

    model = load_target(tiny).float()
    rows, lengths = continue_prompts(model, some_prompts(6, (0.0,)), 8, torch.Generator())
    best = model(rows).logits.argmax(-1)
    for row, length, predicted in zip(rows, lengths.tolist(), best, strict=True):
        assert row[4:length].tolist() == predicted[3 : length - 1].tolist()


def test_each_row_has_its_own_temperature(tiny: Path) -> None:
    import torch

    model = load_target(tiny).float()
    mixed, _ = continue_prompts(model, some_prompts(8), 8, torch.Generator().manual_seed(0))
    greedy, _ = continue_prompts(model, some_prompts(8, (0.0,)), 8, torch.Generator())
    same = (mixed == greedy).all(1)
    assert same[::2].all() and not same[1::2].any()


def test_a_row_ends_with_the_end_token(tiny: Path) -> None:
    import torch

    model = load_target(tiny).float()
    first, _ = continue_prompts(model, some_prompts(4, (0.0,)), 6, torch.Generator())
    model.config.eos_token_id = int(first[0, 6])  # what row 0 writes third
    rows, lengths = continue_prompts(model, some_prompts(4, (0.0,)), 6, torch.Generator())
    at = first[0, 4:].tolist().index(model.config.eos_token_id)
    assert lengths[0] == 4 + at + 1
    assert (rows[0, int(lengths[0]) :] == model.config.eos_token_id).all()


@pytest.fixture
def tiny_unit(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`data.generate_unit` on the tiny model and made-up prompts; returns the folder of results."""
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(data, "require_model", lambda key: tiny)
    monkeypatch.setattr(data, "unit_prompts", lambda params, name: some_prompts(8))
    return tmp_path / "results"


def test_a_shard_is_deterministic_and_made_once(
    tiny_unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = params(), []
    path = data.generate_unit(made, "shard-00", said.append)
    assert load_record(path).results["sequences"] == 8
    first = load_table(path, data.TABLE)
    data.generate_unit(made, "shard-00", said.append)
    assert said[-1] == "shard-00: done before"
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "again"))
    second = load_table(data.generate_unit(made, "shard-00"), data.TABLE)
    assert [row.tolist() for row in first["tokens"]] == [row.tolist() for row in second["tokens"]]
    other = load_table(data.generate_unit(made, "shard-01"), data.TABLE)
    assert [row.tolist() for row in first["tokens"]] != [row.tolist() for row in other["tokens"]]


def test_a_failed_shard_leaves_nothing(tiny_unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_spec.substrate.dflash import generate

    def fail(*args: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(generate, "continue_prompts", fail)
    with pytest.raises(RuntimeError):
        data.generate_unit(params(), "shard-00")
    assert not list(tiny_unit.rglob("*.*"))


# Model and weights.


def tiny_shape(**changes: float) -> Shape:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "taps": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return Shape(**(sizes | changes))


def tiny_parameters(shape: Shape, std: float = 0.2) -> dict:
    import torch

    made = initial_parameters(
        shape, torch.ones(shape.hidden_size), std=std, generator=torch.Generator().manual_seed(1)
    )
    generator = torch.Generator().manual_seed(2)
    for name in (n for n in made if n.endswith("norm.weight")):
        made[name] += 0.3 * torch.randn(made[name].shape, generator=generator)
    return made


def tiny_inputs(shape: Shape, length: int = 12) -> tuple:
    """Taps, tokens, anchors and a reader of random embeddings."""
    import torch

    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(3, length, shape.taps * shape.hidden_size, generator=generator)
    tokens = torch.randint(50, (3, length), generator=generator)
    embedding = torch.randn(50, shape.hidden_size, generator=generator)
    return taps, tokens, torch.tensor([[2, 5], [4, 7], [3, 8]]), Reader(shape, embedding, embedding, 49)


def float_weights(shape: Shape, parameters: dict) -> dict:
    import torch

    return checkpoint_weights(parameters, shape, torch.ones(shape.taps * shape.hidden_size), torch.float32)


def test_drafts_do_not_see_what_comes_after_the_anchor() -> None:
    import torch

    shape = tiny_shape()
    weights = float_weights(shape, tiny_parameters(shape))
    taps, tokens, anchors, reader = tiny_inputs(shape)
    before = reader.drafted(weights, taps, tokens, anchors, 3)
    for row, last in enumerate(anchors.max(1).values.tolist()):
        taps[row, last:] += 100.0  # the anchor's own hidden state is not known when a block is drafted
        tokens[row, last + 1 :] = 0
    assert torch.equal(reader.drafted(weights, taps, tokens, anchors, 3)[:, 1], before[:, 1])
    taps[:, 0] += 1.0
    assert not torch.allclose(reader.drafted(weights, taps, tokens, anchors, 3)[:, 1], before[:, 1])


def test_anchors_of_a_sequence_do_not_see_each_other() -> None:
    import torch

    shape = tiny_shape()
    weights = float_weights(shape, tiny_parameters(shape))
    taps, tokens, anchors, reader = tiny_inputs(shape)
    both = reader.drafted(weights, taps, tokens, anchors, 3)
    alone = [reader.drafted(weights, taps, tokens, anchors[:, [n]], 3) for n in (0, 1)]
    torch.testing.assert_close(both, torch.cat(alone, dim=1))


def test_masks_see_each_other() -> None:
    """Attention within a block is not causal: a longer block changes its first draft."""
    import torch

    shape = tiny_shape()
    weights = float_weights(shape, tiny_parameters(shape))
    taps, tokens, anchors, reader = tiny_inputs(shape)
    short, long = (reader.drafted(weights, taps, tokens, anchors, k)[:, :, 0] for k in (2, 3))
    assert not torch.allclose(short, long)


def test_scaling_the_taps_is_folded_exactly() -> None:
    import torch

    shape = tiny_shape()
    taps, tokens, anchors, reader = tiny_inputs(shape)
    parameters = tiny_parameters(shape)
    scale = torch.exp2(torch.randint(-3, 9, (shape.taps * shape.hidden_size,)).float())
    folded = checkpoint_weights(parameters, shape, scale, torch.float32)
    divided = reader.drafted(float_weights(shape, parameters), taps / scale, tokens, anchors, 3)
    # powers of two: no rounding at all
    assert torch.equal(reader.drafted(folded, taps, tokens, anchors, 3), divided)
    assert torch.equal(folded["fc.weight"] * scale, parameters["fc.weight"])


def test_the_tiny_drafters_of_phase_0_have_the_same_pass() -> None:
    import torch

    from lora_spec.measure import tiny_models as tiny_size
    from lora_spec.measure.tiny_dflash import forward

    drafter = tiny_size.tiny_dflash(layers=2)
    generator = torch.Generator().manual_seed(8)
    state = {
        name: weight * (0.5 + torch.rand(weight.shape, generator=generator))
        for name, weight in drafter.state.items()
    }
    shape = tiny_shape(
        hidden_size=tiny_size.HIDDEN,
        num_attention_heads=tiny_size.HEADS,
        num_key_value_heads=tiny_size.KV_HEADS,
        head_dim=tiny_size.HIDDEN // tiny_size.HEADS,
        rms_norm_eps=1e-6,
    )
    taps = torch.randn(2, 9, 2 * tiny_size.HIDDEN, generator=generator)
    block = torch.randn(2, 3, 4, tiny_size.HIDDEN, generator=generator)
    anchors = torch.tensor([[1, 4, 8], [0, 3, 6]])
    want = forward(state, taps, block, anchors)
    torch.testing.assert_close(block_hidden(state, shape, taps, block, anchors), want, atol=1e-4, rtol=1e-4)


def test_all_layers_have_one_key_norm() -> None:
    import torch

    shape = tiny_shape()
    weights = float_weights(shape, tiny_parameters(shape))
    first, second = (weights[f"layers.{n}.self_attn.k_norm.weight"] for n in (0, 1))
    assert torch.equal(first, second) and not torch.equal(first, torch.ones_like(first))
    assert set(weights) == {*shape.matrices(), *shape.norms()}


def test_the_scale_leaves_out_the_first_token_and_the_filling() -> None:
    import torch

    taps = torch.full((2, 5, 3), 2.0)
    taps[:, 0] = 28288.0
    taps[1, 3:] = 1e6
    assert tap_scale(taps, torch.tensor([5, 3])).tolist() == [2.0, 2.0, 2.0]


def test_taps_are_the_layers_outputs(tiny: Path) -> None:
    import torch

    model = load_target(tiny).float()
    tokens = torch.randint(255, (2, 7), generator=torch.Generator().manual_seed(0))
    outputs, ids, logprobs = taps.read_target(model, tokens, (1, 3), 4)
    states = model(tokens, output_hidden_states=True)
    torch.testing.assert_close(outputs[..., :32], states.hidden_states[2])  # [0] is the embedding
    torch.testing.assert_close(model.model.norm(outputs[..., 32:]), states.hidden_states[-1])
    best = states.logits.log_softmax(-1).topk(4, dim=-1)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(logprobs, best.values)


# Loss.


def wanted(drafts: int = 3, lengths: tuple[int, ...] = (12, 12, 12)) -> Wanted:
    import torch

    _, tokens, anchors, _ = tiny_inputs(tiny_shape())
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(50, (3, 11, 4), generator=generator)
    logprobs = torch.randn(3, 11, 4, generator=generator)
    return wanted_tokens(tokens, torch.tensor(lengths), anchors, ids, logprobs, drafts=drafts, decay=0.5)


def test_labels_follow_the_anchor_and_weights_the_sequence() -> None:
    _, tokens, _anchors, _ = tiny_inputs(tiny_shape())
    made = wanted(lengths=(12, 8, 12))
    assert made.labels[1, 0].tolist() == tokens[1, 5:8].tolist()
    assert made.weights[0, 0].tolist() == [1.0, 0.5, 0.25]
    assert made.weights[1].tolist() == [[1.0, 0.5, 0.25], [0.0, 0.0, 0.0]]  # anchors 4 and 7 of 8 tokens
    assert made.top_shares.sum(-1).allclose(made.top_shares.new_ones(()))


def test_the_loss_over_the_whole_vocabulary_is_cross_entropy() -> None:
    import torch
    from torch.nn import functional

    made, generator = wanted(), torch.Generator().manual_seed(5)
    hidden = torch.randn(3, 2, 3, 32, generator=generator)
    head = torch.randn(50, 32, generator=generator)
    chosen = candidates(made, torch.arange(50), 50, 5, generator)
    assert len(chosen.ids) == 50 and not chosen.correction.any()
    logprobs = (hidden @ head.T).log_softmax(-1)
    label = functional.nll_loss(logprobs.flatten(0, 2), made.labels.flatten(), reduction="none")
    soft = -(logprobs.gather(-1, made.top_ids) * made.top_shares).sum(-1).flatten()
    weights = made.weights.flatten()
    want = ((label + 0.5 * soft) * weights).sum() / weights.sum()
    torch.testing.assert_close(block_loss(hidden, head, made, chosen, distill=0.5), want)


def test_the_sampled_part_stands_for_the_rest() -> None:
    """On average the estimated sum over the vocabulary is the sum; what is wanted is always there."""
    import torch

    made, generator = wanted(), torch.Generator().manual_seed(6)
    logits = torch.randn(400, generator=generator)
    sums = []
    for _ in range(400):
        chosen = candidates(made, torch.tensor([7]), 400, 60, generator)
        exact = {7, *made.labels.flatten().tolist(), *made.top_ids.flatten().tolist()}
        assert exact <= set(chosen.ids.tolist()) and len(set(chosen.ids.tolist())) == len(chosen.ids)
        assert (chosen.correction[chosen.place[made.labels]] == 0).all()
        sums.append((logits[chosen.ids] + chosen.correction).exp().sum())
    assert torch.stack(sums).mean() == pytest.approx(logits.exp().sum().item(), rel=0.02)


# Training.


def tiny_trainer(steps: int = 6, seed: int = 1, **changes: object) -> Trainer:
    import torch

    shape = tiny_shape()
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(50, (20, 16), generator=generator)
    taps = torch.randn(20, 15, shape.taps * shape.hidden_size, generator=generator)
    ids, logprobs = torch.randint(50, (20, 15, 2), generator=generator), torch.zeros(20, 15, 2)
    material = Material(
        tokens=tokens,
        lengths=torch.full((20,), 16),
        rows=lambda numbers: (taps[list(numbers)], ids[list(numbers)], logprobs[list(numbers)]),
        first=4,
    )
    declared = load_dflash().train.model_dump() | {
        "steps": steps,
        "batch": 4,
        "anchors": 3,
        "drafts": (2, 3),
        "hot": 8,
        "random": 10,
        "save_every": 2,
        "warmup_steps": 2,
        "learning_rate": 0.01,
    }
    embedding = torch.randn(50, shape.hidden_size, generator=generator)
    return Trainer(
        tiny_parameters(shape),
        lambda parameters: float_weights(shape, dict(parameters)),
        Reader(shape, embedding, embedding, 49),
        material,
        TrainParams(**(declared | changes)),
        seed,
    )


def no_report(run: Trainer) -> dict:
    return {}


def test_a_continued_training_is_the_uninterrupted_one(tmp_path: Path) -> None:
    import torch

    whole = tiny_trainer()
    whole.run(tmp_path / "whole", no_report)

    class Killed(Exception):
        pass

    def die(run: Trainer) -> dict:
        if run.step == 4:
            raise Killed
        return {}

    stopped = tiny_trainer()
    with pytest.raises(Killed):
        stopped.run(tmp_path / "part", die)
    again = tiny_trainer()
    again.load(tmp_path / "part")
    assert again.step == 2
    again.run(tmp_path / "part", no_report)
    assert again.history == whole.history and [h["step"] for h in again.history] == [2, 4, 6]
    assert all(torch.equal(again.parameters[name], whole.parameters[name]) for name in whole.parameters)
    assert not torch.equal(whole.parameters["fc.weight"], tiny_trainer().parameters["fc.weight"])


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(steps=60, save_every=20)
    trainer.run(tmp_path / "checkpoint", no_report)
    first, *_, last = [entry["loss"] for entry in trainer.history]
    assert last < first - 1


def test_a_loss_that_is_not_finite_stops_it(tmp_path: Path) -> None:
    import torch

    trainer = tiny_trainer()
    with torch.no_grad():
        trainer.parameters["norm.weight"].fill_(float("nan"))
    with pytest.raises(CheckpointError, match="step 1"):
        trainer.run(tmp_path / "checkpoint", no_report)
    assert not (tmp_path / "checkpoint").exists()


def test_every_sequence_comes_once_a_pass() -> None:
    numbers = [n for step in range(10) for n in batch_numbers(20, 4, step, seed=3)]
    assert sorted(numbers[:20]) == sorted(numbers[20:]) == list(range(20))
    assert numbers[:20] != numbers[20:]


def test_anchors_keep_to_the_continuation() -> None:
    import torch

    lengths = torch.tensor([16, 9, 6])
    anchors = draw_anchors(lengths, 4, 12, 4, torch.Generator().manual_seed(0))
    assert anchors.min() >= 4 and anchors.max() <= 12
    assert all(len(set(row)) == 4 and row == sorted(row) for row in anchors.tolist())
    assert anchors[1].tolist() == [4, 5, 6, 7]  # all that a token follows
    assert {4} <= set(anchors[2].tolist())


def test_rates_rise_and_fall() -> None:
    params = load_dflash().train
    rates = [rate_factor(step, params) for step in range(params.steps)]
    assert rates[0] == pytest.approx(1 / params.warmup_steps)
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert rates[params.warmup_steps :] == sorted(rates[params.warmup_steps :], reverse=True)
    assert rates[-1] == pytest.approx(params.final_rate, abs=1e-3)


def test_heldout_counts_right_tokens_from_the_block_s_start() -> None:
    import torch

    class Oracle(Reader):
        """Right at the first position always, at the second where the token is even, never at the third."""

        def drafted(self, weights, taps, tokens, anchors, drafts):
            after = anchors.unsqueeze(-1) + torch.arange(1, drafts + 1)
            said = tokens[torch.arange(len(tokens))[:, None, None], after].clone()
            said[..., 1] += said[..., 1] % 2
            said[..., 2] += 1
            return torch.nn.functional.one_hot(said, 60).float()

    tokens = torch.arange(32).reshape(2, 16)
    oracle = Oracle(tiny_shape(), torch.empty(0), torch.eye(60), 0)
    material = Material(tokens, torch.tensor([16, 10]), lambda numbers: (None, None, None), first=4)
    found = heldout_accuracy({}, oracle, material, drafts=3, every=1)
    # whole blocks end at 7 to 15 of the first sequence and at 7 to 9 of the second
    second = [n % 2 == 0 for n in [*range(6, 15), *range(22, 25)]]
    assert found["accuracy"] == pytest.approx([1.0, sum(second) / 12, 0.0], abs=1e-4)
    assert found["acceptance_length"] == pytest.approx(2 + sum(second) / 12, abs=1e-4)


# All of it, on the tiny model.


@pytest.fixture
def tiny_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DflashParams:
    """A checkout that declares a tiny pair, with its target built and its sequences written."""
    shutil.copytree(params_dir(), tmp_path / "params")
    (tmp_path / "pyproject.toml").touch()
    entries = read_yaml(params_dir() / "models.yaml")["models"]
    declared = read_yaml(params_dir() / "dflash.yaml")
    target, drafter = entries[declared["target"]], entries[declared["drafter"]]
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes["vocab_size"] = 259
    target["geometry"] |= sizes | {"intermediate_size": 64, "num_hidden_layers": 4}
    drafter["geometry"] |= sizes | {"intermediate_size": 48, "num_hidden_layers": 2}
    for entry in (target, drafter):
        entry |= {"status": "unfrozen", "files": {}}
    models = {"models": {declared["target"]: target, declared["drafter"]: drafter}, "pairs": {}}
    (tmp_path / "params" / "models.yaml").write_text(yaml.safe_dump(models, sort_keys=False))
    declared["data"] |= {"sequences": 16, "shard": 8, "batch": 4, "prompt": 4, "generated": 12}
    declared["model"] |= {"taps": [1, 3], "mask_token_id": 258}
    declared["train"] |= {"steps": 4, "batch": 3, "anchors": 4, "drafts": [2, 3], "save_every": 2}
    declared["train"] |= {"hot": 16, "random": 32, "distill": {"top": 4, "weight": 0.5}}
    (tmp_path / "params" / "dflash.yaml").write_text(yaml.safe_dump(declared))
    for name in ("ROOT", "CACHE", "RESULTS"):
        place = tmp_path if name == "ROOT" else tmp_path / name.lower()
        monkeypatch.setenv(f"LORA_SPEC_{name}", str(place))
    make_tiny_llama(tmp_path / "cache" / "models" / declared["target"])
    made = load_dflash()
    generator = np.random.default_rng(0)
    for name in data.unit_names(made):
        rows = generator.integers(0, 255, (8, 16)).tolist()
        rows[3] = rows[3][:7]
        write_unit(made, name, rows, generated_tokens=87, sequences=8)
    return made


def test_training_leaves_a_drafter_a_record_and_a_card(tiny_project: DflashParams) -> None:
    from safetensors.torch import load_file

    made = tiny_project
    assert training.find_training_problem(made) == "to do"
    training.run_training(made, workers=2)
    assert training.find_training_problem(made) is None
    results = load_record(training.training_path()).results
    assert [entry["step"] for entry in results["history"]] == [2, 4]
    assert all(len(entry["accuracy"]) == 2 for entry in results["history"])
    folder = model_dir(made.drafter)
    stored = load_file(folder / "model.safetensors")
    shape = drafter_shape(made)
    assert set(stored) == {*shape.matrices(), *shape.norms()}
    card = dflash_card.write_card(made, load_evaluation())
    assert results["weights_sha256"] in card.read_text() and "4 steps" in card.read_text()
    assert training.run_training(made).skipped == ("train",)
    (folder / "model.safetensors").write_bytes(b"other")
    assert "recorded weights" in str(training.find_training_problem(made))


def test_taps_are_kept_as_they_were_computed(tiny_project: DflashParams) -> None:
    import torch

    made = tiny_project
    taps.compute_taps(made, "shard-01")
    assert taps.has_taps(made, "shard-01") and not taps.has_taps(made, "shard-00")
    taps.compute_taps(made, "shard-00")
    store = taps.TapStore(made, ["shard-00", "shard-01"])
    states, ids, logprobs = store.rows([9, 2])
    tokens = torch.from_numpy(data.load_sequences(made, ["shard-00", "shard-01"]).tokens.astype(np.int64))
    model = load_target(model_dir(made.target))
    want, best, values = taps.read_target(model, tokens[[9]][:, :-1], made.model.taps, 4, made.data.prompt)
    torch.testing.assert_close(states[0], want[0])
    assert torch.equal(ids[0, made.data.prompt :], best[0])
    torch.testing.assert_close(logprobs[0, made.data.prompt :], values[0], atol=2e-2, rtol=1e-2)
    store.close()
    path = taps.taps_path(made, "shard-01")
    path.write_bytes(path.read_bytes()[:-1])
    assert not taps.has_taps(made, "shard-01")


def test_training_without_sequences_says_what_to_run(tiny_project: DflashParams) -> None:
    data.unit_path("shard-01").unlink()
    with pytest.raises(EvidenceError, match="shard-01 cannot be used: to do"):
        training.run_training(tiny_project)
