"""One row of features for an adapter, from the singular values of its modules."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lora_spec.checkpoint import Adapter, Severity
from lora_spec.checkpoint.geometry import BLOCK_OF, MODULE_TYPES
from lora_spec.errors import CheckpointError
from lora_spec.features.catalog import FEATURES, STATISTICS, THIRDS
from lora_spec.features.spectra import ModuleSpectrum, module_spectra


def feature_row(adapter: Adapter, *, strict: bool = True) -> dict[str, float]:
    """All features of an adapter, keys in the order of :data:`FEATURES`.

    They are functions of ΔW = s·BA alone: refactoring (B→BG, A→G⁻¹A), order, files and number formats do not
    count, and a module with ΔW = 0 counts as absent.

    Args:
        adapter: as read.
        strict: refuse an adapter with an abstaining reason, whose numbers would not describe what is served.

    Raises:
        CheckpointError: ``abstained`` (naming the code), or those of :func:`module_spectra`.
    """
    if strict and adapter.abstains:
        worst = next(item for item in adapter.reasons if item.severity is Severity.ABSTAIN)
        raise CheckpointError(
            f"no features for this adapter: {worst.code}",
            where=adapter.directory,
            fix=worst.sentence,
            code="abstained",
        )
    return row_from_spectra(module_spectra(adapter), adapter.num_layers)


def row_from_spectra(spectra: Iterable[ModuleSpectrum], num_layers: int) -> dict[str, float]:
    """The same from spectra already at hand.

    Args:
        spectra: one a module; other types (unsplit fused ones, the fc of a drafter) are left out.
        num_layers: blocks of the base; block i is in third ``3 * i // num_layers``.
    """
    present = [s for s in spectra if s.module_type in MODULE_TYPES and s.values.size and s.values[0] > 0.0]
    table = np.array([_describe(s.values) for s in present])
    cells: dict[tuple[str, str], list[int]] = {}
    for index, spectrum in enumerate(present):
        third = THIRDS[min(3 * spectrum.layer // max(num_layers, 1), 2)]
        kind = spectrum.module_type
        for cell in ((kind, third), (kind, "all"), ("all", third), ("all", "all")):
            cells.setdefault(cell, []).append(index)
        cells.setdefault((BLOCK_OF[kind], ""), []).append(index)

    values = {}
    for (module_type, third), members in cells.items():
        for statistic, value in zip(STATISTICS, _pool(table[members]), strict=True):
            values[f"{statistic}_{module_type}_{third}"] = value
    values["fro_attention"] = values.get("fro_self_attn_", 0.0)
    values["fro_mlp"] = values.get("fro_mlp_", 0.0)
    values["log1p_fro_all_all"] = np.log1p(values.get("fro_all_all", 0.0))
    if present:
        shares = _energy_weights(table)
        depth = float(np.average([s.layer for s in present], weights=shares))
        values["depth_center"] = depth / max(num_layers - 1, 1)
    values["modules"] = len(present)
    values["modules_share"] = len(present) / max(len(MODULE_TYPES) * num_layers, 1)
    return {name: float(values.get(name, 0.0)) for name in FEATURES}


def _describe(values: np.ndarray) -> tuple[float, ...]:
    """Of one module with σ₁ > 0: σ₁, Σσ, Σσ²/σ₁², entropy rank, Σσ²/σ₁² of the first four."""
    energy = np.square(values / values[0])  # relative, so that no square leaves the range of float64
    total = energy.sum()
    share = energy[energy > 0.0] / total
    return values[0], values.sum(), total, np.exp(-(share * np.log(share)).sum()), energy[:4].sum()


def _energy_weights(table: np.ndarray) -> np.ndarray:
    """Σσ² of each module in units of the largest σ₁²."""
    return np.square(table[:, 0] / table[:, 0].max()) * table[:, 2]


def _pool(table: np.ndarray) -> tuple[float, ...]:
    """Values in the order of :data:`STATISTICS` for some modules, one row of :func:`_describe` each."""
    top, nuclear, stable, entropy, first_four = table.T
    weights = _energy_weights(table)
    return (
        top.max() * np.sqrt(weights.sum()),
        top.max(),
        nuclear.sum(),
        stable.mean(),
        entropy.mean(),
        np.average(1.0 / stable, weights=weights),
        np.average(first_four / stable, weights=weights),
        1.0,
    )
