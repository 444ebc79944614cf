"""`lora-spec select-confirm`: choose the adapters that are measured again under other drafters."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("select-confirm")
    def select_confirm(
        execute: Annotated[
            bool, typer.Option("--execute", help="Record the choice; without it it is only printed.")
        ] = False,
    ) -> None:
        """Choose adapters by the rule of params/confirm.yaml, from the committed predictions (analysis tier).

        Records the choice and writes it into the designs; refuses to change it once it was measured.
        """
        from lora_spec import tables
        from lora_spec.paths import rel
        from lora_spec.phases.parameters import NotebookParameters
        from lora_spec.phases.selection import plan_selection, record_path, select

        pocket = NotebookParameters(tier="pocket", evidence_class="measured")
        if not execute:
            chosen, _ = plan_selection(pocket)
            tables.show(chosen, "Plan only. Record it with --execute.")
            return
        chosen, same = select(pocket)
        state = "as it was recorded before" if same else "recorded"
        tables.show(chosen, f"{rel(record_path('pocket'))}: {state}.")
