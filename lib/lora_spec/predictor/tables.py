"""The committed features table, opened one mode at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lora_spec.checkpoint import BaseGeometry, read_adapter
from lora_spec.errors import EvidenceError
from lora_spec.features import FEATURES, feature_row
from lora_spec.models import ModelEntry
from lora_spec.paths import rel
from lora_spec.predictor.params import PredictorParams
from lora_spec.provenance import EvidenceClass, load_record, new_record, table_path, write_record

FEATURES_RECORD = "features.json"
TABLE = "adapters"
KEYS = ("adapter", "content_hash")


def base_geometry(entry: ModelEntry) -> BaseGeometry:
    """Shapes of a model of ``params/models.yaml``, as adapters are checked against them."""
    return BaseGeometry.from_hf_config(entry.geometry.model_dump(), name=entry.base_name)


def compute_features(directories: Mapping[str, Path], base: BaseGeometry) -> pd.DataFrame:
    """Checkpoint features of adapters on disk.

    Args:
        directories: adapter folder by name.
        base: what they are checked against.

    Returns:
        One row per adapter in order of name: ``adapter``, ``content_hash`` and every column of `FEATURES`.

    Raises:
        CheckpointError: an adapter is not readable, or has an abstaining reason.
    """
    rows = []
    for name in sorted(directories):
        adapter = read_adapter(directories[name], base)
        rows.append({"adapter": name, "content_hash": adapter.content_hash, **feature_row(adapter)})
    return pd.DataFrame(rows, columns=[*KEYS, *FEATURES])


def write_features(
    directory: Path,
    features: pd.DataFrame,
    *,
    tier: str,
    base_key: str,
    evidence_class: EvidenceClass,
    seed: int,
) -> None:
    """Write the features record and its table."""
    record = new_record(
        experiment="phase3_features",
        tier=tier,
        phase="phase3",
        evidence_class=evidence_class,
        config={"base": base_key, "features": list(FEATURES)},
        seed=seed,
        revisions={"adapters": dict(zip(features["adapter"], features["content_hash"], strict=True))},
        covers={"adapters": features["content_hash"].tolist()},
    )
    write_record(directory / FEATURES_RECORD, record, {TABLE: features})


def read_features(
    directory: Path, params: PredictorParams, *, allow: Collection[str] = (EvidenceClass.MEASURED,)
) -> pd.DataFrame:
    """The columns of one mode, and no other: the rest of the file is never decoded.

    Returns:
        ``adapter``, ``content_hash`` and ``params.columns``.

    Raises:
        EvidenceError: no features record, a damaged one, of another class, or without a declared column.
    """
    path = directory / FEATURES_RECORD
    load_record(path, allow=allow)
    return project(table_path(path, TABLE), params)


def project(path: Path, params: PredictorParams) -> pd.DataFrame:
    """Column projection of a features file to what the mode may see."""
    try:
        return pq.read_table(path, columns=[*KEYS, *params.columns]).to_pandas()[[*KEYS, *params.columns]]
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise EvidenceError("cannot read the features table", where=rel(path), fix=str(error)) from error
