"""`lora-spec diagnose`: what is in an adapter, what it is expected to do to acceptance, and what serving
should do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_spec.checkpoint import Adapter, Reason, Severity, read_adapter
from lora_spec.cost import CostProfile, load_profile
from lora_spec.features import feature_row
from lora_spec.files import sha256_file
from lora_spec.gate import Decision, DecisionReason, Interval, decide, load_gate_params
from lora_spec.models import load_models
from lora_spec.paths import rel
from lora_spec.predictor import PortablePredictor, Prediction, PredictorError, load_predictor
from lora_spec.predictor.tables import base_geometry
from lora_spec.provenance import EvidenceClass

UNTRAINED = "untrained"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class AdapterSummary(_Model):
    """The adapter, by what its folder says. ``name`` is the folder's name, a label only."""

    name: str
    content_hash: str | None
    base: str | None
    peft_type: str
    rank: int
    modules: int
    module_types: tuple[str, ...]


class PredictorSummary(_Model):
    """The predictor that was asked."""

    file: str
    sha256: str
    mode: str
    evidence_class: EvidenceClass
    target: str
    base: str
    drafter: str
    adapters: int
    domains: int


class Note(_Model):
    """A remark that does not decide anything."""

    code: str
    sentence: str
    severity: Literal["warn", "info"]


class Diagnosis(_Model):
    """Everything `lora-spec diagnose` says; its JSON form is stable under ``schema``.

    ``features`` holds the predictor's inputs, empty where the adapter cannot be described. ``prediction`` is
    null where none could be made; an untrained adapter needs none, its effect is zero.
    """

    schema_: Literal["lora-spec-diagnosis/1"] = Field(default="lora-spec-diagnosis/1", alias="schema")
    adapter: AdapterSummary
    features: dict[str, float]
    predictor: PredictorSummary
    prediction: Prediction | None
    decision: Decision
    notes: tuple[Note, ...]
    evidence_class: EvidenceClass

    def payload(self) -> dict[str, Any]:
        """JSON form."""
        return self.model_dump(mode="json", by_alias=True)


def diagnose(
    directory: Path,
    predictor_file: Path,
    profile_name: str | None = None,
    load: int | None = None,
    *,
    allow_smoke: bool = False,
) -> Diagnosis:
    """Read an adapter, predict its effect on acceptance, and decide.

    Args:
        directory: a PEFT adapter folder.
        predictor_file: from `lora-spec fit`.
        profile_name: cost profile; default from ``params/gate.yaml``.
        load: concurrent requests; default from the profile.
        allow_smoke: accept a predictor fitted on synthetic numbers.

    Raises:
        CheckpointError: the folder is no readable adapter.
        PredictorError: no or no valid predictor, one that asks for unknown features; a smoke one without
        ``allow_smoke`` (code ``smoke_predictor``).
        ParamsError: unknown profile, or a load outside it.
    """
    params = load_gate_params()
    profile = load_profile(params.cost_profile if profile_name is None else profile_name)
    load = profile.load.default if load is None else load
    profile.check_load(load)
    predictor = load_predictor(predictor_file)
    if predictor.evidence_class is EvidenceClass.SMOKE and not allow_smoke:
        raise PredictorError(
            "the predictor was fitted on synthetic numbers",
            where=rel(predictor_file),
            fix="ask for it with --allow-smoke if you mean it",
            code="smoke_predictor",
        )
    adapter = _read(directory, predictor)
    abstain = [_plain(item) for item in adapter.reasons if item.severity is Severity.ABSTAIN]
    if not predictor.knows_base(adapter.config.base_model_name):
        abstain.insert(0, _no_predictor(adapter.config.base_model_name, predictor))

    features, prediction, delta = {}, None, None
    if not abstain:
        row = feature_row(adapter)
        predictor.standardised([row])
        features = {feature.name: row[feature.name] for feature in predictor.features}
        if any(item.code == UNTRAINED for item in adapter.reasons):
            delta = Interval(point=0.0, low=0.0, high=0.0)
        else:
            prediction = predictor.predict(row)
            delta = Interval(point=prediction.point, low=prediction.low, high=prediction.high)
            if prediction.unfamiliar:
                abstain.append(_unfamiliar(prediction))
    smoke, target = predictor.evidence_class is EvidenceClass.SMOKE, predictor.target
    return Diagnosis(
        adapter=_summary(adapter),
        features=features,
        predictor=PredictorSummary(
            file=rel(predictor_file),
            sha256=sha256_file(predictor_file),
            mode=predictor.mode,
            evidence_class=predictor.evidence_class,
            target=f"{target.label} at k = {target.k}, T = {target.temperature:g}",
            base=predictor.base.key,
            drafter=predictor.drafter.key,
            adapters=len(predictor.training.adapters),
            domains=len(set(predictor.training.domains)),
        ),
        prediction=prediction,
        decision=decide(delta, profile, load, params, abstain),
        notes=tuple(_notes(adapter, predictor, profile, prediction)),
        evidence_class=EvidenceClass.SMOKE if smoke else profile.evidence_class,
    )


def _read(directory: Path, predictor: PortablePredictor) -> Adapter:
    """Read against the base's shapes if the adapter belongs to the predictor's base, else without any."""
    adapter = read_adapter(directory, full=False)
    if not predictor.knows_base(adapter.config.base_model_name):
        return read_adapter(directory)
    entry = load_models().model(predictor.base.key)
    known = predictor.base.hidden_size, predictor.base.num_hidden_layers
    if known != (entry.geometry.hidden_size, entry.geometry.num_hidden_layers):
        raise PredictorError(
            f"the predictor knows {predictor.base.key} with other shapes than params/models.yaml has",
            fix="fit it again",
            code="other_base",
        )
    return read_adapter(directory, base_geometry(entry))


def _plain(item: Reason) -> DecisionReason:
    return DecisionReason(code=item.code, sentence=item.sentence)


def _no_predictor(base: str | None, predictor: PortablePredictor) -> DecisionReason:
    named = f"names the base {_one_line(base)}" if base else "names no base"
    known = ", ".join(predictor.base.names)
    return DecisionReason(
        code="base_without_predictor",
        sentence=f"The adapter {named}; this predictor knows adapters of {known} only.",
    )


def _unfamiliar(prediction: Prediction) -> DecisionReason:
    outside = f"; outside the training range: {', '.join(prediction.outside)}" if prediction.outside else ""
    return DecisionReason(
        code="out_of_distribution",
        sentence=f"The adapter is unlike those in training: distance {prediction.mahalanobis:.1f} (limit "
        f"{prediction.mahalanobis_threshold:.1f}), {prediction.nearest_distance:.1f} from the nearest, "
        f"{prediction.nearest} (limit {prediction.nearest_threshold:.1f}){outside}.",
    )


def _summary(adapter: Adapter) -> AdapterSummary:
    config = adapter.config
    return AdapterSummary(
        name=_one_line(adapter.directory.resolve().name),
        content_hash=adapter.content_hash,
        base=None if config.base_model_name is None else _one_line(config.base_model_name),
        peft_type=_one_line(config.peft_type),
        rank=config.r,
        modules=len(adapter.modules),
        module_types=tuple(sorted({module.module_type for module in adapter.modules})),
    )


def _notes(
    adapter: Adapter, predictor: PortablePredictor, profile: CostProfile, prediction: Prediction | None
) -> Iterable[Note]:
    if predictor.drafter.key != profile.drafter.key:
        base = f"alpha {profile.acceptance.alpha_base:.3f}, {profile.acceptance.source}"
        yield Note(
            code="effect_transferred",
            sentence=f"The change was learned on {predictor.base.key} with {predictor.drafter.key} and is "
            f"applied here to the base acceptance of {profile.name} ({base}): an assumption, no measurement.",
            severity="warn",
        )
    if prediction is not None and not any(f.coefficient for f in predictor.features):
        yield Note(
            code="constant_prediction",
            sentence=f"Tuning on {len(predictor.training.adapters)} adapters kept no feature: the prediction "
            "is their mean and does not depend on this adapter's weights.",
            severity="warn",
        )
    if prediction is not None and prediction.outside and not prediction.unfamiliar:
        yield Note(
            code="outside_training_range",
            sentence=f"Beyond the range seen in training: {', '.join(prediction.outside)}.",
            severity="warn",
        )
    for item in adapter.reasons:
        if item.severity is not Severity.ABSTAIN:
            yield Note(code=item.code, sentence=item.sentence, severity=item.severity.value)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:200]


def diagnosis_rows(diagnosis: Diagnosis) -> Sequence[tuple[str, str]]:
    """Label and value pairs for a person, in order."""
    adapter, decision, prediction = diagnosis.adapter, diagnosis.decision, diagnosis.prediction
    rows = [
        ("adapter", adapter.name),
        ("content hash", adapter.content_hash or "not computed"),
        ("base", adapter.base or "not named"),
        (
            "update",
            f"{adapter.peft_type}, rank {adapter.rank}, {adapter.modules} modules ({_types(adapter)})",
        ),
    ]
    rows += [(f"feature {name}", f"{value:.4g}") for name, value in diagnosis.features.items()]
    source = diagnosis.predictor
    if prediction is not None:
        rows.append(
            (
                "predicted change of alpha",
                f"{prediction.point:+.3f} [{prediction.low:+.3f}, {prediction.high:+.3f}] "
                f"at {prediction.level:.0%}",
            )
        )
    elif decision.delta_alpha is not None:
        rows.append(("predicted change of alpha", "0 (the adapter changes no weight)"))
    else:
        rows.append(("predicted change of alpha", "none"))
    rows.append(
        (
            "predictor",
            f"{source.file} ({source.mode}, {source.evidence_class}, {source.adapters} adapters of "
            f"{source.domains} domains; {source.target})",
        )
    )
    rows.append(
        (
            "cost profile",
            f"{decision.cost_profile} ({decision.evidence_class}), load {decision.load} requests",
        )
    )
    if decision.alpha is not None:
        rows.append(
            (
                "alpha of the served pair",
                f"{decision.alpha.point:.3f} [{decision.alpha.low:.3f}, {decision.alpha.high:.3f}], base "
                f"{decision.alpha_base:.3f} from the profile",
            )
        )
    if decision.goodput:
        rows.append(
            (
                "goodput by depth (tok/s)",
                ", ".join(f"{g.depth}: {g.tokens_per_s:.0f}" for g in decision.goodput),
            )
        )
    if decision.regret is not None:
        rows.append(("goodput lost at worst", f"{decision.regret.high:.1%} inside the interval"))
    rows.append(("action", f"{decision.action.value}, depth {decision.depth}"))
    rows += [(f"reason {item.code}", item.sentence) for item in decision.reasons]
    rows += [(f"note {item.code}", item.sentence) for item in diagnosis.notes]
    if diagnosis.evidence_class is EvidenceClass.SMOKE:
        rows.append(("SMOKE", "the predictor was fitted on synthetic numbers: nothing here is evidence"))
    return rows


def _types(adapter: AdapterSummary) -> str:
    return ", ".join(adapter.module_types) or "none known"
