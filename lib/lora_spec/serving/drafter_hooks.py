"""Where `draft_lora` is hooked into vLLM's drafter and worker."""

from __future__ import annotations

from typing import Any

from lora_spec.errors import EngineError
from lora_spec.serving import draft_lora
from lora_spec.serving._patching import Replacements
from lora_spec.serving.draft_lora import of_proposer, query_lengths
from lora_spec.serving.frontend import WORKER_LOAD
from lora_spec.serving.stamp import DraftAdapter

_HOOKS = Replacements("drafter")


def install() -> None:
    """Hook it in; drafters of engines without drafter adapters are not affected. Idempotent.

    Raises:
        EngineError: vLLM lacks what this replaces.
    """
    _install_proposer_hooks()
    _install_worker_methods()


def _install_proposer_hooks() -> None:
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

    setattr(Worker, WORKER_LOAD, load_draft_adapter)
    Worker.list_draft_adapters = list_draft_adapters


def _adapters(worker: Any) -> draft_lora.DraftLoRA:
    adapters = of_proposer(getattr(worker.model_runner, "drafter", None))
    if adapters is None:
        raise EngineError("the engine was started without drafter adapters", code="not_configured")
    return adapters
