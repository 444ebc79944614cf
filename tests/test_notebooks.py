"""The notebooks of phases 1 and 2 run end to end on synthetic records, and refuse what they must."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from lora_spec.errors import ParamsError
from lora_spec.notebook import NotebookError, declared_parameters, load_flat, problems, run_notebook
from lora_spec.params import validate
from lora_spec.phases.parameters import NOTEBOOKS

ROOT = Path(__file__).resolve().parents[1]
MARK = "# NBVAL_CHECK_OUTPUT"


def source(name: str) -> Path:
    return ROOT / "notebooks" / f"{name}.ipynb"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, smoke_results):
    """A checkout of its own, whose build/ holds synthetic records."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    (root / "params").symlink_to(ROOT / "params")
    (root / "build" / "smoke").mkdir(parents=True)
    (root / "build" / "smoke" / "results").symlink_to(smoke_results)
    return root


@pytest.fixture(autouse=True)
def in_checkout(checkout, monkeypatch):
    monkeypatch.setenv("LORA_SPEC_ROOT", str(checkout))
    for name in ("LORA_SPEC_RESULTS", "LORA_SPEC_FIGURES"):
        monkeypatch.delenv(name, raising=False)
    return checkout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_on_the_smoke_tier(name, checkout, tmp_path):
    parameters = load_flat(ROOT / "params" / "tiers" / "smoke.yaml")
    run_notebook(source(name), tmp_path / "out.ipynb", parameters)
    nb = nbformat.read(tmp_path / "out.ipynb", 4)
    assert problems(nb) == []
    shown = "".join(o.get("text", "") for c in nb.cells for o in c.get("outputs", []))
    assert "evidence: smoke" in shown and "controls passed" in shown
    figures = checkout / "build" / "smoke" / "figures"
    assert {path.suffix for path in figures.glob(f"{name}*")} == {".pdf", ".png", ".csv", ".tex"}
    assert not (checkout / "figures").exists()


def test_without_evidence_there_is_one_clear_error_and_no_output(tmp_path):
    with pytest.raises(
        NotebookError, match=r"EvidenceError: no records here \(results/pocket/phase1/effect\)"
    ):
        run_notebook(source("phase1_effect"), tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_is_thin_and_marks_its_results(name):
    nb = nbformat.read(source(name), 4)
    nbformat.validate(nb)
    assert nb.nbformat_minor >= 5
    code = [cell.source for cell in nb.cells if cell.cell_type == "code"]
    for text in code:
        kinds = {type(node) for node in ast.walk(ast.parse(text))}
        assert "print(" not in text
        assert not kinds & {ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While}
        assert (text.startswith(MARK)) == ("tables.show(" in text), text
    defaults = declared_parameters(nb)
    assert validate(NOTEBOOKS[name], defaults, where=name).tier == "pocket"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_misspelt_parameter_is_refused_before_anything_runs(name, tmp_path):
    with pytest.raises(ParamsError, match="no parameter 'teir'"):
        run_notebook(source(name), tmp_path / "out.ipynb", {"teir": "smoke"})
    assert list(tmp_path.iterdir()) == []
