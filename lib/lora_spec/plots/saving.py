"""Write a figure as PDF and PNG whose bytes depend on the data and the installed packages alone."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from lora_spec.files import atomic_write_bytes
from lora_spec.outputs import Stamp, output_dir
from lora_spec.paths import rel
from lora_spec.plots.style import style


@dataclass(frozen=True)
class SavedFigure:
    """The files of one figure; a notebook shows the very PNG that was written."""

    pdf: Path
    png: Path

    def __repr__(self) -> str:
        return f"{rel(self.pdf)}, {self.png.name}"

    def _repr_png_(self) -> bytes:
        return self.png.read_bytes()


def save_figure(figure: Figure, name: str, stamp: Stamp) -> SavedFigure:
    """Write ``figures/<name>.pdf`` and ``.png``.

    No time, host or path enters the files. Evidence class and tier stand in their metadata too.

    Raises:
        EvidenceError: smoke evidence on its way into the checkout's own figures.
    """
    folder = output_dir(stamp)
    metadata = {
        "pdf": {"CreationDate": None, "Title": name, "Subject": stamp.text},
        "png": {"Software": None, "Title": name, "Description": stamp.text},
    }
    paths = {}
    for kind, fields in metadata.items():
        buffer = io.BytesIO()
        with style():
            figure.savefig(buffer, format=kind, metadata=fields)
        paths[kind] = folder / f"{name}.{kind}"
        atomic_write_bytes(paths[kind], buffer.getvalue())
    return SavedFigure(**paths)
