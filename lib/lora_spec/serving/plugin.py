"""The plugin: where each part is hooked into vLLM, in every process of an engine.

`watch` is all that happens unless something is configured: it looks at the arguments of engines that are
built. A configured engine gets the hooks in the process that takes requests in, and, by way of an environment
variable that child processes inherit, in the scheduler's and the worker's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lora_spec.serving import draft_lora, frontend, metrics, prefix_cache
from lora_spec.serving._patching import Fix
from lora_spec.serving.channels import configure
from lora_spec.serving.draft_lora import of_proposer, query_lengths
from lora_spec.serving.stamp import DraftAdapter
from lora_spec.serving.validate import SCHEDULER, check_engine, check_scheduler

# Set by a configured engine for its child processes: the fixes, separated by commas.
ENV_ACTIVE = "LORA_SPEC_SERVING_ACTIVE"
NO_FIXES = "none"

_WATCH = Fix("watch")
_HOOKS = Fix("hooks")


def watch() -> None:
    """Look for a configuration in the arguments of every engine that is built from now on."""
    from vllm.engine.arg_utils import EngineArgs

    stock = _WATCH.original(EngineArgs, "create_engine_config")

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = configure(self)
        if config is None:
            return stock(self, *args, **kwargs)
        check_scheduler(self)
        self.scheduler_cls = SCHEDULER
        if self.per_request_spec_decode_metrics == "none" and self.speculative_config:
            self.per_request_spec_decode_metrics = "summary"  # acceptance by adapter is counted from these
        vllm_config = stock(self, *args, **kwargs)
        check_engine(vllm_config, config)
        activate(needed_fixes() if config.fixes is None else config.fixes)
        return vllm_config

    _WATCH.replace_once(EngineArgs, "create_engine_config", create_engine_config)


def needed_fixes() -> tuple[str, ...]:
    """Repairs that an engine needs on this platform; each looks for its fault first and may step aside."""
    from vllm.platforms import current_platform

    from lora_spec.serving import FIXES

    return FIXES if current_platform.is_cpu() else ("shared_embeddings",)


def activate(fixes: Sequence[str]) -> None:
    """Hook everything in here, and in processes that this one starts."""
    os.environ[ENV_ACTIVE] = ",".join(fixes) or NO_FIXES
    install_hooks()


def install_hooks() -> None:
    """Hook in what `ENV_ACTIVE` says; engines without a configuration are not affected. Idempotent."""
    from lora_spec.serving import install_all

    named = os.environ[ENV_ACTIVE]
    install_all([] if named == NO_FIXES else named.split(","))
    frontend.install()
    prefix_cache.install()
    metrics.install()
    _install_drafter_hooks()
    _install_worker_methods()


def _install_drafter_hooks() -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    base, dflash = SpecDecodeBaseProposer, DFlashProposer
    stock_init = _HOOKS.original(base, "__init__")
    stock_load = _HOOKS.original(base, "load_model")
    stock_graphs = _HOOKS.original(base, "initialize_cudagraph_keys")
    stock_propose = _HOOKS.original(base, "propose")
    stock_metadata = _HOOKS.original(base, "build_per_group_and_layer_attn_metadata")
    stock_context = _HOOKS.original(dflash, "build_model_inputs_first_pass")

    def __init__(self: Any, *args: Any, runner: Any = None, **kwargs: Any) -> None:
        stock_init(self, *args, runner=runner, **kwargs)
        self.lora_spec_runner = runner

    def load_model(self: Any, target_model: Any) -> None:
        stock_load(self, target_model)
        draft_lora.attach(self, self.lora_spec_runner)

    def initialize_cudagraph_keys(self: Any, cudagraph_mode: Any) -> None:
        # A captured graph has no room for "which adapter": drafters with adapters run without.
        if of_proposer(self) is not None:
            cudagraph_mode = CUDAGraphMode.NONE
        stock_graphs(self, cudagraph_mode)

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (adapters := of_proposer(self)) is not None:
            adapters.begin_step(query_lengths(kwargs["common_attn_metadata"]))
        return stock_propose(self, *args, **kwargs)

    def build_per_group_and_layer_attn_metadata(self: Any, metadata: Any, draft_index: int = 0) -> Any:
        if (adapters := of_proposer(self)) is not None:
            adapters.before_forward(query_lengths(metadata), draft_index)
        return stock_metadata(self, metadata, draft_index)

    def build_model_inputs_first_pass(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = stock_context(self, *args, **kwargs)
        if (adapters := of_proposer(self)) is not None:
            adapters.after_context()
        return inputs

    def dummy_run(stock: Any) -> Any:
        def dummy_run(self: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
            if (adapters := of_proposer(self)) is not None:
                adapters.map_base(num_tokens)
            stock(self, num_tokens, *args, **kwargs)

        return dummy_run

    for owner, attribute, hook in (
        (base, "__init__", __init__),
        (base, "load_model", load_model),
        (base, "initialize_cudagraph_keys", initialize_cudagraph_keys),
        (base, "propose", propose),
        (base, "build_per_group_and_layer_attn_metadata", build_per_group_and_layer_attn_metadata),
        (dflash, "build_model_inputs_first_pass", build_model_inputs_first_pass),
        (base, "dummy_run", dummy_run(_HOOKS.original(base, "dummy_run"))),
        (dflash, "dummy_run", dummy_run(_HOOKS.original(dflash, "dummy_run"))),
    ):
        _HOOKS.replace_once(owner, attribute, hook)


def _install_worker_methods() -> None:
    """Methods that `collective_rpc` can call on a worker."""
    from vllm.v1.worker.gpu_worker import Worker

    def load_draft_adapter(self: Any, adapter: dict[str, str]) -> None:
        _adapters(self).load(DraftAdapter(**adapter))

    def list_draft_adapters(self: Any) -> list[str]:
        return _adapters(self).loaded()

    Worker.load_draft_adapter = load_draft_adapter
    Worker.list_draft_adapters = list_draft_adapters


def _adapters(worker: Any) -> draft_lora.DraftLoRA:
    from lora_spec.errors import EngineError

    adapters = of_proposer(getattr(worker.model_runner, "drafter", None))
    if adapters is None:
        raise EngineError("the engine was started without drafter adapters", code="not_configured")
    return adapters
