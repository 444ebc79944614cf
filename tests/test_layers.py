"""Imports point one way, and the analysis tier needs neither torch nor vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lora_spec

ROOT = Path(lora_spec.__file__).parent

# Ground floor first. A room may import itself and what stands before it.
ROOMS = (
    "errors",
    "paths",
    "files",
    "params",
    "provenance",
    "screen",
    "evidence",
    "frozen",
    "models",
    "pool",
    "pool_paper",
    "hub",
    "revisions",
    "queue",
    "checkpoint",
    "features",
    "acceptance",
    "predictor",
    "cost",
    "gate",
    "diagnose",
    "policy",
    "outputs",
    "plots",
    "tables",
    "substrate",
    "serving",
    "measure",
    "tier_plan",
    "phases",
    "smoke",
    "notebook",
    "doctor",
    "bench",
    "commands",
    "cli",
)
HEAVY = {"torch", "vllm", "transformers", "peft", "gguf"}


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Names of imported modules; only those outside functions and TYPE_CHECKING blocks if ``top_level``."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if guarded or (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        nodes.append(node)
        stack.extend(ast.iter_child_nodes(node))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_only_point_down() -> None:
    wrong = []
    for path in sources():
        here = room(path)
        if here == "__init__":
            continue
        for name in imports(path, top_level=True):
            parts = name.split(".")
            room_of = parts[1] if parts[0] == "lora_spec" and len(parts) > 1 else None
            if room_of in ROOMS and ROOMS.index(room_of) > ROOMS.index(here):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_every_room_has_its_place() -> None:
    assert {room(p) for p in sources()} - {"__init__"} <= set(ROOMS)


def test_only_measure_and_serving_import_vllm() -> None:
    for path in sources():
        if room(path) not in {"measure", "serving", "bench", "doctor"}:
            assert not {n for n in imports(path, top_level=False) if n.split(".")[0] == "vllm"}, path


def test_everything_the_analysis_needs_imports_without_torch_and_vllm() -> None:
    rooms = [r for r in ROOMS if r not in {"bench"}]
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {HEAVY!r}:
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Blocker())
import importlib
for name in {rooms!r}:
    importlib.import_module('lora_spec.' + name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
