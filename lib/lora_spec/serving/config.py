"""What an operator configures: drafter adapters and a depth policy, beside the speculative config.

Nothing here needs torch or vllm.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lora_spec.params import StrictModel
from lora_spec.policy.schema import BASE_DRAFTER

# Names of drafter adapters go into logs, metrics and error messages: printable, no spaces around them.
Name = Annotated[
    str,
    Field(min_length=1, max_length=256, pattern=r"^[^\p{C}\p{Z}]([^\p{C}\p{Zl}\p{Zp}]*[^\p{C}\p{Z}])?$"),
]
TargetName = Annotated[str, Field(min_length=1, max_length=256)]  # a target adapter's, which vLLM accepted


def _no_bool(value: object) -> object:
    if isinstance(value, bool):  # a literal takes true for 1
        raise ValueError("a number is wanted")
    return value


FixName = Literal[
    "expand", "grouped_lora", "draft_seeds", "shared_embeddings", "context_norms", "amx_permission"
]

# Ranks that vLLM's LoRA buffers can have (LoRAConfig.max_lora_rank).
Rank = Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(_no_bool)]


class DraftLoRAConfig(StrictModel):
    """Adapters of the drafter.

    Attributes:
        adapters: name -> folder of a PEFT adapter of the drafter.
        max_rank: largest rank that may be loaded; memory of a slot grows with it.
        map: target adapter's name -> drafter adapter's name.
        default: drafter adapter of requests that neither name one nor have a mapped target adapter.
        max_slots: drafter adapters that one batch can mix; further requests wait.
        max_cached: adapters kept in memory (least recently used go first); at least ``max_slots``.
    """

    adapters: dict[Name, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    max_rank: Rank = 16
    map: dict[TargetName, Name] = Field(default_factory=dict)
    default: Name | None = None
    max_slots: Annotated[int, Field(ge=1, le=1024)] = 8
    max_cached: Annotated[int, Field(ge=1, le=65_536)] = 64

    @model_validator(mode="after")
    def _names_exist(self) -> DraftLoRAConfig:
        if BASE_DRAFTER in self.adapters:
            raise ValueError(f"no drafter adapter may be called {BASE_DRAFTER!r}: it names the base drafter")
        named = dict(self.map)
        if self.default is not None:
            named["default"] = self.default
        for where, name in named.items():
            if name != BASE_DRAFTER and name not in self.adapters:
                known = ", ".join(sorted(self.adapters)) or "none"
                raise ValueError(f"{where!r} names the unknown drafter adapter {name!r} (known: {known})")
        if self.max_cached < self.max_slots:
            raise ValueError(f"max_cached ({self.max_cached}) is below max_slots ({self.max_slots})")
        return self


class ServingConfig(StrictModel):
    """Everything the plugin is told.

    Attributes:
        draft_lora: adapters of the drafter, or None.
        depth_policy: path of a policy file (``lora-spec-policy/1``), or None.
        fixes: repairs of vLLM to put in place; None for those that the platform needs.
    """

    draft_lora: DraftLoRAConfig | None = None
    depth_policy: Annotated[str, Field(min_length=1)] | None = None
    fixes: tuple[FixName, ...] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ServingConfig:
        if self.draft_lora is None and self.depth_policy is None:
            raise ValueError("neither draft_lora nor depth_policy is given")
        return self
