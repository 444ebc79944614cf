"""Where the configuration comes from, and how it gets to every process of an engine.

Exactly one of three channels may speak: keys inside `speculative_config`, one key of `additional_config`, or
the YAML/JSON file that an environment variable names. Whichever it was, the checked configuration travels in
`VllmConfig.additional_config["lora_spec"]`, which vLLM hands to its scheduler and workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_spec.errors import ParamsError
from lora_spec.params import read_yaml, validate
from lora_spec.serving.config import ServingConfig

# Names a file for operators of servers.
ENV_FILE = "LORA_SPEC_SERVING_CONFIG"

# Key of `additional_config`, given by a user or put there by `configure`.
KEY = "lora_spec"

# Keys inside `speculative_config`.
SPECULATIVE_KEYS = tuple(ServingConfig.model_fields)


def configure(engine_args: Any) -> ServingConfig | None:
    """Take this plugin's configuration out of vLLM's `EngineArgs` (or the environment) and check it.

    The keys in `engine_args.speculative_config` are removed, since vLLM refuses keys it does not know.

    Returns:
        The configuration, None where no channel says anything.

    Raises:
        ParamsError: more than one channel speaks, or the configuration is not valid.
    """
    given: dict[str, tuple[str, Any]] = {}
    if inline := _take_inline(engine_args):
        given["speculative_config"] = ("speculative_config", inline)
    additional = engine_args.additional_config
    if isinstance(additional, dict) and KEY in additional:
        given["additional_config"] = (f"additional_config[{KEY!r}]", additional[KEY])
    if path := os.environ.get(ENV_FILE, "").strip():
        given["environment"] = (path, read_yaml(Path(path)))
    if len(given) > 1:
        raise ParamsError(
            f"the serving configuration is given twice: {' and '.join(where for where, _ in given.values())}",
            fix="Keep one of them",
        )
    for where, value in given.values():
        config = validate(ServingConfig, value, where=where)
        # A new dict: the caller's own may serve another engine.
        engine_args.additional_config = {**(additional or {}), KEY: config.model_dump(mode="json")}
        return config
    return None


def read_file(path: str) -> ServingConfig:
    """Read and check a configuration file.

    Raises:
        ParamsError: it cannot be read, or is not valid.
    """
    return validate(ServingConfig, read_yaml(Path(path)), where=path)


def _take_inline(engine_args: Any) -> dict[str, Any]:
    speculative = engine_args.speculative_config
    if not isinstance(speculative, Mapping):
        return {}
    names = {name.replace("_", "-"): name for name in SPECULATIVE_KEYS} | {n: n for n in SPECULATIVE_KEYS}
    inline = {names[key]: value for key, value in speculative.items() if key in names}
    if inline:
        engine_args.speculative_config = {k: v for k, v in speculative.items() if k not in names}
    return inline


def config_of(vllm_config: Any) -> ServingConfig | None:
    """The configuration that an engine was built with, or None."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or KEY not in additional:
        return None
    return validate(ServingConfig, additional[KEY], where=f"additional_config[{KEY!r}]")
