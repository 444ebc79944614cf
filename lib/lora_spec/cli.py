"""The `lora-spec` script: it registers the commands, and turns known errors into one line and an exit code.

Exit codes: 0 done; 2 a known error (bad input, missing tier, a full disk, a file that cannot be opened) or
wrong usage; 130 interrupted. Anything else is a defect and shows its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

from lora_spec import __version__
from lora_spec.commands import register_all
from lora_spec.errors import LoraSpecError, printable

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ENVIRONMENT = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
# Typer keeps the class of wrong usage to itself; its base is what all such errors share.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name or a Greek letter must not end the program
            stream.reconfigure(errors="backslashreplace")
    try:
        code = build_app()(standalone_mode=False)
    except LoraSpecError as error:
        _fail(str(error))
    except _UsageError as error:
        _show_usage(error)
    except BrokenPipeError:
        # Whoever read the output has left; keep the interpreter from flushing into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno in _DISK_FULL:
            _fail(f"disk full ({error.filename or 'while writing'}). Free some space and run it again")
        if error.errno not in _ENVIRONMENT or error.filename is None:
            raise
        _fail(f"{error.strerror} ({error.filename}). Check the path and its permissions")
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _show_usage(error: Exception) -> None:
    """Wrong usage as one line; a group without a command prints its help, which Typer has in the message."""
    message = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if not message or "\n" in message:
        print(message, file=sys.stderr)
        sys.exit(2)
    hint = f". Try '{context.command_path} --help'" if context else ""
    _fail(message.rstrip(".") + hint)


def _fail(line: str) -> None:
    print(f"lora-spec: error: {printable(line)}", file=sys.stderr)
    sys.exit(2)
