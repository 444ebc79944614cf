"""`lora-spec evidence`: list the records and verify their hashes."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def evidence(
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    ) -> None:
        """List the committed evidence by tier, phase and class, and verify the hashes of all of it.

        Exits with 2 when a record or table does not match its hash.
        """
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from lora_spec.errors import printable
        from lora_spec.evidence import collect_evidence

        report = collect_evidence()
        if as_json:
            typer.echo(json.dumps(report.payload(), indent=2))
        else:
            table = Table(title="Evidence")
            columns = ("tier", "phase", "class", "records", "adapters", "domains", "prompts", "cells")
            for name in columns:
                table.add_column(name, justify="left" if name in columns[:3] else "right")
            for group in report.groups:
                table.add_row(*(Text(printable(group[name])) for name in columns))
            console = Console()
            console.print(table)
            console.print(_verdict(len(report.groups), len(report.problems)))
            for name, text in report.problems:
                console.print(f"  {printable(name)}: {printable(text)}", soft_wrap=True, markup=False)
        if not report.hashes_ok:
            raise typer.Exit(2)


def _verdict(groups: int, problems: int) -> str:
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''}:"
    return "all hashes match" if groups else "no records here"
