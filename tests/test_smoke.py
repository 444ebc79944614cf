"""The smoke tier: records like real ones that nothing takes for evidence."""

from __future__ import annotations

import pandas as pd
import pytest

from lora_spec.acceptance import check_requests
from lora_spec.errors import EvidenceError, LoraSpecError, ParamsError
from lora_spec.params import load_params
from lora_spec.paths import params_dir, repo_root
from lora_spec.phases import decisions, effect, evidence, predictor, screen, spread
from lora_spec.phases.parameters import (
    EffectParameters,
    NotebookParameters,
    ScreenParameters,
    read_parameters,
)
from lora_spec.pool import without_update
from lora_spec.provenance import load_record
from lora_spec.smoke import main, write_smoke

SMOKE = ScreenParameters(tier="smoke", evidence_class="smoke", cost_profile="h100-8b", loads=[1, 32])
POCKET = ScreenParameters(tier="pocket", evidence_class="measured", cost_profile="h100-8b", loads=[1, 32])


@pytest.fixture
def results(smoke_results, monkeypatch):
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(smoke_results))
    return smoke_results


def test_all_records_are_smoke_and_pass_their_own_checks(smoke_results):
    paths = [path for path in smoke_results.rglob("*.json") if not path.name.startswith("predictor")]
    records = [load_record(path, allow={"smoke"}) for path in paths]
    assert {(r.tier, r.evidence_class) for r in records} == {("smoke", "smoke")}
    check_requests(pd.concat(map(pd.read_parquet, sorted(smoke_results.rglob("*.requests.parquet")))))


def test_smoke_is_refused_where_evidence_is_wanted(results):
    (results / "pocket").symlink_to(results / "smoke")
    try:
        with pytest.raises(EvidenceError, match="evidence class smoke where only measured"):
            evidence.load_phase(POCKET, "phase2", "screen")
        with pytest.raises(EvidenceError, match="evidence class smoke"):
            predictor.load_first_look(POCKET)
        borrowed = POCKET.model_copy(update={"evidence_class": "smoke"})
        with pytest.raises(EvidenceError, match="record of tier smoke among those of tier pocket"):
            evidence.load_phase(borrowed, "phase2", "screen")
    finally:
        (results / "pocket").unlink()


def test_missing_evidence_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path))
    with pytest.raises(EvidenceError, match=r"no records here \(screen\)\. measure first"):
        evidence.load_phase(POCKET, "phase2", "screen")
    assert predictor.load_first_look(POCKET) is None
    assert predictor.takeaway(None) == predictor.ABSENT


def test_synthetic_records_stay_out_of_the_evidence(capsys):
    with pytest.raises(LoraSpecError, match="among the evidence"):
        write_smoke(repo_root() / "results" / "anywhere")
    assert main([str(repo_root() / "results")]) == 2
    assert "lora-spec: error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tier", "evidence_class"), [("smoke", "measured"), ("pocket", "smoke"), ("paper", "smoke")]
)
def test_class_and_tier_of_smoke_go_together(tier, evidence_class):
    with pytest.raises(ValueError, match="smoke evidence belongs to the smoke tier"):
        NotebookParameters(tier=tier, evidence_class=evidence_class)


def test_tier_files_are_what_every_notebook_takes():
    for path in sorted((params_dir() / "tiers").glob("*.yaml")):
        assert load_params(NotebookParameters, path).tier == path.stem


def test_a_misspelt_parameter_is_seen_inside_the_notebook():
    namespace = {"tier": "smoke", "evidence_class": "smoke", "_": 1, "In": [], "Out": {}, "print": print}
    assert read_parameters(EffectParameters, namespace).stamp.is_smoke
    with pytest.raises(ParamsError, match="unknown parameter teir"):
        read_parameters(EffectParameters, namespace | {"teir": "pocket"})
    with pytest.raises(ParamsError, match="parameter tier"):
        read_parameters(EffectParameters, namespace | {"tier": "pokcet"})


def test_phase1_tables(results):
    loaded = evidence.load_phase(SMOKE, "phase1", "effect")
    limits = effect.thresholds()
    effects = effect.effect_table(loaded, limits)
    assert len(effects) == 2 * 2 * 2 * 3 and len(effect.primary(effects)) == 2
    assert set(effect.primary(effects)["verdict"]) <= {"GO", "INVESTIGATE", "STOP"}
    assert set(effect.primary(effects)["k"]) == {4}
    assert (effects["low"] < effects["delta"]).all() and (effects["delta"] < effects["high"]).all()
    power = effect.power_table(effects, limits)
    assert (power["n_3pct"] > power["n_5pct"]).all() and (power["n_5pct"] > power["n_10pct"]).all()
    assert f"decision is {effect.verdict(effects)}" in effect.takeaway(effects, limits, complete=True)
    assert "decision is" not in effect.takeaway(effects, limits, complete=False)
    assert evidence.declared_sentence(loaded, effect.DESIGN).startswith("2 of the 2")
    assert "none of them is among those of params/phase2_screen.yaml" in effect.prompts_sentence(loaded)


def test_the_decision_of_the_phase():
    def verdict(*verdicts):
        return effect.verdict(pd.DataFrame({"verdict": [*verdicts, ""]}))

    assert verdict("GO", "STOP") == "GO"
    assert verdict("STOP", "STOP") == "STOP"
    assert verdict("STOP", "INVESTIGATE") == "INVESTIGATE"


def test_adapters_that_were_not_declared_or_are_missing(results):
    loaded = evidence.load_phase(SMOKE, "phase2", "screen")
    with pytest.raises(EvidenceError, match="not declared in params/phase1_measurement"):
        evidence.declared_sentence(loaded, effect.DESIGN)
    few = loaded.requests[loaded.requests["adapter"].isin(["", loaded.requests["adapter"].max()])]
    part = evidence.PhaseEvidence(loaded.stamp, loaded.records, few)
    assert "missing:" in evidence.declared_sentence(part, screen.DESIGN)
    assert evidence.is_complete(loaded, screen.DESIGN) and not evidence.is_complete(part, screen.DESIGN)


def test_a_failed_control_is_told(results):
    loaded = evidence.load_phase(SMOKE, "phase1", "effect")
    assert evidence.controls_sentence(evidence.controls_table(loaded)).startswith("All ")
    name = "effect/control--self-draft"
    modes = loaded.records[name].results["self_draft"] | {"t08/greedy": {"alpha": 0.9, "expected": 0.6}}
    broken = loaded.records[name].model_copy(update={"results": {"self_draft": modes, "tolerance": 0.03}})
    failing = evidence.PhaseEvidence(loaded.stamp, loaded.records | {name: broken}, loaded.requests)
    sentence = evidence.controls_sentence(evidence.controls_table(failing))
    assert sentence.startswith("Failed controls: self-draft") and "no evidence" in sentence


def test_a_gap_that_was_settled_in_float32_is_told_apart(results):
    loaded = evidence.load_phase(SMOKE, "phase1", "effect")
    name = next(name for name, record in loaded.records.items() if record.results.get("lossless"))
    label, check = next(iter(loaded.records[name].results["lossless"].items()))
    gaps = [{"request": 0, "position": 3, "gap_nats": 0.125}, {"request": 2, "position": 5, "gap_nats": 0.4}]
    exact = {"asked": [2], "requests": 1, "identical": 1, "lossless": True}
    changed = check | {"divergences": gaps, "max_gap_nats": 0.4, "float32": exact}
    record = loaded.records[name]
    record = record.model_copy(update={"results": record.results | {"lossless": {label: changed}}})
    shown = evidence.PhaseEvidence(loaded.stamp, loaded.records | {name: record}, loaded.requests)
    table = evidence.controls_table(shown).set_index("control")
    assert table.loc["gap at a first divergence, nats", "value"] == 0.125
    assert table.loc["identical in float32", ["value", "passed"]].tolist() == [1.0, True]
    assert "identical in float32" not in set(evidence.controls_table(loaded)["control"])


def test_adapters_without_an_update_are_not_fitted(results):
    look = predictor.load_first_look(SMOKE)
    fitted = set(look.out_of_fold["adapter"])
    assert without_update() and not without_update() & fitted
    labels = screen.screened(evidence.load_phase(SMOKE, "phase2", "screen", overlap="overlap")).labels
    assert fitted == set(labels["adapter"])


def test_phase2_tables(results):
    loaded = evidence.load_phase(SMOKE, "phase2", "screen", overlap="overlap")
    labels = screen.screened(loaded).labels
    families = spread.family_table(labels)
    assert families.iloc[-1]["adapters"] == len(labels) == families["adapters"].iloc[:-1].sum()
    assert (families[["down", "none", "up"]].sum(axis=1) == families["adapters"]).all()
    agreement = screen.agreement_table(labels)
    assert list(agreement["label"]) == list(screen.OTHER_LABELS.values())
    assert (agreement["low"] < agreement["pearson"]).all() and (
        agreement["pearson"] < agreement["high"]
    ).all()
    assert f"Δα̂ of {len(labels)} adapters" in screen.takeaway(labels)
    deltas = decisions.measured_deltas(labels)
    decided = decisions.decision_table(deltas, "h100-8b")
    assert set(decided["evidence_class"]) == {"modelled"}
    assert "(modelled)" in decisions.decision_sentence(decided, "measured Δα̂")
    counts = decisions.decision_counts({"measured": deltas}, "h100-8b", [1, 512])
    assert (counts[["green", "amber", "red", "abstain"]].sum(axis=1) == len(labels)).all()
    look = predictor.load_first_look(SMOKE)
    assert set(look.deltas()["adapter"]) >= set(labels["adapter"])
    assert "against constant" in predictor.takeaway(look)
