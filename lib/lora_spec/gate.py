"""From a predicted change of acceptance to an action: green, amber, red or abstain.

The action is the depth with the best expected goodput at the load in question. The gate abstains when
something about the adapter is outside what can be judged, or when the decision could lose too much somewhere
in the predicted interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lora_spec.cost import CostProfile
from lora_spec.params import StrictModel, load_params
from lora_spec.provenance import EvidenceClass

DECISION_SCHEMA = "lora-spec-decision/1"


class Phase1Effect(StrictModel):
    """Thresholds of the GO / INVESTIGATE / STOP decision, see `lora_spec.acceptance.decide_effect`."""

    level: Annotated[float, Field(gt=0.5, lt=1.0)]
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)]
    power: Annotated[float, Field(gt=0.5, lt=1.0)]
    relative_effects: Annotated[tuple[float, ...], Field(min_length=1)]


class GateParams(StrictModel):
    """``params/gate.yaml``; shares of goodput in 0..1."""

    schema_: Literal["lora-spec-gate/1"] = Field(alias="schema")
    cost_profile: str
    max_regret: Annotated[float, Field(gt=0.0, lt=1.0)]
    min_gain: Annotated[float, Field(ge=0.0, lt=1.0)]
    interval_points: Annotated[int, Field(ge=3, le=1001)]
    abstain_depth: Annotated[int, Field(ge=0)]
    phase1_effect: Phase1Effect


def load_gate_params(path: str = "gate.yaml") -> GateParams:
    """Read and check ``params/gate.yaml``."""
    return load_params(GateParams, path)


class Action(StrEnum):
    """What serving should do with an adapter."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"
    ABSTAIN = "abstain"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class DecisionReason(_Model):
    """Machine-readable code and a sentence for a person."""

    code: str
    sentence: str


class Interval(_Model):
    """A point and its interval, in the unit of the quantity."""

    point: float
    low: float
    high: float


class DepthGoodput(_Model):
    """Expected output tokens per second at one depth: at the point prediction and over the interval."""

    depth: int
    tokens_per_s: float
    low: float
    high: float


class Decision(_Model):
    """The answer for one adapter under one cost profile and load.

    ``alpha`` is the profile's own base acceptance moved by the predicted change, clipped to 0..1. ``regret``
    is the share of the best goodput lost by ``depth``: at the point prediction, and the least and most over
    the interval. Both are null without a prediction.
    """

    schema_: Literal["lora-spec-decision/1"] = Field(default=DECISION_SCHEMA, alias="schema")
    action: Action
    depth: int
    reasons: tuple[DecisionReason, ...]
    load: int
    cost_profile: str
    evidence_class: EvidenceClass
    default_depth: int
    alpha_base: float
    alpha: Interval | None
    delta_alpha: Interval | None
    goodput: tuple[DepthGoodput, ...]
    regret: Interval | None


def decide(
    delta: Interval | None,
    profile: CostProfile,
    load: int,
    params: GateParams,
    abstain: Sequence[DecisionReason] = (),
) -> Decision:
    """Choose action and depth.

    Args:
        delta: predicted change of α with its interval, or None where no prediction could be made.
        profile: costs and base acceptance of the served pair.
        load: concurrent requests, within the profile's range.
        params: thresholds.
        abstain: reasons to abstain whatever the prediction says; required where ``delta`` is None.

    Raises:
        ParamsError: the load is outside the profile's range.
        ValueError: neither a prediction nor a reason to abstain.
    """
    profile.check_load(load)
    if delta is None:
        if not abstain:
            raise ValueError("no prediction and no reason to abstain")
        return _decision(
            Action.ABSTAIN, min(params.abstain_depth, profile.default_depth), abstain, profile, load
        )

    depths = range(profile.default_depth + 1)
    # No change exceeds ±1, and beyond that the goodput is flat: only that part of the interval is searched.
    low, high, middle = np.clip([delta.low, delta.high, delta.point], -1.0, 1.0)
    grid = np.union1d(np.linspace(low, high, params.interval_points), [middle])
    point = int(np.searchsorted(grid, middle))
    table = np.stack([profile.goodput(load, k, grid) for k in depths])
    depth = _best_depth(table[:, point], params.min_gain)
    regret = 1.0 - table[depth] / table.max(axis=0)
    if regret.max() > params.max_regret:
        too_wide = DecisionReason(
            code="interval_too_wide",
            sentence=f"Depth {depth} could lose {regret.max():.0%} of the goodput inside the interval, more "
            f"than the {params.max_regret:.0%} allowed.",
        )
        abstain = [*abstain, too_wide]
    if abstain:
        depth = min(params.abstain_depth, profile.default_depth)
        regret = 1.0 - table[depth] / table.max(axis=0)
        action, reasons = Action.ABSTAIN, list(abstain)
    else:
        action = Action.RED if depth == 0 else Action.AMBER if depth < profile.default_depth else Action.GREEN
        reasons = _why(action, depth, table[:, point], profile, load, params)
    moved = np.clip(profile.acceptance.alpha_base + np.array([delta.point, delta.low, delta.high]), 0.0, 1.0)
    return _decision(
        action,
        depth,
        reasons,
        profile,
        load,
        alpha=Interval(point=moved[0], low=moved[1], high=moved[2]),
        delta_alpha=delta,
        goodput=tuple(
            DepthGoodput(depth=k, tokens_per_s=row[point], low=row.min(), high=row.max())
            for k, row in zip(depths, table, strict=True)
        ),
        regret=Interval(point=regret[point], low=regret.min(), high=regret.max()),
    )


def _best_depth(goodput: np.ndarray, min_gain: float) -> int:
    """Depth with the best goodput, or the default (the last) where nothing beats it by ``min_gain``."""
    best = int(np.argmax(goodput))
    return best if goodput[best] > (1.0 + min_gain) * goodput[-1] else len(goodput) - 1


def _why(
    action: Action, depth: int, goodput: np.ndarray, profile: CostProfile, load: int, params: GateParams
) -> list[DecisionReason]:
    default = profile.default_depth
    more = f"{goodput[depth] / goodput[default] - 1.0:.0%} more goodput than the default {default}"
    at = f"at load {load} under {profile.name}"
    if action is Action.GREEN:
        return [
            DecisionReason(
                code="default_depth_best",
                sentence=f"No shorter depth beats the default {default} by {params.min_gain:.0%} {at}.",
            )
        ]
    if action is Action.AMBER:
        reasons = [
            DecisionReason(
                code="shorter_depth_pays",
                sentence=f"Depth {depth} is expected to give {more}, {at}.",
            )
        ]
    else:
        reasons = [
            DecisionReason(
                code="no_depth_pays",
                sentence=f"No speculation is expected to give {more}, and more than any shorter depth, {at}.",
            )
        ]
    unadapted = np.array([float(profile.goodput(load, k)) for k in range(default + 1)])
    if _best_depth(unadapted, params.min_gain) == depth:
        reasons.append(
            DecisionReason(
                code="same_without_effect",
                sentence="The same depth is best for an adapter without effect: load and costs decide here.",
            )
        )
    return reasons


def _decision(
    action: Action,
    depth: int,
    reasons: Sequence[DecisionReason],
    profile: CostProfile,
    load: int,
    *,
    alpha: Interval | None = None,
    delta_alpha: Interval | None = None,
    goodput: tuple[DepthGoodput, ...] = (),
    regret: Interval | None = None,
) -> Decision:
    return Decision(
        action=action,
        depth=depth,
        reasons=tuple(reasons),
        load=load,
        cost_profile=profile.name,
        evidence_class=profile.evidence_class,
        default_depth=profile.default_depth,
        alpha_base=profile.acceptance.alpha_base,
        alpha=alpha,
        delta_alpha=delta_alpha,
        goodput=goodput,
        regret=regret,
    )
