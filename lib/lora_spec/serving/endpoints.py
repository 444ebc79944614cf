"""Drafter adapters loaded, unloaded and listed over HTTP while the server runs.

An endpoint plugin of vLLM (`vllm.endpoint_plugins`). vLLM adds its routes only where `VLLM_PLUGINS` names
`lora_spec`; they change what is served, and so, like vLLM's own routes for target adapters, they are there
only with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`. The API key, where there is one, protects them as everything
below /v1.

Imported by vLLM's plugin loading only: FastAPI has to see the types of the handlers at module level.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from lora_spec.errors import EngineError, LoraSpecError, printable
from lora_spec.serving.config import Name
from lora_spec.serving.frontend import FrontDoor

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI

_logger = logging.getLogger("vllm.lora_spec.endpoints")

_STATE = "lora_spec_front_door"
_NOT_FOUND = ("unknown_adapter", "not_found", "not_a_folder")
_CONFLICT = ("name_taken", "in_use")


class LoadDraftAdapter(BaseModel):
    """Body of POST /v1/load_draft_lora_adapter.

    Attributes:
        lora_name: what requests will call it.
        lora_path: folder of a PEFT adapter of the drafter, as the server sees it.
        load_inplace: let a known name mean this from now on.
    """

    model_config = ConfigDict(extra="forbid")
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadDraftAdapter(BaseModel):
    """Body of POST /v1/unload_draft_lora_adapter."""

    model_config = ConfigDict(extra="forbid")
    lora_name: Name


def _json_only(request: Request) -> None:
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request

    return validate_json_request(request)


router = APIRouter()


@router.post("/v1/load_draft_lora_adapter", dependencies=[Depends(_json_only)])
async def load_draft_lora_adapter(body: LoadDraftAdapter, request: Request) -> JSONResponse:
    """Check an adapter's files, load it into the worker, and only then make its name known."""
    name, path, replace = body.lora_name, body.lora_path, body.load_inplace
    try:
        front = _front(request)
        # Reading every byte takes its time: not on the event loop that serves everybody.
        adapter = await asyncio.to_thread(front.check, name, path, replace=replace)
        await request.app.state.engine_client.collective_rpc("load_draft_adapter", args=(asdict(adapter),))
        adapter = await asyncio.to_thread(front.register, name, path, replace=replace)
    except LoraSpecError as error:
        return _refusal(error)
    except Exception as error:  # of the worker, by way of vLLM, which keeps the message only
        _logger.exception("drafter adapter %r cannot be loaded", name)
        return _error(str(error), "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
    _logger.info("loaded drafter adapter %r, content %s", name, adapter.content_hash[:12])
    return JSONResponse(_shown(adapter))


@router.post("/v1/unload_draft_lora_adapter", dependencies=[Depends(_json_only)])
async def unload_draft_lora_adapter(body: UnloadDraftAdapter, request: Request) -> JSONResponse:
    """Forget a name: later requests that use it are refused, those under way finish with it."""
    try:
        adapter = _front(request).unregister(body.lora_name)
    except LoraSpecError as error:
        return _refusal(error)
    _logger.info("unloaded drafter adapter %r", body.lora_name)
    return JSONResponse(_shown(adapter))


@router.get("/v1/draft_lora_adapters")
async def draft_lora_adapters(request: Request) -> JSONResponse:
    """The names that requests may use now."""
    try:
        known = _front(request).adapters()
    except LoraSpecError as error:
        return _refusal(error)
    return JSONResponse({"object": "list", "data": [_shown(known[name]) for name in sorted(known)]})


def _shown(adapter: Any) -> dict[str, str]:
    return {"id": adapter.name, "root": adapter.path, "content_hash": adapter.content_hash}


def _front(request: Request) -> FrontDoor:
    found = getattr(request.app.state, _STATE, None)
    if isinstance(found, FrontDoor):
        return found
    error = found or EngineError("the server is not ready", code="not_configured")
    raise error.with_traceback(None)  # it is raised again and again


def _refusal(error: LoraSpecError) -> JSONResponse:
    if error.code in _NOT_FOUND:
        return _error(str(error), "NotFoundError", HTTPStatus.NOT_FOUND)
    if error.code in _CONFLICT:
        return _error(str(error), "ConflictError", HTTPStatus.CONFLICT)
    return _error(str(error), "BadRequestError", HTTPStatus.BAD_REQUEST)


def _error(message: str, kind: str, status: HTTPStatus) -> JSONResponse:
    from vllm.entrypoints.serve import create_error_response

    body = create_error_response(printable(message), kind, status)
    return JSONResponse(body.model_dump(), status_code=status.value)


class DraftAdapterEndpoints:
    """What vLLM's endpoint plugin loading makes one of (see `vllm.plugins.endpoint_plugins.interface`)."""

    name = "lora_spec"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, where run-time loading is allowed at all."""
        from vllm import envs

        if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Find the engine's front door; without one every route answers why."""
        try:
            found: FrontDoor | EngineError = FrontDoor.of(engine_client)
        except EngineError as error:
            found = error
        if (getattr(args, "api_server_count", None) or 1) > 1:
            found = EngineError(
                "with several API server processes the others would not know a name loaded here",
                fix="Serve with --api-server-count 1",
                code="api_servers",
            )
        setattr(state, _STATE, found)
