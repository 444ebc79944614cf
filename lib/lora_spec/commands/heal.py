"""`lora-spec heal`: train the LoRA that heals the second drafter."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def heal(
        execute: Annotated[
            bool, typer.Option("--execute", help="Train and measure; without it the plan is printed.")
        ] = False,
    ) -> None:
        """Heal the drafter that lacks eight layers by distillation (cpu tier, half an hour, one thread).

        Writes the LoRA to examples/drafters and its record, and prints what params/models.yaml must pin.
        """
        from lora_spec.measure.healing import plan_healing, run_healing

        if not execute:
            for what, state in plan_healing():
                typer.echo(f"{what}: {state}")
            typer.echo("Plan only. Run it with --execute.")
            return
        pins = run_healing(say=lambda line: typer.echo(line, err=True))
        typer.echo("Pin in params/models.yaml (status: frozen), then run `lora-spec pocket --execute`:")
        typer.echo(f"  source.adapter_sha256: {pins['adapter_sha256']}")
        for name, digest in pins["files"].items():
            typer.echo(f"  files.{name}: {digest}")
        typer.echo(f"  bytes: {pins['bytes']}")
