"""Run notebooks without a surprise: papermill, where it would only warn, and outputs that name no machine.

Papermill accepts a misspelt parameter, a missing `parameters` cell and `SystemExit(0)`; each is an error
here, found before a kernel starts where it can be, and no output is written. What is written carries no path,
user name, time or random id, so equal runs give equal bytes.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import getpass
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbformat import NotebookNode

from lora_spec.errors import LoraSpecError, ParamsError
from lora_spec.files import atomic_write_text
from lora_spec.params import read_yaml
from lora_spec.paths import rel, repo_root

KERNEL = "python3"
INJECTED = "injected-parameters"
_UNKNOWN = object()
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": KERNEL},
    "language_info": {"name": "python"},
}


class NotebookError(LoraSpecError):
    """A notebook is malformed, or one of its cells failed; `traceback` is the cell's, without colours."""

    default_code = "notebook"
    traceback: str = ""


# ---------------------------------------------------------------- parameters


def read_notebook(path: Path | str) -> NotebookNode:
    """Read a notebook as nbformat 4.

    Raises:
        NotebookError: missing, or not a notebook.
    """
    source = Path(path)
    try:
        return nbformat.read(source, as_version=4)
    except FileNotFoundError as error:
        raise NotebookError("notebook not found", where=rel(source)) from error
    except Exception as error:  # nbformat raises its own, json's and unicode's
        raise NotebookError("not a Jupyter notebook", where=rel(source), fix=str(error)[:200]) from error


def declared_parameters(nb: NotebookNode, where: object = None) -> dict[str, Any]:
    """Name and default of every parameter assigned in the one cell tagged `parameters`.

    A default that is no literal is accepted and checked by no type.

    Raises:
        NotebookError: no cell or several cells carry the tag, or the cell is not Python.
    """
    tagged = [c for c in nb.cells if c.cell_type == "code" and "parameters" in c.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise NotebookError(
            f"{len(tagged)} code cells are tagged `parameters`, one is needed",
            where=where,
            fix="Tag the cell that assigns the defaults",
        )
    try:
        body = ast.parse(tagged[0].source).body
    except SyntaxError as error:
        raise NotebookError(f"the parameters cell is not Python: {error.msg}", where=where) from error
    found: dict[str, Any] = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = _literal(getattr(node, "value", None))
    return found


def _literal(node: ast.expr | None) -> Any:
    try:
        return _UNKNOWN if node is None else ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


def check_parameters(given: Mapping[str, Any], declared: Mapping[str, Any], where: object = None) -> None:
    """Refuse a parameter that the notebook does not declare, or whose type is not its default's.

    Raises:
        ParamsError: naming the first wrong parameter.
    """
    for name, value in given.items():
        if name not in declared:
            close = difflib.get_close_matches(name, declared, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"It declares {', '.join(sorted(declared))}"
            raise ParamsError(f"the notebook has no parameter {name!r}", where=where, fix=hint)
        default = declared[name]
        if default is _UNKNOWN or default is None or value is None:
            continue
        wanted = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
            kinds = type(default).__name__, type(value).__name__
            raise ParamsError(
                f"parameter {name!r} is a {kinds[0]}, got the {kinds[1]} {value!r}", where=where
            )


def load_flat(path: Path | str) -> dict[str, Any]:
    """Read a flat parameter file: names to scalars or lists of scalars, as papermill can inject them.

    Raises:
        ParamsError: nested, not a mapping, or a name that is no Python name.
    """
    return _flat(read_yaml(path), rel(path))


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` strings, values as YAML.

    Raises:
        ParamsError: no `=`, a value that is not YAML or is nested, or a name that is no Python name.
    """
    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals:
            raise ParamsError("expected name=value", where=text)
    return _flat(found, "--set")


def _flat(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ParamsError("expected a mapping of parameters", where=where)
    for name, value in data.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise ParamsError(f"{name!r} is no parameter name", where=where)
        items = value if isinstance(value, list) else [value]
        if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
            raise ParamsError(
                f"parameter {name!r} is nested", where=where, fix="Notebook parameters are flat"
            )
    return dict(data)


# ---------------------------------------------------------------- cleaning


def portable(text: str) -> str:
    """Replace what differs between machines and runs: paths of this machine, memory addresses."""
    temp = re.escape(tempfile.gettempdir())
    text = re.sub(rf"{temp}/ipykernel_\d+/\d+\.py", "<cell>", text)
    places = {
        sysconfig.get_path("purelib"): "<site-packages>",
        sys.prefix: "<environment>",
        sys.base_prefix: "<python>",
        str(repo_root()): ".",
        str(Path.cwd()): ".",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "~",
    }
    for place in sorted(filter(lambda p: len(p) > 1, places), key=len, reverse=True):
        text = re.sub(rf"{re.escape(place)}(?![\w.-])", places[place], text)
    return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x0", text)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return portable(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return NotebookNode({key: _clean(item) for key, item in value.items()})
    return value


def strip_metadata(nb: NotebookNode) -> NotebookNode:
    """Remove, in place, all that tells who ran the notebook, where and when; return it.

    Tags, sources, execution counts and outputs stay; images are kept as they are.
    """
    nb.metadata = NotebookNode(nbformat.from_dict(_NOTEBOOK_METADATA))
    for cell in nb.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode({"tags": sorted(tags)} if tags else {})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = NotebookNode()
            if "data" in output:
                output.data.pop(_WIDGET_VIEW, None)  # refers to a live kernel by a random id
                for kind, data in output.data.items():
                    if not kind.startswith("image/") or kind == "image/svg+xml":
                        output.data[kind] = _clean(data)
            for key in ("text", "evalue", "traceback"):
                if key in output:
                    output[key] = _clean(output[key])
    return nb


def problems(nb: NotebookNode) -> list[str]:
    """What a stored notebook must not have: foreign metadata, a machine's paths, a user's name, an error."""
    found = []
    before = nbformat.writes(nb)
    if nbformat.writes(strip_metadata(nbformat.from_dict(nb))) != before:
        found.append("metadata or paths of the machine it was run on (lora-spec notebook clean)")
    if re.search(r"(/home/|/Users/|/root\b|[A-Z]:\\\\Users)", before):
        found.append("an absolute path of a user")
    user = getpass.getuser()
    if user != "root" and re.search(rf"\b{re.escape(user)}\b", before):
        found.append("the name of the user")
    if any(output.output_type == "error" for cell in nb.cells for output in cell.get("outputs", [])):
        found.append("the output of a failed cell")
    return found


def write_notebook(nb: NotebookNode, path: Path | str) -> None:
    """Write `nb` whole and in one form: sorted keys, one final newline."""
    atomic_write_text(path, nbformat.writes(nb).rstrip("\n") + "\n")


# ---------------------------------------------------------------- running


def run_notebook(
    source: Path | str,
    output: Path | str,
    parameters: Mapping[str, Any] | None = None,
    *,
    timeout: int = 1800,
) -> None:
    """Execute `source` in the kernel of this environment and write the stripped result to `output`.

    Args:
        parameters: overrides of the defaults, injected after the `parameters` cell.
        timeout: seconds one cell may take.

    Raises:
        ParamsError: a parameter the notebook does not declare, or one of another type.
        NotebookError: no `parameters` cell; a cell failed, left early or ran too long. `output` is as it was.
    """
    source, given = Path(source), dict(parameters or {})
    if Path(output).is_dir():
        raise NotebookError("the output is a directory", where=rel(output), fix="Give the name of a file")
    nb = read_notebook(source)
    check_parameters(given, declared_parameters(nb, rel(source)), rel(source))
    ids = iter([cell.get("id") or f"cell-{index}" for index, cell in enumerate(nb.cells)])
    with tempfile.TemporaryDirectory(prefix="lora-spec-") as temporary:
        executed = _execute(source, Path(temporary), given, timeout)
    for cell in executed.cells:
        cell.id = INJECTED if INJECTED in cell.metadata.get("tags", []) else next(ids)
    write_notebook(strip_metadata(executed), output)


def _execute(source: Path, temporary: Path, given: dict[str, Any], timeout: int) -> NotebookNode:
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill import execute_notebook
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    where = rel(source)
    try:
        with _environment(given, temporary):
            executed = execute_notebook(
                str(source.resolve()),
                str(temporary / "executed.ipynb"),
                parameters=given,
                kernel_name=KERNEL,
                language="python",
                progress_bar=False,
                cwd=str(source.resolve().parent),
                execution_timeout=timeout,
                # Sockets in a folder of this run: parallel runs can meet neither on a port nor on a file.
                config=Config(KernelManager={"transport": "ipc", "ip": str(temporary / "kernel")}),
            )
    except PapermillExecutionError as error:
        failure = NotebookError(
            f"cell [{error.exec_count}] failed: {error.ename}: {error.evalue}", where=where
        )
        failure.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        raise failure from error
    except CellTimeoutError as error:
        raise NotebookError(f"a cell took longer than {timeout} s", where=where) from error
    except DeadKernelError as error:
        raise NotebookError(
            "the kernel died", where=where, fix="Out of memory, or the cell ended it"
        ) from error
    except NoSuchKernel as error:
        raise NotebookError(
            "no Jupyter kernel named python3", where=where, fix="Install ipykernel"
        ) from error
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":  # papermill lets SystemExit(0) pass
                raise NotebookError(f"cell [{cell.execution_count}] left with {output.ename}", where=where)
    return executed


@contextlib.contextmanager
def _environment(given: Mapping[str, Any], temporary: Path) -> Iterator[None]:
    """Keep the user's IPython and matplotlib settings out, and the smoke tier's files apart from evidence."""
    build = repo_root() / "build"
    changes = {
        "IPYTHONDIR": str(temporary / "ipython"),
        "MPLCONFIGDIR": str(build / "matplotlib"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    if given.get("tier") == "smoke":
        for name in ("results", "figures"):
            variable = f"LORA_SPEC_{name.upper()}"
            changes[variable] = os.environ.get(variable) or str(build / "smoke" / name)
    before = {name: os.environ.get(name) for name in [*changes, "MPLBACKEND"]}
    os.environ.pop("MPLBACKEND", None)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
