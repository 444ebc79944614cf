"""Whether a live rerun agrees with the evidence: weights by hash or features, effects by their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from lora_spec.acceptance import PRIMARY_DECODING, label_table
from lora_spec.errors import EvidenceError
from lora_spec.features import feature_names
from lora_spec.measure.design import GENERAL
from lora_spec.pool import AdapterHashes

_PROMPT = ["prompt_set", "prompt_index"]


@dataclass(frozen=True)
class Weights:
    """How an adapter's new weights compare with the recorded ones."""

    says: str
    agree: bool


@dataclass(frozen=True)
class Report:
    """Outcome of a rerun.

    Attributes:
        effects: from :func:`compare_effects`.
        weights: by adapter.
    """

    effects: pd.DataFrame
    weights: dict[str, Weights]

    @property
    def reproduced(self) -> list[str]:
        """Adapters whose weights and effect both agree."""
        agree = self.effects.loc[self.effects["agrees"], "adapter"]
        return [name for name in agree if self.weights[name].agree]

    @property
    def failed(self) -> list[str]:
        """The others."""
        return [name for name in self.effects["adapter"] if name not in self.reproduced]


def compare_effects(committed: pd.DataFrame, live: pd.DataFrame, names: list[str], z: float) -> pd.DataFrame:
    """Live against committed Δα̂ (T = 0.8, own domain), both paired with their own base arm.

    Args:
        committed, live: ``requests`` tables; of the committed one, the prompts of the live one are compared.
        names: adapters to compare.
        z: combined standard errors that a difference may have.

    Returns:
        One row an adapter: adapter, domain, committed, committed_se, live, live_se, difference, allowed (z
        times the root of the summed squared standard errors), same_base and same_adapted (share of outputs
        whose hash is the committed one), agrees. Both runs share seeds, so equal CPUs give equal outputs and
        a difference of 0; where they differ, the errors are correlated and the limit is a wide one.

    Raises:
        EvidenceError: the two were measured on different prompts (code ``other_prompts``), or either lacks an
            adapter or its base arm.
    """
    tables = [_primary(table, names) for table in (committed, live)]
    tables[0] = tables[0].merge(tables[1][_PROMPT].drop_duplicates(), on=_PROMPT)
    labels = [label_table(table).set_index("adapter") for table in tables]
    rows = []
    for name in names:
        for table, which in zip(reversed(labels), ("live", "committed"), strict=True):
            if name not in table.index:
                raise EvidenceError(f"no {which} request of this adapter", where=name, code="no_requests")
        before, now = (table.loc[name] for table in labels)
        allowed = z * math.hypot(before["delta_alpha_se"], now["delta_alpha_se"])
        difference = now["delta_alpha"] - before["delta_alpha"]
        rows.append(
            {
                "adapter": name,
                "domain": now["domain"],
                "committed": before["delta_alpha"],
                "committed_se": before["delta_alpha_se"],
                "live": now["delta_alpha"],
                "live_se": now["delta_alpha_se"],
                "difference": difference,
                "allowed": allowed,
                "same_base": _same_outputs(*tables, adapter="", domain=now["domain"]),
                "same_adapted": _same_outputs(*tables, adapter=name, domain=now["domain"]),
                "agrees": bool(abs(difference) <= allowed),
            }
        )
    return pd.DataFrame(rows)


def _primary(requests: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    wanted = (requests["decoding"] == PRIMARY_DECODING) & (requests["prompt_set"] != GENERAL)
    return requests[wanted & requests["adapter"].isin(["", *names])]


def _same_outputs(committed: pd.DataFrame, live: pd.DataFrame, *, adapter: str, domain: str) -> float:
    keys = ["k", "prompt_index"]
    outputs = [
        table[(table["adapter"] == adapter) & (table["prompt_set"] == domain)].set_index(keys)[
            "output_sha256"
        ]
        for table in (committed, live)
    ]
    if not outputs[1].index.isin(outputs[0].index).all() or len(outputs[0]) < len(outputs[1]):
        raise EvidenceError(
            "the committed evidence was measured on other prompts",
            where=adapter or f"base on {domain}",
            fix="measure the whole design again: its prompts have changed",
            code="other_prompts",
        )
    return float((outputs[1] == outputs[0].reindex(outputs[1].index)).mean())


def compare_weights(
    recorded: AdapterHashes | None,
    found: AdapterHashes,
    features: tuple[Mapping[str, float], Mapping[str, float]] | None,
    tolerance: float,
) -> Weights:
    """New weights against the recorded ones: by hash where the CPU flags agree, else by features.

    Args:
        recorded, found: hashes of both. features: recorded and new features, where recorded ones exist.
        tolerance: largest relative difference of a whole-adapter feature.
    """
    if recorded is None:
        return Weights("no hash recorded", agree=False)
    if recorded.recipe_sha256 != found.recipe_sha256:
        return Weights("recorded for another recipe", agree=False)
    if recorded.weights_sha256 == found.weights_sha256:
        return Weights("identical", agree=True)
    if recorded.cpu_flags == found.cpu_flags:
        return Weights("differ on an equal CPU", agree=False)
    if features is None:
        return Weights("other CPU, no features recorded", agree=False)
    before, now = features
    worst = max(
        abs(now[name] - before[name]) / max(abs(before[name]), 1e-12)
        for name in feature_names(scope="total")
        if before[name] or now[name]
    )
    return Weights(f"other CPU, features differ by {worst:.1%}", agree=worst <= tolerance)
