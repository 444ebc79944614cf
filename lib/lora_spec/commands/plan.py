"""`lora-spec plan`: what is declared of a tier that is not executed here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lora_spec.tier_plan import TierPlan

_Tier = Annotated[str, typer.Option("--tier", help="colab or paper.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def plan(tier: _Tier = "paper", as_json: _Json = False) -> None:
        """Check and print the plan of a tier that needs a GPU: models, adapters, screens, cost, what is open.

        Class contract: nothing of it is run here. Exits with 2 when its files contradict each other.
        """
        from dataclasses import asdict

        from lora_spec.tier_plan import plan_tier

        made = plan_tier(tier)
        if as_json:
            items = [asdict(item) | {"state": item.state} for item in made.items]
            typer.echo(json.dumps(asdict(made) | {"items": items}, indent=2))
        else:
            print_plan(made)
        if made.problems:
            raise typer.Exit(2)


def show_planned_only(tier: str, execute: bool) -> None:
    """What a command does with a tier that is only planned: show its plan, or refuse to run it.

    Raises:
        LoraSpecError: it was to be run; says all that is missing.
    """
    from lora_spec.tier_plan import plan_tier, refuse_to_execute

    if execute:
        refuse_to_execute(tier)
    print_plan(plan_tier(tier))


def print_plan(plan: TierPlan) -> None:
    """A plan on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    for what in ("model", "adapter"):
        table = Table(title=f"Tier {plan.tier}: {what}s on the hub ({plan.evidence_class}: nothing was run)")
        for name in (what, "repository", "licence", "state"):
            table.add_column(name, overflow="fold")
        items = [item for item in plan.items if item.what == what]
        for item in items:
            table.add_row(item.name, item.repo or "", item.licence or "", item.state)
        if items:
            console.print(table)
    lines = [
        f"{screen.pair} ({screen.role}, params/{screen.design}): {screen.own} recipes of ours, "
        f"{screen.named} public adapters named, {screen.open} open; {screen.domains} domains of "
        f"{screen.families} families; {screen.requests} requests; about {screen.measure_gpu_h:.0f} GPU-h "
        f"to measure and {screen.train_gpu_h:.0f} to train on {screen.gpu}"
        for screen in plan.screens
    ]
    headings = {
        "Screens (hours are estimates from assumed rates, nothing is measured)": lines,
        "These contradict each other": plan.problems,
        "Unfrozen": plan.unfrozen,
    }
    for heading, told in headings.items():
        if told:
            console.print(f"{heading}: {len(told)}")
            for line in told:
                console.print(f"  {line}", markup=False)
    console.print("Nothing of it runs before all of it is settled: lora-spec freeze.")
