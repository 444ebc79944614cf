"""`lora-spec dflash`: train and evaluate the DFlash drafter of the pocket target."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Stage(StrEnum):
    """What the command does, in this order."""

    DATA = "data"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def dflash(
        stages: Annotated[
            list[Stage] | None, typer.Argument(help="Stages; all, in order, when none.")
        ] = None,
        execute: Annotated[
            bool, typer.Option("--execute", help="Run; without it the plan is printed.")
        ] = False,
        workers: Annotated[int, typer.Option(min=1, help="Shards at a time, one thread each.")] = 2,
    ) -> None:
        """Train the drafter of params/dflash.yaml: the target's own continuations, then training (cpu tier).

        Saved whole after each unit; a killed run is continued by the next.
        """
        from lora_spec.substrate.dflash.config import load_dflash
        from lora_spec.substrate.dflash.data import run_data

        params = load_dflash()
        chosen = [stage for stage in Stage if stage in (stages or list(Stage))]
        if execute and Stage.DATA in chosen:
            report = run_data(params, workers=workers)
            typer.echo(f"data: {len(report.completed)} units made, {len(report.skipped)} were there")
        if not execute:
            _print_plan(params, chosen)


def _print_plan(params: object, stages: list[Stage]) -> None:
    from rich.console import Console
    from rich.table import Table

    from lora_spec.paths import rel
    from lora_spec.substrate.dflash.data import find_unit_problem, unit_names, unit_path

    table = Table(title="DFlash drafter (plan only; nothing was run)")
    for name in ("stage", "unit", "state", "output"):
        table.add_column(name, no_wrap=name == "unit")
    if Stage.DATA in stages:
        for unit in unit_names(params):
            table.add_row("data", unit, find_unit_problem(params, unit) or "done", rel(unit_path(unit)))
    Console().print(table)
    typer.echo("Run it with --execute.")
