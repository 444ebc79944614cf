"""`lora-spec notebook`: run a notebook with parameters, or store and clean the committed ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

_Notebooks = Annotated[list[Path], typer.Argument(help="Notebooks.")]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(no_args_is_help=True, help="Run, store and clean notebooks.")
    app.add_typer(group, name="notebook")

    @group.command()
    def run(
        notebook: Annotated[Path, typer.Argument(help="Notebook to execute; it is not changed.")],
        output: Annotated[Path, typer.Option("--output", "-o", help="Where the executed copy is written.")],
        params: Annotated[
            Path | None, typer.Option("--params", "-f", help="Flat YAML file (params/tiers/*.yaml).")
        ] = None,
        settings: Annotated[
            list[str] | None, typer.Option("--set", "-p", help="name=value, over the file (repeatable).")
        ] = None,
        timeout: Annotated[int, typer.Option(min=1, help="Seconds one cell may take.")] = 1800,
    ) -> None:
        """Execute a notebook; an unknown parameter or a failed cell is an error and writes nothing."""
        from lora_spec.notebook import load_flat, parse_settings

        given = (load_flat(params) if params else {}) | parse_settings(settings or [])
        _run(notebook, output, given, timeout)

    @group.command()
    def store(notebooks: _Notebooks) -> None:
        """Execute notebooks with their default parameters and store the cleaned result in place."""
        for path in notebooks:
            _run(path, path, {}, 1800)

    @group.command()
    def clean(notebooks: _Notebooks) -> None:
        """Strip paths, times, user names and widget state from notebooks, in place."""
        from lora_spec.notebook import read_notebook, strip_metadata, write_notebook

        for path in notebooks:
            write_notebook(strip_metadata(read_notebook(path)), path)


def _run(notebook: Path, output: Path, given: dict[str, object], timeout: int) -> None:
    from lora_spec.notebook import NotebookError, run_notebook

    try:
        run_notebook(notebook, output, given, timeout=timeout)
    except NotebookError as error:
        if error.traceback:
            print(error.traceback, file=sys.stderr)
        raise
