"""Read and validate PEFT adapter folders from untrusted sources, with numpy alone."""

from lora_spec.checkpoint.adapter import Adapter, content_hash, read_adapter
from lora_spec.checkpoint.geometry import MODULE_TYPES, BaseGeometry
from lora_spec.checkpoint.modules import LoraModule
from lora_spec.checkpoint.reasons import ERROR_CODES, REASONS, Reason, Severity
from lora_spec.checkpoint.scale import EngineRule

__all__ = [
    "ERROR_CODES",
    "MODULE_TYPES",
    "REASONS",
    "Adapter",
    "BaseGeometry",
    "EngineRule",
    "LoraModule",
    "Reason",
    "Severity",
    "content_hash",
    "read_adapter",
]
