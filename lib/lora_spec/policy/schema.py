"""Form of the policy file, and reading and writing it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints, model_validator

from lora_spec.errors import ParamsError, printable
from lora_spec.files import atomic_write_json, parse_json
from lora_spec.gate import Action
from lora_spec.params import StrictModel, validate
from lora_spec.provenance import EvidenceClass

POLICY_SCHEMA = "lora-spec-policy/1"

MAX_BYTES = 16 << 20
MAX_ADAPTERS = 10_000
MAX_DEPTH = 1_000

# What a policy, a map or a request says to get the base drafter, so no adapter may be called so.
BASE_DRAFTER = "none"

Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Depth = Annotated[int, Field(ge=0, le=MAX_DEPTH)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PolicyReason(StrictModel):
    """Machine-readable code and a sentence for a person."""

    code: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
    sentence: Annotated[str, StringConstraints(min_length=1, max_length=2_000)]


class Serve(StrictModel):
    """How requests are served.

    Attributes:
        depth: most drafts a step; null for the engine's own number, which also caps larger ones.
        drafter_adapter: name of a drafter adapter that the server knows, or "none" for the base drafter; null
            says nothing about it.
    """

    depth: Depth | None = None
    drafter_adapter: Name | None = None


class AdapterPolicy(Serve):
    """What was decided for one target adapter.

    Attributes:
        content_hash: the adapter's identity; the entry holds for no other files of the same name.
        action: what the depth amounts to.
        reasons: why, the deciding ones first.
    """

    content_hash: Sha256
    action: Action
    reasons: Annotated[tuple[PolicyReason, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _action_and_depth_agree(self) -> AdapterPolicy:
        if self.action is Action.RED and self.depth != 0 and self.drafter_adapter in (None, BASE_DRAFTER):
            raise ValueError(
                "red stops speculation: its depth must be 0 unless a drafter_adapter is named, "
                f"and it is {_shown(self.depth)}"
            )
        if self.action in (Action.GREEN, Action.AMBER) and self.depth == 0:
            raise ValueError(f"{self.action} speculates: its depth cannot be 0")
        if self.action is Action.AMBER and self.depth is None:
            raise ValueError("amber speculates shorter: its depth cannot be null")
        return self


class BasePolicy(StrictModel):
    """Requests without a target adapter."""

    depth: Depth | None = None


class CostProfileSource(StrictModel):
    """The cost profile that was decided under."""

    name: Name
    sha256: Sha256


class PredictorSource(StrictModel):
    """The predictor that was asked."""

    file: Name
    sha256: Sha256


class Policy(StrictModel):
    """The whole file; one written by hand may leave out where it comes from (the last five fields).

    Attributes:
        base_model: the model that the adapters belong to (a label: a server's own name for it may differ).
        default: target adapters that are not listed, and those whose files are not the ones judged.
        base: requests without a target adapter.
        adapters: target adapter's name, as the server calls it -> what was decided.
        load: concurrent requests that were decided for.
    """

    schema_: Literal["lora-spec-policy/1"] = Field(alias="schema")
    base_model: Name
    default: Serve
    adapters: Annotated[dict[Name, AdapterPolicy], Field(max_length=MAX_ADAPTERS)]
    base: BasePolicy = BasePolicy()
    predictor: PredictorSource | None = None
    cost_profile: CostProfileSource | None = None
    load: Annotated[int, Field(ge=1)] | None = None
    evidence_class: EvidenceClass | None = None
    created_utc: AwareDatetime | None = None

    @property
    def drafter_adapters(self) -> dict[str, str]:
        """Target adapter's name -> drafter adapter's name, where one is named."""
        named = {name: entry.drafter_adapter for name, entry in self.adapters.items()}
        return {name: drafter for name, drafter in named.items() if drafter is not None}


def _shown(depth: int | None) -> str:
    return "null (the engine's own)" if depth is None else str(depth)


def parse_policy(data: bytes, where: object) -> Policy:
    """Check the bytes of a policy file.

    Raises:
        ParamsError: (code ``policy``) too large, not strict JSON, of another schema, or not valid; the
            message names the first wrong key.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ParamsError(f"a policy file of more than {MAX_BYTES >> 20} MiB")
        raw = parse_json(data)
        if isinstance(raw, dict) and raw.get("schema") != POLICY_SCHEMA:
            raise ParamsError(f"no {POLICY_SCHEMA}: its schema is {str(raw.get('schema'))!r:.80}")
        return validate(Policy, raw, where=where)
    except ParamsError as error:
        raise ParamsError(printable(error.what), where=where, fix=error.fix, code="policy") from error
    except ValueError as error:
        raise ParamsError(printable(f"not valid JSON: {error}"), where=where, code="policy") from error


def read_policy_bytes(path: Path | str) -> bytes:
    """The file's bytes, at most one more than a policy may have.

    Raises:
        ParamsError: (code ``policy``) it cannot be read.
    """
    try:
        # Without O_NONBLOCK a server would wait for the other end of a named pipe, and serve nobody.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as handle:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ParamsError("the policy is no regular file", where=path, code="policy")
            return handle.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        detail = getattr(error, "strerror", None) or error
        raise ParamsError(f"cannot read the policy file: {detail}", where=path, code="policy") from error


def load_policy(path: Path | str) -> Policy:
    """Read and check a policy file.

    Raises:
        ParamsError: (code ``policy``) it cannot be read, or is not valid.
    """
    return parse_policy(read_policy_bytes(path), path)


def write_policy(path: Path | str, policy: Policy) -> None:
    """Write the file whole, over an older policy or where nothing was.

    Raises:
        ParamsError: (code ``policy``) another file is in the place.
        OSError: it cannot be written.
    """
    target = Path(path)
    if target.is_dir() or (target.exists() and not _is_policy(target)):
        raise ParamsError(
            "something else than a policy is there",
            where=path,
            fix="Choose another name, or remove it first",
            code="policy",
        )
    atomic_write_json(target, policy.model_dump(mode="json", by_alias=True))


def _is_policy(path: Path) -> bool:
    try:
        head = parse_json(read_policy_bytes(path))
    except (ParamsError, ValueError):
        return False
    return isinstance(head, dict) and head.get("schema") == POLICY_SCHEMA


def policy_rows(policy: Policy) -> Sequence[tuple[str, str, str, str, str]]:
    """A table for a person, its header first; requests that no entry names come last."""
    rows = [("adapter", "action", "depth", "drafter adapter", "why")]
    for name, entry in sorted(policy.adapters.items()):
        why = "; ".join(item.code for item in entry.reasons)
        rows.append((name, entry.action.value, *_served(entry.depth, entry.drafter_adapter), why))
    rows.append(("(not listed)", "", *_served(policy.default.depth, policy.default.drafter_adapter), ""))
    rows.append(("(no adapter)", "", *_served(policy.base.depth, None), ""))
    return rows


def _served(depth: int | None, drafter: str | None) -> tuple[str, str]:
    return "engine's" if depth is None else str(depth), drafter or "-"
