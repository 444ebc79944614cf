"""Frozen prompt windows: token ids cut once from held-out documents, checked by hash at every load."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from lora_spec.errors import IntegrityError, ParamsError
from lora_spec.files import sha256_bytes
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import params_dir, rel

SCHEMA = "lora-spec-prompts/1"
GENERAL = "general"


class FrozenFile(StrictModel):
    """One file of windows as it was frozen."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    eval: int
    calibration: int


class ExtensionParams(StrictModel):
    """How many windows join sets that were frozen before.

    Attributes:
        domains: sets that get ``eval`` further windows, from the domain's extension corpus.
        eval: windows for each of them.
        general: windows that each extension corpus gives to the general set, from documents of their own.
    """

    domains: list[str]
    eval: int = Field(ge=1)
    general: int = Field(ge=1)


class PromptParams(StrictModel):
    """``params/prompts.yaml``: how windows are cut, and what the frozen files hash to.

    Attributes:
        window: token ids of a window.
        prompt: leading ids that are the prompt; the rest is the reference continuation.
        eval: windows a domain from held-out documents.
        calibration: windows a domain from calibration documents.
        general: windows each domain gives to the general set, from held-out documents of their own.
        tokenizer_sha256: hash of the tokenizer.json the ids belong to.
        extension: windows that were added later, at the end of some sets.
        sets: frozen files by prompt set; the file is ``params/prompts/<set>.json``.
        more: the files that extend some of them, ``params/prompts/<set>.more.json``.
    """

    schema_: str = Field(alias="schema", pattern=r"^lora-spec-prompt-sets/1$")
    window: int = Field(ge=2)
    prompt: int = Field(ge=1)
    eval: int
    calibration: int
    general: int
    extension: ExtensionParams | None = None
    tokenizer_sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    sets: dict[str, FrozenFile] = Field(default_factory=dict)
    more: dict[str, FrozenFile] = Field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """Windows of one domain, or of ``general``.

    Attributes:
        domain: name of the set.
        window: token ids of each window.
        prompt: the first ``prompt`` ids of a window are the prompt, the rest the reference continuation.
        eval: windows from held-out documents; those of an extension follow, so the earlier ones keep their
            indices.
        calibration: windows from calibration documents (none in ``general``).
        sha256: hash of the file, that of an extension apart.
        tokenizer_sha256: hash of the tokenizer the ids belong to.
    """

    domain: str
    window: int
    prompt: int
    eval: list[list[int]]
    calibration: list[list[int]]
    sha256: str
    tokenizer_sha256: str


def load_prompt_params() -> PromptParams:
    """Read and check ``params/prompts.yaml``."""
    return load_params(PromptParams, "prompts.yaml")


def prompts_path(domain: str) -> Path:
    """The frozen file of a prompt set."""
    return params_dir() / "prompts" / f"{domain}.json"


def more_path(domain: str) -> Path:
    """The frozen file that extends a prompt set."""
    return params_dir() / "prompts" / f"{domain}.more.json"


def load_prompts(domain: str, params: PromptParams | None = None) -> PromptSet:
    """Read the frozen windows of ``domain`` (or ``general``), with those that extend them at the end.

    Raises:
        ParamsError: no such prompt set.
        IntegrityError: a file is missing, changed since it was frozen, or not of the expected form.
    """
    params = params or load_prompt_params()
    frozen = params.sets.get(domain)
    if frozen is None:
        raise ParamsError("unknown prompt set", where=domain, fix=f"Known: {', '.join(params.sets)}")
    loaded = _read(domain, prompts_path(domain), frozen, params)
    if domain not in params.more:
        return loaded
    more = _read(domain, more_path(domain), params.more[domain], params)
    return replace(loaded, eval=[*loaded.eval, *more.eval])


def _read(domain: str, path: Path, frozen: FrozenFile, params: PromptParams) -> PromptSet:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IntegrityError("frozen prompts are missing", where=rel(path), fix="Restore the file") from error
    if sha256_bytes(data) != frozen.sha256:
        raise IntegrityError(
            "frozen prompts were changed: the sha256 is not the one in params/prompts.yaml",
            where=rel(path),
            fix="Restore the file, or freeze all prompts again and discard what was measured on the old ones",
        )
    content = json.loads(data)
    loaded = PromptSet(
        domain=content["domain"],
        window=content["window"],
        prompt=content["prompt"],
        eval=content["eval"],
        calibration=content["calibration"],
        sha256=frozen.sha256,
        tokenizer_sha256=content["tokenizer_sha256"],
    )
    if (
        content["schema"] != SCHEMA
        or loaded.domain != domain
        or (loaded.window, loaded.prompt) != (params.window, params.prompt)
        or loaded.tokenizer_sha256 != params.tokenizer_sha256
        or (len(loaded.eval), len(loaded.calibration)) != (frozen.eval, frozen.calibration)
        or any(len(window) != loaded.window for window in [*loaded.eval, *loaded.calibration])
    ):
        raise IntegrityError(
            "frozen prompts do not have the form params/prompts.yaml states", where=rel(path)
        )
    return loaded
