"""Every feature: name, unit, family, scope and meaning, in the fixed column order."""

from __future__ import annotations

from dataclasses import dataclass

from lora_spec.checkpoint.geometry import MODULE_TYPES

THIRDS = ("early", "middle", "late")


@dataclass(frozen=True)
class FeatureInfo:
    """What one column means.

    Attributes:
        name: column, ``<statistic>_<module type>_<depth third>``; ``all`` stands for every type or third.
        unit: ``weight`` (unit of a weight entry), ``rank``, ``share`` (0 to 1), ``flag`` (0 or 1),
            ``modules``, ``log weight``.
        family: ``norm``, ``shape`` (of the spectrum, free of size), ``mask`` or ``depth``.
        scope: ``cell`` (type and third), ``type``, ``third`` or ``total``.
        description: one sentence.
    """

    name: str
    unit: str
    family: str
    scope: str
    description: str


# Statistic → unit, family, meaning over the modules of a cell. Modules with ΔW = 0 count as absent.
STATISTICS: dict[str, tuple[str, str, str]] = {
    "fro": ("weight", "norm", "Frobenius norm of ΔW, root of the sum of squares over modules"),
    "spectral": ("weight", "norm", "largest singular value of ΔW over modules"),
    "nuclear": ("weight", "norm", "nuclear norm of ΔW, summed over modules"),
    "stable_rank": ("rank", "shape", "‖ΔW‖_F² / ‖ΔW‖₂², mean over modules (Rudelson and Vershynin 2007)"),
    "entropy_rank": (
        "rank",
        "shape",
        "exp of the entropy of σ²/Σσ², mean over modules (Roy and Vetterli 2007)",
    ),
    "top1": ("share", "shape", "share of Σσ² in the first singular value of each module, all modules pooled"),
    "top4": ("share", "shape", "share of Σσ² in the first four of each module, all modules pooled"),
    "mask": ("flag", "mask", "1 where any module has ΔW ≠ 0"),
}

_EXTRAS = (
    FeatureInfo("log1p_fro_all_all", "log weight", "norm", "total", "log(1 + ‖ΔW‖_F) over all modules"),
    FeatureInfo("fro_attention", "weight", "norm", "type", "Frobenius norm of ΔW over q, k, v, o"),
    FeatureInfo("fro_mlp", "weight", "norm", "type", "Frobenius norm of ΔW over gate, up, down"),
    FeatureInfo("depth_center", "share", "depth", "total", "mean depth of ‖ΔW‖_F² (0 first block, 1 last)"),
    FeatureInfo("modules", "modules", "mask", "total", "number of modules with ΔW ≠ 0"),
    FeatureInfo("modules_share", "share", "mask", "total", "that number over all projections of the base"),
)


def _build() -> dict[str, FeatureInfo]:
    made: list[FeatureInfo] = []

    def add(statistic: str, module_type: str, third: str, scope: str) -> None:
        unit, family, text = STATISTICS[statistic]
        name = f"{statistic}_{module_type}_{third}"
        made.append(FeatureInfo(name, unit, family, scope, f"{text}; types: {module_type}, depth: {third}"))

    for statistic in STATISTICS:
        for module_type in MODULE_TYPES:
            for third in THIRDS:
                add(statistic, module_type, third, "cell")
    for module_type in MODULE_TYPES:
        add("fro", module_type, "all", "type")
    for third in THIRDS:
        add("fro", "all", third, "third")
    for statistic in STATISTICS:
        add(statistic, "all", "all", "total")
    made.extend(_EXTRAS)
    return {info.name: info for info in made}


FEATURES: dict[str, FeatureInfo] = _build()


def feature_names(*, family: str | None = None, scope: str | None = None) -> tuple[str, ...]:
    """Names in column order, of one family or scope where given."""
    return tuple(
        info.name
        for info in FEATURES.values()
        if (family is None or info.family == family) and (scope is None or info.scope == scope)
    )
