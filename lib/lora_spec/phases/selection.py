"""Which adapters are measured again under other drafters: a rule fixed beforehand, applied once.

The choice is a record of its own, with the hashes of the predictions it was made from, and the designs' lists
of adapters are written from it. Once anything is measured on a choice it cannot be changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
from pydantic import Field, PositiveInt

from lora_spec.errors import EvidenceError, ParamsError
from lora_spec.files import atomic_write_text, canonical_sha256, sha256_bytes
from lora_spec.measure.design import load_design
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import params_dir, rel, results_dir
from lora_spec.phases.evidence import PhaseEvidence, domain_families, load_phase
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.phases.predictor import MODELS, load_first_look
from lora_spec.phases.predictor import RECORD as FIT_RECORD
from lora_spec.pool import without_update
from lora_spec.provenance import EvidenceClass, load_record, load_table, new_record, write_record

PARAMS_FILE = "confirm.yaml"
RECORD = "selection/confirm.json"
"""Where a choice is recorded, in the phase's folder."""
TABLE = "adapters"
ROLES = {"lowest": "lowest predicted", "highest": "highest predicted", "random": "random"}
"""Why an adapter was chosen: key in the tables to what readers see."""
HEADERS = {"adapter": "adapter", "domain": "domain", "role": "chosen as", "predicted": "predicted Δα̂"}
_SAME = 1e-9
"""Predictions that differ by less are one: coefficients of zero leave rounding behind."""


class ConfirmRule(StrictModel):
    """``params/confirm.yaml``.

    Attributes:
        ranked_by: models of ``phases.predictor.MODELS`` in order of preference; see :func:`rank`.
        moved_share: share of the adapters that a model must tell from the mean of the others to be used.
        extremes: adapters on each side.
        per_domain: at most so many of a domain on each side.
        random: adapters drawn from the rest.
        seed: of the draw.
        designs: design files that list the chosen adapters, relative to ``params/``.
    """

    schema_: Literal["lora-spec-confirm/1"] = Field(alias="schema")
    ranked_by: Annotated[tuple[Literal["elasticnet", "norm_log", "norm_linear"], ...], Field(min_length=1)]
    moved_share: Annotated[float, Field(gt=0, le=1)]
    extremes: PositiveInt
    per_domain: PositiveInt
    random: PositiveInt
    seed: int
    designs: Annotated[tuple[str, ...], Field(min_length=1)]


def load_rule() -> ConfirmRule:
    """Read and check ``params/confirm.yaml``."""
    return load_params(ConfirmRule, PARAMS_FILE)


def rank(out_of_fold: pd.DataFrame, rule: ConfirmRule) -> pd.DataFrame:
    """The predictions to choose by, free of the adapters' own labels.

    A prediction for a left-out domain holds the mean label of the other domains, which falls as the own
    labels rise. By itself it would rank adapters by their own labels, upside down, so it is taken off and the
    mean of all put in its place: what remains to tell adapters apart comes from their weights.

    Args:
        out_of_fold: of a fit: adapter, domain, delta_alpha, constant and a column for each model.
        rule: names the models; the first that leaves ``constant`` for ``moved_share`` of the adapters is
            used.

    Returns:
        Columns adapter, domain, predicted, ranked_by (the model).

    Raises:
        EvidenceError: no model tells enough adapters apart (code ``no_ranking``).
    """
    for model in rule.ranked_by:
        moved = out_of_fold[model] - out_of_fold["constant"]
        if float((moved.abs() > _SAME).mean()) >= rule.moved_share:
            predicted = moved + out_of_fold["delta_alpha"].mean()
            return out_of_fold[["adapter", "domain"]].assign(predicted=predicted, ranked_by=model)
    raise EvidenceError(
        f"none of {', '.join(rule.ranked_by)} tells {rule.moved_share:.0%} of the adapters from the mean",
        fix="screen more adapters, then `lora-spec fit --execute`",
        code="no_ranking",
    )


def choose(predictions: pd.DataFrame, rule: ConfirmRule, excluded: Collection[str] = ()) -> pd.DataFrame:
    """Apply the rule; the order of the rows does not matter.

    Args:
        predictions: from :func:`rank`; one row an adapter.
        rule: what to choose.
        excluded: adapters that may not be chosen.

    Returns:
        Columns adapter, domain, predicted, ranked_by, role (of :data:`ROLES`): lowest first, then highest,
        then random.

    Raises:
        EvidenceError: a prediction that is not finite, an adapter given twice, or too few adapters (code
            ``too_few_adapters``).
    """
    table = predictions[~predictions["adapter"].isin(list(excluded))]
    table = table.sort_values(["predicted", "adapter"], ignore_index=True)
    table = table[["adapter", "domain", "predicted", "ranked_by"]]
    if table["adapter"].duplicated().any() or not table["predicted"].map(_finite).all():
        raise EvidenceError("an adapter has two predictions, or one that is not finite", code="predictions")
    rows: list[tuple[int, str]] = []
    for role, order in (("lowest", table.index), ("highest", table.index[::-1])):
        taken = {index for index, _ in rows}
        counts: dict[str, int] = {}
        found = 0
        for index in order:
            domain = table.at[index, "domain"]
            if found == rule.extremes or index in taken or counts.get(domain, 0) == rule.per_domain:
                continue
            counts[domain] = counts.get(domain, 0) + 1
            rows.append((index, role))
            found += 1
    rest = sorted(
        set(table.index) - {index for index, _ in rows},
        key=lambda index: sha256_bytes(f"{rule.seed}/{table.at[index, 'adapter']}".encode()),
    )
    rows += [(index, "random") for index in rest[: rule.random]]
    if len(rows) != 2 * rule.extremes + rule.random:
        raise EvidenceError(
            f"{len(rows)} adapters can be chosen where the rule wants {2 * rule.extremes + rule.random}",
            fix="screen more adapters, then `lora-spec fit --execute`",
            code="too_few_adapters",
        )
    return (
        table.loc[[index for index, _ in rows]].assign(role=[role for _, role in rows]).reset_index(drop=True)
    )


def _finite(value: float) -> bool:
    return abs(value) < float("inf")


def record_path(tier: str) -> Path:
    """Where the choice of a tier is recorded."""
    return results_dir(tier, "phase2") / RECORD


def load_selection(parameters: NotebookParameters) -> pd.DataFrame | None:
    """The recorded choice, or None where none was made.

    Returns:
        Columns of :func:`choose`, and family.

    Raises:
        EvidenceError: damaged, or of another class.
    """
    path = record_path(parameters.tier)
    if not path.is_file():
        return None
    load_record(path, allow={parameters.evidence_class})
    table = load_table(path, TABLE)
    return table.assign(family=table["domain"].map(domain_families()).fillna(""))


def selection_sentence(selection: pd.DataFrame | None) -> str:
    """What was chosen, in one sentence."""
    if selection is None:
        return "No adapters have been chosen for confirmation yet."
    counts = selection["role"].value_counts()
    listed = ", ".join(f"{counts.get(role, 0)} {label}" for role, label in ROLES.items())
    distinct = selection["predicted"].nunique()
    return (
        f"{len(selection)} adapters of {selection['domain'].nunique()} domains were chosen by the rule of "
        f"params/{PARAMS_FILE} before they were measured under these drafters: {listed}. Their predictions "
        f"({MODELS[selection['ranked_by'].iloc[0]]}, with one mean for all domains), {distinct} distinct "
        f"ones, run from {selection['predicted'].min():+.3f} to {selection['predicted'].max():+.3f}."
    )


def plan_selection(parameters: NotebookParameters) -> tuple[pd.DataFrame, dict[str, str]]:
    """What the rule chooses from the committed predictions, and the hashes of what it read.

    Raises:
        EvidenceError: no predictor is fitted, it is not of this screen, or knows too few adapters.
    """
    look = load_first_look(parameters)
    if look is None:
        raise EvidenceError("no predictor has been fitted", fix="run: lora-spec fit --execute", code="no_fit")
    fit = load_record(results_dir(parameters.tier, "phase3") / FIT_RECORD, allow={parameters.evidence_class})
    screen = load_phase(parameters, "phase2", "screen")
    if fit.revisions["records"] != _records_sha256(screen):
        raise EvidenceError(
            "the predictor was fitted on other records than those of the screen",
            fix="run: lora-spec fit --execute",
            code="stale_fit",
        )
    revisions = {
        "fit": fit.record_sha256,
        "predictor": fit.results["predictor_sha256"],
        "records": fit.revisions["records"],
    }
    rule = load_rule()
    return choose(rank(look.out_of_fold, rule), rule, without_update()), revisions


def _records_sha256(screen: PhaseEvidence) -> str:
    """Hash of the records of a screen, as a fit records it."""
    hashes = {name.split("/")[1]: record.record_sha256 for name, record in screen.records.items()}
    return canonical_sha256(hashes)


def select(parameters: NotebookParameters) -> tuple[pd.DataFrame, bool]:
    """Choose, record the choice and write it into the designs.

    Returns:
        The choice, and whether it is the one that was recorded before.

    Raises:
        EvidenceError: as :func:`plan_selection`, or another choice although records of the first one exist
            (code ``selection_fixed``).
    """
    rule = load_rule()
    chosen, revisions = plan_selection(parameters)
    before = load_selection(parameters)
    same = before is not None and before[list(chosen.columns)].equals(chosen)
    if same:
        _write_designs(chosen, rule)
        return chosen, True
    measured = [
        path for name in rule.designs for path in sorted(load_design(name).directory().glob("*.json"))
    ]
    if measured:
        raise EvidenceError(
            "the choice is fixed: adapters have been measured on it",
            where=rel(measured[0]),
            fix="keep it; a new choice would need new designs",
            code="selection_fixed",
        )
    write_selection(record_path(parameters.tier), chosen, rule, revisions, parameters)
    _write_designs(chosen, rule)
    return chosen, False


def write_selection(
    path: Path,
    chosen: pd.DataFrame,
    rule: ConfirmRule,
    revisions: dict[str, str],
    parameters: NotebookParameters,
) -> None:
    """Write the record of a choice to ``path``."""
    record = new_record(
        experiment="confirm_selection",
        tier=parameters.tier,
        phase="phase2",
        evidence_class=EvidenceClass(parameters.evidence_class),
        config={"rule": rule.model_dump(mode="json", by_alias=True)},
        seed=rule.seed,
        revisions=revisions,
        covers={"domains": sorted(set(chosen["domain"]))},
        results={role: chosen.loc[chosen["role"] == role, "adapter"].tolist() for role in ROLES},
    )
    write_record(path, record, {TABLE: chosen})


_ADAPTERS = re.compile(r"^adapters:.*\n(?:  - .*\n)*", re.MULTILINE)
_FP32 = re.compile(r"^  fp32_adapters:.*\n", re.MULTILINE)


def with_adapters(text: str, chosen: pd.DataFrame) -> str:
    """The text of a design file with the chosen adapters, of which the two outermost are checked in fp32.

    Raises:
        ParamsError: the file does not have one list of adapters and one of fp32_adapters.
    """
    names = chosen["adapter"].tolist()
    ends = [chosen.loc[chosen["role"] == role, "adapter"].iloc[0] for role in ("lowest", "highest")]
    listed = "adapters:\n" + "".join(f"  - {name}\n" for name in names)
    text, first = _ADAPTERS.subn(lambda _: listed, text)
    text, second = _FP32.subn(lambda _: f"  fp32_adapters: [{', '.join(ends)}]\n", text)
    if (first, second) != (1, 1):
        raise ParamsError("expected one list of adapters and one of fp32_adapters in the design")
    return text


def _write_designs(chosen: pd.DataFrame, rule: ConfirmRule) -> None:
    paths = [params_dir() / name for name in rule.designs]
    for path, text in [(path, with_adapters(path.read_text(encoding="utf-8"), chosen)) for path in paths]:
        atomic_write_text(path, text)
