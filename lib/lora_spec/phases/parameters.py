"""Parameters of notebooks: flat, checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from lora_spec.outputs import Stamp
from lora_spec.params import StrictModel, validate

_IPYTHON = frozenset({"In", "Out"})
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


class NotebookParameters(StrictModel):
    """What every notebook takes, and what ``params/tiers/<tier>.yaml`` holds.

    Attributes:
        tier: whose evidence to read, ``results/<tier>/``.
        evidence_class: the one class of records to accept.
    """

    tier: Literal["smoke", "pocket", "colab", "paper"]
    evidence_class: Literal["measured", "modelled", "contract", "smoke"]

    @model_validator(mode="after")
    def _smoke_stays_apart(self) -> NotebookParameters:
        if (self.tier == "smoke") != (self.evidence_class == "smoke"):
            raise ValueError("smoke evidence belongs to the smoke tier, and only there")
        return self

    @property
    def stamp(self) -> Stamp:
        """What figures and tables of the run say they rest on."""
        return Stamp(self.tier, self.evidence_class)


class ComposabilityParameters(NotebookParameters):
    """``phase0_composability``."""


class EffectParameters(NotebookParameters):
    """``phase1_effect``."""


class ScreenParameters(NotebookParameters):
    """``phase2_screen``.

    Attributes:
        cost_profile: under which decisions are shown, a file of ``params/cost_profiles/``.
        loads: concurrent requests to decide at, within the profile's range.
    """

    cost_profile: str
    loads: list[int] = Field(min_length=1)


class ConfirmParameters(NotebookParameters):
    """``phase2_confirm``."""


class CostParameters(NotebookParameters):
    """``phase2_cost``."""


NOTEBOOKS: dict[str, type[NotebookParameters]] = {
    "phase0_composability": ComposabilityParameters,
    "phase1_effect": EffectParameters,
    "phase2_screen": ScreenParameters,
    "phase2_cost": CostParameters,
    "phase2_confirm": ConfirmParameters,
}
"""Notebook name to the model of its parameters."""

P = TypeVar("P", bound=NotebookParameters)


def read_parameters(model: type[P], namespace: Mapping[str, Any]) -> P:
    """Check what a notebook's first cells defined; call it with ``globals()`` before the rest is defined.

    Every plain value counts as a parameter, so a misspelt one that was injected is seen.

    Raises:
        ParamsError: an unknown, missing or invalid parameter.
    """
    given = {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_") and name not in _IPYTHON and isinstance(value, _PLAIN)
    }
    return validate(model, given, where="notebook parameters")
