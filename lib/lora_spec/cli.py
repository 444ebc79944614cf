"""The `lora-spec` script: it registers the commands, and turns known errors into one line and an exit code.

Exit codes: 0 done; 2 a known error (bad input, missing tier, full disk) or wrong usage; 130 interrupted.
Anything else is a defect and shows its traceback.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from lora_spec import __version__
from lora_spec.commands import register_all
from lora_spec.errors import LoraSpecError


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lora-spec {__version__}")
        raise typer.Exit()


def build_app() -> typer.Typer:
    """Return the application with every command of `lora_spec.commands` registered."""
    app = typer.Typer(
        name="lora-spec",
        help="Predict what a LoRA adapter does to speculative decoding, and serve the answer in vLLM.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        """Options of the script itself."""

    register_all(app)
    return app


def main() -> None:
    """Run the script on `sys.argv` and exit."""
    try:
        build_app()()
    except LoraSpecError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(f"disk full ({error.filename or 'while writing'}). Free some space and run it again")


def _fail(line: str) -> None:
    print(f"lora-spec: error: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)
