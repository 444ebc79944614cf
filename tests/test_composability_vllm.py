"""Phase 0 in real engines: cells that stock vLLM gets wrong, and that are right once the fixes are in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_spec.measure.composability.cells import Cell, load_phase0
from lora_spec.provenance import load_record

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

MIXED = Cell("none", "mixed")
SAMPLED = Cell("draft_model", sampling="sampled")
DYNAMIC = Cell("draft_model", drafter_lora="dynamic")
REFERENCES = [f"references/stock/draft_model-base-{drafter}" for drafter in ("base", "d1", "d2")]


def run(results: Path, *units: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lora_spec.measure.composability.runner", "phase0_runtime.yaml", *units],
        env=os.environ | {"LORA_SPEC_RESULTS": str(results), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    run(folder, "inputs")
    run(folder, *REFERENCES)
    for column in ("stock", "plugin"):
        run(folder, *(f"cells/{column}/{cell.name}" for cell in (MIXED, SAMPLED, DYNAMIC)))
    run(folder, "controls/plugin/planted-draft_model-fields")
    return folder


def verdict(results: Path, folder: str, name: str) -> dict[str, Any]:
    phase = results / load_phase0().tier / "phase0"
    return load_record(phase / folder / f"{name}.json").results


def test_base_requests_beside_adapters_are_silently_wrong_only_in_stock(results: Path) -> None:
    stock, fixed = (verdict(results, column, MIXED.name) for column in ("stock", "plugin"))
    assert (stock["status"], stock["silent"]) == ("wrong", True)
    outputs = stock["checks"]["outputs"]
    assert outputs["base"]["identical"] == 0
    assert all(outputs[t]["identical"] == outputs[t]["requests"] == 27 for t in ("t1", "t2"))
    assert fixed["status"] == "works"


def test_sampled_speculation_is_silently_wrong_only_in_stock(results: Path) -> None:
    stock, fixed = (verdict(results, column, SAMPLED.name) for column in ("stock", "plugin"))
    assert (stock["status"], stock["silent"]) == ("wrong", True)
    found = stock["checks"]["distribution"]["base"]
    assert found["tv"] > 2 * found["limit"]
    assert fixed["status"] == "works" and fixed["checks"]["accepted"] >= 50


def test_drafter_adapters_are_refused_in_stock_and_equal_merged_drafters_with_the_plugin(
    results: Path,
) -> None:
    stock, served = (verdict(results, column, DYNAMIC.name) for column in ("stock", "plugin"))
    assert stock["status"] == "unsupported" and "draft_lora" in stock["how"][0]
    assert served["status"] == "works" and served["checks"]["drafters_differ"]
    assert all(arm["equal"] == arm["requests"] for arm in served["checks"]["acceptance"].values())


def test_requests_on_the_wrong_drafter_adapter_are_seen(results: Path) -> None:
    planted = verdict(results, "controls", "planted-draft_model-fields")
    assert planted["status"] == "wrong"
    outputs = planted["checks"]["outputs"]["base"]
    assert outputs["identical"] == outputs["requests"]  # only acceptance gives it away
