"""The DFlash drafter with torch: the target's continuations, taps, model, loss, training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_dflash import params
from tiny_llama import make_tiny_llama

from lora_spec.provenance import load_record, load_table
from lora_spec.substrate.dflash import data
from lora_spec.substrate.dflash.prompts import Prompt

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

    from lora_spec.substrate.dflash.generate import continue_prompts, load_target

    model = load_target(tiny).float()
    rows, lengths = continue_prompts(model, some_prompts(6, (0.0,)), 8, torch.Generator())
    best = model(rows).logits.argmax(-1)
    for row, length, predicted in zip(rows, lengths.tolist(), best, strict=True):
        assert row[4:length].tolist() == predicted[3 : length - 1].tolist()


def test_each_row_has_its_own_temperature(tiny: Path) -> None:
    import torch

    from lora_spec.substrate.dflash.generate import continue_prompts, load_target

    model = load_target(tiny).float()
    mixed, _ = continue_prompts(model, some_prompts(8), 8, torch.Generator().manual_seed(0))
    greedy, _ = continue_prompts(model, some_prompts(8, (0.0,)), 8, torch.Generator())
    same = (mixed == greedy).all(1)
    assert same[::2].all() and not same[1::2].any()


def test_a_row_ends_with_the_end_token(tiny: Path) -> None:
    import torch

    from lora_spec.substrate.dflash.generate import continue_prompts, load_target

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
