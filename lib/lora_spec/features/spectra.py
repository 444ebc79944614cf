"""Singular values of ΔW = s·BA from its factors, never forming ΔW.

With G_A = AAᵀ = LLᵀ and G_B = BᵀB, the squared singular values of BA are the eigenvalues of LᵀG_B L, an r×r
problem. Products square the condition of the factors: where that rounding could be seen in the sum of the
singular values, QR of both factors and an SVD of R_B R_Aᵀ take over.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lora_spec.checkpoint import Adapter, LoraModule
from lora_spec.errors import CheckpointError

# Elements of a factor widened to float64 at a time: bounds memory and stays in the cache.
_BLOCK_ELEMENTS = 1 << 16
# Share of the nuclear norm that rounding of the products may reach before QR takes over.
_TOLERANCE = 1e-6
_WORKERS = 2


@dataclass(frozen=True)
class ModuleSpectrum:
    """Singular values of one module.

    Attributes:
        name, module_type, layer: as in :class:`LoraModule`.
        values: float64, descending, min(rank, in, out) of them, in units of a weight entry; never negative.
    """

    name: str
    module_type: str
    layer: int
    values: np.ndarray


def singular_values(a: np.ndarray, b: np.ndarray, scale: float = 1.0, *, method: str = "auto") -> np.ndarray:
    """Singular values of ``scale * b @ a``.

    Args:
        a: (rank, in), float32 or float64.
        b: (out, rank), float32 or float64.
        scale: s; its sign does not matter.
        method: ``gram``, ``qr``, or ``auto`` (Gram unless its rounding could matter).

    Returns:
        float64, descending, min(rank, in, out) values.

    Raises:
        ValueError: a factor holds NaN or infinity, or the product leaves the range of float64.
    """
    count = min(a.shape[0], a.shape[1], b.shape[0])
    values = _from_gram(a, b, count, strict=method == "auto") if method != "qr" else None
    if values is None:
        values = _from_qr(a, b)[:count]
    values = abs(scale) * values
    if not np.isfinite(values).all():
        raise ValueError("singular values leave the range of float64")
    return values


def _from_gram(a: np.ndarray, b: np.ndarray, count: int, *, strict: bool) -> np.ndarray | None:
    """By Gram products; None where QR should take over (range or, if ``strict``, too much rounding)."""
    with np.errstate(over="ignore", invalid="ignore"):
        g_a, g_b = _gram(a.T), _gram(b)
        size = np.linalg.norm(g_a) * np.linalg.norm(g_b)
    if not 0.0 < size < np.inf:
        return None
    try:
        lower = np.linalg.cholesky(g_a)
    except np.linalg.LinAlgError:  # the rows of A are dependent
        weights, vectors = np.linalg.eigh(g_a)
        lower = vectors * np.sqrt(np.maximum(weights, 0.0))
    squares = np.linalg.eigvalsh(lower.T @ g_b @ lower)[::-1][:count]
    squares = np.maximum(squares, 0.0)
    values = np.sqrt(squares)
    rounding = np.sqrt(squares + np.finfo(np.float64).eps * size) - values
    return None if strict and rounding.sum() > _TOLERANCE * values.sum() else values


def _from_qr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    top_a, top_b = np.abs(a).max(), np.abs(b).max()
    if not (np.isfinite(top_a) and np.isfinite(top_b)):
        raise ValueError("a factor holds NaN or infinity")
    if top_a == 0.0 or top_b == 0.0:
        return np.zeros(a.shape[0])
    r_a = np.linalg.qr(a.T.astype(np.float64) / top_a, mode="r")
    r_b = np.linalg.qr(b.astype(np.float64) / top_b, mode="r")
    with np.errstate(over="ignore"):  # whoever asked looks for infinity and names the tensor
        return np.linalg.svd(r_b @ r_a.T, compute_uv=False) * float(top_a) * float(top_b)


def _gram(tall: np.ndarray) -> np.ndarray:
    """``tall.T @ tall`` in float64, block by block: (n, r) → (r, r)."""
    length, rank = tall.shape
    step = max(1, _BLOCK_ELEMENTS // rank)
    total = np.zeros((rank, rank))
    for start in range(0, length, step):
        block = tall[start : start + step].astype(np.float64)
        total += block.T @ block
    return total


def module_spectra(adapter: Adapter) -> list[ModuleSpectrum]:
    """Spectra of all modules in the adapter's order; each worker holds one pair of factors at a time.

    Raises:
        CheckpointError: ``non_finite``, naming the tensor; those of reading.
    """
    workers = min(_WORKERS, os.cpu_count() or 1)
    with _one_blas_thread(), ThreadPoolExecutor(workers) as pool:
        return list(pool.map(_spectrum, adapter.modules))


def _spectrum(module: LoraModule) -> ModuleSpectrum:
    a, b = module.read_a(), module.read_b()
    try:
        values = singular_values(a, b, module.scale)
    except ValueError as error:
        name = module.b_name if np.isfinite(a).all() else module.a_name
        raise CheckpointError(str(error), where=f"{module.name}: {name}", code="non_finite") from error
    return ModuleSpectrum(module.name, module.module_type, module.layer, values)


@cache
def _blas() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()


def _one_blas_thread() -> AbstractContextManager[Any]:
    """The products are small: whole modules in parallel beat threads inside each product."""
    blas = _blas()
    return blas.limit(limits=1, user_api="blas") if blas else nullcontext()
