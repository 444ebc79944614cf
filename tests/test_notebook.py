"""Running and cleaning notebooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lora_spec.errors import LoraSpecError, ParamsError
from lora_spec.notebook import (
    NotebookError,
    check_parameters,
    declared_parameters,
    load_flat,
    parse_settings,
    portable,
    problems,
    read_notebook,
    run_notebook,
    strip_metadata,
    write_notebook,
)

ROOT = Path(__file__).resolve().parents[1]
STORED = sorted((ROOT / "notebooks").glob("*.ipynb"))


def nbval(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir"]
    command += [str(paths[0].parent), "--nbval-lax", "--nbval-sanitize-with"]
    command += [str(ROOT / "tests" / "nbval_sanitize.cfg"), *map(str, paths)]
    environment = os.environ | {"LORA_SPEC_FIGURES": str(paths[0].parent / "figures")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


# ---------------------------------------------------------------- parameters


def test_declared_parameters_are_the_assignments_of_the_tagged_cell(make_notebook):
    nb = read_notebook(
        make_notebook("tier = 'pocket'\nseed: int = 3  # for all\npath = f'{tier}'\n", "x = 1")
    )
    declared = declared_parameters(nb)
    assert list(declared) == ["tier", "seed", "path"]
    assert declared["seed"] == 3


@pytest.mark.parametrize("parameters", [None, "def broken(:"])
def test_a_notebook_without_a_parameters_cell_is_refused(make_notebook, parameters):
    with pytest.raises(NotebookError, match="parameters"):
        declared_parameters(read_notebook(make_notebook(parameters, "1")))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"sede": 3}, r"no parameter 'sede'.*Did you mean seed"),
        ({"zzz": 3}, "It declares rate, seed"),
        ({"seed": 1.5}, "'seed' is a int, got the float"),
        ({"seed": True}, "'seed' is a int, got the bool"),
        ({"rate": "high"}, "'rate' is a float"),
    ],
)
def test_unknown_or_mistyped_parameters_are_named(given, match):
    with pytest.raises(ParamsError, match=match):
        check_parameters(given, {"seed": 0, "rate": 0.5})


def test_an_integer_is_a_float_and_none_is_any_type():
    check_parameters({"rate": 1, "limit": 5, "seed": None}, {"rate": 0.5, "limit": None, "seed": 0})


def test_parameter_files_are_flat(tmp_path):
    path = tmp_path / "tier.yaml"
    path.write_text("tier: pocket\ndepths: [1, 2]\n")
    assert load_flat(path) == {"tier": "pocket", "depths": [1, 2]}
    for text in ("a: {b: 1}\n", "- 1\n", "no-name: 1\n", "a: 1\na: 2\n"):
        path.write_text(text)
        with pytest.raises(ParamsError):
            load_flat(path)


def test_settings_are_yaml_values():
    assert parse_settings(["seed=3", "tier=smoke", "hot=true", "name=a=b"]) == {
        "seed": 3,
        "tier": "smoke",
        "hot": True,
        "name": "a=b",
    }
    for text in ("seed", "seed=[1", "seed={a: 1}", "=1"):
        with pytest.raises(ParamsError):
            parse_settings([text])


# ---------------------------------------------------------------- running


def test_a_run_is_repeatable_and_names_no_machine(make_notebook, tmp_path):
    source = make_notebook(
        "seed = 1",
        "import sys, os, tempfile, warnings\nprint(sys.executable, os.getcwd(), object())",
        "warnings.warn('careful')\nprint(seed, os.path.realpath(sys.prefix), tempfile.gettempdir())",
    )
    before = source.read_bytes()
    first, second = tmp_path / "a" / "1.ipynb", tmp_path / "2.ipynb"
    run_notebook(source, first, {"seed": 7})
    run_notebook(source, second, {"seed": 7})
    assert source.read_bytes() == before
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    assert str(tmp_path) not in text and sys.prefix not in text
    assert problems(read_notebook(first)) == []
    outputs = ["".join(o.get("text", "")) for c in read_notebook(first).cells for o in c.outputs]
    assert outputs[0].startswith("<environment>/bin/python"), "the kernel is this environment's own"
    assert any(text.startswith("7 ") for text in outputs)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2.ipynb", "a", "made.ipynb"]


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        ("raise ValueError('no such thing')", r"cell \[2\] failed: ValueError: no such thing"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "kernel died"),
        ("import time; time.sleep(60)", "longer than 2 s"),
    ],
)
def test_a_failing_cell_writes_nothing(make_notebook, tmp_path, cell, match):
    output = tmp_path / "out.ipynb"
    output.write_text("as it was")
    with pytest.raises(NotebookError, match=match):
        run_notebook(make_notebook("seed = 1", cell), output, timeout=2)
    assert output.read_text() == "as it was"


def test_runs_side_by_side_keep_their_kernels_apart(make_notebook, tmp_path):
    """Started in the same instant, as `make -j2` does, each run must talk to its own kernel."""
    source = make_notebook("name = 'none'\n", "print(name)")
    code = "import sys; from pathlib import Path; from lora_spec.notebook import run_notebook; "
    code += "run_notebook(Path(sys.argv[1]), Path(sys.argv[2]), {'name': sys.argv[3]})"
    outputs = {name: tmp_path / f"{name}.ipynb" for name in ("a", "b", "c")}
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(source), str(output), name])
        for name, output in outputs.items()
    ]
    try:
        assert [run.wait(60) for run in runs] == [0, 0, 0]
    finally:
        for run in runs:
            run.kill()
    for name, output in outputs.items():
        assert read_notebook(output).cells[-1].outputs[0].text == f"{name}\n"


def test_the_command_line_refuses_a_misspelt_parameter(make_notebook, tmp_path, cli):
    output = tmp_path / "new" / "out.ipynb"
    done = cli("notebook", "run", make_notebook("seed = 1", "seed"), "-o", output, "-p", "sede=2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "sede" in done.stderr
    assert not output.parent.exists()


def test_the_command_line_shows_the_traceback_of_a_failed_cell(make_notebook, tmp_path, cli):
    source = make_notebook("seed = 1", "def deep():\n    return 1 / 0\ndeep()")
    done = cli("notebook", "run", source, "-o", tmp_path / "out.ipynb")
    assert done.returncode == 2
    assert "return 1 / 0" in done.stderr and "\x1b" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lora-spec: error: cell [2] failed: ZeroDivisionError")


def test_the_smoke_tier_writes_apart(make_notebook, tmp_path):
    source = make_notebook(
        "tier = 'pocket'", "import os\nprint(os.environ.get('LORA_SPEC_FIGURES', 'figures'))"
    )
    for tier, where in (("pocket", "figures"), ("smoke", "./build/smoke/figures")):
        run_notebook(source, tmp_path / "out.ipynb", {"tier": tier})
        assert read_notebook(tmp_path / "out.ipynb").cells[-1].outputs[0].text.strip() == where


def test_a_directory_is_no_output(make_notebook, tmp_path):
    with pytest.raises(NotebookError, match="directory"):
        run_notebook(make_notebook("a = 1", "1 / 0"), tmp_path)


def test_a_missing_or_damaged_notebook_is_one_clear_error(tmp_path):
    for text in (None, "{", '{"cells": 3}'):
        path = tmp_path / "x.ipynb"
        if text is not None:
            path.write_text(text)
        with pytest.raises(LoraSpecError, match="otebook"):
            run_notebook(path, tmp_path / "out.ipynb")


# ---------------------------------------------------------------- cleaning


def test_strip_metadata_removes_who_where_and_when():
    cell = new_code_cell("1", metadata={"tags": ["b", "a"], "execution": {"iopub.status.idle": "2026-01-01"}})
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "ab12"}, "text/plain": "Slider()"}
    cell.outputs = [
        new_output(
            "display_data", data=widget | {"text/html": [f"<p>{Path.home()}/x</p>"], "image/png": "AA=="}
        )
    ]
    nb = new_notebook(
        cells=[cell], metadata={"papermill": {"input_path": str(Path.home() / "x.ipynb")}, "widgets": {}}
    )
    assert problems(nb)
    strip_metadata(nb)
    assert set(nb.metadata) == {"kernelspec", "language_info"}
    assert nb.cells[0].metadata == {"tags": ["a", "b"]}
    data = nb.cells[0].outputs[0].data
    assert data == {"text/plain": "Slider()", "text/html": ["<p>~/x</p>"], "image/png": "AA=="}
    assert problems(nb) == []


def test_portable_leaves_other_paths_alone():
    assert portable("/usr/share and /rootless/x and 0x12") == "/usr/share and /rootless/x and 0x12"


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_notebooks_are_clean_checked_and_parametrized(path):
    nb = read_notebook(path)
    nbformat.validate(nb)
    assert problems(nb) == []
    declared = declared_parameters(nb, path.name)
    for tier in (ROOT / "params" / "tiers").glob("*.yaml"):
        check_parameters(load_flat(tier), declared, f"{path.name} with {tier.name}")
    checked = [c for c in nb.cells if c.cell_type == "code" and c.source.startswith("# NBVAL_CHECK_OUTPUT")]
    assert any(cell.outputs for cell in checked), "no result cell of this notebook is checked"
    assert all(c.execution_count for c in nb.cells if c.cell_type == "code" and c.source.strip())


def test_nbval_passes_a_true_output_and_fails_a_tampered_one(make_notebook):
    paths = [
        make_notebook(None, "# NBVAL_CHECK_OUTPUT\nprint(0.25 + 1)", name=f"{name}.ipynb") for name in "ab"
    ]
    for path, shown in zip(paths, ("1.25", "1.35"), strict=True):
        nb = read_notebook(path)
        nb.cells[0].execution_count = 1
        nb.cells[0].outputs = [new_output("stream", name="stdout", text=f"{shown}\n")]
        write_notebook(nb, path)
    done = nbval(*paths)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout
    assert "1.35" in done.stdout


def test_a_tampered_copy_of_a_stored_notebook_fails(tmp_path):
    """One digit of a checked output changed, in the smallest stored notebook that shows a number there."""
    shift = str.maketrans("123456789", "234567891")

    def text(cell):
        return json.dumps(cell.outputs, ensure_ascii=False)

    def numbered(nb):
        checked = [c for c in nb.cells if c.source.startswith("# NBVAL_CHECK_OUTPUT")]
        return next((c for c in checked if text(c).translate(shift) != text(c)), None)

    paths = sorted(STORED, key=lambda each: each.stat().st_size)
    path, nb = next((path, nb) for path, nb in ((p, read_notebook(p)) for p in paths) if numbered(nb))
    cell = numbered(nb)
    cell.outputs = [nbformat.from_dict(each) for each in json.loads(text(cell).translate(shift))]
    nbformat.write(nb, tmp_path / path.name)
    done = nbval(tmp_path / path.name)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-2000:]
