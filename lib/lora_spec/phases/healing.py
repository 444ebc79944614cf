"""What the second drafter's healing did, as its record says."""

from __future__ import annotations

import pandas as pd

from lora_spec.paths import results_dir
from lora_spec.phases.parameters import NotebookParameters
from lora_spec.provenance import load_records, load_table

FOLDER = "healing"
TABLE = "calibration"
HEALED = "healed"
HEADERS = {
    "drafter": "drafter",
    "domains": "domains",
    "overlap": "overlap",
    "top1": "top-1 agreement",
    "entropy_target": "entropy of the target",
    "entropy_drafter": "entropy of the drafter",
}


def load_calibration(parameters: NotebookParameters) -> pd.DataFrame | None:
    """Agreement of drafters with the target by domain, teacher-forced on calibration windows.

    Returns:
        Columns drafter, domain, windows, overlap, top1, entropy_target, entropy_drafter (nats); None where no
        drafter has been healed.

    Raises:
        EvidenceError: damaged, or of another class.
    """
    folder = results_dir(parameters.tier, "phase2") / FOLDER
    if not any(folder.glob("*.json")):
        return None
    records = load_records(folder, allow={parameters.evidence_class})
    tables = [load_table(folder / f"{name}.json", TABLE) for name in records]
    return pd.concat(tables, ignore_index=True)


def healed_entropies(calibration: pd.DataFrame | None) -> pd.DataFrame | None:
    """The healed drafter's rows, for ``phases.entropy.point_table``."""
    return None if calibration is None else calibration[calibration["drafter"] == HEALED]


def healing_table(calibration: pd.DataFrame) -> pd.DataFrame:
    """Means over domains, one row a drafter."""
    grouped = calibration.groupby("drafter", sort=False)
    means = grouped[list(HEADERS)[2:]].mean()
    means.insert(0, "domains", grouped["domain"].nunique())
    return means.reset_index()


def healing_sentence(calibration: pd.DataFrame | None) -> str:
    """What healing changed, in one sentence."""
    if calibration is None:
        return "No drafter has been healed yet."
    means = healing_table(calibration).set_index("drafter")
    told = [
        f"{name}: overlap {row['overlap']:.3f}, top-1 agreement {row['top1']:.3f}"
        for name, row in means.iterrows()
    ]
    return (
        f"Agreement with the target over {means['domains'].iloc[0]} domains, teacher-forced at T = 0.8 on "
        f"calibration windows, which nothing was trained on: {'; '.join(told)}."
    )
