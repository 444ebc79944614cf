"""The lock file ``params/frozen.yaml``: commits, hashes and licences of what lies on the hub.

What a person declares (``models.yaml``, ``adapter_pool_paper.yaml``) never holds a commit that a program
looked up; what ``lora-spec freeze`` looked up is here, and only here. Both are merged when they are loaded,
so a declaration keeps its comments and a frozen revision can be told from a wish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PositiveInt

from lora_spec.files import atomic_write_text
from lora_spec.params import StrictModel, read_yaml, validate
from lora_spec.paths import params_dir, rel

LOCK_FILE = "frozen.yaml"
_HEAD = """\
# Written by `lora-spec freeze --execute`; not by hand. Commits of hub repositories, the licences that their
# cards name, and sha256 of the files that matter. Declarations: models.yaml, adapter_pool_paper.yaml.
"""

Repo = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FrozenRepo(StrictModel):
    """One repository at one commit.

    Attributes:
        repo: its name on the hub.
        revision: the commit.
        licence: what its card says.
        files: name to sha256 of the weights and tokenizer at the top of the repository.
        bytes: what those files take together.
        config: of a model, its geometry; of an adapter, what its ``adapter_config.json`` says that matters.
    """

    repo: Repo
    revision: Revision
    licence: Annotated[str, Field(min_length=1)]
    files: Annotated[dict[FileName, Sha256], Field(min_length=1)]
    bytes: PositiveInt
    config: dict[str, Any]


class Lock(StrictModel):
    """``params/frozen.yaml``: by key of the model, and by name of the adapter."""

    schema_: Literal["lora-spec-frozen/1"] = Field(alias="schema")
    models: dict[str, FrozenRepo] = Field(default_factory=dict)
    adapters: dict[str, FrozenRepo] = Field(default_factory=dict)


def load_lock() -> Lock:
    """Read and check the lock file; an absent one freezes nothing.

    Raises:
        ParamsError: it is damaged.
    """
    path = params_dir() / LOCK_FILE
    if not path.is_file():
        return Lock(schema="lora-spec-frozen/1")
    return validate(Lock, read_yaml(path), where=rel(path))


def write_lock(models: Mapping[str, FrozenRepo], adapters: Mapping[str, FrozenRepo]) -> None:
    """Write the lock file whole, sorted, or leave what was there."""
    lock = Lock(schema="lora-spec-frozen/1", models=dict(models), adapters=dict(adapters))
    text = yaml.safe_dump(lock.model_dump(mode="json", by_alias=True), sort_keys=True, width=110)
    atomic_write_text(params_dir() / LOCK_FILE, _HEAD + text)
