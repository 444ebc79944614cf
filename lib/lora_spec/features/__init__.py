"""Numbers describing an adapter's ΔW, from its weights alone."""

from lora_spec.features.catalog import FEATURES, FeatureInfo, feature_names
from lora_spec.features.rows import feature_row, row_from_spectra
from lora_spec.features.spectra import ModuleSpectrum, module_spectra, singular_values

__all__ = [
    "FEATURES",
    "FeatureInfo",
    "ModuleSpectrum",
    "feature_names",
    "feature_row",
    "module_spectra",
    "row_from_spectra",
    "singular_values",
]
