"""Read an untrusted PEFT adapter folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_spec.checkpoint.config import AdapterConfig, config_reasons, parse_config
from lora_spec.checkpoint.folder import AdapterFolder
from lora_spec.checkpoint.geometry import BaseGeometry
from lora_spec.checkpoint.modules import LoraModule, collect_modules
from lora_spec.checkpoint.reasons import Reason, Severity, listed, reason
from lora_spec.checkpoint.scale import EngineRule, ScaleResolver
from lora_spec.checkpoint.weights import CONFIG_NAME, TensorScan, Weights, open_weights, scan
from lora_spec.errors import CheckpointError
from lora_spec.files import canonical_sha256


@dataclass(frozen=True)
class Adapter:
    """A readable adapter and everything that stands against judging it.

    Attributes:
        directory: where it lies (a label, no identity).
        config: the checked configuration; ``config.raw`` is the whole of it.
        modules: adapted projections in order of layer and type; factors are read on demand.
        reasons: abstaining ones first.
        base: the geometry it was checked against, or None.
        content_hash: identity (hex sha256), or None when read with ``full=False``.
    """

    directory: Path
    config: AdapterConfig
    modules: tuple[LoraModule, ...]
    reasons: tuple[Reason, ...]
    base: BaseGeometry | None
    content_hash: str | None

    @property
    def abstains(self) -> bool:
        """Whether any reason forbids a prediction."""
        return any(item.severity is Severity.ABSTAIN for item in self.reasons)

    @property
    def num_layers(self) -> int:
        """Blocks of the base, or one more than the last adapted block where the base is not known."""
        if self.base:
            return self.base.num_layers
        return max((module.layer for module in self.modules), default=-1) + 1


def read_adapter(
    directory: Path | str,
    base: BaseGeometry | None = None,
    *,
    served_modules: Collection[str] | None = None,
    engine: EngineRule = EngineRule.PATTERNS,
    full: bool = True,
) -> Adapter:
    """Read and check an adapter folder (``adapter_config.json`` and safetensors, in one file or in shards).

    Nothing is unpickled, no name or link is followed out of the folder, and only a piece of a tensor is held.

    Args:
        directory: the adapter folder.
        base: geometry that names and shapes are checked against; without it an odd key prefix abstains.
        served_modules: what the server wraps (``lora_target_modules``), to find adapters idle there.
        engine: how the server's engine scales; vLLM 0.32 follows PEFT's patterns.
        full: also read every byte: content hash, NaN and infinity, ΔW that is zero. Without it these are
            found (or not) by whoever reads the factors.

    Raises:
        CheckpointError: not readable as an adapter; ``code`` is one of :data:`reasons.ERROR_CODES`, and the
            message names file and tensor.
    """
    folder, config, weights = _open(directory)
    reasons = config_reasons(config) + list(weights.reasons)
    modules: list[LoraModule] = []
    if config.is_lora:
        resolver = ScaleResolver(config, folder.where(CONFIG_NAME))
        modules, found = collect_modules(
            weights, config, resolver, base=base, served_modules=served_modules, engine=engine
        )
        reasons += found
    if base is None:
        reasons.append(reason("base_not_given", "no geometry"))
    elif config.base_model_name and base.name and not _same_base(config.base_model_name, base.name):
        reasons.append(reason("base_differs", f"{config.base_model_name}, not {base.name}"))
    digest = None
    if full:
        scanned = scan(weights)
        digest = _content_hash(config, weights, scanned, folder)
        reasons += _untrained(modules, scanned)
    return Adapter(Path(directory), config, tuple(modules), _tidy(reasons), base, digest)


def content_hash(directory: Path | str) -> str:
    """Identity of an adapter: hex sha256 over canonical configuration and tensors, whatever its name or path.

    Raises:
        CheckpointError: as :func:`read_adapter`, for files and configuration only.
    """
    folder, config, weights = _open(directory)
    return _content_hash(config, weights, scan(weights), folder)


def _open(directory: Path | str) -> tuple[AdapterFolder, AdapterConfig, Weights]:
    folder = AdapterFolder(directory)
    if CONFIG_NAME not in folder.names():
        raise CheckpointError(
            f"no {CONFIG_NAME} in the folder",
            where=folder.label,
            code="not_an_adapter",
            fix="Give the folder of a saved PEFT adapter.",
        )
    config = parse_config(folder.read_json(CONFIG_NAME), folder.where(CONFIG_NAME))
    return folder, config, open_weights(folder)


def _content_hash(
    config: AdapterConfig, weights: Weights, scanned: Mapping[str, TensorScan], folder: AdapterFolder
) -> str:
    tensors = {}
    for name in weights.files:
        info = weights.info(name)
        tensors[name] = [info.dtype, list(info.shape), scanned[name].sha256]
    try:
        return canonical_sha256({"config": config.canonical(), "tensors": tensors})
    except ValueError as error:  # half of a surrogate pair has no UTF-8 form; 1e999 parses to infinity
        raise CheckpointError(
            "the configuration holds text or numbers that cannot be written back",
            where=folder.where(CONFIG_NAME),
            code="bad_json",
        ) from error


def _same_base(named: str, expected: str) -> bool:
    """Compare by last path component: local copies and mirrors differ in what comes before it."""
    return named.rstrip("/").rpartition("/")[2].lower() == expected.rstrip("/").rpartition("/")[2].lower()


def _untrained(modules: list[LoraModule], scanned: Mapping[str, TensorScan]) -> list[Reason]:
    zero = [
        module.name
        for module in modules
        if module.scale == 0.0 or scanned[module.a_name].is_zero or scanned[module.b_name].is_zero
    ]
    if not zero:
        return []
    if len(zero) == len(modules):
        return [reason("untrained", f"all {len(zero)} modules")]
    return [reason("partly_untrained", listed(zero))]


def _tidy(reasons: list[Reason]) -> tuple[Reason, ...]:
    """One reason a code and sentence, abstaining ones first, otherwise in order of finding."""
    order = list(Severity)
    return tuple(sorted(dict.fromkeys(reasons), key=lambda item: order.index(item.severity)))
