"""`lora-spec policy`: write or check the file that tells a server how deep to speculate for each adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from lora_spec.commands._options import AllowSmoke, Load, Predictor, Profile

if TYPE_CHECKING:
    from lora_spec.policy import Policy

T = TypeVar("T")

_Adapters = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=]FOLDER...",
        help="PEFT adapter folders. The server must call an adapter as its folder is called, or NAME.",
    ),
]
_Output = Annotated[Path | None, typer.Option("--output", "-o", help="Policy file to write (JSON).")]
_Check = Annotated[
    Path | None, typer.Option("--check", help="Check this policy file and print it; write nothing.")
]
_Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter-adapter",
        metavar="NAME=DRAFTER",
        help="Serve target adapter NAME with drafter adapter DRAFTER (as the server calls it). Where the "
        "gate says red, of the unadapted drafter, it then speculates at the profile's default depth. "
        "Repeatable.",
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=DEPTH",
        help="Depth of adapter NAME, whatever the gate says; recorded as the reason set_by_hand. Repeatable.",
    ),
]
_Default = Annotated[
    int | None,
    typer.Option(
        "--default-depth", min=0, max=1_000, help="Depth of adapters not listed (default: the engine's own)."
    ),
]
_Base = Annotated[
    int | None,
    typer.Option(
        "--base-depth",
        min=0,
        max=1_000,
        help="Depth of requests without an adapter (default: the engine's own).",
    ),
]
_Model = Annotated[
    str | None,
    typer.Option("--base-model", help="Base model to write down (default: the one that the adapters name)."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("policy")
    def command(
        adapters: _Adapters = None,
        output: _Output = None,
        check: _Check = None,
        cost_profile: Profile = None,
        load: Load = None,
        predictor: Predictor = None,
        drafter_adapter: _Drafters = None,
        set_: _Set = None,
        default_depth: _Default = None,
        base_depth: _Base = None,
        base_model: _Model = None,
        allow_smoke: AllowSmoke = False,
    ) -> None:
        """Write the policy file of a server: action, depth and drafter adapter of each target adapter.

        Each adapter is diagnosed as `lora-spec diagnose` does. A server that was given the file reads it
        again when it changes; requests that are under way keep the depth they started with.
        """
        from lora_spec.diagnose import diagnose
        from lora_spec.policy import BasePolicy, Serve, build_policy, load_policy, write_policy
        from lora_spec.predictor.paths import predictor_path

        if check is not None:
            others = (
                cost_profile,
                load,
                predictor,
                drafter_adapter,
                set_,
                default_depth,
                base_depth,
                base_model,
            )
            if adapters or output is not None or allow_smoke or any(other is not None for other in others):
                raise typer.BadParameter("--check takes neither adapters nor other options")
            _print(load_policy(check))
            return
        if not adapters or output is None:
            raise typer.BadParameter("give adapters and --output, or --check")
        drafters = dict(_pairs(drafter_adapter, "--drafter-adapter"))
        depths = {name: _depth(name, value) for name, value in _pairs(set_, "--set")}
        folders = dict(_unique([_named(adapter) for adapter in adapters], "adapters"))
        file = predictor or predictor_path()
        policy = build_policy(
            {
                name: diagnose(folder, file, cost_profile, load, allow_smoke=allow_smoke)
                for name, folder in folders.items()
            },
            drafter_adapters=drafters,
            depths=depths,
            default=Serve(depth=default_depth),
            base=BasePolicy(depth=base_depth),
            base_model=base_model,
        )
        write_policy(output, policy)
        _print(policy)
        typer.echo(f"wrote {output}")


def _named(adapter: str) -> tuple[str, Path]:
    """NAME=FOLDER, or a folder under its own name; a folder whose name holds an equals sign is a folder."""
    name, found, folder = adapter.partition("=")
    if found and not Path(adapter).is_dir():
        return name, Path(folder)
    return Path(adapter).resolve().name, Path(adapter)


def _pairs(given: Sequence[str] | None, option: str) -> list[tuple[str, str]]:
    # From the right: neither a depth nor a drafter adapter's name needs an equals sign.
    pairs = []
    for item in given or ():
        name, _, value = item.rpartition("=")
        if not (name and value):
            raise typer.BadParameter(f"{option} takes NAME=VALUE, not {item!r}")
        pairs.append((name, value))
    return _unique(pairs, option)


def _unique(pairs: list[tuple[str, T]], where: str) -> list[tuple[str, T]]:
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise typer.BadParameter(f"{where}: the name {twice!r} is given twice")
    return pairs


def _depth(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise typer.BadParameter(f"--set {name}: the depth is a whole number from 0 on, not {value[:20]!r}")
    return int(value)


def _print(policy: Policy) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from lora_spec.errors import printable
    from lora_spec.policy import policy_rows

    rows = policy_rows(policy)
    console = Console()
    if not console.is_terminal:
        for row in rows:
            typer.echo("\t".join(printable(cell) for cell in row))
    else:
        header, *body = rows
        table = Table(*header, title=Text(f"Policy for {printable(policy.base_model)}"))
        for row in body:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
    profile = policy.cost_profile
    made = f"decided under {profile.name} at load {policy.load}" if profile else "no cost profile named"
    typer.echo(f"{made}; evidence: {policy.evidence_class or 'none named'}")
