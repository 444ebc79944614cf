"""Shared fixtures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the checkout."""
    return ROOT


class Finished(NamedTuple):
    """How a command of the script ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run `lora-spec ARGS` in this process."""
    from lora_spec.cli import main

    def run(*args: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["lora-spec", *map(str, args)])
        capfd.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as leave:
            code = leave.code
        captured = capfd.readouterr()
        return Finished(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture
def make_notebook(tmp_path: Path) -> Callable[..., Path]:
    """Write a notebook whose first cell is tagged `parameters`."""

    def make(parameters: str | None, *sources: str, name: str = "made.ipynb") -> Path:
        cells = [new_code_cell(source) for source in sources]
        if parameters is not None:
            cells.insert(0, new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        path = tmp_path / name
        nbformat.write(new_notebook(cells=cells), path)
        return path

    return make


@pytest.fixture(scope="session")
def smoke_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for `results/` that holds the smoke tier's synthetic records; read it only."""
    from lora_spec.smoke import write_smoke

    folder = tmp_path_factory.mktemp("smoke") / "results"
    write_smoke(folder)
    return folder
