"""`lora-spec freeze`: look up what lies on the hub at its commit, and lock it.

(Freezing prompts is another thing: `lora_spec.substrate.freeze`.) Everything is looked up and checked first;
the lock file is written once, at the end. A repository that is not what is declared stays unfrozen and is
reported; where the hub cannot be asked nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lora_spec.errors import LoraSpecError, NetworkError, ParamsError
from lora_spec.frozen import FrozenRepo, load_lock, write_lock
from lora_spec.hub import HubClient, HubRepo
from lora_spec.models import Geometry, HubSource, ModelEntry, ModelsParams, load_models
from lora_spec.pool import MODULES
from lora_spec.pool_paper import HubSlot, PaperPool, load_paper_pool

State = Literal["frozen", "unfrozen", "open"]
MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
_WEIGHTS = (".safetensors",)
_ALSO = ("tokenizer.json",)
_UNCLEAR = frozenset({"other", "unknown"})
_CONFIG_OF_ADAPTER = ("base_model_name_or_path", "r", "lora_alpha", "target_modules", "use_rslora")


@dataclass(frozen=True)
class HubItem:
    """One thing that lies on the hub.

    Attributes:
        what: ``model`` or ``adapter``.
        name: its key or name in the parameter files.
        tiers: whose it is; a model belongs to its own and to those of the pairs it is in.
        repo: repository, None for an open slot.
        revision: commit, None while unfrozen.
        licence: as declared or frozen, None while nobody has read it.
        pair: of an adapter, its pair.
    """

    what: Literal["model", "adapter"]
    name: str
    tiers: tuple[str, ...]
    repo: str | None
    revision: str | None
    licence: str | None
    pair: str = ""

    @property
    def state(self) -> State:
        """``open`` where there is no repository yet."""
        if self.revision is not None:
            return "frozen"
        return "unfrozen" if self.repo else "open"


class _Declared(NamedTuple):
    models: ModelsParams
    pool: PaperPool
    frozen: Mapping[str, FrozenRepo]  # adapters


def _declared() -> _Declared:
    return _Declared(load_models(), *load_paper_pool())


def hub_items() -> list[HubItem]:
    """Everything declared on the hub: models, then adapters, in the order of the files.

    Raises:
        ParamsError: a damaged parameter or lock file.
    """
    return _items(_declared())


def _items(declared: _Declared) -> list[HubItem]:
    items = []
    models, pool, frozen = declared
    for key, entry in models.models.items():
        if isinstance(entry.source, HubSource):
            source = entry.source
            users = [pair.tier for pair in models.pairs.values() if key in (pair.target, pair.drafter)]
            tiers = tuple(dict.fromkeys([entry.tier, *users]))
            items.append(HubItem("model", key, tiers, source.repo, source.revision, entry.licence))
    for slot in pool.slots:
        if isinstance(slot, HubSlot):
            lock = frozen.get(slot.name)
            revision, licence = (lock.revision, lock.licence) if lock else (None, slot.licence)
            items.append(HubItem("adapter", slot.name, (pool.tier,), slot.repo, revision, licence, slot.pair))
    return items


@dataclass(frozen=True)
class FreezeReport:
    """What was frozen now, and by name why the rest was not."""

    frozen: list[HubItem]
    left: dict[str, str]


def freeze(
    client: HubClient, *, tier: str | None = None, say: Callable[[str], None] = lambda line: None
) -> FreezeReport:
    """Look up every unfrozen repository of the tier (default: all) and write the lock file.

    What is frozen stays as it is: a newer commit on the hub changes nothing.

    Args:
        client: how the hub is asked.
        say: told each repository as it is found.

    Raises:
        NetworkError: the hub cannot be asked. Nothing is written.
    """
    declared, lock = _declared(), load_lock()
    models, adapters = dict(lock.models), dict(lock.adapters)
    report = FreezeReport([], {})
    for item in _items(declared):
        if item.state != "unfrozen" or tier not in (None, *item.tiers):
            continue
        try:
            entry = _look_up(client, item, declared)
        except LoraSpecError as error:
            if error.code == NetworkError.default_code:
                raise
            report.left[item.name] = str(error)
            continue
        (models if item.what == "model" else adapters)[item.name] = entry
        report.frozen.append(item)
        say(f"{item.name}: {item.repo} at {entry.revision}")
    if report.frozen:
        write_lock(models, adapters)
    return report


def _look_up(client: HubClient, item: HubItem, declared: _Declared) -> FrozenRepo:
    found = client.repo(str(item.repo), None)
    name = MODEL_CONFIG if item.what == "model" else ADAPTER_CONFIG
    config = client.read_json(str(item.repo), name, found.revision)
    if item.what == "model":
        entry = declared.models.model(item.name)
        return _locked(item, found, entry.licence, _geometry(item, entry, config))
    slot = declared.pool.slot(item.name)
    assert isinstance(slot, HubSlot)
    target = declared.models.model(declared.models.pair(slot.pair).target)
    for problem in _misfits(slot, target.base_name, config):
        raise ParamsError(
            f"the adapter does not fit its slot: {problem}",
            where=f"{item.name}, {item.repo}",
            fix="choose another one, or correct the slot",
        )
    kept = {name: config[name] for name in _CONFIG_OF_ADAPTER if name in config}
    return _locked(item, found, slot.licence, kept)


def _geometry(item: HubItem, entry: ModelEntry, config: Mapping[str, Any]) -> dict[str, Any]:
    """The geometry in a config, which must be the declared one where one is declared."""
    read = {name: config[name] for name in Geometry.model_fields if name in config}
    if "head_dim" not in read and {"hidden_size", "num_attention_heads"} <= read.keys():
        read["head_dim"] = read["hidden_size"] // read["num_attention_heads"]
    read.setdefault("tie_word_embeddings", False)
    if missing := sorted(set(Geometry.model_fields) - set(read)):
        raise ParamsError(
            f"its {MODEL_CONFIG} has no {', '.join(missing)}", where=f"{item.name}, {item.repo}"
        )
    if entry.geometry is not None:
        for name, value in entry.geometry.model_dump().items():
            if read[name] != value:
                raise ParamsError(
                    f"declared {name} {value}, the hub has {read[name]}",
                    where=f"{item.name}, {item.repo}",
                    fix="correct params/models.yaml",
                )
    return read


def _misfits(slot: HubSlot, target: str, config: Mapping[str, Any]) -> list[str]:
    """Why a public adapter is not what its slot wants, as far as its configuration tells."""
    problems = []
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        problems.append(f"type {config.get('peft_type')!r}, DoRA {bool(config.get('use_dora'))}")
    low, high = slot.wanted.rank
    rank = config.get("r")
    if not isinstance(rank, int) or not low <= rank <= high:
        problems.append(f"rank {rank!r}, wanted {low} to {high}")
    modules = config.get("target_modules")
    if isinstance(modules, list) and slot.wanted.modules != "any":
        wanted = set(MODULES[slot.wanted.modules])
        if set(modules) != wanted:
            problems.append(f"modules {', '.join(sorted(map(str, modules)))}, wanted {slot.wanted.modules}")
    if config.get("modules_to_save"):
        problems.append(f"it also saves {', '.join(map(str, config['modules_to_save']))}")
    base = str(config.get("base_model_name_or_path"))
    if _base(base) != _base(target):
        problems.append(f"base {base}, wanted {target}")
    return problems


def _base(name: str) -> str:
    """A base's name without the "Meta-" that older cards of Llama 3.1 have."""
    return name.lower().replace("/meta-llama-", "/llama-")


def _locked(item: HubItem, found: HubRepo, declared: str | None, config: dict[str, Any]) -> FrozenRepo:
    where = f"{item.name}, {item.repo}"
    licence = found.licence
    if declared is None and (licence is None or licence.lower() in _UNCLEAR):
        raise ParamsError(
            f"its card names no licence that says what is allowed ({licence})",
            where=where,
            fix="read the licence, and declare it in the parameter file",
            code="licence",
        )
    if declared is not None and licence is not None and licence.lower() not in _UNCLEAR:
        ours, theirs = ("".join(c for c in name.lower() if c.isalnum()) for name in (declared, licence))
        if not (ours.startswith(theirs) or theirs.startswith(ours)):
            raise ParamsError(
                f"declared licence {declared}, its card says {licence}", where=where, code="licence"
            )
    kept = {
        name: (size, digest)
        for name, (size, digest) in found.files.items()
        if digest is not None and "/" not in name and (name.endswith(_WEIGHTS) or name in _ALSO)
    }
    if not any(name.endswith(_WEIGHTS) for name in kept):
        raise LoraSpecError("no safetensors at the top of the repository", where=where, code="no_weights")
    return FrozenRepo(
        repo=str(item.repo),
        revision=found.revision,
        licence=str(licence or declared),
        files={name: digest for name, (_, digest) in kept.items() if digest is not None},
        bytes=sum(size for size, _ in kept.values()),
        config=config,
    )
