"""The collector on the real pocket pair and a real adapter: killed, resumed, repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lora_spec.errors import MissingTierError
from lora_spec.measure.design import load_design
from lora_spec.paths import examples_dir
from lora_spec.provenance import load_record, load_table
from lora_spec.substrate.pocket import DRAFTER, TARGET, require_model

pytestmark = pytest.mark.vllm

ADAPTER = "german-r8-qv-s80"


def small_design(path: Path) -> Path:
    """The committed screen, cut to four prompts of twelve tokens, limits widened to what these support."""
    config = load_design("phase2_screen.yaml").config()
    config |= {
        "adapters": [ADAPTER],
        "max_tokens": 12,
        "own": {"start": 0, "count": 4},
        "general": {"start": 0, "count": 4},
    }
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
    folder = results / "pocket" / "phase2" / "screen"
    run = start(design, results)
    deadline = time.monotonic() + 300
    while not list(folder.glob("*.json")) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    kept = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    assert kept, "no unit was saved before the kill"
    for path in folder.glob("*.json"):
        load_record(path)

    run = start(design, results)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output.decode()
    names = {"control--self-draft", "control--fp32-lossless", "base--german", "base--general", ADAPTER}
    assert {path.stem for path in folder.glob("*.json")} == names
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    for name, data in kept.items():
        assert (folder / name).read_bytes() == data, "a finished unit was measured again"

    unit = folder / f"{ADAPTER}.json"
    before = load_table(unit, "requests")
    assert load_record(unit).results["first_token_changed"].count(True) == 4
    assert before["accepted_emitted"].sum() > 0
    unit.unlink()
    run = start(design, results)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output.decode()
    again = load_table(unit, "requests")
    assert again["output_sha256"].tolist() == before["output_sha256"].tolist()
    assert again["accepted_emitted"].tolist() == before["accepted_emitted"].tolist()
