"""How long features take, against forming ΔW and against just reading the file.

Both sides of each ratio are timed in the same run on generated adapters: all modules of the pocket target at
rank 16 and one block of Llama-3.1-8B shapes at rank 64, bf16. Short sides count
their best of some repetitions.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lora_spec.checkpoint import BaseGeometry, LoraModule, read_adapter
from lora_spec.checkpoint.geometry import BLOCK_OF, MODULE_TYPES
from lora_spec.features import feature_row, singular_values

POCKET = BaseGeometry(30, 576, 9, 3, 64, 1536, 49152)
LARGE = BaseGeometry(1, 4096, 32, 8, 128, 14336, 128256)
_SEED = 0


def _best(action: Callable[[], Any], repetitions: int) -> float:
    """Least wall seconds of some repetitions."""
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return min(times)


def _write(directory: Path, base: BaseGeometry, rank: int) -> Path:
    """A bf16 adapter on every projection of ``base`` with random factors."""
    rng = np.random.default_rng(_SEED)
    header: dict[str, Any] = {}
    pieces, place = [], 0
    for layer in range(base.num_layers):
        for kind in MODULE_TYPES:
            out, into = base.shapes[kind]
            name = f"base_model.model.model.layers.{layer}.{BLOCK_OF[kind]}.{kind}_proj"
            for side, shape, size in (("A", (rank, into), into**-0.5), ("B", (out, rank), 0.01)):
                array = rng.standard_normal(shape, dtype=np.float32) * np.float32(size)
                piece = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
                header[f"{name}.lora_{side}.weight"] = {
                    "dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + len(piece)],
                }  # fmt: skip
                place += len(piece)
                pieces.append(piece)
    directory.mkdir(parents=True)
    text = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(pieces)
    )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "generated"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@contextmanager
def _adapters() -> Iterator[list[tuple[Path, BaseGeometry]]]:
    with tempfile.TemporaryDirectory() as root:
        yield [
            (_write(Path(root) / "pocket", POCKET, 16), POCKET),
            (_write(Path(root) / "large", LARGE, 64), LARGE),
        ]


def _dense(module: LoraModule) -> np.ndarray:
    delta = module.scale * (module.read_b() @ module.read_a())
    return np.linalg.svd(delta, compute_uv=False)[: module.rank]


def _gram(module: LoraModule) -> np.ndarray:
    return singular_values(module.read_a(), module.read_b(), module.scale)


def run() -> dict[str, Any]:
    """Time the features; about 15 s on two idle cores, nearly all of it the dense SVD of one 1024×4096 ΔW.

    ``gram_vs_dense_svd``: seconds of a dense SVD of a formed ΔW over those of the singular values from its
    factors, one k_proj of each adapter. ``gram_vs_file_read``: seconds of reading and all features of the
    large adapter over those of reading its file, warm.

    Returns:
        {"ratios": {name: {"value", "goal", "sense"}}, "seconds": {side: best}}.

    Raises:
        AssertionError: the two ways disagree, so that their times must not be compared.
    """
    with _adapters() as adapters:
        path, base = adapters[-1]
        file = path / "adapter_model.safetensors"
        features_s = _best(lambda: feature_row(read_adapter(path, base, full=False)), 7)
        read_s = _best(file.read_bytes, 7)
        gram_s = dense_s = 0.0
        for path, base in adapters:
            module = next(m for m in read_adapter(path, base, full=False).modules if m.module_type == "k")
            begin = time.perf_counter()
            exact = _dense(module)
            dense_s += time.perf_counter() - begin
            np.testing.assert_allclose(_gram(module), exact, rtol=1e-3)
            gram_s += _best(lambda module=module: _gram(module), 7)
    return {
        "ratios": {
            "gram_vs_dense_svd": {"value": dense_s / gram_s, "goal": 1000.0, "sense": ">="},
            "gram_vs_file_read": {"value": features_s / read_s, "goal": 20.0, "sense": "<="},
        },
        "seconds": {"features": features_s, "file_read": read_s, "gram": gram_s, "dense_svd": dense_s},
    }
