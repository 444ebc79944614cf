"""`lora-spec diagnose ADAPTER`: what an adapter does to acceptance, and what serving should do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lora_spec.commands._options import AllowSmoke, Load, Predictor, Profile

_Adapter = Annotated[Path, typer.Argument(help="PEFT adapter folder.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("diagnose")
    def command(
        adapter: _Adapter,
        predictor: Predictor = None,
        cost_profile: Profile = None,
        load: Load = None,
        as_json: _Json = False,
        allow_smoke: AllowSmoke = False,
    ) -> None:
        """Say what an adapter is expected to do to acceptance, and what serving should do: green, amber, red,
        abstain.

        Exits with 0 whatever the decision, and with 2 when the adapter, the predictor or the profile is not
        usable.
        """
        from lora_spec.diagnose import diagnose, diagnosis_rows
        from lora_spec.errors import printable
        from lora_spec.predictor.paths import predictor_path

        result = diagnose(adapter, predictor or predictor_path(), cost_profile, load, allow_smoke=allow_smoke)
        if as_json:
            typer.echo(json.dumps(result.payload(), indent=2, ensure_ascii=False))
            return
        rows = diagnosis_rows(result)
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        if not console.is_terminal:
            for label, value in rows:
                typer.echo(f"{label}: {printable(value)}")
            return
        colours = {"green": "green", "amber": "yellow", "red": "red", "abstain": "magenta"}
        table = Table(
            show_header=False,
            title=f"Decision under {result.decision.cost_profile} ({result.decision.evidence_class})",
        )
        for label, value in rows:
            style = f"bold {colours[result.decision.action.value]}" if label == "action" else ""
            table.add_row(Text(label), Text(printable(value), style=style))
        console.print(table)
