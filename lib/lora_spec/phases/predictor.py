"""A first look at the predictor beside the screen it was fitted on; phase 3 has the full account."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from lora_spec.errors import EvidenceError
from lora_spec.files import sha256_file
from lora_spec.paths import rel, results_dir
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.predictor import PortablePredictor, load_predictor
from lora_spec.provenance import load_record, load_table

RECORD = "record.json"
TABLE = "oof"
MODELS = {
    "elasticnet": "weights (ElasticNet)",
    "norm_log": "log(1 + ‖ΔW‖)",
    "norm_linear": "‖ΔW‖",
    "constant": "constant",
    "no_effect": "no effect",
}
"""Key in the table to what readers see; the predictor first, then the baselines it must beat."""
ABSENT = "No predictor has been fitted on this evidence yet, so there is nothing to look at here."


@dataclass(frozen=True)
class FirstLook:
    """A fitted predictor and its predictions for domains that it did not see.

    Attributes:
        out_of_fold: one row per adapter: label, its error, ``predicted``, and a column per baseline.
        errors: one row per model: model, mae, low, high (CI over domains at ``error_level``), r2.
    """

    predictor: PortablePredictor
    out_of_fold: pd.DataFrame
    errors: pd.DataFrame
    error_level: float

    @property
    def interval(self) -> tuple[float, float]:
        """Half width and level of the prediction interval."""
        return self.predictor.interval.half_width, self.predictor.interval.level

    def deltas(self) -> pd.DataFrame:
        """Out-of-fold prediction and interval per adapter, as ``decisions.decision_table`` takes them."""
        point, half_width = self.out_of_fold["predicted"], self.interval[0]
        return pd.DataFrame(
            {
                "adapter": self.out_of_fold["adapter"],
                "point": point,
                "low": point - half_width,
                "high": point + half_width,
            }
        )


def load_first_look(parameters: NotebookParameters) -> FirstLook | None:
    """The fitted predictor of the tier, or None where none has been fitted.

    Raises:
        EvidenceError: damaged, of another class, or predictor and record do not belong together.
    """
    path = results_dir(parameters.tier, "phase3") / RECORD
    if not path.is_file():
        return None
    record = load_record(path, allow={parameters.evidence_class})
    file = path.with_name(record.results["predictor"])
    if not file.is_file() or sha256_file(file) != record.results["predictor_sha256"]:
        raise EvidenceError("the predictor is not its record's", where=rel(file), fix="fit it again")
    metrics = record.results["metrics"]
    table = load_table(path, TABLE)
    table["predicted"] = table["elasticnet"]
    errors = [
        {
            "model": label,
            "mae": metrics["models"][name]["mae"]["value"],
            "low": metrics["models"][name]["mae"]["low"],
            "high": metrics["models"][name]["mae"]["high"],
            "r2": metrics["models"][name]["r2"]["value"],
        }
        for name, label in MODELS.items()
    ]
    return FirstLook(load_predictor(file), table, pd.DataFrame(errors), metrics["interval_level"])


def takeaway(look: FirstLook | None) -> str:
    """Whether weights alone beat the trivial baselines, in one sentence computed from the metrics."""
    if look is None:
        return ABSENT
    mae = look.errors.set_index("model")["mae"]
    gains = look.predictor.metrics["mae_gain"]
    parts = [
        f"{gain['value']:+.3f} against {MODELS[name]} ({_interval(gain, look.error_level)})"
        for name, gain in gains.items()
    ]
    return (
        f"For domains left out, weights alone predict Δα̂ with a mean absolute error of {mae.iloc[0]:.3f}. "
        f"Gain in mean absolute error: {'; '.join(parts)}. {len(look.out_of_fold)} adapters of "
        f"{look.out_of_fold['domain'].nunique()} domains are few: the {look.interval[1]:.0%} interval is "
        f"± {look.interval[0]:.3f}."
    )


def _interval(gain: dict[str, float | None], level: float) -> str:
    low, high = gain["low"], gain["high"]
    if low is None or high is None:
        return "no interval"
    judgement = "better" if low > 0 else "worse" if high < 0 else "not told apart"
    return f"{level:.0%} CI {low:+.3f} to {high:+.3f}: {judgement}"
