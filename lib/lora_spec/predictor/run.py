"""`lora-spec fit`: from committed records to the predictor file, its out-of-fold table and a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from lora_spec.acceptance import label_table
from lora_spec.errors import EvidenceError
from lora_spec.files import canonical_sha256, sha256_file
from lora_spec.models import ModelEntry, PairEntry, load_models
from lora_spec.paths import adapter_dir, rel, results_dir
from lora_spec.pool import load_pool, without_update
from lora_spec.predictor.params import PredictorParams, load_predictor_params
from lora_spec.predictor.paths import predictor_path
from lora_spec.predictor.portable import Base, Drafter, PortablePredictor, save_predictor
from lora_spec.predictor.tables import (
    FEATURES_RECORD,
    TABLE,
    base_geometry,
    compute_features,
    read_features,
    write_features,
)
from lora_spec.provenance import EvidenceClass, Record, load_record, load_table, new_record, write_record
from lora_spec.screen import load_screen

FIT_RECORD = "record.json"
OUT_OF_FOLD = "oof"


@dataclass(frozen=True)
class FitInputs:
    """Everything a fit needs, checked; ``to_compute`` are adapters whose features are not committed."""

    params: PredictorParams
    records: Mapping[str, Record]
    requests: pd.DataFrame
    labels: pd.DataFrame
    content_hashes: Mapping[str, str]
    to_compute: Mapping[str, Path]
    evidence_class: EvidenceClass
    tier: str
    output: Path

    @property
    def pair(self) -> tuple[PairEntry, ModelEntry]:
        """The pair the labels belong to, and its target."""
        models = load_models()
        pair = models.pair(self.params.pair)
        return pair, models.model(pair.target)


@dataclass(frozen=True)
class FitOutcome:
    """What a fit wrote. ``unchanged``: the predictor equals the file that was there, byte for byte."""

    predictor: PortablePredictor
    path: Path
    unchanged: bool


def plan_fit(
    records: Path | None = None,
    adapters: Sequence[Path] = (),
    output: Path | None = None,
    evidence_class: str = EvidenceClass.MEASURED,
) -> FitInputs:
    """Read and check records and find the features; computes and writes nothing.

    Args:
        records: folder with ``screen/`` and, if overlap was scored, ``overlap/``; default
        ``results/pocket/phase2``.
        adapters: folders of adapters whose features shall be computed anew (by folder name); the rest comes
            from the committed features table, or from the adapters in the cache.
        output: folder to write to; default ``results/pocket/phase3``.
        evidence_class: class of the records to accept.

    Raises:
        EvidenceError: no or damaged records, records of another pair or depth, or features that are neither
            committed nor computable.
    """
    params = load_predictor_params()
    allow, source = (EvidenceClass(evidence_class),), records or results_dir("pocket", "phase2")
    found, requests = load_screen(source / "screen", allow=allow)
    overlap = (
        load_screen(source / "overlap", "overlap", allow=allow)[1] if (source / "overlap").is_dir() else None
    )
    _check_pair(found, params)
    families = {recipe.domain: recipe.family for recipe in load_pool().values()}
    labels = label_table(requests, overlap, families=families, base_floor=_base_floor(found))
    labels = labels[~labels["adapter"].isin(without_update())].reset_index(drop=True)
    inputs = FitInputs(
        params=params,
        records=found,
        requests=requests,
        labels=labels,
        content_hashes={name: _content_hash(found, name) for name in labels["adapter"]},
        to_compute={},
        evidence_class=EvidenceClass(evidence_class),
        tier=next(iter(found.values())).tier,
        output=output or results_dir("pocket", "phase3"),
    )
    return _with_missing_features(inputs, {path.resolve().name: path for path in adapters})


def run_fit(inputs: FitInputs) -> FitOutcome:
    """Compute missing features, fit, and write; an unchanged predictor of equal records leaves its own alone.

    Raises:
        EvidenceError: features that do not belong to the measured adapters, or too few domains.
    """
    from threadpoolctl import threadpool_limits

    from lora_spec.predictor.fit import fit_predictor

    pair, target = inputs.pair
    params, directory = inputs.params, inputs.output
    if inputs.to_compute:
        _extend_features(inputs, target, pair.target)
    features = read_features(directory, params, allow=(inputs.evidence_class,))
    _check_identity(features, inputs.content_hashes)
    with threadpool_limits(1):
        fit = fit_predictor(
            features,
            inputs.labels,
            params,
            base=Base(
                key=pair.target,
                names=(target.base_name,),
                hidden_size=target.geometry.hidden_size,
                num_hidden_layers=target.geometry.num_hidden_layers,
            ),
            drafter=Drafter(key=pair.drafter, method=pair.method),
            evidence_class=inputs.evidence_class,
        )
    path = predictor_path(directory, params.mode)
    before = _recorded(directory, inputs.evidence_class)
    save_predictor(path, fit.predictor)
    revisions = {
        "adapters": dict(inputs.content_hashes),
        "records": canonical_sha256({n: r.record_sha256 for n, r in inputs.records.items()}),
    }
    unchanged = before is not None and before.results.get("predictor_sha256") == sha256_file(path)
    if not (unchanged and before.revisions == revisions):
        record = new_record(
            experiment="phase3_fit",
            tier=inputs.tier,
            phase="phase3",
            evidence_class=inputs.evidence_class,
            config={"predictor": params.model_dump(mode="json", by_alias=True)},
            seed=params.seed,
            revisions=revisions,
            covers={
                "adapters": list(inputs.content_hashes.values()),
                "domains": sorted(set(inputs.labels["domain"])),
            },
            results={
                "predictor": path.name,
                "predictor_sha256": sha256_file(path),
                "data_sha256": fit.predictor.training.data_sha256,
                "metrics": fit.predictor.metrics,
            },
        )
        write_record(directory / FIT_RECORD, record, {OUT_OF_FOLD: fit.out_of_fold})
    return FitOutcome(fit.predictor, path, unchanged)


def _recorded(directory: Path, evidence_class: EvidenceClass) -> Record | None:
    """The whole record here; None where there is none, and after a fit that did not end."""
    try:
        return load_record(directory / FIT_RECORD, allow=(evidence_class,))
    except EvidenceError:
        return None


def _check_pair(records: Mapping[str, Record], params: PredictorParams) -> None:
    """The labels must be those the parameters declare: same pair, same depth."""
    pair = load_models().pair(params.pair)
    expected = {"target": pair.target, "drafter": pair.drafter, "num_speculative_tokens": params.k}
    for name, record in records.items():
        design = record.config.get("design", {})
        for key, value in expected.items():
            if design.get(key) != value:
                raise EvidenceError(
                    f"{key} is {design.get(key)!r}, the predictor declares {value!r}",
                    where=name,
                    code="other_pair",
                )


def _content_hash(records: Mapping[str, Record], name: str) -> str:
    """Identity of a measured adapter, from the record of its unit."""
    covered = records[name].covers.adapters if name in records else []
    if len(covered) != 1:
        raise EvidenceError(
            "no record names the content hash of this adapter", where=name, code="no_identity"
        )
    return covered[0]


def _base_floor(records: Mapping[str, Record]) -> float | None:
    floors = {
        record.config["design"].get("controls", {}).get("base_alpha_floor") for record in records.values()
    }
    return max((floor for floor in floors if floor is not None), default=None)


def _with_missing_features(inputs: FitInputs, given: Mapping[str, Path]) -> FitInputs:
    """Find where the features of each labelled adapter come from."""
    names = list(inputs.labels["adapter"])
    if unknown := sorted(set(given) - set(names)):
        raise EvidenceError(f"adapter {unknown[0]} has no label among the records", code="no_label")
    committed: set[str] = set()
    if (inputs.output / FEATURES_RECORD).is_file():
        table = read_features(inputs.output, inputs.params, allow=(inputs.evidence_class,))
        current = dict(zip(table["adapter"], table["content_hash"], strict=True))
        committed = {name for name in names if current.get(name) == inputs.content_hashes.get(name)}
    wanted = {
        name: given.get(name) or adapter_dir(name) for name in names if name in given or name not in committed
    }
    for name, path in wanted.items():
        if not path.is_dir():
            raise EvidenceError(
                f"features of {name} are neither in the committed table nor computable",
                where=rel(path),
                fix="restore the features table, or build the adapter",
                code="features_missing",
            )
    return replace(inputs, to_compute=wanted)


def _extend_features(inputs: FitInputs, target: ModelEntry, base_key: str) -> None:
    computed = compute_features(inputs.to_compute, base_geometry(target))
    _check_identity(computed, inputs.content_hashes)
    if (inputs.output / FEATURES_RECORD).is_file():
        old = load_table(inputs.output / FEATURES_RECORD, TABLE)
        keep = old["adapter"].isin(inputs.labels["adapter"]) & ~old["adapter"].isin(computed["adapter"])
        computed = pd.concat([old[keep], computed], ignore_index=True).sort_values(
            "adapter", ignore_index=True
        )
    write_features(
        inputs.output,
        computed,
        tier=inputs.tier,
        base_key=base_key,
        evidence_class=inputs.evidence_class,
        seed=inputs.params.seed,
    )


def _check_identity(features: pd.DataFrame, hashes: Mapping[str, str]) -> None:
    """Features must be of the very adapters that were measured."""
    for name, digest in zip(features["adapter"], features["content_hash"], strict=True):
        if name in hashes and digest != hashes[name]:
            raise EvidenceError(
                "the adapter on disk is not the one that was measured",
                where=name,
                fix="use the measured adapter, or measure this one",
                code="other_adapter",
            )
