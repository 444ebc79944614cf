"""The plugin: where each part is hooked into vLLM, in every process of an engine.

`watch` is all that happens unless something is configured: it looks at the arguments of engines that are
built. A configured engine gets the hooks in the process that takes requests in, and, by way of an environment
variable that child processes inherit, in the scheduler's and the worker's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from lora_spec.serving._patching import Replacements

# Set by a configured engine for its child processes: the fixes, separated by commas.
ENV_ACTIVE = "LORA_SPEC_SERVING_ACTIVE"
NO_FIXES = "none"

_WATCH = Replacements("watch")


def watch() -> None:
    """Look for a configuration in the arguments of every engine that is built from now on."""
    from vllm.engine.arg_utils import EngineArgs

    if "create_engine_config" not in vars(EngineArgs):
        return  # some other vLLM, which must start as if this plugin were not there

    stock = _WATCH.original(EngineArgs, "create_engine_config")

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not at the top: every vLLM on this machine imports this module, and most are not configured.
        from lora_spec.serving.channels import configure

        config = configure(self)
        if config is None:
            return stock(self, *args, **kwargs)
        from lora_spec.serving.validate import SCHEDULER, check_engine, check_scheduler

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
    from lora_spec.serving import drafter_hooks, drafting, frontend, install_all, metrics, prefix_cache

    named = os.environ[ENV_ACTIVE]
    install_all([] if named == NO_FIXES else named.split(","))
    frontend.install()
    prefix_cache.install()
    metrics.install()
    drafter_hooks.install()
    drafting.install()
