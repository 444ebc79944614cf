"""`lora-spec soak`: minutes of mixed load on a real server."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def soak(
        minutes: Annotated[float, typer.Option(min=0.1, max=1440, help="Of mixed load.")] = 10.0,
        clients: Annotated[int, typer.Option(min=1, max=64, help="At the same time.")] = 16,
        execute: Annotated[
            bool, typer.Option("--execute", help="Run; without it the plan is printed.")
        ] = False,
    ) -> None:
        """Soak a server: mixed adapters, loading and unloading, policies that change, malformed requests.

        Each adapter is first served alone (a few minutes), to tell later which one made an output. Writes
        results/bench/soak.json (cpu tier).
        """
        from rich.console import Console
        from rich.table import Table

        from lora_spec.errors import EngineError
        from lora_spec.measure.soak import SoakParams, record_soak, run_soak, work_folder
        from lora_spec.measure.soak_world import pocket_world
        from lora_spec.paths import rel

        world = pocket_world()
        params = SoakParams(minutes=minutes, clients=clients)
        if not execute:
            arms, runs = len(world.arms), 1 + params.repeats
            typer.echo(f"{arms} adapters alone, {runs} times {len(world.prompts)} prompts each; then")
            typer.echo(f"{clients} clients for {minutes:g} minutes. Nothing was run; run it with --execute.")
            return
        folder = work_folder()
        result = run_soak(world, params, folder / "server.log", folder, say=typer.echo)
        table = Table("check", "value", "limit", "passed?")
        for check in result.checks:
            table.add_row(check.name, f"{check.value:.4g}", check.limit, "yes" if check.passed else "NO")
        Console().print(table)
        typer.echo(f"wrote {rel(record_soak(world, params, result))}")
        if not result.passed:
            raise EngineError("the soak failed", where=rel(folder / "server.log"), code="soak")
