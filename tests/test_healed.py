"""The healed drafter: which layers it lacks, its distillation, and the merge that rebuilds it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from tiny_llama import make_tiny_llama

from lora_spec.errors import CheckpointError, IntegrityError, ParamsError
from lora_spec.files import sha256_file
from lora_spec.measure import healing
from lora_spec.models import HealedSource, ModelsParams, load_models
from lora_spec.params import validate
from lora_spec.pool import Training
from lora_spec.substrate import heal, pocket, writing
from lora_spec.substrate.heal import HealingParams, load_healing

TEXTS = {
    domain: [
        f"{domain} {number} of a made-up text that repeats itself, {number * 7919}" for number in range(40)
    ]
    for domain in ("german", "sql")
}


def tiny(**changes: object) -> HealingParams:
    """The declared healing, small enough for a Llama of a few kilobytes."""
    declared = load_healing()
    training = Training(**(declared.training.model_dump() | {"block_tokens": 32, "batch": 2}))
    values = {
        "training": training,
        "rank": 2,
        "alpha": 4,
        "steps": 6,
        "blocks_per_domain": 8,
        "learning_rate": 0.02,
    }
    return declared.model_copy(update=values | changes)


# What is declared.


def test_the_declared_drafter_lacks_eight_neighbouring_layers_and_sees_no_block_twice() -> None:
    declared = load_healing()
    dropped = declared.source.dropped_layers
    assert list(dropped) == list(range(dropped[0], dropped[0] + 8))
    assert declared.entry.geometry.num_hidden_layers == 22
    needed = declared.steps * declared.training.batch
    assert needed <= declared.blocks_per_domain * len(declared.domains)
    assert load_models().pair("pocket-healed").drafter == declared.model


def test_every_value_of_the_recipe_changes_its_identity() -> None:
    declared = load_healing()
    changes = {"rank": 3, "alpha": 3, "learning_rate": 0.01, "steps": 3, "seed": 3, "blocks_per_domain": 400}
    hashes = {declared.recipe_sha256()}
    for name, value in changes.items():
        hashes.add(declared.model_copy(update={name: value}).recipe_sha256())
    hashes.add(declared.model_copy(update={"domains": declared.domains[:-1]}).recipe_sha256())
    assert len(hashes) == len(changes) + 2


def test_a_frozen_healed_model_needs_the_hash_of_its_lora() -> None:
    data = load_models().model_dump(mode="json")
    entry = data["models"][load_healing().model]
    entry |= {"status": "frozen", "files": {"model.safetensors": "0" * 64}}
    entry["source"]["adapter_sha256"] = None
    with pytest.raises(ParamsError, match="needs pinned hashes"):
        validate(ModelsParams, data, where="models.yaml")
    entry["source"]["adapter_sha256"] = "1" * 64
    assert load_healing().model in pocket.pocket_keys(validate(ModelsParams, data, where="models.yaml"))
    entry["geometry"]["num_hidden_layers"] = 23
    with pytest.raises(ParamsError, match="does not follow from dropped_layers"):
        validate(ModelsParams, data, where="models.yaml")


def test_what_is_not_trained_yet_is_no_part_of_the_build() -> None:
    models = load_models()
    if models.model(load_healing().model).status == "frozen":
        pytest.skip("it is trained")
    assert load_healing().model not in pocket.pocket_keys(models)


def test_the_command_plans_and_writes_nothing(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(healing, "healing_dir", lambda key: tmp_path / key)
    done = cli("heal")
    assert done.returncode == 0 and "not trained" in done.stdout and "Plan only" in done.stdout
    assert list(tmp_path.iterdir()) == []


def blocks(*overlaps: float) -> pd.DataFrame:
    """Measured blocks of 8 layers that begin at 0, 1, …; the best first, as `score_blocks` gives them."""
    rows = [{"first": i, "last": i + 7, "overlap": o, "top1": o} for i, o in enumerate(overlaps)]
    return pd.DataFrame(rows).sort_values("overlap", ascending=False, ignore_index=True)


def test_layers_that_are_not_the_best_to_leave_out_are_refused() -> None:
    source = load_healing().source.model_copy(update={"dropped_layers": tuple(range(1, 9))})
    healing.check_choice(blocks(0.1, 0.3, 0.2), source, 0.0)
    healing.check_choice(blocks(0.304, 0.3, 0.2), source, 0.005)
    with pytest.raises(ParamsError, match="layers 2 to 9 are the better ones"):
        healing.check_choice(blocks(0.1, 0.3, 0.31), source, 0.005)
    gap = source.model_copy(update={"dropped_layers": (1, 2, 3, 4, 5, 6, 7, 9)})
    with pytest.raises(ParamsError, match="no block of neighbours"):
        healing.check_choice(blocks(0.1, 0.3, 0.2), gap, 0.005)


# With torch.


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("parent"))


@pytest.fixture(scope="module")
def shortened(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama without its layers 1 and 2."""
    out = tmp_path_factory.mktemp("shortened")
    writing.drop_layers(parent, out, (1, 2))
    return out


@pytest.mark.torch
def test_healing_brings_the_drafter_nearer_and_repeats_bit_for_bit(parent: Path, shortened: Path) -> None:
    import torch

    params = tiny(steps=24, blocks_per_domain=24)
    first, second = (heal.heal(params, parent, shortened, TEXTS) for _ in range(2))
    assert first.losses == second.losses and min(first.losses) >= 0
    assert all(torch.equal(first.tensors[name], tensor) for name, tensor in second.tensors.items())
    assert sum(first.losses[-5:]) < 0.8 * sum(first.losses[:5])
    assert first.config["base_model_name_or_path"] == params.model


@pytest.mark.torch
def test_a_drafter_that_is_its_target_has_nothing_to_learn(parent: Path) -> None:
    trained = heal.heal(tiny(steps=1), parent, parent, TEXTS)
    assert trained.losses == [pytest.approx(0.0, abs=1e-6)]


@pytest.mark.torch
def test_too_few_blocks_are_an_error(parent: Path, shortened: Path) -> None:
    with pytest.raises(ParamsError, match="16 blocks where 20 are needed"):
        heal.heal(tiny(steps=10), parent, shortened, TEXTS)


@pytest.fixture
def healed(parent: Path, shortened: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A trained LoRA on disk, and what `build_healed` needs to find it."""
    params = tiny()
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / params.source.parent).symlink_to(parent)
    monkeypatch.setattr(writing, "healing_dir", lambda key: tmp_path / "drafters" / key)
    directory = tmp_path / "drafters" / params.model
    heal.save_lora(heal.heal(params, parent, shortened, TEXTS), directory, params)
    config = json.loads((shortened / "config.json").read_text())
    names = params.entry.geometry.model_dump()
    entry = params.entry.model_copy(
        update={"geometry": params.entry.geometry.model_copy(update={name: config[name] for name in names})}
    )
    source = HealedSource(
        kind="healed",
        parent=params.source.parent,
        dropped_layers=(1, 2),
        adapter_sha256=sha256_file(directory / "adapter_model.safetensors"),
    )
    return params, entry, source, directory


@pytest.mark.torch
def test_the_lora_is_known_by_recipe_and_weights(healed) -> None:
    params, _, _, directory = healed
    assert heal.find_lora_problem(directory, params) is None
    assert heal.find_lora_problem(directory, tiny(seed=9)) == "trained from another recipe"
    assert heal.find_lora_problem(directory.parent, params) == "not trained"
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert heal.find_lora_problem(directory, params) == "its weights were changed"


@pytest.mark.torch
def test_the_build_merges_the_pinned_lora_the_same_way_with_any_threads(healed, shortened, tmp_path) -> None:
    import torch
    from safetensors.torch import load_file

    params, entry, source, directory = healed
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = tmp_path / f"built{threads}"
        out.mkdir()
        writing.build_healed(params.model, entry, source, out)
        made.append(sha256_file(out / "model.safetensors"))
    torch.set_num_threads(1)
    assert made[0] == made[1]
    before, after = load_file(shortened / "model.safetensors"), load_file(out / "model.safetensors")
    lora = load_file(directory / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in lora.values()} == {torch.bfloat16}
    changed = 0
    for name, tensor in after.items():
        factors = [lora.get(f"base_model.model.{name[:-7]}.lora_{side}.weight") for side in "AB"]
        if factors[0] is None:
            assert torch.equal(tensor, before[name]), name
            continue
        update = (factors[1].double() @ factors[0].double()) * params.alpha / params.rank
        expected = before[name].double() + update
        assert torch.allclose(tensor.double(), expected, rtol=2**-8, atol=1e-6), name
        changed += not torch.equal(tensor, before[name])
    assert changed == 2 * 7


@pytest.mark.torch
def test_another_lora_than_the_pinned_one_is_refused(healed, tmp_path: Path) -> None:
    params, entry, source, _ = healed
    out = tmp_path / "out"
    out.mkdir()
    wrong = source.model_copy(update={"adapter_sha256": "0" * 64})
    with pytest.raises(IntegrityError, match="missing or was changed"):
        writing.build_healed(params.model, entry, wrong, out)
    short = entry.model_copy(update={"geometry": entry.geometry.model_copy(update={"num_hidden_layers": 1})})
    with pytest.raises(CheckpointError):
        writing.build_healed(params.model, short, source, out)
    assert list(out.iterdir()) == []


@pytest.mark.torch
def test_layers_that_do_nothing_are_found_to_be_the_ones_to_leave_out(parent: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "idle"
    shutil.copytree(parent, folder)
    state = load_file(folder / "model.safetensors")
    for layer in (1, 2):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            state[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    windows = [[(7 * i + j) % 250 for j in range(24)] for i in range(10)]
    table = healing.score_blocks(folder, 2, windows, 8, 0.8)
    assert len(table) == 3 and (table["first"].iloc[0], table["last"].iloc[0]) == (1, 2)
    assert table["overlap"].iloc[0] == pytest.approx(1.0, abs=1e-4) and table["top1"].iloc[0] == 1.0
    assert (table["overlap"].iloc[1:] < 0.999).all()
