"""From stored tensors to LoRA modules: pairing, places, scales, and everything that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from lora_spec.checkpoint.config import AdapterConfig
from lora_spec.checkpoint.geometry import BLOCK_OF, FUSED, MODULE_TYPES, BaseGeometry
from lora_spec.checkpoint.keys import HEAD_OR_EMBEDDING, STANDARD_PREFIX, Key, Place, parse_key, parse_place
from lora_spec.checkpoint.reasons import Reason, listed, reason
from lora_spec.checkpoint.scale import EngineRule, ScaleResolver
from lora_spec.checkpoint.tensors import WEIGHT_DTYPES, SafetensorsFile
from lora_spec.checkpoint.weights import Weights
from lora_spec.errors import CheckpointError

MAX_RANK = 4096
_ORDER = {name: position for position, name in enumerate(MODULE_TYPES)}


@dataclass(frozen=True)
class LoraModule:
    """One adapted projection; ΔW = ``scale`` · B · A. The two factors are read when asked for.

    Attributes:
        name: module name in the base, e.g. ``model.layers.3.self_attn.q_proj`` (a part of a fused projection
            carries the name of the part).
        module_type: ``q``, ``k``, ``v``, ``o``, ``gate``, ``up``, ``down`` or ``fc`` (``qkv``, ``gate_up``
            where they could not be split).
        layer: index of the block; -1 for the ``fc`` of a drafter, which stands before them.
        rank, in_features, out_features: sizes; A is (rank, in_features), B is (out_features, rank).
        scale: as PEFT resolves it (α/r or α/√r with its patterns).
        engine_scale: what the engine would apply.
        a_name, b_name: stored tensor names.
    """

    name: str
    module_type: str
    layer: int
    rank: int
    in_features: int
    out_features: int
    scale: float
    engine_scale: float
    a_name: str
    b_name: str
    _a_file: SafetensorsFile = field(repr=False, compare=False)
    _b_file: SafetensorsFile = field(repr=False, compare=False)
    _rows: tuple[int, int] | None = None

    @property
    def where(self) -> str:
        """File and tensor of B, for messages."""
        return self._b_file.where(self.b_name)

    @property
    def pair_bytes(self) -> int:
        """Stored bytes of A and of this module's rows of B."""
        a, b = self._a_file.tensors[self.a_name], self._b_file.tensors[self.b_name]
        return a.nbytes + b.nbytes * self.out_features // b.shape[0]

    def read_a(self) -> np.ndarray:
        """A, (rank, in_features), float32 (float64 where stored so)."""
        return self._a_file.matrix(self.a_name)

    def read_b(self) -> np.ndarray:
        """B, (out_features, rank), float32 (float64 where stored so)."""
        return self._b_file.matrix(self.b_name, self._rows)


def collect_modules(
    weights: Weights,
    config: AdapterConfig,
    resolver: ScaleResolver,
    *,
    base: BaseGeometry | None,
    served_modules: Collection[str] | None,
    engine: EngineRule,
) -> tuple[list[LoraModule], list[Reason]]:
    """Pair the factors, place them in the base, and gather what stands against a prediction.

    Args:
        weights: the checked files.
        config: the checked configuration.
        resolver: scales of the configuration.
        base: geometry to check names and shapes against, or None.
        served_modules: module names that the server wraps with LoRA (its ``lora_target_modules``), or None.
        engine: how the engine resolves scales.

    Returns:
        Modules in order of layer and type (those that act on the base), and reasons.

    Raises:
        CheckpointError: ``duplicate_key``, ``missing_half``, ``bad_shape``, ``rank_mismatch``, ``bad_dtype``,
            ``too_large``, ``unsafe_pattern``.
    """
    keys = {name: parse_key(name) for name in weights.files}
    pairs = _pair(weights, keys)
    reasons = _key_reasons(keys) + _other_tensors(weights, keys, config, base)
    modules: list[LoraModule] = []
    head, unknown, strange, wrong_rank = [], [], [], []
    for module, pair in sorted(pairs.items()):
        a_name, b_name = _check_pair(weights, pair)
        if module.rpartition(".")[2] in HEAD_OR_EMBEDDING:
            head.append(module)
            if base and module.endswith("lm_head") and weights.info(b_name).shape[0] != base.vocab_size:
                reasons.append(_vocabulary(b_name, weights.info(b_name).shape[0], base))
            continue
        place = parse_place(module)
        if place is None:
            unknown.append(module)
            continue
        if base and not base.has(place.prefix, place.layer):
            strange.append(module)
            continue
        if not base and place.prefix != STANDARD_PREFIX:
            strange.append(module)
        made = _module(weights, module, place, a_name, b_name, resolver, engine)
        if made.rank != resolver.peft(module).rank:
            wrong_rank.append(f"{module} has {made.rank}, configured {resolver.peft(module).rank}")
        modules.append(made)
    if head:
        reasons.append(reason("head_or_embedding_adapted", listed(head)))
    if unknown:
        code = "no_matching_module" if base and not modules else "unknown_module"
        reasons.append(reason(code, listed(unknown)))
    if strange and not base:
        reasons.append(reason("unusual_prefix", strange[0]))
    elif strange:
        reasons.append(reason("keys_without_module" if modules else "no_matching_module", strange[0]))
    if wrong_rank:
        reasons.append(reason("rank_not_as_configured", listed(wrong_rank, 1)))
    reasons += _scale_reasons(modules, resolver, engine) + _served_reasons(modules, served_modules)
    modules, split_reasons = _split_fused(modules, base)
    reasons += split_reasons
    if not modules:
        reasons.append(reason("no_lora_tensors", f"{len(weights.files)} tensors stored"))
    modules.sort(key=lambda m: (m.layer, _ORDER.get(m.module_type, len(_ORDER)), m.name))
    return modules, reasons


def _pair(weights: Weights, keys: dict[str, Key]) -> dict[str, dict[str, str]]:
    pairs: dict[str, dict[str, str]] = {}
    for name, key in keys.items():
        if key.kind not in ("A", "B"):
            continue
        pair = pairs.setdefault(key.module, {})
        if key.kind in pair:
            raise CheckpointError(
                f"two tensors are lora_{key.kind} of one module, the other is {pair[key.kind]}",
                where=weights.files[name].where(name),
                code="duplicate_key",
            )
        pair[key.kind] = name
    return pairs


def _check_pair(weights: Weights, pair: dict[str, str]) -> tuple[str, str]:
    for half, other in (("A", "B"), ("B", "A")):
        if half not in pair:
            name = pair[other]
            raise CheckpointError(
                f"lora_{other} without its lora_{half}",
                where=weights.files[name].where(name),
                code="missing_half",
            )
    for name in pair.values():
        info, file = weights.info(name), weights.files[name]
        if info.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"LoRA weight stored as {info.dtype}",
                where=file.where(name),
                code="bad_dtype",
                fix=f"Supported are {', '.join(WEIGHT_DTYPES)}.",
            )
        if len(info.shape) != 2 or 0 in info.shape:
            raise CheckpointError(
                f"LoRA weight of shape {info.shape} is no non-empty matrix",
                where=file.where(name),
                code="bad_shape",
                fix="Sharded training must gather weights before saving.",
            )
    a, b = weights.info(pair["A"]), weights.info(pair["B"])
    if a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"lora_A has rank {a.shape[0]}, lora_B has rank {b.shape[1]}",
            where=weights.files[b.name].where(b.name),
            code="rank_mismatch",
        )
    if a.shape[0] > MAX_RANK:
        raise CheckpointError(
            f"rank {a.shape[0]} is above {MAX_RANK}",
            where=weights.files[a.name].where(a.name),
            code="too_large",
        )
    return pair["A"], pair["B"]


def _module(
    weights: Weights,
    name: str,
    place: Place,
    a_name: str,
    b_name: str,
    resolver: ScaleResolver,
    rule: EngineRule,
) -> LoraModule:
    a, b = weights.info(a_name), weights.info(b_name)
    return LoraModule(
        name, place.module_type, place.layer, a.shape[0], a.shape[1], b.shape[0],
        resolver.peft(name).value, resolver.engine(name, rule).value,
        a_name, b_name, weights.files[a_name], weights.files[b_name],
    )  # fmt: skip


def _key_reasons(keys: dict[str, Key]) -> list[Reason]:
    reasons = []
    if names := sorted({key.adapter for key in keys.values() if key.adapter}):
        reasons.append(reason("adapter_name_in_keys", listed(names)))
    if bare := [name for name, key in keys.items() if key.kind in ("A", "B") and not key.prefixed]:
        reasons.append(reason("prefix_missing", bare[0]))
    return reasons


def _vocabulary(name: str, rows: int, base: BaseGeometry) -> Reason:
    return reason("vocabulary_resized", f"{name} has {rows} rows, the base {base.vocab_size}")


def _other_tensors(
    weights: Weights, keys: dict[str, Key], config: AdapterConfig, base: BaseGeometry | None
) -> list[Reason]:
    """Reasons for every tensor that is no plain LoRA factor; one reason per code."""
    found: dict[str, list[str]] = {}
    reasons = []
    for name, key in keys.items():
        last = key.module.rpartition(".")[2]
        vocabulary = last in HEAD_OR_EMBEDDING
        if key.kind in ("A", "B"):
            continue
        if key.kind in ("base", "full") and vocabulary:
            # PEFT stores embeddings when it thinks they changed; only modules_to_save means trained.
            code = "modules_to_save" if last in config.modules_to_save else "embedding_weights_stored"
            if base and weights.info(name).shape[:1] != (base.vocab_size,):
                reasons.append(_vocabulary(name, next(iter(weights.info(name).shape), 0), base))
        elif key.kind == "full" and "lora_" not in last:
            code = "modules_to_save"
        elif key.kind == "embedding":
            code = "head_or_embedding_adapted"
            shape = weights.info(name).shape  # A is (rank, vocabulary)
            if base and "lora_embedding_A" in name and len(shape) == 2 and shape[1] != base.vocab_size:
                reasons.append(_vocabulary(name, shape[1], base))
        else:
            code = {"dora": "dora", "lora_bias": "bias", "bias": "bias"}.get(key.kind, "unknown_tensor")
        found.setdefault(code, []).append(name)
    return reasons + [reason(code, listed(names)) for code, names in found.items()]


def _scale_reasons(modules: list[LoraModule], resolver: ScaleResolver, rule: EngineRule) -> list[Reason]:
    def text(module: LoraModule, other: float) -> str:
        return f"{module.name} has {module.scale:g}, there {other:g}"

    differing = [m for m in modules if m.engine_scale != m.scale]
    if differing:
        return [reason("engine_scale_differs", text(differing[0], differing[0].engine_scale))]
    if resolver.has_patterns and rule is not EngineRule.GLOBAL:
        for module in modules:
            other = resolver.engine(module.name, EngineRule.GLOBAL).value
            if other != module.scale:
                return [reason("scale_depends_on_engine", text(module, other))]
    return []


def _served_reasons(modules: list[LoraModule], served: Collection[str] | None) -> list[Reason]:
    if served is None or not modules:
        return []
    wrapped = set(served)

    def is_served(module: LoraModule) -> bool:
        kind = module.module_type
        # Packed projections count for their parts and the reverse, as in vLLM's is_in_target_modules.
        related = {kind, *FUSED.get(kind, ()), *(fused for fused, parts in FUSED.items() if kind in parts)}
        return module.name in wrapped or any(f"{name}_proj" in wrapped for name in related)

    left_out = [module for module in modules if not is_served(module)]
    if not left_out:
        return []
    kinds = listed(sorted({f"{module.module_type}_proj" for module in left_out}), 7)
    return [reason("not_served" if len(left_out) == len(modules) else "partly_served", kinds)]


def _split_fused(
    modules: list[LoraModule], base: BaseGeometry | None
) -> tuple[list[LoraModule], list[Reason]]:
    """Check shapes against the base and cut fused projections into their parts (which share A)."""
    made: list[LoraModule] = []
    wrong, fused, split = [], [], []
    for module in modules:
        shape = (module.out_features, module.in_features)
        if base and shape != base.shape(module.module_type):
            wrong.append(f"{module.name} is {shape}, the base has {base.shape(module.module_type)}")
            made.append(module)
        elif module.module_type not in FUSED:
            made.append(module)
        elif base is None:
            fused.append(module.name)
            made.append(module)
        else:
            split.append(module.name)
            made.extend(_parts(module, base))
    names = [module.name for module in made]
    if len(set(names)) != len(names):
        twice = next(module for module in made if names.count(module.name) > 1)
        raise CheckpointError(
            "a projection is adapted alone and within a fused one", where=twice.where, code="duplicate_key"
        )
    reasons = []
    if wrong:
        reasons.append(reason("shape_mismatch", listed(wrong, 1)))
    if fused:
        reasons.append(reason("fused_modules", listed(fused)))
    if split:
        reasons.append(reason("fused_split", listed(split)))
    return made, reasons


def _parts(module: LoraModule, base: BaseGeometry) -> Iterator[LoraModule]:
    start = 0
    for part in FUSED[module.module_type]:
        rows = base.shapes[part][0]
        name = f"{base.prefix}layers.{module.layer}.{BLOCK_OF[part]}.{part}_proj"
        yield replace(module, name=name, module_type=part, out_features=rows, _rows=(start, start + rows))
        start += rows
