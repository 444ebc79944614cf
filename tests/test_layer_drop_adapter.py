"""The drafter's form of a target adapter: the same ΔW in every layer that the drafter keeps."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from adapter_factory import BASE, random_pairs, write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_spec.checkpoint import read_adapter
from lora_spec.errors import CheckpointError, ParamsError
from lora_spec.paths import examples_dir
from lora_spec.substrate.layer_drop_adapter import drop_adapter_layers, make_drafter_adapters

LAYERS = BASE.num_layers


def drop(source: Path, out: Path, dropped: tuple[int, ...]) -> Path:
    out.mkdir(parents=True)
    drop_adapter_layers(source, out, dropped, layers=LAYERS, base_name="made-up/drafter")
    return out


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dropped=st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS - 1),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
    shards=st.sampled_from([1, 2]),
)
def test_every_kept_layer_keeps_its_factors(
    tmp_path_factory: pytest.TempPathFactory, dropped: set[int], dtype: str, shards: int
) -> None:
    folder = tmp_path_factory.mktemp("drop")
    source = write_adapter(folder / "target", dtype=dtype, shards=shards)
    made = drop(source, folder / "drafter", tuple(dropped))
    kept = [layer for layer in range(LAYERS) if layer not in dropped]
    drafter = replace(BASE, num_layers=len(kept), name="made-up/drafter")
    before, after = read_adapter(source, BASE), read_adapter(made, drafter)
    assert not after.abstains
    assert after.content_hash != before.content_hash
    old = {(module.layer, module.module_type): module for module in before.modules}
    assert len(after.modules) == len(kept) * 7
    for module in after.modules:
        twin = old[kept[module.layer], module.module_type]
        assert module.scale == twin.scale
        np.testing.assert_array_equal(module.read_a(), twin.read_a())
        np.testing.assert_array_equal(module.read_b(), twin.read_b())


def test_chosen_layers_are_renumbered(tmp_path: Path) -> None:
    pairs = random_pairs(layers=range(2, 5))
    source = write_adapter(tmp_path / "target", pairs, layers_to_transform=[2, 3, 4])
    made = drop(source, tmp_path / "drafter", (0, 3))
    config = json.loads((made / "adapter_config.json").read_text())
    assert config["layers_to_transform"] == [1, 2]
    assert config["base_model_name_or_path"] == "made-up/drafter"
    assert {m.layer for m in read_adapter(made).modules} == {1, 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"layers.3.self_attn.q_proj": 4}},
        {"alpha_pattern": {r"layers\.[0-2]\..*": 2}},
        {"target_modules": r".*layers\.(1|2)\..*_proj"},
    ],
    ids=str,
)
def test_layer_numbers_in_patterns_are_refused(tmp_path: Path, changes: dict) -> None:
    source = write_adapter(tmp_path / "target", **changes)
    with pytest.raises(CheckpointError, match="cannot be renumbered"):
        drop(source, tmp_path / "drafter", (1,))


def test_an_adapter_of_dropped_layers_only_is_refused(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "target", random_pairs(layers=range(1, 2)))
    with pytest.raises(CheckpointError, match="no tensor in a layer that the drafter keeps"):
        drop(source, tmp_path / "drafter", (1,))


def test_an_adapter_of_a_deeper_model_is_refused(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "target", random_pairs(layers=range(LAYERS + 1)))
    with pytest.raises(CheckpointError, match=f"layer {LAYERS} is not among"):
        drop(source, tmp_path / "drafter", (0,))


@pytest.mark.parametrize("absolute", [True, False])
def test_a_path_is_no_name_and_its_folder_is_left_alone(
    absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(examples_dir() / "german-r8-qv-s80", tmp_path / "mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ParamsError, match="not a path"):
        make_drafter_adapters([str(folder) if absolute else "../../mine"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_committed_examples_become_drafter_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path))
    (first,) = make_drafter_adapters(["german-r8-qv-s80"])
    side = json.loads((first / "lora_spec.json").read_text())
    adapter = read_adapter(first)
    assert side["content_hash"] == adapter.content_hash
    assert side["made_from"]["name"] == "german-r8-qv-s80"
    assert adapter.num_layers == 26
    (again,) = make_drafter_adapters(["german-r8-qv-s80"])
    assert read_adapter(again).content_hash == adapter.content_hash


@pytest.mark.torch
def test_the_drafter_with_it_is_the_adapted_target_without_the_layers(tmp_path: Path) -> None:
    import peft
    import torch
    from tiny_llama import make_tiny_llama
    from transformers import AutoModelForCausalLM

    from lora_spec.substrate.writing import drop_layers

    def load(folder: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    dropped = (1,)
    target = make_tiny_llama(tmp_path / "target")
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = peft.get_peft_model(load(target), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    adapted.save_pretrained(tmp_path / "adapter")

    drafter, converted = tmp_path / "drafter", tmp_path / "converted"
    drop_layers(target, drafter, dropped)
    converted.mkdir()
    drop_adapter_layers(tmp_path / "adapter", converted, dropped, layers=4, base_name="drafter")

    merged = adapted.merge_and_unload()
    merged.model.layers = torch.nn.ModuleList(
        layer for index, layer in enumerate(merged.model.layers) if index not in dropped
    )
    for index, layer in enumerate(merged.model.layers):
        layer.self_attn.layer_idx = index
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = merged(ids, use_cache=False).logits
        plain = load(drafter)(ids, use_cache=False).logits
        got = peft.PeftModel.from_pretrained(load(drafter), converted)(ids, use_cache=False).logits
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
