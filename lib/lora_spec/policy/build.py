"""From diagnoses to a policy."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lora_spec.errors import ParamsError
from lora_spec.files import sha256_file
from lora_spec.gate import Action
from lora_spec.params import validate
from lora_spec.paths import params_dir
from lora_spec.policy.schema import BASE_DRAFTER, POLICY_SCHEMA, BasePolicy, Policy, Serve

if TYPE_CHECKING:
    from lora_spec.diagnose import Diagnosis

SET_BY_HAND = "set_by_hand"
DRAFTER_BY_HAND = "drafter_adapter_by_hand"


def build_policy(
    diagnoses: Mapping[str, Diagnosis],
    *,
    drafter_adapters: Mapping[str, str] | None = None,
    depths: Mapping[str, int] | None = None,
    default: Serve | None = None,
    base: BasePolicy | None = None,
    base_model: str | None = None,
) -> Policy:
    """A policy out of diagnoses made with one predictor, cost profile and load.

    Args:
        diagnoses: target adapter's name, as the server calls it -> its diagnosis.
        drafter_adapters: target adapter's name -> drafter adapter to use. A red adapter then speculates at
            the profile's default depth: red was said of the unadapted drafter.
        depths: target adapter's name -> depth, set by hand; it beats the gate and is recorded as a reason.
        default: for adapters not listed; default: the engine's own depth.
        base: for requests without an adapter; default: the engine's own depth.
        base_model: needed where the adapters name different bases, or none.

    Raises:
        ParamsError: nothing to decide about, an override of an unknown adapter, or no one base model.
        ValueError: diagnoses of different predictors, profiles or loads.
    """
    drafter_adapters, depths = drafter_adapters or {}, depths or {}
    if not diagnoses:
        raise ParamsError("no adapter to write a policy for", code="policy")
    for name in {**drafter_adapters, **depths}:
        if name not in diagnoses:
            raise ParamsError(
                "an override of an adapter that is not given",
                where=name,
                fix=f"Given: {', '.join(diagnoses)}",
                code="policy",
            )
    some = next(iter(diagnoses.values()))
    source, decision = some.predictor, some.decision
    if len({(d.predictor.sha256, d.decision.cost_profile, d.decision.load) for d in diagnoses.values()}) > 1:
        raise ValueError("diagnoses of different predictors, cost profiles or loads")
    profile = params_dir() / "cost_profiles" / f"{decision.cost_profile}.yaml"
    entries = {
        name: _entry(diagnosis, depths.get(name), drafter_adapters.get(name))
        for name, diagnosis in diagnoses.items()
    }
    raw = {
        "schema": POLICY_SCHEMA,
        "base_model": base_model or _base_model(diagnoses),
        "default": (default or Serve()).model_dump(),
        "base": (base or BasePolicy()).model_dump(),
        "adapters": entries,
        "predictor": {"file": source.file, "sha256": source.sha256},
        "cost_profile": {"name": decision.cost_profile, "sha256": sha256_file(profile)},
        "load": decision.load,
        "evidence_class": some.evidence_class,
        "created_utc": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }
    return validate(Policy, raw, where="the new policy")


def _entry(diagnosis: Diagnosis, depth: int | None, drafter: str | None) -> dict[str, object]:
    decision = diagnosis.decision
    action, chosen, default = decision.action, decision.depth, decision.default_depth
    said = f"the gate said {action}, depth {chosen}"
    by_hand = []
    if depth is not None:
        by_hand.append((SET_BY_HAND, f"Depth {depth} was set by hand; {said}."))
        action = Action.RED if depth == 0 else Action.AMBER if depth < default else Action.GREEN
        chosen = depth
    elif drafter not in (None, BASE_DRAFTER) and action is Action.RED:
        chosen = default
    if drafter is not None:
        text = f"Drafter adapter {drafter} was named by hand; {said}, of the drafter without it."
        by_hand.append((DRAFTER_BY_HAND, text))
    reasons = [*by_hand, *((item.code, item.sentence) for item in decision.reasons)]
    return {
        "content_hash": diagnosis.adapter.content_hash,
        "action": action,
        "depth": chosen,
        "drafter_adapter": drafter,
        "reasons": [{"code": code, "sentence": sentence[:2_000]} for code, sentence in reasons],
    }


def _base_model(diagnoses: Mapping[str, Diagnosis]) -> str:
    named = sorted({d.adapter.base for d in diagnoses.values() if d.adapter.base is not None})
    if len(named) == 1:
        return named[0]
    raise ParamsError(
        f"the adapters name {'different bases' if named else 'no base'}",
        where=", ".join(named) or None,
        fix="Give --base-model if one server is to serve them all",
        code="policy",
    )
