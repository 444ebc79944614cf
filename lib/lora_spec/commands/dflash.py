"""`lora-spec dflash`: train and evaluate the DFlash drafter of the pocket target."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lora_spec.substrate.dflash.config import DflashParams


class Stage(StrEnum):
    """What the command does, in this order; ``freeze`` only when it is named."""

    DATA = "data"
    TRAIN = "train"
    EVALUATE = "evaluate"
    FREEZE = "freeze"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def dflash(
        stages: Annotated[
            list[Stage] | None,
            typer.Argument(help="Stages; data, train and evaluate when none. freeze pins the weights."),
        ] = None,
        execute: Annotated[
            bool, typer.Option("--execute", help="Run; without it the plan is printed.")
        ] = False,
        workers: Annotated[int, typer.Option(min=1, help="Shards at a time, one thread each.")] = 2,
        delete_data: Annotated[
            bool, typer.Option("--delete-data", help="Then delete what can be made again (7 GB of taps).")
        ] = False,
    ) -> None:
        """Train the drafter of params/dflash.yaml: the target's own continuations, then training (cpu tier).

        Saved whole after each unit; a killed run is continued by the next.
        """
        from lora_spec.substrate.dflash.config import load_dflash

        params = load_dflash()
        chosen = [stage for stage in Stage if stage in (stages or [Stage.DATA, Stage.TRAIN, Stage.EVALUATE])]
        if not execute:
            _print_plan(params, chosen)
            return
        for stage in chosen:
            _run(stage, params, workers)
        if delete_data:
            import shutil

            from lora_spec.substrate.dflash.config import work_dir

            shutil.rmtree(work_dir(), ignore_errors=True)


def _run(stage: Stage, params: DflashParams, workers: int) -> None:
    from lora_spec.measure.dflash import evaluate_drafter, find_evaluation_problem, load_evaluation
    from lora_spec.measure.dflash_card import write_card
    from lora_spec.paths import rel
    from lora_spec.substrate.dflash.data import run_data
    from lora_spec.substrate.dflash.export import freeze_drafter
    from lora_spec.substrate.dflash.train import run_training

    if stage is Stage.DATA:
        report = run_data(params, workers=workers)
        typer.echo(f"data: {len(report.completed)} units made, {len(report.skipped)} were there")
    elif stage is Stage.TRAIN:
        run_training(params, workers=workers)
        typer.echo(rel(write_card(params, load_evaluation())))
    elif stage is Stage.EVALUATE:
        evaluation = load_evaluation()
        if find_evaluation_problem(params, evaluation):
            evaluate_drafter(params, evaluation, say=lambda line: typer.echo(line, err=True))
        typer.echo(rel(write_card(params, evaluation)))
        typer.echo("Speed against the target alone: lora-spec bench dflash")
    else:
        for name, digest in freeze_drafter(params).items():
            typer.echo(f"params/models.yaml: {params.drafter}: {name} {digest}")


def _print_plan(params: DflashParams, stages: list[Stage]) -> None:
    from rich.console import Console
    from rich.table import Table

    from lora_spec.measure.dflash import evaluation_path, find_evaluation_problem, load_evaluation
    from lora_spec.models import load_models
    from lora_spec.paths import rel
    from lora_spec.substrate.dflash.data import find_unit_problem, unit_names, unit_path
    from lora_spec.substrate.dflash.train import find_training_problem, training_path

    rows: list[tuple[Stage, str, str | None, str]] = [
        (Stage.DATA, unit, find_unit_problem(params, unit), rel(unit_path(unit)))
        for unit in unit_names(params)
    ]
    rows.append((Stage.TRAIN, "train", find_training_problem(params), rel(training_path())))
    problem = find_evaluation_problem(params, load_evaluation())
    rows.append((Stage.EVALUATE, "evaluate", problem, rel(evaluation_path())))
    frozen = load_models().model(params.drafter).status == "frozen"
    rows.append((Stage.FREEZE, "freeze", None if frozen else "to do", "params/models.yaml"))
    table = Table(title="DFlash drafter (plan only; nothing was run)")
    for name in ("stage", "unit", "state", "output"):
        table.add_column(name, no_wrap=name == "unit")
    for stage, unit, problem, output in rows:
        if stage in stages:
            table.add_row(stage, unit, problem or "done", output)
    Console().print(table)
    typer.echo("Run it with --execute.")
