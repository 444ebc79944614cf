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
    given: list[tuple[str, Any]] = []
    if inline := _take_inline(engine_args):
        given.append(("speculative_config", inline))
    additional = engine_args.additional_config
    if isinstance(additional, dict):
        _refuse_misspelt(additional)
        # What was put there by an earlier call for the same arguments came through a channel already.
        if KEY in additional and not isinstance(additional[KEY], _Checked):
            given.append((f"additional_config[{KEY!r}]", additional[KEY]))
    if path := os.environ.get(ENV_FILE, "").strip():
        given.append((path, read_yaml(Path(path))))
    if len(given) > 1:
        raise ParamsError(
            f"the serving configuration is given twice: {' and '.join(where for where, _ in given)}",
            fix="Keep one of them",
        )
    if not given and isinstance(additional, dict) and KEY in additional:
        given.append((f"additional_config[{KEY!r}]", additional[KEY]))
    for where, value in given:
        if not isinstance(additional, dict | None):
            raise ParamsError(
                "additional_config must be a mapping beside a serving configuration", where=where
            )
        config = _checked(value, where)
        # A new dict: the caller's own may serve another engine.
        engine_args.additional_config = {**(additional or {}), KEY: _Checked(config.model_dump(mode="json"))}
        return config
    return None


class _Checked(dict[str, Any]):
    """A configuration that `configure` put into `additional_config`."""


def _checked(value: Any, where: str) -> ServingConfig:
    _refuse_keys(value, where)
    return validate(ServingConfig, value, where=where)


def _refuse_keys(value: Any, where: str) -> None:
    """Keys that are no strings would become some ("no" is False in YAML, and would be called "false")."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, Mapping):
            for key, item in inner.items():
                if not isinstance(key, str):
                    raise ParamsError(f"a name is no word: {key!r:.80}", where=where, fix="Put it in quotes")
                if isinstance(item, Mapping):
                    pending.append(item)


def _refuse_misspelt(additional: Mapping[Any, Any]) -> None:
    for key in additional:
        if key != KEY and str(key).lower().replace("-", "_") == KEY:
            raise ParamsError(f"unknown key {key!r} in additional_config", fix=f"Call it {KEY!r}")


def read_file(path: str) -> ServingConfig:
    """Read and check a configuration file.

    Raises:
        ParamsError: it cannot be read, or is not valid.
    """
    return _checked(read_yaml(Path(path)), path)


def _take_inline(engine_args: Any) -> dict[str, Any]:
    speculative = engine_args.speculative_config
    if not isinstance(speculative, Mapping):
        return {}
    names = {name.replace("_", "-"): name for name in SPECULATIVE_KEYS} | {n: n for n in SPECULATIVE_KEYS}
    inline: dict[str, Any] = {}
    for key, value in speculative.items():
        if key in names:
            if names[key] in inline:
                raise ParamsError(
                    f"{names[key]} is given twice, with and without dashes", where="speculative_config"
                )
            inline[names[key]] = value
    if inline:
        engine_args.speculative_config = {k: v for k, v in speculative.items() if k not in names}
    return inline


def config_of(vllm_config: Any) -> ServingConfig | None:
    """The configuration that an engine was built with, or None."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or KEY not in additional:
        return None
    return validate(ServingConfig, additional[KEY], where=f"additional_config[{KEY!r}]")
