"""`lora-spec diagnose` on made-up adapters of the pocket base: every path, and a stable JSON form."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from adapter_factory import random_pairs, write_adapter
from predictor_data import PAIR, TARGET, pocket_adapter, pocket_geometry

from lora_spec.checkpoint import read_adapter
from lora_spec.diagnose import diagnose, diagnosis_rows
from lora_spec.features import FEATURES, feature_row
from lora_spec.predictor import PredictorError, load_predictor_params, save_predictor
from lora_spec.predictor.fit import fit_predictor
from lora_spec.predictor.portable import Base, PortablePredictor
from lora_spec.provenance import EvidenceClass

SIZES = np.geomspace(0.25, 64.0, 12)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [pocket_adapter(root / f"adapter-{i:02d}", seed=i, size=float(s)) for i, s in enumerate(SIZES)]


@pytest.fixture(scope="module")
def predictor(adapters) -> PortablePredictor:
    """Fitted on the made-up adapters; labels fall with the logarithm of their size."""
    base = pocket_geometry()
    rows = [{"adapter": path.name, **feature_row(read_adapter(path, base))} for path in adapters]
    features = pd.DataFrame(rows, columns=["adapter", *FEATURES])
    rng = np.random.default_rng(0)
    labels = pd.DataFrame(
        {
            "adapter": features["adapter"],
            "domain": [f"domain-{i:02d}" for i in range(12)],
            "family": "made_up",
            "delta_alpha": -0.03 * features["log1p_fro_all_all"] + rng.normal(0, 0.005, 12),
            "delta_alpha_se": 0.01,
        }
    )
    params = load_predictor_params()
    params = params.model_copy(
        update={
            "bootstrap": params.bootstrap.model_copy(update={"draws": 20}),
            "elasticnet": params.elasticnet.model_copy(update={"l1_ratios": (0.5,)}),
        }
    )
    pair = PAIR | {
        "base": Base(
            key=TARGET,
            names=("HuggingFaceTB/SmolLM2-135M-Instruct",),
            hidden_size=base.hidden_size,
            num_hidden_layers=base.num_layers,
        )
    }
    return fit_predictor(features, labels, params, evidence_class="measured", **pair).predictor


@pytest.fixture(scope="module")
def predictor_file(predictor, tmp_path_factory):
    path = tmp_path_factory.mktemp("predictor") / "p.json"
    save_predictor(path, predictor)
    return path


def test_a_known_adapter_gets_a_prediction_and_a_decision(adapters, predictor_file) -> None:
    result = diagnose(adapters[3], predictor_file)
    assert result.prediction is not None and not result.prediction.unfamiliar
    assert result.prediction.low < result.prediction.point < result.prediction.high
    assert result.decision.action == "green" and result.decision.cost_profile == "h100-8b"
    assert result.decision.load == 32 and result.evidence_class == "modelled"
    assert result.adapter.name == "adapter-03" and result.adapter.module_types == ("q", "v")
    assert set(result.features) == set(load_predictor_params().feature_names)
    assert [note.code for note in result.notes][:1] == ["effect_transferred"]


def test_a_predictor_that_kept_no_feature_says_so(adapters, predictor, tmp_path) -> None:
    features = tuple(f.model_copy(update={"coefficient": 0.0}) for f in predictor.features)
    path = tmp_path / "constant.json"
    save_predictor(path, predictor.model_copy(update={"features": features}))
    results = [diagnose(adapter, path) for adapter in (adapters[3], adapters[8])]
    assert results[0].prediction.point == results[1].prediction.point
    assert all("constant_prediction" in {note.code for note in result.notes} for result in results)


def test_all_four_actions(adapters, predictor, predictor_file, tmp_path) -> None:
    def action(path, load, file=predictor_file):
        return diagnose(path, file, "h100-8b", load).decision.action

    harmful = tmp_path / "harmful.json"
    save_predictor(harmful, predictor.model_copy(update={"intercept": predictor.intercept - 0.3}))
    wide = tmp_path / "wide.json"
    interval = predictor.interval.model_copy(update={"half_width": 0.5})
    save_predictor(wide, predictor.model_copy(update={"interval": interval}))
    assert action(adapters[3], 1) == "green"
    assert action(adapters[3], 192) == "amber"
    assert action(adapters[3], 256, harmful) == "red"
    assert action(adapters[3], 192, wide) == "abstain"


def test_the_pocket_profile_is_red_and_needs_no_transfer(adapters, predictor_file) -> None:
    result = diagnose(adapters[3], predictor_file, "pocket-cpu")
    assert result.decision.action == "red"
    assert "effect_transferred" not in {note.code for note in result.notes}


def reasons(result) -> list[str]:
    return [reason.code for reason in result.decision.reasons]


def test_an_adapter_of_another_base_abstains(predictor_file, tmp_path) -> None:
    other = diagnose(write_adapter(tmp_path / "other"), predictor_file)
    assert other.decision.action == "abstain" and reasons(other)[0] == "base_without_predictor"
    assert other.prediction is None and other.decision.delta_alpha is None and other.features == {}
    nameless = diagnose(pocket_adapter(tmp_path / "n", base_model_name_or_path=None), predictor_file)
    assert reasons(nameless)[0] == "base_without_predictor"
    copied = pocket_adapter(
        tmp_path / "c", size=2.0, base_model_name_or_path="/models/smollm2-135m-instruct/"
    )
    assert diagnose(copied, predictor_file).decision.action == "green"


def test_an_adapter_that_claims_the_base_but_has_other_shapes_abstains(predictor_file, tmp_path) -> None:
    path = write_adapter(tmp_path / "liar", base_model_name_or_path=pocket_geometry().name)
    result = diagnose(path, predictor_file)
    assert result.decision.action == "abstain" and "shape_mismatch" in reasons(result)


def test_problems_of_the_adapter_abstain_with_their_code(predictor_file, tmp_path) -> None:
    result = diagnose(pocket_adapter(tmp_path / "d", use_dora=True), predictor_file)
    assert result.decision.action == "abstain" and "dora" in reasons(result)
    assert result.prediction is None
    wrong_prefix = random_pairs(0, 2, ("q",), range(2), pocket_geometry())
    wrong_prefix = {
        name.replace("model.", "model.language_model."): pair for name, pair in wrong_prefix.items()
    }
    path = write_adapter(tmp_path / "w", wrong_prefix, r=2, base_model_name_or_path=pocket_geometry().name)
    result = diagnose(path, predictor_file)
    assert result.decision.action == "abstain" and "no_matching_module" in reasons(result)


def test_an_unfamiliar_adapter_abstains(predictor_file, tmp_path) -> None:
    result = diagnose(pocket_adapter(tmp_path / "huge", size=1e6), predictor_file)
    assert result.decision.action == "abstain" and reasons(result)[0] == "out_of_distribution"
    assert result.prediction is not None and result.prediction.unfamiliar
    assert "log1p_fro_all_all" in result.decision.reasons[0].sentence


def test_an_untrained_adapter_has_no_effect(predictor_file, tmp_path) -> None:
    result = diagnose(pocket_adapter(tmp_path / "zero", size=0.0), predictor_file)
    assert result.decision.action == "green" and result.prediction is None
    assert result.decision.delta_alpha is not None and result.decision.delta_alpha.point == 0.0
    assert "untrained" in {note.code for note in result.notes}
    assert any("changes no weight" in value for _, value in diagnosis_rows(result))


def test_a_smoke_predictor_must_be_asked_for(adapters, predictor, tmp_path) -> None:
    path = tmp_path / "smoke.json"
    save_predictor(path, predictor.model_copy(update={"evidence_class": EvidenceClass.SMOKE}))
    with pytest.raises(PredictorError) as error:
        diagnose(adapters[3], path)
    assert error.value.code == "smoke_predictor"
    result = diagnose(adapters[3], path, allow_smoke=True)
    assert result.evidence_class == "smoke" and diagnosis_rows(result)[-1][0] == "SMOKE"


def test_command_prints_plain_lines_when_piped(cli, adapters, predictor_file) -> None:
    first = cli("diagnose", adapters[3], "--predictor", predictor_file)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[0] == "adapter: adapter-03"
    assert any(line.startswith("action: green, depth 4") for line in lines)
    assert any(line.startswith("cost profile: h100-8b (modelled), load 32") for line in lines)
    assert all(": " in line for line in lines) and "\x1b" not in first.stdout
    assert str(adapters[3].parent) not in first.stdout
    assert cli("diagnose", adapters[3], "--predictor", predictor_file).stdout == first.stdout


def test_command_prints_a_table_on_a_terminal(cli, adapters, predictor_file, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    done = cli("diagnose", adapters[3], "--predictor", predictor_file)
    assert done.returncode == 0 and "\x1b[" in done.stdout
    assert "h100-8b (modelled)" in done.stdout and "default_depth_best" in done.stdout


def test_command_prints_json(cli, adapters, predictor_file) -> None:
    done = cli("diagnose", adapters[3], "--predictor", predictor_file, "--json", "--load", 1)
    payload = json.loads(done.stdout)
    assert list(payload) == [
        "schema",
        "adapter",
        "features",
        "predictor",
        "prediction",
        "decision",
        "notes",
        "evidence_class",
    ]
    assert payload["schema"] == "lora-spec-diagnosis/1" and payload["decision"]["load"] == 1
    assert set(payload["adapter"]) == {
        "name",
        "content_hash",
        "base",
        "peft_type",
        "rank",
        "modules",
        "module_types",
    }
    assert payload["predictor"]["evidence_class"] == "measured"


def test_abstaining_exits_with_zero(cli, predictor_file, tmp_path) -> None:
    done = cli("diagnose", write_adapter(tmp_path / "other"), "--predictor", predictor_file)
    assert done.returncode == 0 and "action: abstain, depth 0" in done.stdout
    assert "reason base_without_predictor: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["none"], "not found"),
        (["good", "--cost-profile", "none"], "unknown cost profile"),
        (["good", "--load", "5000"], "outside what profile"),
        (["good", "--predictor", "none.json"], "predictor file not found"),
        (["nan"], "NaN or infinity"),
        (["good", "--load", "0"], "greater than or equal to 1"),
        (["good", "--load", "nan"], "valid integer"),
        (["good", "--cost-profile", ""], "unknown cost profile"),
        (["gone\x1b[31m"], "gone?[31m"),
        (["a\0b"], "null byte"),
    ],
)
def test_errors_are_one_line(cli, adapters, predictor_file, tmp_path, monkeypatch, arguments, match) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "nan":
        pocket_adapter(tmp_path / "nan", size=float("nan"))
    target = adapters[3] if arguments[0] == "good" else arguments[0]
    done = cli(
        "diagnose",
        target,
        *(["--predictor", predictor_file] if "--predictor" not in arguments else []),
        *arguments[1:],
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("lora-spec: error: ") and done.stderr.count("\n") == 1
    assert match.lower() in done.stderr.lower()


def test_a_predictor_that_does_not_fit_the_library_is_refused(adapters, predictor, tmp_path) -> None:
    path = tmp_path / "other.json"
    first = predictor.features[0].model_copy(update={"name": "no_such"})
    save_predictor(path, predictor.model_copy(update={"features": (first, *predictor.features[1:])}))
    with pytest.raises(PredictorError, match="no_such"):
        diagnose(adapters[3], path)
    base = predictor.base.model_copy(update={"hidden_size": 5})
    save_predictor(path, predictor.model_copy(update={"base": base}))
    with pytest.raises(PredictorError, match="other shapes"):
        diagnose(adapters[3], path)


def test_hostile_names_cannot_write_to_the_terminal(cli, predictor_file, tmp_path) -> None:
    path = pocket_adapter(tmp_path / "a\x1b[31mb", base_model_name_or_path="x\x1b]0;y\x07\nz")
    done = cli("diagnose", path, "--predictor", predictor_file)
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\x07" not in done.stdout


def test_hostile_words_of_a_predictor_stay_on_their_line(cli, adapters, predictor, tmp_path) -> None:
    path = tmp_path / "p.json"
    drafter = predictor.drafter.model_copy(update={"key": "d\x1b[31m\naction: green"})
    save_predictor(path, predictor.model_copy(update={"drafter": drafter}))
    done = cli("diagnose", adapters[3], "--predictor", path)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert sum(line.startswith("action: ") for line in done.stdout.splitlines()) == 1
