"""The policy file: how deep a server speculates for each adapter, and with which drafter adapter.

`lora-spec policy` writes it from diagnoses; the vLLM plugin reads it. Nothing here needs torch or vllm.
"""

from lora_spec.policy.build import DRAFTER_BY_HAND, SET_BY_HAND, build_policy
from lora_spec.policy.schema import (
    POLICY_SCHEMA,
    AdapterPolicy,
    BasePolicy,
    Policy,
    Serve,
    load_policy,
    parse_policy,
    policy_rows,
    read_policy_bytes,
    write_policy,
)

__all__ = [
    "DRAFTER_BY_HAND",
    "POLICY_SCHEMA",
    "SET_BY_HAND",
    "AdapterPolicy",
    "BasePolicy",
    "Policy",
    "Serve",
    "build_policy",
    "load_policy",
    "parse_policy",
    "policy_rows",
    "read_policy_bytes",
    "write_policy",
]
