"""`lora-spec bench`: run benchmarks and record their ratios."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def bench(
        names: Annotated[
            list[str] | None, typer.Argument(help="Benchmarks; all that can run when none.")
        ] = None,
        list_only: Annotated[bool, typer.Option("--list", help="Print the names and run nothing.")] = False,
    ) -> None:
        """Time pairs of implementations in one run, and write results/bench/NAME.json.

        A missed goal is reported, not an error. Without names, benchmarks of an absent tier are left out.
        """
        from rich.console import Console
        from rich.table import Table

        from lora_spec.bench import Ratio, bench_names, run_bench
        from lora_spec.errors import MissingTierError

        if list_only:
            typer.echo("\n".join(bench_names()))
            return
        rows: list[tuple[str, Ratio]] = []
        for name in names or bench_names():
            try:
                rows += [(name, ratio) for ratio in run_bench(name)]
            except MissingTierError as error:
                if names:
                    raise
                typer.echo(f"left out: {error}", err=True)
        table = Table("benchmark", "ratio", "value", "goal", "met?")
        for name, ratio in rows:
            goal = "-" if ratio.goal is None else f"{ratio.sense} {ratio.goal:g}"
            met = {True: "yes", False: "no", None: "-"}[ratio.met]
            table.add_row(name, ratio.name, f"{ratio.value:.3g}", goal, met)
        Console().print(table)
