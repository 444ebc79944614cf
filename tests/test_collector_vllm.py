"""The collector on the real pocket pair and a real adapter: killed, resumed, repeated."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from lora_spec.acceptance import label_table
from lora_spec.errors import MissingTierError
from lora_spec.measure.design import EngineParams, load_design
from lora_spec.measure.engine import Completion, EngineSpec, Request
from lora_spec.measure.inputs import Inputs
from lora_spec.measure.lossless import losslessness
from lora_spec.measure.session import Call, run_session
from lora_spec.measure.tiny_models import VOCAB, prompts, save, save_random_adapter, tiny_dflash, tiny_llama
from lora_spec.measure.units import ArmRunner
from lora_spec.paths import examples_dir
from lora_spec.provenance import load_record, load_table
from lora_spec.substrate.model_folders import DRAFTER, TARGET, require_model

pytestmark = pytest.mark.vllm

ADAPTER = "german-r8-qv-s80"


def small_design(path: Path) -> Path:
    """The committed screen, cut to a few prompts of twelve tokens, limits widened to what these support.

    Two depths, fewer greedy prompts than sampled ones, and a stopping rule that is content with the minimum.
    """
    config = load_design("phase2_screen.yaml").config()
    config |= {
        "output": "resume-test",  # logs and locks lie apart from those of a screen that may be running
        "adapters": [ADAPTER],
        "max_tokens": 12,
        "depths": [2],
        "decodings": {"greedy": {"temperature": 0.0, "own": 3, "general": 0}, "t08": {"temperature": 0.8}},
        "precision": {"se": 0.9, "chunk": 4, "minimum": 4},
        "own": {"start": 0, "count": 10},
        "general": {"start": 0, "count": 4},
    }
    config["engine"] |= {"max_num_seqs": 4}
    config["controls"] |= {
        "self_draft_tolerance": 0.2,
        "self_draft_prompts": 4,
        "overlap_tolerance": 0.5,
        "base_alpha_floor": 0.0,
        "fp32_prompts": 2,
        "fp32_adapters": [ADAPTER],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def start(design: Path, results: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-c",
        "from lora_spec.cli import main; main()",
        "measure",
        str(design),
        "--execute",
    ]
    return subprocess.Popen(
        command,
        env=os.environ | {"LORA_SPEC_RESULTS": str(results)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(run: subprocess.Popen[bytes]) -> bytes:
    """Output of a run that is waited for, and ended (with its units) where it takes too long."""
    try:
        return run.communicate(timeout=900)[0]
    finally:
        run.kill()


@pytest.fixture(scope="module")
def ready() -> None:
    try:
        require_model(TARGET), require_model(DRAFTER)
    except MissingTierError as error:
        pytest.skip(f"{error}")
    if not (examples_dir() / ADAPTER).is_dir():
        pytest.fail("the committed example adapter is missing")


def test_a_killed_run_resumes_and_a_repeated_unit_gives_equal_tokens(ready: None, tmp_path: Path) -> None:
    design, results = small_design(tmp_path / "design.yaml"), tmp_path / "results"
    folder = results / "pocket" / "phase2" / "resume-test"
    run = start(design, results)
    deadline = time.monotonic() + 600
    while not list(folder.glob("*.json")) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    kept = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    assert kept, "no unit was saved before the kill"
    for path in folder.glob("*.json"):
        load_record(path)

    run = start(design, results)
    output = finish(run)
    assert run.returncode == 0, output.decode()
    names = {"control--self-draft", "control--fp32-lossless", "base--german", "base--general", ADAPTER}
    assert {path.stem for path in folder.glob("*.json")} == names
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    for name, data in kept.items():
        assert (folder / name).read_bytes() == data, "a finished unit was measured again"

    unit = folder / f"{ADAPTER}.json"
    before = load_table(unit, "requests")
    record = load_record(unit)
    assert record.results["first_token_changed"] == [True] * 3
    assert record.results["precision"]["stopped"] == "precision reached"
    assert set(record.results["lossless"]) == {"german", "german/k2"}
    assert before["accepted_emitted"].sum() > 0
    served = before.groupby(["k", "decoding", "prompt_set"])["prompt_index"].agg(list).to_dict()
    expected = {
        ("t08", "german"): [0, 1, 2, 3],
        ("t08", "general"): [0, 1, 2, 3],
        ("greedy", "german"): [0, 1, 2],
    }
    assert served == {(k, *key): value for k in (2, 4) for key, value in expected.items()}
    assert {prompt.split("/")[0] for prompt in record.covers.prompts} == {"german", "general"}
    assert len(record.covers.prompts) == 8
    base = load_table(folder / "base--german.json", "requests")
    assert len(base) == 2 * (10 + 3)
    greedy = before[before["decoding"] == "greedy"].groupby("prompt_index")["output_sha256"]
    assert (greedy.nunique() == 1).all(), "greedy output depends on the depth"
    labels = label_table(pd.concat([base, load_table(folder / "base--general.json", "requests"), before]))
    assert labels["n_prompts"].tolist() == [4]

    unit.unlink()
    run = start(design, results)
    output = finish(run)
    assert run.returncode == 0, output.decode()
    again = load_table(unit, "requests")
    assert again["output_sha256"].tolist() == before["output_sha256"].tolist()
    assert again["accepted_emitted"].tolist() == before["accepted_emitted"].tolist()


def test_an_adapter_that_was_never_trained_changes_no_logit(ready: None, tmp_path: Path) -> None:
    """Beside the base in one engine its first tokens equal the base's bit for bit; a trained one's do not."""
    null = tmp_path / "null"
    shutil.copytree(examples_dir() / ADAPTER, null)
    weights = load_file(null / "adapter_model.safetensors")
    save_file(
        {name: np.zeros_like(w) if "lora_B" in name else w for name, w in weights.items()},
        null / "adapter_model.safetensors",
    )
    design = load_design(small_design(tmp_path / "design.yaml"))
    runner = ArmRunner(Inputs(design))
    trained = runner.inputs.adapter(ADAPTER)
    unit = runner.inputs.units[-1]
    changed = runner.first_tokens_changed(unit, trained, dtype="bfloat16")
    assert all(changed)
    unchanged = runner.first_tokens_changed(unit, replace(trained, path=null), dtype="bfloat16")
    assert unchanged == [False] * len(changed)


def test_dflash_drafts_are_sampled_losslessly_beside_target_lora(tmp_path: Path) -> None:
    """Where asked to, vLLM draws DFlash drafts from the drafter's distributions, by the request's seeds."""
    model = tiny_llama()
    target = Path(save(model, tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"eos_token_id": VOCAB - 1}))
    adapter = Path(save_random_adapter(model.state_dict(), tmp_path / "adapter", seed=3))
    params = EngineParams(dtype="float32", max_num_seqs=8, max_model_len=64, kv_cache_gib=1, threads=1)
    plain = EngineSpec(target=target, params=params, seed=1, adapter=adapter, max_lora_rank=8)
    drafter = Path(tiny_dflash().save(tmp_path / "drafter"))
    speculative = replace(plain, drafter=drafter, method="dflash", num_speculative_tokens=4)

    def calls(adapted: bool) -> list[Call]:
        def requests(target_seed: int | None, draft_seed: int | None) -> list[Request]:
            return [Request(p, target_seed, draft_seed, adapted) for p in prompts(8)]

        seeds = [(None, None), (5, 6), (5, 6), (5, 7)]
        return [Call(requests(*pair), 0.8 if pair[0] else 0.0, 24, logprobs=2) for pair in seeds]

    def work(completions: list[Completion]) -> list[tuple[list[int], list[int]]]:
        return [(done.tokens, done.steps_accepted) for done in completions]

    expected = run_session(plain, [calls(False)[0], calls(True)[0]]).completions
    found = run_session(speculative, [*calls(False), *calls(True)])
    assert found.fixes["shared_embeddings"] == "applied"
    for reference, got in zip(expected, (found.completions[:4], found.completions[4:]), strict=True):
        greedy, once, again, otherwise = got
        assert losslessness(reference, greedy, near_tie=1e-3)["lossless"]
        assert work(once) == work(again)
        assert work(once) != work(otherwise), "the draft seed does nothing: drafts are not sampled"
        assert sum(sum(done.steps_accepted) for done in got[1]) > 0
    assert [c.tokens for c in expected[0]] != [c.tokens for c in expected[1]], "the adapter does nothing"
