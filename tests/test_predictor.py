"""The fit, its folds and intervals, the exported file, isolation of the mode, and `lora-spec fit`."""

from __future__ import annotations

import json
import math
import shutil
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predictor_data import PAIR, made_up_tables, write_screen

from lora_spec.errors import EvidenceError, LoraSpecError, ParamsError
from lora_spec.params import validate
from lora_spec.predictor import PredictorError, load_predictor, load_predictor_params, save_predictor
from lora_spec.predictor import intervals as iv
from lora_spec.predictor.fit import MODEL, Fit, fit_predictor
from lora_spec.predictor.ood import distances, shrunk_precision, standardiser
from lora_spec.predictor.params import PredictorParams
from lora_spec.predictor.portable import PortablePredictor, transformed
from lora_spec.predictor.tables import project

PARAMS = load_predictor_params()
QUICK = PARAMS.model_copy(
    update={
        "bootstrap": PARAMS.bootstrap.model_copy(update={"draws": 50}),
        "elasticnet": PARAMS.elasticnet.model_copy(update={"l1_ratios": (0.5,)}),
    }
)


@pytest.fixture(scope="module")
def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    return made_up_tables()


def do_fit(features: pd.DataFrame, labels: pd.DataFrame, params: PredictorParams = QUICK) -> Fit:
    return fit_predictor(features, labels, params, evidence_class="smoke", **PAIR)


@pytest.fixture(scope="module")
def fitted(tables) -> Fit:
    return do_fit(*tables)


def test_the_export_equals_scikit_learn(tables, fitted) -> None:
    from sklearn.linear_model import ElasticNet
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    features, labels = tables
    names = list(PARAMS.feature_names)
    transforms = [choice.transform for choice in PARAMS.features]
    metrics = fitted.predictor.metrics
    pipeline = make_pipeline(
        FunctionTransformer(lambda x: transformed(x, transforms, names)),
        StandardScaler(),
        ElasticNet(alpha=metrics["penalty"], l1_ratio=metrics["l1_ratio"], tol=1e-12, max_iter=10**6),
    )
    values = features[names].to_numpy()
    pipeline.fit(values, labels["delta_alpha"])
    expected = pipeline.predict(values * 1.3)
    got = [fitted.predictor.predict(row).point for row in (features[names] * 1.3).to_dict("records")]
    assert np.max(np.abs(expected - got)) < 1e-9


def test_out_of_fold_predictions_never_saw_their_domain() -> None:
    features, labels = made_up_tables(n=12, per_domain=2)
    before = do_fit(features, labels).out_of_fold.set_index("adapter")
    changed = labels.copy()
    mine = changed["domain"] == "domain-02"
    changed.loc[mine, "delta_alpha"] = [5.0, -7.0]
    after = do_fit(features, changed).out_of_fold.set_index("adapter")
    held = labels.loc[mine, "adapter"]
    for model in (MODEL, "constant", "norm_linear", "norm_log", "l1_ratio", "penalty"):
        assert before.loc[held, model].tolist() == after.loc[held, model].tolist()
    assert not np.allclose(before.drop(held)["constant"], after.drop(held)["constant"])


def test_baselines_by_hand(tables, fitted) -> None:
    features, labels = tables
    table = fitted.out_of_fold
    y, size = labels["delta_alpha"].to_numpy(), features["fro_all_all"].to_numpy()
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        assert table.loc[i, "constant"] == pytest.approx(y[rest].mean())
        slope, intercept = np.polyfit(np.log1p(size[rest]), y[rest], 1)
        assert table.loc[i, "norm_log"] == pytest.approx(intercept + slope * np.log1p(size[i]))
    assert (table["no_effect"] == 0).all()
    scores = fitted.predictor.metrics["models"]
    assert scores["constant"]["mae"]["value"] == pytest.approx(np.mean(np.abs(y - table["constant"])))
    assert "spearman" not in scores["constant"] and scores[MODEL]["spearman"]["value"] > 0.5
    assert fitted.predictor.metrics["beats_constant"]


def test_a_null_is_reported_as_one() -> None:
    features, labels = made_up_tables()
    rng = np.random.default_rng(3)
    labels["delta_alpha"] = rng.normal(0, 0.02, len(labels))
    metrics = do_fit(features, labels).predictor.metrics
    assert not metrics["beats_constant"]
    assert metrics["models"][MODEL]["r2"]["value"] < 0.2


def test_file_round_trip_is_exact_and_repeatable(tables, fitted, tmp_path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    save_predictor(first, fitted.predictor)
    save_predictor(second, do_fit(*tables).predictor)
    assert first.read_bytes() == second.read_bytes()
    assert load_predictor(first) == fitted.predictor
    shuffled = (table.sample(frac=1, random_state=1) for table in tables)
    save_predictor(second, do_fit(*shuffled).predictor)
    assert first.read_bytes() == second.read_bytes()


def test_json_form_is_stable(fitted) -> None:
    payload = fitted.predictor.payload()
    assert list(payload) == [
        "schema",
        "mode",
        "target",
        "base",
        "drafter",
        "features",
        "intercept",
        "interval",
        "ood",
        "training",
        "evidence_class",
        "metrics",
    ]
    feature = {"name", "unit", "transform", "mean", "scale", "min", "max", "coefficient"}
    assert set(payload["features"][0]) == feature
    assert payload["evidence_class"] == "smoke" and payload["target"]["k"] == 4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(schema="lora-spec-predictor/2"), "expected a lora-spec-predictor/1"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d["features"][0].update(extra=1), r"features\.0\.extra"),
        (lambda d: d.pop("intercept"), "intercept"),
        (lambda d: d.update(intercept=math.nan), "NaN"),
        (lambda d: d["metrics"].update(mae=math.inf), "Infinity"),
        (lambda d: d["features"][0].update(scale=0.0), "scale"),
        (lambda d: d["features"].pop(), "does not fit"),
        (lambda d: d["training"]["adapters"].pop(), "different lengths"),
        (lambda d: d["features"].__setitem__(0, d["features"][1]), "named twice"),
        (lambda d: d.update(mode="checkpoint_meta"), "mode"),
        (lambda d: d.update(evidence_class="guessed"), "evidence_class"),
        (lambda d: d.update(evidence_class="contract"), "measured or on smoke"),
        (lambda d: d.update(intercept="0.1"), "intercept"),
        (lambda d: d.update(intercept=True), "intercept"),
        (lambda d: d["features"][0].update(min=2.0, max=1.0), "min above max"),
        (lambda d: d["ood"]["precision"][0].__setitem__(0, -1.0), "positive definite"),
        (lambda d: d["ood"]["precision"][0].__setitem__(1, 1e6), "symmetric"),
    ],
)
def test_damaged_files_are_refused(fitted, tmp_path, change, match) -> None:
    data = fitted.predictor.payload()
    change(data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PredictorError, match=match):
        load_predictor(path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff", b"null", b"[" * 100_000, b'{"a": 1, "a": 2}']
)
def test_other_files_are_refused(tmp_path, content) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(PredictorError):
        load_predictor(path)
    with pytest.raises(PredictorError, match="not found"):
        load_predictor(tmp_path / "none.json")


def test_inputs_are_checked(tables, fitted) -> None:
    row = tables[0].iloc[0].to_dict()
    for name, value, code in (("fro_mlp", None, "feature_missing"), ("fro_mlp", math.nan, "feature_value")):
        bad = {k: v for k, v in row.items() if k != name} | ({} if value is None else {name: value})
        with pytest.raises(PredictorError) as error:
            fitted.predictor.predict(bad)
        assert error.value.code == code and name in str(error.value)
    with pytest.raises(PredictorError):
        fitted.predictor.predict(row | {"fro_mlp": -2.0})


def test_a_prediction_that_overflows_is_an_error_without_warnings(tables, fitted) -> None:
    data = fitted.predictor.payload()
    data["features"][0].update(scale=1e-320)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PredictorError) as error:
            PortablePredictor.model_validate(data).predict(tables[0].iloc[0].to_dict())
    assert error.value.code == "overflow"


def test_the_mode_sees_only_its_columns(tables, fitted, tmp_path) -> None:
    features, labels = tables
    own = ["adapter", "content_hash", *PARAMS.columns]
    poison = pd.DataFrame(np.nan, features.index, [*features.columns.drop(own), "meta_rank"])
    poisoned = pd.concat([poison, features[own]], axis=1)
    path = tmp_path / "features.parquet"
    poisoned.to_parquet(path)
    opened = project(path, PARAMS)
    assert list(opened.columns) == ["adapter", "content_hash", *PARAMS.columns]
    again = do_fit(opened, labels)
    assert again.predictor == fitted.predictor
    assert again.out_of_fold.equals(fitted.out_of_fold)
    row = tables[0].iloc[3].to_dict()
    other = {k: v if k in PARAMS.feature_names else math.nan for k, v in row.items()}
    assert fitted.predictor.predict(other) == fitted.predictor.predict(row)


def test_a_mode_may_not_declare_another_modes_column() -> None:
    data = PARAMS.model_dump(mode="json", by_alias=True)
    data["features"][0] = {"name": "kl", "transform": "identity"}
    with pytest.raises(ParamsError, match="kl is no checkpoint feature"):
        validate(PredictorParams, data, where="test")
    data["features"][0] = data["features"][1]
    with pytest.raises(ParamsError, match="named twice"):
        validate(PredictorParams, data, where="test")


def test_missing_features_and_labels_are_named(tables) -> None:
    features, labels = tables
    with pytest.raises(EvidenceError, match="adapter-05"):
        do_fit(features[features["adapter"] != "adapter-05"], labels)
    with pytest.raises(EvidenceError) as error:
        do_fit(features, labels[labels["domain"].isin(["domain-00", "domain-01"])])
    assert error.value.code == "too_few_domains"
    with pytest.raises(EvidenceError, match="not finite"):
        do_fit(features, labels.assign(delta_alpha=math.nan))


# Distances


def test_training_adapters_are_familiar_and_far_ones_are_not(tables, fitted) -> None:
    features = tables[0]
    for row in features.to_dict("records"):
        prediction = fitted.predictor.predict(row)
        assert not prediction.unfamiliar and prediction.outside == ()
        assert prediction.nearest == row["adapter"] and prediction.nearest_distance < 1e-9
    far = {
        k: v * 1e4 if k.startswith(("fro", "spectral")) else v for k, v in features.iloc[-1].to_dict().items()
    }
    prediction = fitted.predictor.predict(far)
    assert prediction.unfamiliar and "fro_mlp" in prediction.outside


def test_mahalanobis_by_hand() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(9, 3))
    precision = shrunk_precision(points, 0.5)
    covariance = points.T @ points / 8
    expected = np.linalg.inv(0.5 * covariance + 0.5 * np.trace(covariance) / 3 * np.eye(3))
    assert precision == pytest.approx(expected)
    query = rng.normal(size=(2, 3))
    mahalanobis, nearest = distances(points, precision, query)
    assert mahalanobis == pytest.approx([math.sqrt(q @ expected @ q) for q in query])
    assert nearest == pytest.approx([min(np.linalg.norm(q - p) for p in points) for q in query])
    assert standardiser(np.ones((4, 1)) * 3.7)[1].tolist() == [1.0]


# Intervals and metrics

residual_groups = st.lists(
    st.tuples(st.floats(-1, 1), st.sampled_from("abcdefghij")), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=60)
@given(residual_groups, st.floats(0.1, 0.95))
def test_half_width_equals_a_slow_search(pairs: list[tuple[float, str]], level: float) -> None:
    residuals, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    sizes = {g: groups.count(g) for g in groups}

    def mass(width: float) -> float:
        inside = (1 / sizes[g] for r, g in pairs if abs(r) <= width)
        return sum(inside) / (len(sizes) + 1)

    enough = [w for w in sorted(abs(r) for r in residuals) if mass(w) >= level - 1e-9]
    width = iv.grouped_half_width(residuals, groups, level)
    assert width == (enough[0] if enough else math.inf)


def test_intervals_cover_new_groups() -> None:
    covered = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        groups = np.repeat([f"g{i}" for i in range(12)], 2)
        residuals = np.repeat(rng.normal(size=12), 2) + rng.normal(0, 0.3, 24)
        width = iv.grouped_half_width(residuals[:-2], groups[:-2].tolist(), 0.8)
        covered.append(abs(residuals[-1]) <= width)
    assert 0.75 < np.mean(covered) < 0.9


def test_too_few_groups_have_no_interval() -> None:
    assert iv.grouped_half_width([0.1, 0.2, 0.3], ["a", "b", "c"], 0.8) == math.inf
    assert iv.grouped_half_width([0.1, 0.2, 0.3, 0.4], ["a", "b", "c", "d"], 0.8) == 0.4


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=20))
def test_spearman_equals_scipy(pairs: list[tuple[int, int]]) -> None:
    from scipy.stats import spearmanr

    x, y = (np.array([p[i] for p in pairs], dtype=float) for i in range(2))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert math.isnan(iv.spearman(x, y))
    else:
        assert iv.spearman(x, y) == pytest.approx(float(spearmanr(x, y).statistic))


def test_domain_draws_keep_domains_whole() -> None:
    groups = ["a", "b", "b", "c"]
    for rows in iv.domain_draws(groups, 50, 0):
        assert list(rows).count(1) == list(rows).count(2)
    assert iv.interval_of([math.nan, math.nan, 1.0], 0.9) == (None, None)
    assert iv.with_interval(iv.r2, np.ones(3), np.ones(3), [np.arange(3)], 0.9)["value"] is None


# The command


@pytest.fixture(scope="module")
def screen(tmp_path_factory):
    root = tmp_path_factory.mktemp("screen")
    folders = write_screen(root / "records", root / "adapters")
    return root / "records", folders


def fit_args(records, output, *more):
    return ["fit", "--records", records, "--output", output, "--evidence-class", "smoke", *more]


def test_fit_command(cli, screen, tmp_path) -> None:
    records, folders = screen
    output = tmp_path / "out"
    given_folders = [part for folder in folders for part in ("--adapters", folder)]
    planned = cli(*fit_args(records, output, *given_folders))
    assert planned.returncode == 0 and "Plan only" in planned.stdout and not output.exists()

    done = cli(*fit_args(records, output, "--execute", *given_folders))
    assert done.returncode == 0, done.stderr
    assert "6 adapters of 6 domains" in done.stdout and "written" in done.stdout
    names = {"features.json", "features.adapters.parquet", "predictor-checkpoint_only.json"}
    assert {path.name for path in output.iterdir()} == names | {"record.json", "record.oof.parquet"}
    predictor = load_predictor(output / "predictor-checkpoint_only.json")
    assert predictor.evidence_class == "smoke" and predictor.base.names == (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )

    # A fresh clone has the features table but no adapters: the same bytes, and the record stays as it was.
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    again = cli(*fit_args(records, output, "--execute"))
    assert again.returncode == 0 and "reproduced byte for byte" in again.stdout
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before

    # A fit that ended between predictor and record is seen, and mended by the next.
    (output / "record.oof.parquet").unlink()
    mended = cli(*fit_args(records, output, "--execute"))
    assert mended.returncode == 0 and "written" in mended.stdout
    assert (output / "record.oof.parquet").is_file()


def test_fit_without_features_or_with_other_adapters(cli, screen, tmp_path) -> None:
    records, folders = screen
    result = cli(*fit_args(records, tmp_path / "out"))
    assert result.returncode == 2 and "neither in the committed table nor computable" in result.stderr
    other = shutil.copytree(folders[0], tmp_path / folders[1].name)
    given_folders = [part for folder in [folders[0], other, *folders[2:]] for part in ("--adapters", folder)]
    result = cli(*fit_args(records, tmp_path / "out", "--execute", *given_folders))
    assert result.returncode == 2 and "not the one that was measured" in result.stderr
    assert not (tmp_path / "out").exists()
    stranger = shutil.copytree(folders[0], tmp_path / "stranger")
    result = cli(*fit_args(records, tmp_path / "out", "--adapters", stranger))
    assert result.returncode == 2 and "no label" in result.stderr


def test_fit_refuses_other_classes_and_pairs(cli, screen, tmp_path) -> None:
    records, folders = screen
    result = cli("fit", "--records", records, "--output", tmp_path / "out")
    assert result.returncode == 2 and "evidence class smoke" in result.stderr
    write_screen(tmp_path / "other", tmp_path / "adapters", k=7)
    result = cli(*fit_args(tmp_path / "other", tmp_path / "out", "--adapters", folders[0]))
    assert result.returncode == 2 and "num_speculative_tokens is 7" in result.stderr
    result = cli("fit", "--records", tmp_path / "none")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    result = cli("fit", "--evidence-class", "any")
    assert result.returncode == 2


def test_errors_are_of_the_library() -> None:
    assert issubclass(PredictorError, LoraSpecError)
