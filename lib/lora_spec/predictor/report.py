"""A fitted predictor in a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping

from lora_spec.predictor.portable import PortablePredictor


def fit_lines(predictor: PortablePredictor) -> list[str]:
    """What was fitted, how well it predicts left-out domains beside trivial baselines, and what that
    supports.
    """
    metrics = predictor.metrics
    kind = f"{predictor.mode}, {predictor.evidence_class}"
    lines = [f"Predictor of {predictor.target.label} ({kind}), domains left out:"]
    for name, scores in metrics["models"].items():
        parts = [f"{metric} {_with_interval(score)}" for metric, score in scores.items()]
        lines.append(f"  {name}: " + ", ".join(parts))
    gain = metrics["mae_gain"]["constant"]
    verdict = "beats" if metrics["beats_constant"] else "does not beat"
    lines.append(
        f"  ElasticNet {verdict} the constant baseline: mean absolute error lower by {_with_interval(gain)} "
        f"({metrics['interval_level']:.0%} intervals, domains resampled)."
    )
    interval = predictor.interval
    lines.append(
        f"  {interval.level:.0%} interval: ±{interval.half_width:.3f} from {interval.groups} domains; it "
        f"covered {metrics['interval_coverage_left_out']:.0%} of left-out domains. {interval.note}"
    )
    lines.append(f"  Reliability of the labels (a cap on R²): {metrics['label_reliability']:.2f}.")
    return lines


def _with_interval(score: Mapping[str, float | None]) -> str:
    if score["value"] is None:
        return "undefined"
    text = f"{score['value']:.3f}"
    return text if score["low"] is None else f"{text} [{score['low']:.3f}, {score['high']:.3f}]"
