"""Parameter files: YAML checked by pydantic, where an unknown name is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from lora_spec.errors import ParamsError
from lora_spec.paths import params_dir, rel


class StrictModel(BaseModel):
    """Base of every parameter model: unknown names are errors and values are not coerced across types."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


M = TypeVar("M", bound=BaseModel)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice (YAML would silently keep the last)."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key is no scalar", key_node.start_mark)
        key = loader.construct_object(key_node, deep=deep)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} given twice", key_node.start_mark
            )
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def read_yaml(path: Path | str) -> Any:
    """Parse one YAML file safely.

    Raises:
        ParamsError: missing, unreadable, not YAML, or a key given twice.
    """
    source = Path(path)
    try:
        return yaml.load(source.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError as error:
        raise ParamsError("parameter file not found", where=rel(source)) from error
    except yaml.YAMLError as error:
        detail = " ".join(str(error).split())
        raise ParamsError(f"not valid YAML: {detail}", where=rel(source)) from error
    except RecursionError as error:
        raise ParamsError("not valid YAML: nested too deeply", where=rel(source)) from error
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file can have
        raise ParamsError("cannot read the parameter file", where=rel(source), fix=str(error)) from error


def validate(model: type[M], data: Any, *, where: object) -> M:
    """Check ``data`` against ``model``; the first problem becomes one readable line.

    Raises:
        ParamsError: naming the parameter, what it was and what was expected.
    """
    if not isinstance(data, Mapping):
        raise ParamsError(f"expected a mapping of parameters, got {type(data).__name__}", where=where)
    try:
        # By way of JSON, because only there strict types let a list be a tuple and a word an enumeration.
        return model.model_validate_json(json.dumps(data), strict=True)
    except (TypeError, RecursionError) as error:
        raise ParamsError("a value is no number, word, list or mapping", where=where) from error
    except ValidationError as error:
        problems = error.errors()
        first = problems[0]
        name = ".".join(str(part) for part in first["loc"]) or "(top level)"
        if first["type"] == "extra_forbidden":
            text = f"unknown parameter {name}"
        else:
            text = f"parameter {name}: {first['msg']}, got {first.get('input')!r:.80}"
        if len(problems) > 1:
            text += f" (and {len(problems) - 1} more)"
        raise ParamsError(text, where=where) from error
    except ValueError as error:  # a YAML alias inside what it stands for
        raise ParamsError("a value contains itself", where=where) from error


def load_params(model: type[M], path: Path | str) -> M:
    """Read and check one parameter file; a relative path is taken from ``params/``."""
    source = Path(path)
    if not source.is_absolute():
        source = params_dir() / source
    return validate(model, read_yaml(source), where=rel(source))
