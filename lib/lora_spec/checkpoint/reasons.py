"""Why an adapter is outside what can be judged: every code, its severity and its sentence, in one place.

Codes of *reasons* travel with a readable adapter; codes of *errors* (:data:`ERROR_CODES`) stop the reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """``abstain``: no prediction may be made. ``warn``: an operator should know. ``info``: a note."""

    ABSTAIN = "abstain"
    WARN = "warn"
    INFO = "info"


@dataclass(frozen=True)
class Reason:
    """One machine-readable remark about an adapter.

    Attributes:
        code: stable name, a key of :data:`REASONS`.
        sentence: one sentence for a person, naming the module, field or tensor.
        severity: what it means for a decision.
    """

    code: str
    sentence: str
    severity: Severity


_A, _W, _I = Severity.ABSTAIN, Severity.WARN, Severity.INFO

REASONS: dict[str, tuple[Severity, str]] = {
    "unsupported_type": (_A, "The adapter type {detail} is not LoRA; its weights have another meaning."),
    "no_matching_module": (
        _A,
        "No key matches a module of the base, so the adapter would do nothing or not load: {detail}.",
    ),
    "keys_without_module": (_A, "Some keys match no module of the base and would be lost; first: {detail}."),
    "unusual_prefix": (
        _A,
        "Keys do not start like those of a Llama-like base, and no geometry was given; first: {detail}.",
    ),
    "unknown_module": (_A, "A module of a kind the features do not know is adapted: {detail}."),
    "shape_mismatch": (_A, "The adapter was trained for other shapes than the base has: {detail}."),
    "not_served": (
        _A,
        "The server wraps none of the adapted modules, where the adapter is a no-op: {detail}.",
    ),
    "partly_served": (_A, "The server wraps only some of the adapted modules; left out: {detail}."),
    "engine_scale_differs": (_A, "The engine would apply another scale than PEFT: {detail}."),
    "scale_depends_on_engine": (
        _W,
        "Scales vary by module, and an engine that ignores the patterns differs: {detail}.",
    ),
    "rank_not_as_configured": (
        _A,
        "The stored rank is not the configured one, so the scale is ambiguous: {detail}.",
    ),
    "dora": (_A, "DoRA rescales the base weights, which the features do not cover ({detail})."),
    "modules_to_save": (_A, "Whole modules are replaced, which is no low-rank change: {detail}."),
    "vocabulary_resized": (_A, "A stored embedding or head has another vocabulary than the base: {detail}."),
    "embedding_weights_stored": (
        _A,
        "Embedding or head weights are stored, trained or just copied (the base can tell): {detail}.",
    ),
    "head_or_embedding_adapted": (
        _A,
        "The head or the embedding is adapted, which drafters that share it do not see: {detail}.",
    ),
    "bias": (_A, "Trained biases are outside the features ({detail})."),
    "init_changes_base": (
        _A,
        "The initialisation {detail} changes the base weights, so BA alone is not the difference.",
    ),
    "unsupported_feature": (_A, "The configuration uses {detail}, which the features do not cover."),
    "unknown_tensor": (_A, "A stored tensor has no known meaning: {detail}."),
    "fused_modules": (
        _A,
        "Fused projections cannot be split without the shapes of the base: {detail}.",
    ),
    "no_lora_tensors": (_A, "The checkpoint holds no LoRA weight that acts on a known module ({detail})."),
    "untrained": (_W, "ΔW is zero everywhere, as before training: the adapter changes nothing ({detail})."),
    "partly_untrained": (_W, "ΔW is zero in some modules: {detail}."),
    "adapter_name_in_keys": (
        _W,
        "Keys carry an adapter name ({detail}); read here, but PEFT and vLLM expect keys without it.",
    ),
    "prefix_missing": (_W, "Keys lack the prefix base_model.model. that PEFT writes; first: {detail}."),
    "sharded": (_W, "The weights are in {detail} files; vLLM reads adapter_model.safetensors only."),
    "base_unnamed": (_W, "adapter_config.json does not say which base the adapter belongs to ({detail})."),
    "base_differs": (_W, "The adapter names another base: {detail}."),
    "base_not_given": (_I, "Keys and shapes were not checked against a base ({detail})."),
    "fused_split": (_I, "Fused projections were split by the shapes of the base: {detail}."),
    "pickle_ignored": (_I, "{detail} lies beside the safetensors file and was not opened."),
}

ERROR_CODES: dict[str, str] = {
    "not_found": "no such folder",
    "not_a_folder": "the path is a file",
    "not_an_adapter": "no adapter_config.json, or no weights",
    "outside_folder": "a name or link leads out of the folder",
    "unreadable": "a file cannot be read, is no regular file, or changed while being read",
    "too_large": "a file, header or rank is beyond the limits of this reader",
    "bad_json": "not JSON, a name given twice, or a number JSON does not have",
    "bad_config": "adapter_config.json has a value of the wrong kind",
    "unsafe_pattern": "a pattern is no valid expression or could run for ever",
    "bad_header": "a safetensors header breaks the format",
    "truncated": "a file is shorter than its header says",
    "bad_index": "the shard index and the shards disagree",
    "duplicate_key": "two tensors mean the same weight",
    "missing_half": "lora_A without lora_B, or the reverse",
    "bad_shape": "a LoRA weight is no non-empty matrix",
    "rank_mismatch": "lora_A and lora_B disagree on the rank",
    "bad_dtype": "a LoRA weight is stored in an unsupported number format",
    "non_finite": "a tensor holds NaN or infinity",
    "pickle_refused": "only a pickle is there, and pickles run code",
    "abstained": "features were asked of an adapter that has an abstaining reason",
}

_MAX_TEXT = 160


def shown(text: object) -> str:
    """``text`` from an untrusted file, fit for one line of a terminal: no control characters, short."""
    line = str(text)
    if not line.isprintable():
        line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def reason(code: str, detail: object) -> Reason:
    """The reason ``code`` with its detail filled in.

    Raises:
        KeyError: ``code`` is not in :data:`REASONS`.
    """
    severity, template = REASONS[code]
    return Reason(code, template.format(detail=shown(detail)), severity)


def listed(names: Iterable[str], limit: int = 3) -> str:
    """The first names and how many more there are."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more
