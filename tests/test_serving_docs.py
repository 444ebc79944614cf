"""docs/serving.md says what the plugin does, and its example runs as it is written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from lora_spec.serving import FIXES, REPAIRS, channels
from lora_spec.serving.config import DraftLoRAConfig, FixName, ServingConfig
from lora_spec.serving.counters import PREFIX, AcceptanceCounters, Labels

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "serving.md").read_text()
SOURCES = "".join(path.read_text() for path in (ROOT / "lib" / "lora_spec" / "serving").glob("*.py"))
BLOCKS = dict(re.findall(r"^```sh (\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL))


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(title: str) -> list[str]:
    rows = [line.split("|")[1].strip() for line in section(title).splitlines() if line.startswith("| `")]
    return [row.strip("`") for row in rows]


def test_every_key_is_documented_and_no_other() -> None:
    keys = {f"draft_lora.{name}" for name in DraftLoRAConfig.model_fields}
    keys |= set(ServingConfig.model_fields) - {"draft_lora"}
    documented = {key for key in first_cells("Configuration") if not key.startswith("LORA_SPEC")}
    assert documented == keys
    assert channels.ENV_FILE in TEXT and f'additional_config["{channels.KEY}"]' in TEXT


def test_defaults_are_the_documented_ones() -> None:
    for line in section("Configuration").splitlines():
        match = re.match(r"\| `draft_lora\.(\w+)` \| (\d+) \|", line)
        if match:
            assert getattr(DraftLoRAConfig(), match[1]) == int(match[2])


def test_every_repair_is_documented_as_the_doctor_says_it_and_may_be_asked_for() -> None:
    rows = [re.match(r"\| `(\w+)` \| (.+) \|$", line) for line in section("Repairs").splitlines()]
    assert {row[1]: row[2] for row in rows if row} == REPAIRS
    assert set(REPAIRS) == set(FIXES) == set(get_args(FixName))


def test_every_counter_is_documented_and_no_other() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    AcceptanceCounters(registry)
    names = {f"{family.name}_total" for family in registry.collect()}
    assert set(first_cells("Metrics")) == names
    assert all(name.startswith(PREFIX) for name in names)
    for label in ("target_adapter", "draft_adapter", "depth", "model"):
        assert hasattr(Labels(), label) and f"`{label}`" in section("Metrics")


def test_routes_and_codes_exist() -> None:
    for route in re.findall(r"`(?:POST|GET) (/v1/\w+)`", TEXT):
        assert f'"{route}"' in SOURCES, route
    codes = set()
    for line in section("What is refused").splitlines():
        if line.startswith("|") and line.count("|") == 3:
            codes |= set(re.findall(r"`([a-z_0-9]+)`", line.split("|")[2]))
    assert len(codes) > 10
    for code in codes - {"params"}:  # the class's own
        assert f'"{code}"' in SOURCES, code


def run(block: str, port: int) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", BLOCKS[block].replace("8000", str(port))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@contextlib.contextmanager
def serving(port: int, log: Path) -> Any:
    from lora_spec.measure.server import Client

    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", BLOCKS["serve"].replace("8000", str(port))],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 600
        while True:
            with contextlib.suppress(OSError):
                if Client(port).get("/health").status == 200:
                    break
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.vllm
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_example_runs_as_written(tmp_path: Path) -> None:
    from lora_spec.errors import MissingTierError
    from lora_spec.substrate.model_folders import DRAFTER, TARGET, require_model

    try:
        require_model(TARGET), require_model(DRAFTER)
    except MissingTierError as error:
        pytest.skip(str(error))
    assert BLOCKS["setup"].startswith("make pocket\n")  # done: the line above says so
    BLOCKS["setup"] = BLOCKS["setup"].removeprefix("make pocket\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run("setup", port)
    assert "python\tamber\t2\tpython" in run("policy", port)
    with serving(port, tmp_path / "server.log"):
        told = run("ask", port)
    answers = [json.loads("{" + line + "}")["speculative_decoding"] for line in told.splitlines()[:3]]
    assert [(a["draft_depth"], a["draft_adapter"]) for a in answers] == [
        (None, None),
        (4, "german"),
        (2, "python"),
    ]
    assert answers[2]["num_draft_tokens"] <= 2 * answers[2]["num_spec_steps"]
    assert all(a["num_accepted_draft_tokens"] > 0 for a in answers)
    counters = told.splitlines()[3:]
    for target, draft, depth in (
        ("base", "base", "engine"),
        ("german", "german", "4"),
        ("python", "python", "2"),
    ):
        labels = f'depth="{depth}",draft_adapter="{draft}",model="smollm2",target_adapter="{target}"'
        assert any(labels in line and "accepted_tokens_total" in line for line in counters), labels
