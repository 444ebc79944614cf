"""The DFlash drafter as it is trained and as vLLM serves it: the same drafts, token by token."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from lora_spec.errors import MissingTierError
from lora_spec.measure import dflash as evaluation
from lora_spec.params import read_yaml
from lora_spec.paths import cache_dir, params_dir
from lora_spec.provenance import load_record, load_table
from lora_spec.substrate.dflash.config import load_dflash
from lora_spec.substrate.model_folders import WEIGHTS, model_dir, require_model

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")

K, TOKENS, LENGTH, PROMPTS = 4, 24, 20, 4


def random_drafter(folder: Path) -> Path:
    """The declared drafter with random weights, large enough that the context decides what it drafts."""
    from lora_spec.substrate.dflash.export import export_drafter
    from lora_spec.substrate.dflash.train import load_reader
    from lora_spec.substrate.dflash.weights import checkpoint_weights, initial_parameters

    params = load_dflash()
    reader, norm = load_reader(params)
    generator = torch.Generator().manual_seed(0)
    parameters = initial_parameters(reader.shape, norm, std=0.2, generator=generator)
    for name in (n for n in parameters if n.endswith("norm.weight")):
        parameters[name] *= 1 + 0.2 * torch.randn(parameters[name].shape, generator=generator)
    scale = torch.rand(parameters["fc.weight"].shape[1], generator=generator) * 4 + 0.5
    weights = checkpoint_weights(parameters, reader.shape, scale, torch.bfloat16)
    export_drafter(params, weights, folder)
    return folder


def drafts_in_vllm(folder: Path, target: Path, drafter: Path, prompts: list[list[int]]) -> list[dict]:
    order = {"target": str(target), "drafter": str(drafter), "prompts": prompts}
    (folder / "order.json").write_text(json.dumps(order | {"k": K, "max_tokens": TOKENS}))
    script = Path(__file__).with_name("dflash_drafts_script.py")
    done = subprocess.run(
        [sys.executable, script, folder / "order.json", folder / "answer.json"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "answer.json").read_text())


def test_vllm_drafts_what_the_model_drafts(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from lora_spec.substrate.dflash.generate import load_target
    from lora_spec.substrate.dflash.optimise import Reader
    from lora_spec.substrate.dflash.taps import read_target
    from lora_spec.substrate.dflash.weights import drafter_shape

    params = load_dflash()
    try:
        target = require_model(params.target)
    except MissingTierError as error:
        pytest.skip(str(error))
    drafter = random_drafter(tmp_path / "drafter")
    prompts = np.random.default_rng(1).integers(100, 40000, (PROMPTS, LENGTH)).tolist()
    served = drafts_in_vllm(tmp_path, target, drafter, prompts)

    model = load_target(target).float()
    embedding = model.model.embed_tokens.weight
    reader = Reader(drafter_shape(params), embedding, embedding, params.model.mask_token_id)
    weights = {name: weight.float() for name, weight in load_file(drafter / WEIGHTS).items()}
    compared, moved = 0, 0
    for prompt, answer in zip(prompts, served, strict=True):
        ids = torch.tensor([prompt + answer["tokens"]])
        taps, _, _ = read_target(model, ids, params.model.taps, 1)
        anchors = torch.arange(LENGTH, LENGTH + TOKENS).unsqueeze(0)
        with torch.no_grad():
            ours, late = (
                (reader.drafted(weights, states, ids, anchors, K) @ embedding.T).argmax(-1)[0].tolist()
                for states in (taps, taps.roll(1, dims=1))
            )
        at = 0  # the last known token, counted among those of the output
        for known, drafted in answer["drafts"]:
            assert known == answer["tokens"][at]
            assert drafted == ours[at]
            compared, moved = compared + 1, moved + (drafted != late[at])
            said = answer["tokens"][at + 1 : at + 1 + K]
            right = [a == b for a, b in zip(drafted, said, strict=False)]
            at += 1 + (right.index(False) if False in right else len(right))
            if at >= TOKENS:
                break
    assert compared >= PROMPTS * TOKENS / (K + 1)
    assert moved > compared / 2, "the drafts hardly depend on the context, so that this test shows nothing"


def test_the_evaluation_is_measured_recorded_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_spec.bench import dflash as bench

    made = load_dflash()
    try:
        require_model(made.target)
    except MissingTierError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("LORA_SPEC_CACHE", str(cache_dir()))
    shutil.copytree(params_dir(), tmp_path / "params")
    (tmp_path / "pyproject.toml").touch()
    declared = read_yaml(params_dir() / "dflash.yaml")
    declared["data"] |= {"domains": ["german", "python"], "mixture": ["python"]}
    (tmp_path / "params" / "dflash.yaml").write_text(yaml.safe_dump(declared))
    small = read_yaml(params_dir() / "dflash_evaluation.yaml") | {"max_tokens": 8}
    small |= {"prompts": {"start": 0, "count": 3}, "speed": {"repetitions": 2, "goal": 1.3}}
    (tmp_path / "params" / "dflash_evaluation.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.setenv("LORA_SPEC_ROOT", str(tmp_path))
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    params, declared = load_dflash(), evaluation.load_evaluation()
    random_drafter(model_dir(params.drafter))

    assert evaluation.find_evaluation_problem(params, declared) == "to do"
    evaluation.evaluate_drafter(params, declared)
    assert evaluation.find_evaluation_problem(params, declared) is None
    record = load_record(evaluation.evaluation_path())
    assert record.results["lossless"]["requests"] == 9 and record.results["lossless"]["lossless"]
    assert set(record.results["acceptance"]) == {"greedy", "t08"}
    assert set(record.results["acceptance"]["t08"]) == {"german", "python", "general", "all"}
    assert record.results["goal_met"] is False  # random weights
    table = load_table(evaluation.evaluation_path(), evaluation.TABLE)
    assert len(table) == 18 and (table["drafted"] > 0).all()

    outcome = bench.run()
    assert outcome["ratios"]["dflash_over_plain_batch_1"]["value"] > 0
    assert outcome["prompts"] == 3 and outcome["sides"]["plain"]["tokens"] == 24
    assert outcome["sides"]["dflash"]["draft_steps"] > 0
