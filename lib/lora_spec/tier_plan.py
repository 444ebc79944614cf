"""The plan of a tier that is declared, not executed: is it consistent, what is open, what would it cost?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lora_spec.errors import LoraSpecError, ParamsError
from lora_spec.measure.design import GENERAL, Design, UnitKind, design_units, load_design
from lora_spec.models import PairEntry, load_models
from lora_spec.params import read_yaml
from lora_spec.paths import params_dir
from lora_spec.pool import load_pool
from lora_spec.pool_paper import HubSlot, OwnSlot, PaperPair, PaperPool, load_paper_pool
from lora_spec.provenance import EvidenceClass
from lora_spec.revisions import HubItem, hub_items
from lora_spec.substrate.corpora import load_corpora

PLANNED_TIERS = ("colab", "paper")
"""Tiers whose measurements are a contract: declared, checked, not run here."""


@dataclass(frozen=True)
class PlannedScreen:
    """One pair of the tier and its screen.

    Attributes:
        pair: key of the pair. role, design: of `lora_spec.pool_paper.PaperPair`.
        own, named, open: slots with a recipe of ours, with a public adapter's name, and with neither.
        domains, families: distinct ones of the slots.
        requests: speculative requests of all arms, decodings and depths.
        measure_gpu_h, train_gpu_h: estimates from the pair's assumptions; nothing of them is measured.
        gpu: on what.
    """

    pair: str
    role: str
    design: str
    own: int
    named: int
    open: int
    domains: int
    families: int
    requests: int
    measure_gpu_h: float
    train_gpu_h: float
    gpu: str


@dataclass(frozen=True)
class TierPlan:
    """A tier as it is declared.

    Attributes:
        evidence_class: always ``contract``.
        items: what of it lies on the hub.
        screens: its pairs with their screens.
        problems: contradictions between its files, one line each; empty when it is consistent.
        unfrozen: what has to be settled before anything of it may run, one line each.
    """

    tier: str
    items: list[HubItem]
    screens: list[PlannedScreen] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unfrozen: list[str] = field(default_factory=list)
    evidence_class: EvidenceClass = EvidenceClass.CONTRACT


def planned_tier(design: str) -> str | None:
    """The tier of a design file (relative to ``params/``) that is only planned here, else None.

    Raises:
        ParamsError: it cannot be read.
    """
    path = Path(design) if Path(design).is_absolute() else params_dir() / design
    data = read_yaml(path)
    tier = data.get("tier") if isinstance(data, dict) else None
    return tier if tier in PLANNED_TIERS else None


def plan_tier(tier: str) -> TierPlan:
    """Check everything that is declared of a tier and put its plan together; fetches and writes nothing.

    Raises:
        LoraSpecError: no such tier is planned, or a file of it is damaged.
    """
    if tier not in PLANNED_TIERS:
        raise LoraSpecError(
            f"no plan for tier {tier!r}",
            fix=f"Planned tiers: {', '.join(PLANNED_TIERS)}; commands of the others print their own plans",
        )
    plan = TierPlan(tier, [item for item in hub_items() if tier in item.tiers])
    for item in plan.items:
        if item.state == "open":
            plan.unfrozen.append(f"adapter {item.name}: no repository chosen")
        elif item.state == "unfrozen":
            plan.unfrozen.append(f"{item.what} {item.name}: {item.repo} is not looked up")
    pool, _ = load_paper_pool()
    if pool.tier == tier:
        models = load_models()
        families = {name: domain.family for name, domain in load_corpora().domains.items()}
        _check_slots(pool, families, plan)
        for key, pair in pool.pairs.items():
            _add_screen(pool, key, pair, models.pair(key), families, plan)
    return plan


def refuse_to_execute(tier: str) -> None:
    """Say why nothing of a planned tier may run: it always raises.

    Raises:
        ParamsError: its files contradict each other.
        LoraSpecError: (code ``unfrozen``) with all that is missing; (code ``no_runner``) when all is there.
    """
    plan = plan_tier(tier)
    if plan.problems:
        raise ParamsError("; ".join(plan.problems), where=f"tier {tier}")
    if plan.unfrozen:
        raise LoraSpecError(
            f"{len(plan.unfrozen)} parts of the tier are not settled: {'; '.join(plan.unfrozen)}",
            where=f"tier {tier}",
            fix="run `lora-spec freeze --execute` online, and fill the open slots in params/",
            code="unfrozen",
        )
    raise LoraSpecError(
        "all of it is frozen, but this version has no runner for tiers that need a GPU",
        where=f"tier {tier}",
        code="no_runner",
    )


def _check_slots(pool: PaperPool, families: Mapping[str, str], plan: TierPlan) -> None:
    """Names against the other pool, domains against the corpora (``families``: of each domain)."""
    for name in sorted({slot.name for slot in pool.slots} & set(load_pool())):
        plan.problems.append(f"adapter {name} is declared in both pools")
    for slot in pool.slots:
        known = families.get(slot.domain)
        if known is not None and known != slot.family:
            plan.problems.append(f"adapter {slot.name}: domain {slot.domain} is of family {known}")
        if known is None and isinstance(slot, OwnSlot):
            plan.problems.append(f"adapter {slot.name}: no corpus of domain {slot.domain}")


def _add_screen(
    pool: PaperPool,
    key: str,
    pair: PaperPair,
    entry: PairEntry,
    families: Mapping[str, str],
    plan: TierPlan,
) -> None:
    design, slots = load_design(pair.design), pool.of_pair(key)
    declared = {"tier": entry.tier, "target": entry.target, "drafter": entry.drafter, "method": entry.method}
    for name, value in declared.items():
        if (said := getattr(design, name)) != value:
            plan.problems.append(f"{pair.design}: {name} {said}, pair {key} has {value}")
    if entry.evidence != EvidenceClass.CONTRACT:
        plan.problems.append(f"pair {key} claims class {entry.evidence}: nothing of it was run")
    names = [slot.name for slot in slots]
    if set(design.adapters) != set(names):
        odd = sorted(set(design.adapters) ^ set(names))
        plan.problems.append(f"{pair.design}: {', '.join(odd)} on one side only of design and pool")
        return
    plan.unfrozen.extend(_unfrozen_prompts(key, entry.target, slots, families))
    plan.unfrozen.extend(f"pair {key}: {sentence.rstrip('.')}" for sentence in pair.open)
    plan.screens.append(_screen(pool, key, pair, design, slots))


def _unfrozen_prompts(
    key: str, target: str, slots: list[OwnSlot | HubSlot], families: Mapping[str, str]
) -> list[str]:
    """Prompts are cut with the target's tokenizer: those that are frozen belong to the pocket target."""
    ours = sorted({slot.domain for slot in slots if slot.domain in families})
    foreign = sorted({slot.domain for slot in slots} - set(ours))
    lines = [f"pair {key}: prompts of {len(ours)} domains and {GENERAL} are not cut for {target}"]
    return lines + [f"pair {key}: no corpus of domain {domain} to cut prompts from" for domain in foreign]


def _screen(
    pool: PaperPool, key: str, pair: PaperPair, design: Design, slots: list[OwnSlot | HubSlot]
) -> PlannedScreen:
    units = design_units(design, {slot.name: slot.domain for slot in slots})
    arms = [unit for unit in units if unit.kind is not UnitKind.CONTROL]
    requests = sum(design.requests(name) for unit in arms for name in unit.prompt_sets)
    assumed = pair.assumed
    # An engine per depth, and one that does not speculate.
    starts = len(units) * (len(design.all_depths) + 1)
    seconds = requests * design.max_tokens / assumed.generated_tokens_per_s + starts * assumed.engine_start_s
    own = [slot for slot in slots if isinstance(slot, OwnSlot)]
    hub = [slot for slot in slots if isinstance(slot, HubSlot)]
    trained = sum(slot.steps for slot in own) * pool.training.batch * pool.training.block_tokens
    training = trained / assumed.trained_tokens_per_s + len(own) * assumed.engine_start_s
    return PlannedScreen(
        pair=key,
        role=pair.role,
        design=pair.design,
        own=len(own),
        named=sum(slot.repo is not None for slot in hub),
        open=sum(slot.repo is None for slot in hub),
        domains=len({slot.domain for slot in slots}),
        families=len({slot.family for slot in slots}),
        requests=requests,
        measure_gpu_h=assumed.gpus * seconds / 3600,
        train_gpu_h=assumed.gpus * training / 3600,
        gpu=f"{assumed.gpus} x {assumed.gpu}",
    )
