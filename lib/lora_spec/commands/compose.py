"""`lora-spec compose`: phase 0, which cells of LoRA × speculation work in the pinned vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

_Params = Annotated[str, typer.Option("--params", help="Parameter file, relative to params/.")]
_Execute = Annotated[bool, typer.Option("--execute", help="Run; without it the plan is printed.")]
_Only = Annotated[list[str] | None, typer.Option("--only", help="Run only this cell (repeatable).")]
_Column = Annotated[
    str | None, typer.Option("--column", help="Only this column: stock (vLLM alone) or plugin (with ours).")
]
_Workers = Annotated[int, typer.Option(min=1, help="Batches of cells run at the same time.")]
_Replace = Annotated[bool, typer.Option("--replace-stale", help="Measure stale records again.")]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def compose(
        params: _Params = "phase0_runtime.yaml",
        execute: _Execute = False,
        only: _Only = None,
        column: _Column = None,
        workers: _Workers = 2,
        replace_stale: _Replace = False,
    ) -> None:
        """Try every cell of LoRA x speculation on tiny models in vLLM, stock and with the plugin (cpu tier).

        Each cell runs in a process of its own with a time limit and becomes one record: works and lossless,
        wrong, error, unsupported or not exercised. Saves after every cell and resumes.
        """
        from rich.console import Console
        from rich.table import Table

        from lora_spec.errors import LoraSpecError
        from lora_spec.measure.composability.cells import COLUMNS
        from lora_spec.measure.composability.runner import Runner
        from lora_spec.measure.composability.units import Kind

        if column is not None and column not in COLUMNS:
            raise LoraSpecError(f"no column {column!r}", fix=f"Use {' or '.join(COLUMNS)}")
        runner = Runner(params)
        units = runner.select(only or (), column)
        if execute:
            runner.execute(workers=workers, only=only or (), column=column, replace_stale=replace_stale)
            return
        table = Table(
            title=f"{runner.params.experiment}, vLLM {runner.params.vllm} (plan only; nothing was run)"
        )
        for name in ("cell", *COLUMNS):
            table.add_column(name, no_wrap=True)
        states = {(u.name, u.column): runner.state(u) for u in units if u.kind is Kind.CELL}
        for name in dict.fromkeys(name for name, _ in states):
            table.add_row(name, *(states.get((name, c), "") for c in COLUMNS))
        console = Console()
        console.print(table)
        others = sum(unit.kind is not Kind.CELL for unit in units)
        todo = len(runner.to_do(units))
        console.print(
            f"{len(states)} engines for cells, {others} for references and controls; {todo} of them to run. "
            "Run them with --execute."
        )
