"""`lora-spec doctor`: say which tiers run here."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def doctor(
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
        network: Annotated[bool, typer.Option("--network", help="Also ask the package index.")] = False,
    ) -> None:
        """Say which tiers run here and what the others lack. Exits with 0 whatever it finds."""
        from rich.console import Console
        from rich.table import Table

        from lora_spec.doctor import examine, payload

        reports = examine(network=network)
        if as_json:
            typer.echo(json.dumps(payload(reports), indent=2, ensure_ascii=False))
            return
        console = Console()
        for report in reports.values():
            table = Table(show_header=False, box=None, padding=(0, 1))
            for check in report.checks:
                mark = {"ok": "✓", "note": "·", "missing": "✗"}[check.state]
                fix = f" → {check.fix}" if check.fix and check.state != "ok" else ""
                table.add_row(f"  {mark}", check.name, f"{check.detail}{fix}")
            console.print(
                f"[bold]{report.tier}[/bold]: {'runs here' if report.runs else 'does not run here'}"
            )
            console.print(table, markup=False)
