"""``adapter_config.json``: the values that decide ΔW, checked, and what they put out of reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_spec.checkpoint.reasons import Reason, listed, reason, shown
from lora_spec.errors import CheckpointError

# Keys that decide ΔW, with PEFT's defaults: they are the configuration part of an adapter's identity.
_IDENTITY_DEFAULTS: dict[str, Any] = {
    "peft_type": None,
    "r": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_modules": None,
    "modules_to_save": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "layers_pattern": None,
}

# Initialisations that leave the base weights alone; every other named one replaces them by W − BA or similar.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")

_FEATURES_OUT_OF_REACH = (
    "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora", "target_parameters",
    "trainable_token_indices", "arrow_config", "kasa_config", "monteclora_config", "megatron_config",
)  # fmt: skip


@dataclass(frozen=True)
class AdapterConfig:
    """The checked part of ``adapter_config.json``.

    Attributes:
        peft_type: as written, e.g. ``"LORA"``.
        r, lora_alpha, use_rslora, rank_pattern, alpha_pattern: what the scale is resolved from.
        modules_to_save: names of wholly replaced modules.
        base_model_name: ``base_model_name_or_path``, or None.
        raw: the whole object as parsed.
    """

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    base_model_name: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_lora(self) -> bool:
        """Whether the type is the one that the features understand."""
        return self.peft_type == "LORA"

    def canonical(self) -> dict[str, Any]:
        """The keys that decide ΔW, defaults filled in and ``target_modules`` sorted: part of the identity."""
        made = {}
        for key, default in _IDENTITY_DEFAULTS.items():
            value = self.raw.get(key)
            made[key] = default if value is None else value
        if isinstance(made["target_modules"], list):
            made["target_modules"] = sorted(made["target_modules"], key=str)
        return made


def parse_config(raw: dict[str, Any], where: str) -> AdapterConfig:
    """Check the values that this library uses; unknown keys are kept and ignored.

    Raises:
        CheckpointError: ``bad_config``, naming the key.
    """

    def fail(key: str, wanted: str) -> CheckpointError:
        value = shown(repr(raw.get(key)))
        return CheckpointError(f"{key} must be {wanted}, got {value}", where=where, code="bad_config")

    def flag(key: str) -> bool:
        value = raw.get(key)
        if value is not None and type(value) is not bool:
            raise fail(key, "true or false")
        return bool(value)

    def pattern(key: str, good: Any, wanted: str) -> dict[str, Any]:
        value = raw.get(key) or {}
        if not isinstance(value, dict) or not all(good(item) for item in value.values()):
            raise fail(key, f"an object of {wanted}")
        return value

    peft_type = raw.get("peft_type")
    if not isinstance(peft_type, str) or not peft_type:
        raise fail("peft_type", "the name of an adapter type")
    base = raw.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise fail("base_model_name_or_path", "a string")
    if peft_type != "LORA":
        return AdapterConfig(peft_type, 0, 0.0, base_model_name=base or None, raw=raw)

    defaults = _IDENTITY_DEFAULTS
    rank, alpha = raw.get("r", defaults["r"]), raw.get("lora_alpha", defaults["lora_alpha"])
    if not _is_rank(rank):
        raise fail("r", "a positive integer")
    if not _is_number(alpha):
        raise fail("lora_alpha", "a finite number")
    targets = raw.get("target_modules")
    if not (targets is None or isinstance(targets, str) or _is_names(targets)):
        raise fail("target_modules", "a string or a list of strings")
    saved = raw.get("modules_to_save")
    if saved is not None and not _is_names(saved):
        raise fail("modules_to_save", "a list of strings")
    flag("use_dora")
    return AdapterConfig(
        peft_type,
        rank,
        float(alpha),
        use_rslora=flag("use_rslora"),
        rank_pattern=pattern("rank_pattern", _is_rank, "positive integers"),
        alpha_pattern=pattern("alpha_pattern", _is_number, "finite numbers"),
        modules_to_save=tuple(saved or ()),
        base_model_name=base or None,
        raw=raw,
    )


def config_reasons(config: AdapterConfig) -> list[Reason]:
    """What the configuration alone says against a prediction."""
    if not config.is_lora:
        return [reason("unsupported_type", config.peft_type)]
    raw, found = config.raw, []
    if raw.get("use_dora"):
        found.append(reason("dora", "use_dora is set"))
    if config.modules_to_save:
        found.append(reason("modules_to_save", listed(config.modules_to_save)))
    if raw.get("bias", "none") not in (None, "none"):
        found.append(reason("bias", f"bias is {raw['bias']!r}"))
    if raw.get("lora_bias"):
        found.append(reason("bias", "lora_bias is set"))
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        found.append(reason("init_changes_base", repr(init)))
    found += [reason("unsupported_feature", key) for key in _FEATURES_OUT_OF_REACH if raw.get(key)]
    if config.base_model_name is None:
        found.append(reason("base_unnamed", "base_model_name_or_path is missing"))
    return found


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
