"""`lora-spec drafter-adapters`: drafter adapters for the pocket tier's layer-drop drafter."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def drafter_adapters(
        names: Annotated[list[str], typer.Argument(help="Adapters of params/adapter_pool.yaml.")],
    ) -> None:
        """Turn target adapters into adapters of the layer-drop drafter, without training.

        Kept layers' tensors are copied under the drafter's layer numbers, into build/cache/drafter-adapters/.
        """
        from lora_spec.paths import rel
        from lora_spec.substrate.layer_drop_adapter import make_drafter_adapters

        for folder in make_drafter_adapters(names):
            typer.echo(rel(folder))
