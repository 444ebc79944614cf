"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Predictor = Annotated[
    Path | None,
    typer.Option("--predictor", help="Predictor file (default: the committed one of the pocket tier)."),
]
Profile = Annotated[
    str | None, typer.Option("--cost-profile", help="Cost profile (default from params/gate.yaml).")
]
Load = Annotated[
    int | None, typer.Option("--load", min=1, help="Concurrent requests (default from the profile).")
]
AllowSmoke = Annotated[
    bool, typer.Option("--allow-smoke", help="Accept a predictor fitted on synthetic numbers.")
]
