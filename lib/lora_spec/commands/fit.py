"""`lora-spec fit`: fit the weights-only predictor on committed records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Records = Annotated[
    Path | None, typer.Option("--records", help="Folder with screen/ and overlap/ (results/pocket/phase2).")
]
_Adapters = Annotated[
    list[Path] | None,
    typer.Option("--adapters", help="Adapter folder whose features are computed anew (repeatable)."),
]
_Output = Annotated[Path | None, typer.Option("--output", help="Folder to write to (results/pocket/phase3).")]
_Execute = Annotated[
    bool, typer.Option("--execute", help="Fit and write; without it inputs are only checked.")
]
_Class = Annotated[
    str, typer.Option("--evidence-class", help="Class of the records to accept: measured or smoke.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def fit(
        records: _Records = None,
        adapters: _Adapters = None,
        output: _Output = None,
        execute: _Execute = False,
        evidence_class: _Class = "measured",
    ) -> None:
        """Fit the checkpoint-only predictor, with domains left out, and export it as one JSON file.

        Features of adapters that are not on disk come from the committed features table.
        """
        from lora_spec.paths import rel
        from lora_spec.predictor.paths import predictor_path
        from lora_spec.predictor.report import fit_lines
        from lora_spec.predictor.run import plan_fit, run_fit

        if evidence_class not in ("measured", "smoke"):
            raise typer.BadParameter("use measured or smoke", param_hint="--evidence-class")
        inputs = plan_fit(records, adapters or (), output, evidence_class)
        labels = inputs.labels
        typer.echo(
            f"{len(labels)} adapters of {labels['domain'].nunique()} domains, {len(inputs.records)} records "
            f"verified; features of {len(inputs.to_compute)} adapters to be computed, the rest is committed."
        )
        if not execute:
            typer.echo(f"Plan only. With --execute: {rel(predictor_path(inputs.output, inputs.params.mode))}")
            return
        outcome = run_fit(inputs)
        for line in fit_lines(outcome.predictor):
            typer.echo(line)
        state = "reproduced byte for byte" if outcome.unchanged else "written"
        typer.echo(f"{rel(outcome.path)}: {state}.")
