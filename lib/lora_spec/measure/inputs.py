"""The frozen inputs of a design: checked before anything runs, without importing torch or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.checkpoint import BaseGeometry, read_adapter
from lora_spec.errors import LoraSpecError, ParamsError
from lora_spec.features import feature_row
from lora_spec.files import canonical_sha256
from lora_spec.measure.design import Design, MeasureUnit, design_units
from lora_spec.models import load_models
from lora_spec.paths import adapter_dir
from lora_spec.pool import load_pool_file
from lora_spec.provenance import Record, cpu_flags
from lora_spec.substrate.model_folders import WEIGHTS, model_dir, require_model
from lora_spec.substrate.prompts import PromptSet, load_prompts


@dataclass(frozen=True)
class AdapterInput:
    """One adapter as it lies on disk.

    Attributes:
        name: label in the pool.
        path: PEFT directory.
        content_hash: identity.
        rank: largest rank of its modules.
        frobenius: global ||s BA||_F.
    """

    name: str
    path: Path
    content_hash: str
    rank: int
    frobenius: float


class Inputs:
    """Resolves a design's names to verified files."""

    def __init__(self, design: Design) -> None:
        self.design = design
        self.pool = load_pool_file()
        self.domain_of = {name: self.pool.recipe(name).domain for name in design.adapters}
        models = load_models()
        self.weights_sha256 = {}
        for key in (design.target, design.drafter):
            if WEIGHTS not in models.model(key).files:
                raise ParamsError(
                    f"model {key} has no pinned weights and cannot be run", where=design.experiment
                )
            self.weights_sha256[key] = models.model(key).files[WEIGHTS]
        self.target_path = model_dir(design.target)
        self.drafter_path = model_dir(design.drafter)
        self._adapters: dict[str, AdapterInput] = {}
        self._prompts: dict[str, PromptSet] = {}
        self.units = design_units(design, self.domain_of)

    def prompts(self, prompt_set: str) -> PromptSet:
        """The frozen windows of one prompt set, hash-checked and long enough for the design.

        Raises:
            ParamsError: fewer windows than the design asks for.
        """
        if prompt_set not in self._prompts:
            self._prompts[prompt_set] = load_prompts(prompt_set)
        loaded = self._prompts[prompt_set]
        needed = self.design.indices(prompt_set).stop
        if len(loaded.eval) < needed:
            raise ParamsError(
                f"{len(loaded.eval)} windows where the design needs {needed}",
                where=f"prompt set {prompt_set}",
                fix="freeze more windows of it",
            )
        return loaded

    def windows_sha256(self, prompt_set: str) -> str:
        """Hash of the windows that the design uses; others may join the set without changing it."""
        windows = self.prompts(prompt_set).eval
        return canonical_sha256([windows[i] for i in self.design.indices(prompt_set)])

    def adapter(self, name: str) -> AdapterInput:
        """Read one adapter through the safe reader.

        Raises:
            LoraSpecError: it is not trained yet, or not readable.
        """
        path = adapter_dir(name)
        if not path.is_dir():
            raise LoraSpecError(
                f"adapter {name} is not trained yet",
                fix="run `lora-spec adapters --execute`",
                code="adapter_missing",
            )
        if name not in self._adapters:
            entry = load_models().model(self.design.target)
            base = BaseGeometry.from_hf_config(entry.geometry.model_dump(), name=entry.base_name)
            adapter = read_adapter(path, base)
            self._adapters[name] = AdapterInput(
                name=name,
                path=path,
                content_hash=adapter.content_hash,
                rank=max(module.rank for module in adapter.modules),
                frobenius=feature_row(adapter)["fro_all_all"],
            )
        return self._adapters[name]

    def verify_models(self) -> None:
        """Check both models' weights against their pinned sha256.

        Raises:
            LoraSpecError: absent or changed.
        """
        for key in (self.design.target, self.design.drafter):
            require_model(key)

    def revisions(self, unit: MeasureUnit) -> dict[str, Any]:
        """Immutable identities of everything the unit reads.

        Raises:
            LoraSpecError: its adapter is not trained yet, or not readable.
        """
        revisions = self._declared(unit)
        if unit.adapter is not None:
            revisions["adapter"]["content_hash"] = self.adapter(unit.adapter).content_hash
        return revisions

    def matches(self, unit: MeasureUnit, record: Record) -> bool:
        """Whether ``record`` was measured on what ``unit`` reads.

        An adapter is known by its recipe, then by its content where it could have come out bit for bit the
        same: one that is not trained here, or was measured on a machine with other CPU flags, has the recipe
        alone to go by, so that a screen can go on elsewhere.
        """
        declared, recorded = self._declared(unit), dict(record.revisions)
        if unit.adapter is not None:
            recorded["adapter"] = dict(recorded.get("adapter", {}))
            content_hash = recorded["adapter"].pop("content_hash", None)
            comparable = list(record.runtime.get("cpu_flags", ())) == list(cpu_flags())
            if (
                comparable
                and adapter_dir(unit.adapter).is_dir()
                and content_hash != self.adapter(unit.adapter).content_hash
            ):
                return False
        return declared == recorded

    def _declared(self, unit: MeasureUnit) -> dict[str, Any]:
        """Identities that hold on every machine."""
        design = self.design
        declared: dict[str, Any] = {
            "target": {"key": design.target, "sha256": self.weights_sha256[design.target]},
            "drafter": {"key": design.drafter, "sha256": self.weights_sha256[design.drafter]},
            "prompts": {name: self.windows_sha256(name) for name in unit.prompt_sets},
        }
        if unit.adapter is not None:
            declared["adapter"] = {
                "name": unit.adapter,
                "recipe_sha256": self.pool.recipe_sha256(unit.adapter),
            }
        return declared


def validate(inputs: Inputs, units: Sequence[MeasureUnit]) -> list[str]:
    """Every problem with the inputs of ``units``, one line each; empty when all can run."""
    problems: list[str] = []

    def check(action: Any, *args: Any) -> None:
        try:
            action(*args)
        except LoraSpecError as error:
            line = str(error)
            if line not in problems:
                problems.append(line)

    check(inputs.verify_models)
    for unit in units:
        check(inputs.revisions, unit)
    return problems
