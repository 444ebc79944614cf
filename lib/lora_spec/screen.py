"""The committed evidence of a screen, as one table."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pandas as pd

from lora_spec.errors import EvidenceError
from lora_spec.paths import rel
from lora_spec.provenance import EvidenceClass, Record, load_records, load_table, table_path


def load_screen(
    directory: Path, table: str = "requests", *, allow: Collection[str] = (EvidenceClass.MEASURED,)
) -> tuple[dict[str, Record], pd.DataFrame]:
    """Verified records of a screen by unit, and one table of all their rows.

    Args:
        directory: holds one record a unit.
        table: ``requests`` of an acceptance screen, ``overlap`` of a teacher-forced one.
        allow: evidence classes to accept.

    Raises:
        EvidenceError: no records, no such table, or a record that is damaged or of another class.
    """
    records = load_records(directory, allow=allow)
    paths = {name: directory / f"{name}.json" for name in records}
    frames = [
        load_table(paths[n], table) for n in records if table_path(paths[n], table).name in records[n].files
    ]
    if not frames:
        raise EvidenceError(f"no record here has a table {table}", where=rel(directory))
    return records, pd.concat(frames, ignore_index=True)
