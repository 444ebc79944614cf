"""`lora-spec adapters`: train the declared adapters."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lora_spec.commands.plan import show_planned_only


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def adapters(
        execute: Annotated[
            bool, typer.Option("--execute", help="Train; without it the plan is printed.")
        ] = False,
        only: Annotated[
            list[str] | None, typer.Option("--only", help="Only this adapter (repeatable).")
        ] = None,
        workers: Annotated[int, typer.Option(min=1, help="Adapters trained at a time, one thread each.")] = 2,
        record_hashes: Annotated[
            bool,
            typer.Option("--record-hashes", help="Write the trained hashes to params/adapter_hashes.yaml."),
        ] = False,
        tier: Annotated[
            str, typer.Option("--tier", help="pocket, or a tier that is only planned here (paper).")
        ] = "pocket",
    ) -> None:
        """Train the LoRA adapters declared in params/adapter_pool.yaml (cpu tier, about 70 CPU-seconds each).

        Saved whole after each adapter; a killed queue is continued by the next.
        """
        from lora_spec.substrate.adapters import plan_adapters, record_hashes_file, train_adapters

        if tier != "pocket":
            show_planned_only(tier, execute)
            return
        if execute:
            train_adapters(only or (), workers=workers)
        states = plan_adapters(only or ())
        _print(states, "Adapter pool" if execute else "Adapter pool (plan only; nothing was trained)")
        if record_hashes:
            typer.echo(f"recorded {record_hashes_file()} adapters in params/adapter_hashes.yaml")
        left = [state for state in states if state.problem]
        if left and not execute:
            seconds = sum(state.cpu_seconds for state in left)
            typer.echo(f"{len(left)} to train, about {seconds:.0f} CPU-seconds. Run it with --execute.")


def _print(states: list, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    weights = {None: "", True: " (as recorded)", False: " (other weights than recorded)"}
    table = Table(title=title)
    left = ("adapter", "note", "state")
    for name in ("adapter", "alpha", "rate", "CPU-s", "note", "state"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for state in states:
        recipe = state.recipe
        table.add_row(
            recipe.name,
            f"{recipe.alpha}{' (rs)' if recipe.rslora else ''}",
            f"{recipe.learning_rate:g}",
            f"{state.cpu_seconds:.0f}",
            state.note,
            state.problem or f"done{weights[state.reproduced]}",
        )
    # A file or a pipe has no width to fit into, and cut names would be of no use there.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
