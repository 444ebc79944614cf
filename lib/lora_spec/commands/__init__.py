"""Commands of the `lora-spec` script: each module defines `register(app)` and does nothing else on import.
Those whose names start with `_` are parts of commands.

A command parses and calls one plain function of the library; heavy imports stay inside its body, so that
`lora-spec --help` is quick and works in every tier.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer


def register_all(app: typer.Typer) -> None:
    """Register the commands of every module in this package, in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    for name in names:
        if not name.startswith("_"):
            importlib.import_module(f"{__name__}.{name}").register(app)
