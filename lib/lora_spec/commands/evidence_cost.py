"""`lora-spec evidence-cost`: what it costs to estimate an adapter's effect, by counting and by scoring."""

from __future__ import annotations

from typing import Annotated

import typer

_Params = Annotated[str, typer.Option("--params", help="Parameter file, relative to params/.")]
_Execute = Annotated[bool, typer.Option("--execute", help="Run; without it the plan is printed and checked.")]
_Only = Annotated[list[str] | None, typer.Option("--only", help="Run only this adapter (repeatable).")]
_Replace = Annotated[bool, typer.Option("--replace-stale", help="Measure stale records again.")]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("evidence-cost")
    def command(
        params: _Params = "evidence_cost.yaml",
        execute: _Execute = False,
        only: _Only = None,
        replace_stale: _Replace = False,
    ) -> None:
        """Time five ways to estimate delta_alpha on the same prompts, one thread (cpu tier; an idle machine).

        One adapter at a time; saves after each and resumes.
        """
        from rich.console import Console
        from rich.table import Table

        from lora_spec.measure.evidence_cost import EvidenceCost
        from lora_spec.paths import rel

        plan = EvidenceCost(params)
        if execute:
            plan.execute(only=only or (), replace_stale=replace_stale)
            return
        names = [plan.unit(name).name for name in only or plan.params.adapters]
        if problems := plan.problems():
            for line in problems:
                typer.echo(line)
            raise typer.Exit(2)
        table = Table(title=f"{plan.params.experiment} (plan only; nothing was run)")
        for name in ("adapter", "domain", "prompts", "state", "record"):
            table.add_column(name, justify="right" if name == "prompts" else "left", overflow="fold")
        for name in names:
            unit = plan.unit(name)
            row = (name, str(unit.domain), str(plan.params.prompts.count), plan.state(name))
            table.add_row(*row, rel(plan.record_path(name)))
        Console().print(table)
        typer.echo("All frozen inputs verified. Run it with --execute on an idle machine: it is timed.")
