"""Where requests come in: names are resolved once, and the answer goes along with the request.

A request's drafter adapter is, in this order: what the request itself says (`SamplingParams.extra_args`,
`vllm_xargs` over HTTP), what belongs to its target adapter (the map, or the policy), the default, the base
drafter. Its depth is the policy's. What cannot be resolved is a ValueError (HTTP 400) before anything is
queued.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from lora_spec.checkpoint import BaseGeometry
from lora_spec.errors import EngineError
from lora_spec.serving._patching import Replacements
from lora_spec.serving.channels import config_of
from lora_spec.serving.config import BASE_DRAFTER, DraftLoRAConfig, Name, ServingConfig
from lora_spec.serving.policy_source import PolicyEntry, PolicySource
from lora_spec.serving.stamp import EXTRA_ARG, DraftAdapter, Stamp
from lora_spec.serving.validate import check_adapter, drafter_geometry

if TYPE_CHECKING:
    from lora_spec.policy import Policy

# Method of a worker that loads an adapter now instead of when a request needs it.
WORKER_LOAD = "load_draft_adapter"

# Field of a request that names its drafter adapter, or BASE_DRAFTER.
REQUEST_FIELD = "draft_lora"

_HOOK = Replacements("frontend")
_ATTRIBUTE = "_lora_spec_front_door"
_NAME: TypeAdapter[str] = TypeAdapter(Name)

Invalid = Callable[[str, str, Any], Exception]


class FrontDoor:
    """Names of one engine's drafter adapters, and the answers that follow from them.

    Args:
        config: the checked configuration.
        geometry: shapes of the drafter (needed with `draft_lora` only).

    Raises:
        CheckpointError, EngineError: a configured adapter cannot be served.
        ParamsError: the policy file is not valid, or contradicts the configuration.
    """

    def __init__(self, config: ServingConfig, geometry: BaseGeometry | None = None) -> None:
        self.config = config
        self._draft = config.draft_lora or DraftLoRAConfig()
        self._geometry = geometry
        self._lock = threading.Lock()  # for writers; readers take the dict that is there
        self._adapters: dict[str, DraftAdapter] = {}
        self.policy: PolicySource | None = None
        self._loadings: Counter[str] = Counter()  # by content
        for name, path in self._draft.adapters.items():
            self.register(name, path)
        if config.depth_policy is not None:
            self.policy = PolicySource(config.depth_policy, self._check_policy)

    @classmethod
    def of(cls, engine: Any) -> FrontDoor:
        """The front door of an `LLM`, an `AsyncLLM`, or anything that has their input processor.

        Raises:
            EngineError: the engine was started without a serving configuration.
        """
        for path in (("llm_engine", "input_processor"), ("input_processor",), ()):
            found = engine
            for name in path:
                found = getattr(found, name, None)
            if (front := getattr(found, _ATTRIBUTE, None)) is not None:
                return front
        raise EngineError(
            "the engine has no serving configuration",
            where=type(engine).__name__,
            fix="Give draft_lora or depth_policy in speculative_config",
            code="not_configured",
        )

    def adapters(self) -> dict[str, DraftAdapter]:
        """Names that requests may use now."""
        return dict(self._adapters)

    def check(self, name: str, path: str | Path, *, replace: bool = False) -> DraftAdapter:
        """Everything that `register` checks, without making the name known.

        Raises:
            CheckpointError, EngineError: as `register`.
        """
        if self.config.draft_lora is None or self._geometry is None:
            raise EngineError(
                "the engine was started without drafter adapters",
                fix="Give draft_lora in speculative_config",
                code="not_configured",
            )
        if name == BASE_DRAFTER or not _is_name(name):
            raise EngineError(f"no drafter adapter may be called {name!r:.80}", code="reserved_name")
        adapter = check_adapter(name, path, self._geometry, self._draft)
        self._check_name(adapter, replace)
        return adapter

    def _check_name(self, adapter: DraftAdapter, replace: bool) -> None:
        known = self._adapters.get(adapter.name)
        if known is not None and known.content_hash != adapter.content_hash and not replace:
            raise EngineError(
                "a drafter adapter of this name with other content is loaded",
                where=adapter.name,
                fix="Unload it first, or load in place",
                code="name_taken",
            )

    def register(self, name: str, path: str | Path, *, replace: bool = False) -> DraftAdapter:
        """Check an adapter's files and make its name known.

        Requests under way keep what they had; a name that now means other content never meets cached K/V or
        loaded weights of the old one, because both go by content.

        Args:
            name: new name.
            path: folder of a PEFT adapter of the drafter.
            replace: let a known name mean this from now on.

        Raises:
            CheckpointError, EngineError: the adapter cannot be served, or the name is taken or reserved.
        """
        adapter = self.check(name, path, replace=replace)
        with self._lock:
            self._check_name(adapter, replace)
            adapter = dataclasses.replace(adapter, loading=self._loadings[adapter.content_hash])
            self._loadings[adapter.content_hash] += 1
            self._adapters = {**self._adapters, name: adapter}
        if self.policy is not None:
            self.policy.look_again()  # one that named this adapter too early was refused
        return adapter

    def unregister(self, name: str) -> DraftAdapter:
        """Forget a name: later requests that use it are refused, those under way finish.

        Raises:
            EngineError: unknown name, or one that the map, the policy or the default needs.
        """
        with self._lock:
            if name not in self._adapters:
                raise EngineError("no such drafter adapter", where=name, code="unknown_adapter")
            if name in {*self._draft.map.values(), self._draft.default, *self._policy_drafters()}:
                raise EngineError(
                    "the map, the policy or the default uses this drafter adapter",
                    where=name,
                    fix="Change that first",
                    code="in_use",
                )
            gone = self._adapters[name]
            self._adapters = {key: value for key, value in self._adapters.items() if key != name}
        return gone

    def resolve(
        self, extra_args: dict[str, Any] | None, lora_request: Any = None, *, invalid: Invalid | None = None
    ) -> Stamp:
        """The answer for one request.

        Args:
            extra_args: of its `SamplingParams`.
            lora_request: its target adapter (`LoRARequest`), or None.
            invalid: makes the exception from message, parameter and value (default: ValueError).

        Raises:
            ValueError: the request names no known drafter adapter, or carries a stamp of its own.
        """
        fail = invalid or (lambda message, parameter, value: ValueError(message))
        extra_args = extra_args or {}
        if EXTRA_ARG in extra_args:
            raise fail(f"{EXTRA_ARG!r} is written by the server only", EXTRA_ARG, extra_args[EXTRA_ARG])
        for key in extra_args:
            if key != REQUEST_FIELD and str(key).lower().replace("-", "_") == REQUEST_FIELD:
                raise fail(f"unknown field {key!r:.80}: call it {REQUEST_FIELD!r}", str(key), extra_args[key])
        entry = PolicyEntry() if self.policy is None else self.policy.decide(lora_request)
        name = extra_args.get(REQUEST_FIELD)
        if name is not None:
            if self.config.draft_lora is None:
                raise fail("this server has no drafter adapters", REQUEST_FIELD, name)
            if not isinstance(name, str):
                raise fail(f"{REQUEST_FIELD} must be a name", REQUEST_FIELD, name)
        else:
            name = self._mapped(lora_request, entry)
        adapters = self._adapters
        if name is None or name == BASE_DRAFTER:
            adapter = None
        elif name in adapters:
            adapter = adapters[name]
        else:
            known = ", ".join(sorted(adapters)[:8]) or "none"
            raise fail(f"unknown drafter adapter {name!r:.80} (known: {known})", REQUEST_FIELD, name)
        # A request that never drafts needs no slot for an adapter.
        return Stamp(None if entry.depth == 0 else adapter, entry.depth)

    def _mapped(self, lora_request: Any, entry: PolicyEntry) -> str | None:
        if lora_request is not None and lora_request.lora_name in self._draft.map:
            return self._draft.map[lora_request.lora_name]
        if entry.drafter_adapter is not None:
            return entry.drafter_adapter
        return self._draft.default

    def _policy_drafters(self) -> set[str]:
        return set() if self.policy is None else _named_by(self.policy.current())

    def _check_policy(self, policy: Policy) -> None:
        """What `PolicySource` asks of every version of the file, the first and later ones."""
        named = _named_by(policy)
        if named and self._draft.map:
            raise EngineError(
                "both draft_lora.map and the policy name drafter adapters",
                where=self.config.depth_policy,
                fix="Keep one of them",
                code="two_maps",
            )
        if unknown := sorted(named - {BASE_DRAFTER} - set(self._adapters)):
            raise EngineError(
                f"the policy names the unknown drafter adapter {unknown[0]!r}",
                where=self.config.depth_policy,
                fix=f"Known: {', '.join(sorted(self._adapters)) or 'none'}",
                code="unknown_adapter",
            )


def _is_name(name: Any) -> bool:
    try:
        _NAME.validate_python(name, strict=True)
    except ValidationError:
        return False
    return True


def _named_by(policy: Policy) -> set[str]:
    """Names of drafter adapters in a policy, its default's too."""
    return {*policy.drafter_adapters.values(), policy.default.drafter_adapter} - {None}


def _open(processor: Any) -> None:
    config = config_of(processor.vllm_config)
    if config is None:
        return
    geometry = None if config.draft_lora is None else drafter_geometry(processor.vllm_config)
    setattr(processor, _ATTRIBUTE, FrontDoor(config, geometry))


def load_draft_adapter(llm: Any, name: str, path: str | Path, *, replace: bool = False) -> DraftAdapter:
    """Load a drafter adapter into a running `LLM`; requests can name it from then on.

    Args:
        llm: a vLLM `LLM` that was started with `draft_lora`.
        name, path, replace: as for `FrontDoor.register`.

    Raises:
        CheckpointError, EngineError: the adapter cannot be served; nothing has changed then.
    """
    front = FrontDoor.of(llm)
    llm.collective_rpc(WORKER_LOAD, args=(asdict(front.check(name, path, replace=replace)),))
    return front.register(name, path, replace=replace)


def unload_draft_adapter(llm: Any, name: str) -> None:
    """Forget a drafter adapter of a running `LLM`: requests that name it are refused, those under way finish.

    Its weights leave the memory when others need the room.

    Raises:
        EngineError: unknown name, or one that the map, the policy or the default needs.
    """
    FrontDoor.of(llm).unregister(name)


def install() -> None:
    """Stamp every request that an `InputProcessor` takes in; doing it again changes nothing."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    stock_init = _HOOK.original(InputProcessor, "__init__")
    stock_process = _HOOK.original(InputProcessor, "process_inputs")

    class InvalidRequest(VLLMValidationError, ValueError):
        """vLLM's own error, which its server answers with 400; it is no ValueError, which callers expect."""

    def invalid(message: str, parameter: str, value: Any) -> Exception:
        # Shortened: it is repeated in the answer.
        return InvalidRequest(message, parameter=parameter, value=f"{value!r:.80}")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        _open(self)

    def process_inputs(
        self: Any,
        request_id: str,
        prompt: Any,
        params: Any,
        supported_tasks: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        front: FrontDoor | None = getattr(self, _ATTRIBUTE, None)
        stamp = None
        if front is not None and hasattr(params, "extra_args") and hasattr(params, "temperature"):
            stamp = front.resolve(params.extra_args, lora_request, invalid=invalid)
        request = stock_process(
            self, request_id, prompt, params, supported_tasks, arrival_time, lora_request, *args, **kwargs
        )
        if stamp is not None:
            # Stock made the params the request's own.
            request.sampling_params.extra_args = stamp.to_extra_args(request.sampling_params.extra_args)
        return request

    _HOOK.replace_once(InputProcessor, "__init__", __init__)
    _HOOK.replace_once(InputProcessor, "process_inputs", process_inputs)
