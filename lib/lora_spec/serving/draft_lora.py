"""LoRA adapters on the drafter: a manager on the drafter's layers, and a map of rows before every forward.

vLLM 0.32 wraps the target's layers only. Here a second `LRUCacheWorkerLoRAManager` wraps every linear layer
of the drafter (neither `lm_head` nor `embed_tokens`), and each drafter forward is told which row belongs to
which adapter: right before it, vLLM builds attention metadata that carries the forward's own query lengths.

Requests say by their stamps what they want (`lora_spec.serving.stamp`). Rows without a stamp, and rows whose
adapter cannot be loaded any more, run on the base drafter: the output of speculative decoding does not depend
on it, and a server that keeps answering is worth more than acceptance. Both are logged as errors.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_spec.checkpoint import content_hash
from lora_spec.errors import EngineError
from lora_spec.serving import drafter_kernels, grouped_lora
from lora_spec.serving._patching import APPLIED
from lora_spec.serving.channels import config_of
from lora_spec.serving.config import DraftLoRAConfig
from lora_spec.serving.stamp import DraftAdapter, read_stamp

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(f"vllm.{__name__}")

ATTRIBUTE = "lora_spec_draft_lora"


class DraftLoRA:
    """The adapters of one drafter in one worker.

    Args:
        proposer: vLLM's `SpecDecodeBaseProposer`, its model loaded.
        runner: the model runner that owns it (for the requests of a batch, in order of rows).
        config: slots, ranks and adapters.

    Raises:
        EngineError: a configured adapter does not load, or has modules that the drafter does not have.
    """

    def __init__(self, proposer: Any, runner: Any, config: DraftLoRAConfig) -> None:
        self.runner = runner
        self.failed: set[int] = set()
        self.is_dflash = hasattr(proposer.model, "precompute_and_store_context_kv")
        self._query_lengths: np.ndarray | None = None
        self._ids = np.zeros(0, dtype=np.int64)
        self._ready: frozenset[int] = frozenset()  # adapters of the last batch, in slots ever since
        self._prepare(proposer.model)
        self._manager = _manager(proposer, config)
        proposer.model = self._manager.create_lora_manager(proposer.model, self._manager.vllm_config)
        self._manager.use_drafter_kernels()
        if self.is_dflash:
            use_wrapped_context_projections(proposer.model.model)
        self._known: dict[int, DraftAdapter] = {}
        # The front door checked files and shapes; whether vLLM loads them only vLLM can tell.
        for name, path in list(config.adapters.items())[: config.max_cached]:
            self.load(DraftAdapter(name, path, content_hash(path)))

    def _prepare(self, model: Any) -> None:
        # Without embedding modules only linear layers are wrapped.
        model.embedding_modules = {}
        if self.is_dflash:
            from vllm.model_executor.models.utils import WeightsMapper

            # Checkpoints of DFlash drafters, and adapters trained on them, have no "model." prefix.
            model.hf_to_vllm_mapper = WeightsMapper(
                orig_to_new_prefix={"layers.": "model.layers.", "fc.": "model.fc."}
            )

    # ------------------------------------------------------------------ loading

    def load(self, adapter: DraftAdapter) -> None:
        """Load an adapter into memory and a slot.

        Raises:
            EngineError: the files are gone, are other files now, or do not fit the drafter.
        """
        self._ready = frozenset()
        self._manager.check_and_add(adapter)
        self._known[adapter.int_id] = adapter
        self.failed.discard(adapter.int_id)

    def unload(self, adapter: DraftAdapter) -> None:
        """Take an adapter out of its slot and out of memory; nothing happens if it is not there."""
        self._ready = frozenset()
        self._manager.remove_adapter(adapter.int_id)

    def loaded(self) -> list[str]:
        """Names of the adapters in memory."""
        return sorted(self._known[i].name for i in self._manager.list_adapters() if i in self._known)

    def cached_bytes(self) -> int:
        """Bytes of the adapters in memory, in a slot or not."""
        return self._manager.cached_bytes()

    def slots_bytes(self) -> int:
        """Bytes of the slots' buffers, which are there whether or not adapters are."""
        return self._manager.slots_bytes()

    # ------------------------------------------------------------------ rows

    def begin_step(self, context_lengths: np.ndarray) -> None:
        """Look up the batch's adapters; DFlash then reads the target's states under this map.

        Args:
            context_lengths: int64 [requests], tokens of each request in the target's forward.
        """
        self._ids = self._request_ids(len(context_lengths))
        self._query_lengths = None
        if self.is_dflash:
            self.map_rows(context_lengths)

    def before_forward(self, lengths: np.ndarray, draft_index: int) -> None:
        """Map the rows of the next forward, or for DFlash's only one remember them until its context is in.

        Args:
            lengths: int64 [requests], query tokens of each request in that forward.
            draft_index: which forward of the draft step it is.
        """
        if self.is_dflash and draft_index == 0:
            self._query_lengths = lengths
        else:
            self.map_rows(lengths)

    def after_context(self) -> None:
        """DFlash's context K/V are written: from here on rows are queries."""
        if self._query_lengths is not None:
            self.map_rows(self._query_lengths)

    def map_rows(self, lengths: np.ndarray) -> None:
        """Tell every wrapped layer whose rows come next."""
        from vllm.lora.layers import LoRAMapping

        ids = self._ids[: len(lengths)]
        mapping = LoRAMapping(tuple(np.repeat(ids, lengths).tolist()), tuple(ids.tolist()), is_prefill=True)
        self._manager.set_mapping(mapping)

    def map_base(self, rows: int) -> None:
        """All rows are the base drafter's (dummy runs)."""
        from vllm.lora.layers import LoRAMapping

        self._manager.set_mapping(LoRAMapping((0,) * rows, (0,), is_prefill=True))

    def _request_ids(self, count: int) -> np.ndarray:
        """Adapter of each row's request, int64 [count], 0 for the base drafter; loads what is missing."""
        ids = np.zeros(count, dtype=np.int64)
        wanted: dict[int, DraftAdapter] = {}
        for row, request_id in enumerate(self.runner.input_batch.req_ids[:count]):
            params = self.runner.requests[request_id].sampling_params
            stamp = None if params is None else read_stamp(params)
            if stamp is None:
                if params is not None:
                    logger.error("request %s came in by no front door: base drafter", request_id)
            elif stamp.draft_adapter is not None:
                adapter = stamp.draft_adapter
                ids[row] = adapter.int_id
                wanted[adapter.int_id] = adapter
        if wanted.keys() != self._ready:
            usable = {int_id: adapter for int_id, adapter in wanted.items() if self._available(adapter)}
            ids[~np.isin(ids, list(usable))] = 0
            self._manager.activate(usable.values())
            self._ready = frozenset(usable)
        return ids

    def _available(self, adapter: DraftAdapter) -> bool:
        if adapter.int_id in self.failed:
            return False
        try:
            self.load(adapter)
        except Exception as error:
            # Once per content, not once per step; loading it again by name clears it.
            self.failed.add(adapter.int_id)
            logger.error("drafter adapter %r cannot be loaded, base drafter instead: %s", adapter.name, error)
            return False
        return True


def use_wrapped_context_projections(inner: Any) -> None:
    """Let DFlash write its context K/V through the wrapped projections.

    Stock multiplies with one fused weight that it copied from all layers at loading, so no adapter would
    touch the context. Setting it aside makes stock's own fallback run, which calls the layers one by one.

    Args:
        inner: the drafter's `DFlashQwen3Model`, its layers wrapped.
    """
    inner._fused_kv_weight = inner._fused_kv_bias = None
    inner._context_qkv_projs = [layer.self_attn.qkv_proj for layer in inner.layers]


def keep_eager(inner: Any) -> None:
    """Run the drafter uncompiled: a graph traced without adapters would ignore them later, silently."""
    inner.do_not_compile = True


def query_lengths(metadata: Any) -> np.ndarray:
    """Query tokens of each request, int64 [requests], of vLLM's `CommonAttentionMetadata`."""
    starts: torch.Tensor = metadata.query_start_loc_cpu
    return (starts[1:] - starts[:-1]).numpy().astype(np.int64)


def attach(proposer: Any, runner: Any) -> None:
    """Give a proposer whose model was just loaded its adapters, if its engine is configured for them."""
    config = config_of(proposer.vllm_config)
    if config is None or config.draft_lora is None:
        return
    if (inner := getattr(proposer.model, "model", None)) is not None:
        keep_eager(inner)
    setattr(proposer, ATTRIBUTE, DraftLoRA(proposer, runner, config.draft_lora))


def of_proposer(proposer: Any) -> DraftLoRA | None:
    """The adapters of a proposer, None where it has none."""
    return getattr(proposer, ATTRIBUTE, None)


def _manager(proposer: Any, config: DraftLoRAConfig) -> Any:
    """vLLM's LoRA manager on a copied configuration whose model is the drafter."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    class DrafterLoRAManager(LRUCacheWorkerLoRAManager):
        vllm_config: Any

        def check_and_add(self, adapter: DraftAdapter) -> None:
            if adapter.int_id not in self.list_adapters():
                found = content_hash(adapter.path)
                if found != adapter.content_hash:
                    raise EngineError("the files have changed since they were checked", where=adapter.name)
            self.add_adapter(LoRARequest(adapter.name, adapter.int_id, adapter.path))

        def _load_adapter(self, lora_request: Any) -> Any:
            lora = super()._load_adapter(lora_request)
            self._refuse_lost(lora, lora_request.lora_name)
            return lora

        def _refuse_lost(self, lora: Any, name: str) -> None:
            """vLLM drops weights of modules that it did not wrap; that would be a silent no-op."""
            served = set(self._adapter_manager.modules)
            served.update(*self._adapter_manager.packed_modules.values())
            if lost := sorted(set(lora.loras) - served):
                raise EngineError(
                    f"the drafter has no such module: {lost[0]}", where=f"drafter adapter {name!r}"
                )

        def activate(self, adapters: Iterable[DraftAdapter]) -> None:
            self._apply_adapters({LoRARequest(a.name, a.int_id, a.path) for a in adapters})

        def use_drafter_kernels(self) -> None:
            if grouped_lora.status() == APPLIED:  # on CPU, and unless the operator wants stock's
                drafter_kernels.use(self._adapter_manager)

        def cached_bytes(self) -> int:
            weights: list[Any] = []
            for adapter in self._adapter_manager.list_adapters().values():
                for lora in adapter.loras.values():
                    for side in (lora.lora_a, lora.lora_b):
                        weights += side if isinstance(side, list) else [side]  # packed: one a projection
            return sum(weight.nbytes for weight in weights if weight is not None)

        def slots_bytes(self) -> int:
            modules = self._adapter_manager.modules.values()
            return sum(w.nbytes for m in modules for w in (*m.lora_a_stacked, *m.lora_b_stacked))

        def set_mapping(self, mapping: Any) -> None:
            self._adapter_manager.set_adapter_mapping(mapping)

    vllm_config = copy.copy(proposer.vllm_config)  # shallow, and without its checks: it is one already
    vllm_config.model_config = proposer.draft_model_config
    vllm_config.lora_config = LoRAConfig(
        max_lora_rank=config.max_rank, max_loras=config.max_slots, max_cpu_loras=config.max_cached
    )
    vllm_config.lora_config.verify_with_model_config(vllm_config.model_config)
    scheduler_config = copy.copy(proposer.vllm_config.scheduler_config)
    # DFlash queries 1 + k tokens a request, which may exceed the budget of tokens a step.
    scheduler_config.max_num_batched_tokens = max(
        scheduler_config.max_num_batched_tokens,
        scheduler_config.max_num_seqs * (1 + proposer.num_speculative_tokens),
    )
    vllm_config.scheduler_config = scheduler_config
    manager = DrafterLoRAManager(vllm_config, proposer.device, {})
    manager.vllm_config = vllm_config
    return manager
