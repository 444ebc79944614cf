"""`lora-spec reproduce`: train and measure a part of the screen again, and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lora_spec.measure.agreement import Report


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def reproduce(
        subset: Annotated[int, typer.Option(min=1, help="How many adapters of the screen.")] = 3,
        execute: Annotated[
            bool, typer.Option("--execute", help="Run; without it the choice is printed.")
        ] = False,
        workers: Annotated[int, typer.Option(min=1, help="Units run at the same time.")] = 2,
    ) -> None:
        """Train a few adapters of the screen again, measure them live, compare with the evidence (cpu tier).

        Which ones is fixed by params/reproduce.yaml. Exit code 1 where something does not reproduce.
        """
        from lora_spec.measure.reproduce import plan_reproduction, run_reproduction
        from lora_spec.paths import rel
        from lora_spec.pool import load_pool

        plan = plan_reproduction(subset)
        recipes = load_pool()
        for name in plan.design.adapters:
            typer.echo(
                f"{name} ({recipes[name].domain}, {recipes[name].family}): {recipes[name].steps} steps"
            )
        if not execute:
            typer.echo(
                f"Plan only; nothing was run. Run it with --execute; it goes to {rel(plan.directory)}."
            )
            return
        report = run_reproduction(plan, workers=workers)
        _print(report)
        if report.failed:
            typer.echo(f"NOT reproduced: {', '.join(report.failed)}.")
            raise typer.Exit(1)
        typer.echo(f"{len(report.reproduced)} of {len(report.effects)} adapters reproduce.")


def _print(report: Report) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(title="Δα̂ at T = 0.8 on the own domain: committed and live (measured)")
    left = ("adapter", "weights", "verdict")
    for name in (*left[:2], "committed", "live", "difference", "allowed", "same outputs", left[2]):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in report.effects.itertuples():
        table.add_row(
            row.adapter,
            report.weights[row.adapter].says,
            f"{row.committed:+.3f} ± {1.96 * row.committed_se:.3f}",
            f"{row.live:+.3f} ± {1.96 * row.live_se:.3f}",
            f"{row.difference:+.3f}",
            f"{row.allowed:.3f}",
            f"{row.same_base:.0%}, {row.same_adapted:.0%}",
            "reproduces" if row.adapter in report.reproduced else "DIFFERS",
        )
    # A file or a pipe has no width to fit into.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
