"""`lora-spec freeze`: look up commits, licences and hashes on the hub, and lock them."""

from __future__ import annotations

from typing import Annotated

import typer

_Execute = Annotated[
    bool, typer.Option("--execute", help="Ask the hub and write; without it the plan is printed.")
]
_Tier = Annotated[str | None, typer.Option("--tier", help="Only this tier (colab, paper).")]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def freeze(execute: _Execute = False, tier: _Tier = None) -> None:
        """Look up the declared hub models and adapters and write their commits to params/frozen.yaml.

        Downloads no weights. What is frozen stays as it is; what is not as declared stays unfrozen and is
        reported (exit code 2). Where the hub cannot be asked, nothing is written. (Prompts are frozen by
        `lora-spec corpora --freeze`.)
        """
        from rich.console import Console
        from rich.table import Table

        from lora_spec.errors import LoraSpecError, printable
        from lora_spec.frozen import LOCK_FILE
        from lora_spec.revisions import freeze as look_up
        from lora_spec.revisions import hub_items
        from lora_spec.tier_plan import PLANNED_TIERS

        if tier is not None and tier not in PLANNED_TIERS:
            known = ", ".join(PLANNED_TIERS)
            raise LoraSpecError(f"nothing of tier {tier!r} is on the hub", fix=f"Tiers: {known}")
        if execute:
            from lora_spec.hub import Hub

            report = look_up(Hub(), tier=tier, say=lambda line: typer.echo(printable(line)))
            typer.echo(f"{len(report.frozen)} frozen now in params/{LOCK_FILE}, {len(report.left)} left")
            for name, problem in report.left.items():
                typer.echo(printable(f"left unfrozen: {name}: {problem}"), err=True)
            if report.left:
                raise typer.Exit(2)
            return
        items = [item for item in hub_items() if tier in (None, *item.tiers)]
        table = Table(title="On the hub (plan only; nothing was looked up)")
        for name in ("name", "repository", "revision", "state"):
            table.add_column(name, overflow="fold")
        for item in items:
            revision = "" if item.revision is None else item.revision[:12]
            table.add_row(item.name, item.repo or "", revision, item.state)
        Console(soft_wrap=True).print(table)
        todo = sum(item.state == "unfrozen" for item in items)
        slots = sum(item.state == "open" for item in items)
        typer.echo(f"{todo} to look up, {slots} open slots to fill by hand. Run it with --execute, online.")
