"""`lora-spec measure` and `lora-spec score`: collect acceptance in vLLM, and teacher-forced overlap."""

from __future__ import annotations

from typing import Annotated

import typer

from lora_spec.commands.plan import show_planned_only

_Design = Annotated[str, typer.Argument(help="Design file, relative to params/ (phase2_screen.yaml).")]
_Execute = Annotated[bool, typer.Option("--execute", help="Run; without it the plan is printed and checked.")]
_Workers = Annotated[int, typer.Option(min=1, help="Units measured at the same time.")]
_Only = Annotated[list[str] | None, typer.Option("--only", help="Run only this unit (repeatable).")]
_Replace = Annotated[bool, typer.Option("--replace-stale", help="Measure stale records again.")]


def _run(
    design: str, task: str, execute: bool, workers: int, only: list[str] | None, replace_stale: bool
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lora_spec.measure.collector import Collector
    from lora_spec.paths import rel
    from lora_spec.tier_plan import planned_tier

    if tier := planned_tier(design):
        show_planned_only(tier, execute)
        return
    collector = Collector(design, task)
    if execute:
        collector.execute(workers=workers, only=only or (), replace_stale=replace_stale)
        return
    problems = collector.problems(only or ())
    console = Console()
    if problems:
        console.print("[bold]These inputs must be mended first:[/bold]")
        for line in problems:
            console.print(f"  {line}", soft_wrap=True, markup=False)
        raise typer.Exit(2)
    title = f"{escape(collector.design.experiment)}: {task} (plan only; nothing was run)"
    table = Table(title=title)
    for name in ("unit", "kind", "requests", "state", "record"):
        table.add_column(name, justify="right" if name == "requests" else "left")
    for row in collector.plan(only or ()):
        table.add_row(row.unit.name, row.unit.kind.value, str(row.requests), row.state, escape(rel(row.path)))
    console.print(table)
    console.print("All frozen inputs verified. Run it with --execute.")


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command()
    def measure(
        design: _Design,
        execute: _Execute = False,
        workers: _Workers = 2,
        only: _Only = None,
        replace_stale: _Replace = False,
    ) -> None:
        """Measure acceptance in vLLM: base and adapted arms on the same frozen prompts (cpu tier).

        Saves after every unit and resumes; refuses runs whose controls fail.
        """
        _run(design, "acceptance", execute, workers, only, replace_stale)

    @app.command()
    def score(
        design: _Design,
        execute: _Execute = False,
        workers: _Workers = 2,
        only: _Only = None,
        replace_stale: _Replace = False,
    ) -> None:
        """Score overlap, agreement and divergences teacher-forced on the frozen windows (cpu tier)."""
        _run(design, "overlap", execute, workers, only, replace_stale)

    @app.command()
    def effect(design: _Design) -> None:
        """Print what a design's records say: Δα of every adapter, with its interval over n prompts."""
        from rich.console import Console
        from rich.table import Table

        from lora_spec.acceptance import label_table
        from lora_spec.measure.design import load_design
        from lora_spec.screen import load_screen

        loaded = load_design(design)
        _, requests = load_screen(loaded.directory())
        labels = label_table(requests).sort_values("delta_alpha")
        table = Table(title=f"{loaded.experiment}: acceptance α at T = 0.8, own domain (measured)")
        for name in ("adapter", "base", "adapted", "Δα ± 95 %", "n"):
            table.add_column(name, justify="left" if name == "adapter" else "right", no_wrap=True)
        for row in labels.itertuples():
            table.add_row(
                row.adapter,
                f"{row.alpha_base:.3f}",
                f"{row.alpha_adapted:.3f}",
                f"{row.delta_alpha:+.3f} ± {1.96 * row.delta_alpha_se:.3f}",
                str(row.n_prompts),
            )
        Console().print(table)
