"""Features are functions of ΔW alone, equal to a dense SVD, and never NaN."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from adapter_factory import ALL_TYPES, BASE, dense_delta, module_name, random_pairs, write_adapter
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.checkpoint import read_adapter
from lora_spec.checkpoint.geometry import MODULE_TYPES
from lora_spec.errors import CheckpointError
from lora_spec.features import (
    FEATURES,
    ModuleSpectrum,
    feature_names,
    feature_row,
    module_spectra,
    row_from_spectra,
    singular_values,
)
from lora_spec.features.catalog import STATISTICS, THIRDS

TOLERANCE = {"F64": 1e-9, "F32": 1e-5, "F16": 5e-3, "BF16": 4e-2}


def row_of(directory, base=BASE):
    return feature_row(read_adapter(directory, base))


def close(first, second, rel):
    assert list(first) == list(second) == list(FEATURES)
    for name in FEATURES:
        assert first[name] == pytest.approx(second[name], rel=rel, abs=1e-12), name


def oracle(pairs, scale=2.0, layers=6):
    """The same features from formed matrices and dense SVDs, written out plainly."""
    spectra = []
    for layer in range(layers):
        for module_type in MODULE_TYPES:
            pair = pairs.get(module_name(module_type, layer))
            if pair is not None and pair[1].any():
                values = np.linalg.svd(dense_delta(pair, scale), compute_uv=False)
                spectra.append((module_type, THIRDS[layer * 3 // layers], layer, values[: pair[0].shape[0]]))
    row = dict.fromkeys(FEATURES, 0.0)

    def put(cell, found):
        if not found:
            return
        squared = [(v**2).sum() for v in found]
        made = {
            "fro": math.sqrt(sum(squared)),
            "spectral": max(v.max() for v in found),
            "nuclear": sum(v.sum() for v in found),
            "stable_rank": np.mean([(v**2).sum() / v.max() ** 2 for v in found]),
            "entropy_rank": np.mean(
                [math.exp(-sum(p * math.log(p) for p in v**2 / (v**2).sum() if p)) for v in found]
            ),
            "top1": sum(v.max() ** 2 for v in found) / sum(squared),
            "top4": sum((np.sort(v)[-4:] ** 2).sum() for v in found) / sum(squared),
            "mask": 1.0,
        }
        for statistic, value in made.items():
            if f"{statistic}_{cell}" in row:
                row[f"{statistic}_{cell}"] = value

    for t in (*MODULE_TYPES, "all"):
        for third in (*THIRDS, "all"):
            put(f"{t}_{third}", [v for a, b, _, v in spectra if t in (a, "all") and third in (b, "all")])
    squares = [(layer, (v**2).sum()) for _, _, layer, v in spectra]
    total = sum(s for _, s in squares)
    row["log1p_fro_all_all"] = math.log1p(math.sqrt(total))
    row["fro_attention"] = math.sqrt(sum((v**2).sum() for t, _, _, v in spectra if t in "qkvo"))
    row["fro_mlp"] = math.sqrt(sum((v**2).sum() for t, _, _, v in spectra if t in ("gate", "up", "down")))
    row["depth_center"] = sum(layer * s for layer, s in squares) / total / (layers - 1) if total else 0.0
    row["modules"] = float(len(spectra))
    row["modules_share"] = len(spectra) / 42
    return row


@pytest.mark.parametrize("types", [ALL_TYPES, ("q", "v"), ("down",)])
@pytest.mark.parametrize("rank", [1, 4, 8, 20])  # 20 is more than the base is wide
def test_equal_to_dense_svd(tmp_path, types, rank):
    pairs = random_pairs(seed=rank, rank=rank, types=types)
    directory = write_adapter(tmp_path / "a", pairs, dtype="F64", r=rank, lora_alpha=2 * rank)
    close(row_of(directory), oracle(pairs), 1e-8)


def test_equal_to_dense_svd_with_layers_left_out(tmp_path):
    pairs = random_pairs(types=("o", "up"), layers=range(3, 5))
    row = row_of(write_adapter(tmp_path / "a", pairs, dtype="F64"))
    close(row, oracle(pairs), 1e-8)
    assert row["mask_o_early"] == 0.0 and row["mask_o_middle"] == row["mask_o_late"] == 1.0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 3.0), st.integers(1, 8))
def test_refactoring_changes_nothing(seed, spread, rank):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rank, 16)), rng.normal(size=(24, rank))
    u, _ = np.linalg.qr(rng.normal(size=(rank, rank)))
    v, _ = np.linalg.qr(rng.normal(size=(rank, rank)))
    g = u @ np.diag(10.0 ** rng.uniform(-spread, spread, rank)) @ v
    before = singular_values(a, b, 0.5)
    after = singular_values(np.linalg.solve(g, a), b @ g, 0.5)
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6 * before.sum())
    np.testing.assert_allclose(singular_values(a, 2 * b, -0.25), before)


def test_refactored_adapter_has_equal_features(tmp_path):
    pairs = random_pairs(seed=3)
    rng = np.random.default_rng(4)
    other = {}
    for name, (a, b) in pairs.items():
        g = rng.normal(size=(4, 4)) + 4 * np.eye(4)
        other[name] = (np.linalg.solve(g, a), b @ g)
    first = row_of(write_adapter(tmp_path / "a", pairs, dtype="F64"))
    close(row_of(write_adapter(tmp_path / "b", other, dtype="F64")), first, 1e-9)
    # The same ΔW at twice the rank and another split of the scale.
    wider = {name: (np.concatenate([a, a]), np.concatenate([b, b], axis=1)) for name, (a, b) in pairs.items()}
    close(row_of(write_adapter(tmp_path / "c", wider, dtype="F64", r=8, lora_alpha=8)), first, 1e-6)
    scaled = {name: (a, b / 7) for name, (a, b) in pairs.items()}
    close(row_of(write_adapter(tmp_path / "d", scaled, dtype="F64", lora_alpha=56)), first, 1e-9)


def test_order_files_names_and_targets_do_not_count(tmp_path):
    pairs = random_pairs(seed=5)
    first = row_of(write_adapter(tmp_path / "a", pairs))
    shuffled = {name: pairs[name] for name in sorted(pairs, key=hash)}
    ways = [
        write_adapter(tmp_path / "b", shuffled),
        write_adapter(tmp_path / "c", pairs, shards=5),
        write_adapter(tmp_path / "d", pairs, adapter="default"),
        write_adapter(tmp_path / "e", pairs, target_modules="all-linear"),
        write_adapter(tmp_path / "f", pairs, target_modules=r".*_proj"),
        write_adapter(tmp_path / "g", pairs, prefix=""),
    ]
    for way in ways:
        assert row_of(way) == first


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_number_formats_agree_within_their_precision(tmp_path, dtype):
    pairs = random_pairs(seed=6)
    exact = row_of(write_adapter(tmp_path / "a", pairs, dtype="F64"))
    close(row_of(write_adapter(tmp_path / "b", pairs, dtype=dtype)), exact, TOLERANCE[dtype])


def test_fused_projections_give_the_features_of_their_parts(tmp_path):
    plain = random_pairs(seed=7)
    fused, parts = {}, {}
    for layer in range(6):
        for name, kinds, block in (("qkv", "qkv", "self_attn"), ("gate_up", ("gate", "up"), "mlp")):
            a = plain[module_name(kinds[0], layer)][0]
            rows = [plain[module_name(kind, layer)][1] for kind in kinds]
            fused[f"model.layers.{layer}.{block}.{name}_proj"] = (a, np.concatenate(rows))
            parts.update({module_name(kind, layer): (a, b) for kind, b in zip(kinds, rows, strict=True)})
    close(row_of(write_adapter(tmp_path / "a", fused)), row_of(write_adapter(tmp_path / "b", parts)), 1e-9)


def test_scale_patterns_and_rslora_enter_the_features(tmp_path):
    pairs = random_pairs(seed=8, types=("q", "v"))
    plain = row_of(write_adapter(tmp_path / "a", pairs))
    louder = row_of(write_adapter(tmp_path / "b", pairs, alpha_pattern={"q_proj": 24}))
    assert louder["fro_q_all"] == pytest.approx(3 * plain["fro_q_all"])
    assert louder["fro_v_all"] == plain["fro_v_all"]
    stabilised = row_of(write_adapter(tmp_path / "c", pairs, use_rslora=True))
    assert stabilised["fro_all_all"] == pytest.approx(2 * plain["fro_all_all"])


def test_untrained_and_absent_modules_are_zero_and_finite(tmp_path):
    zero = {name: (a, b * 0) for name, (a, b) in random_pairs().items()}
    assert set(row_of(write_adapter(tmp_path / "a", zero)).values()) == {0.0}
    assert set(row_from_spectra([], 0).values()) == {0.0}
    some = {**random_pairs(types=("q",)), **{k: v for k, v in zero.items() if ".v_proj" in k}}
    assert row_of(write_adapter(tmp_path / "b", some)) == row_of(
        write_adapter(tmp_path / "c", random_pairs(types=("q",)))
    )


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_very_small_and_large_weights_stay_finite(tmp_path, size):
    pairs = {name: (a * size, b) for name, (a, b) in random_pairs(types=("q", "up")).items()}
    row = row_of(write_adapter(tmp_path / "a", pairs, dtype="BF16"))
    normal = row_of(write_adapter(tmp_path / "b", random_pairs(types=("q", "up")), dtype="BF16"))
    assert all(math.isfinite(value) for value in row.values())
    assert row["fro_all_all"] == pytest.approx(size * normal["fro_all_all"], rel=0.02)
    assert row["stable_rank_all_all"] == pytest.approx(normal["stable_rank_all_all"], rel=0.02)


def test_abstaining_adapters_give_no_features_unless_asked(tmp_path):
    directory = write_adapter(tmp_path / "a", use_dora=True)
    with pytest.raises(CheckpointError) as caught:
        row_of(directory)
    assert caught.value.code == "abstained" and "dora" in str(caught.value)
    assert feature_row(read_adapter(directory, BASE), strict=False)["modules"] == 42
    nothing = write_adapter(tmp_path / "b", {}, extra={"x": np.ones(2)}, peft_type="LOHA")
    assert not any(feature_row(read_adapter(nothing, BASE), strict=False).values())


@pytest.mark.parametrize("side", [0, 1])
def test_nan_is_found_without_the_full_scan(tmp_path, side):
    pairs = random_pairs(types=("q",))
    pairs[module_name("q", 2)][side][1, 1] = np.nan
    adapter = read_adapter(write_adapter(tmp_path / "a", pairs), BASE, full=False)
    with pytest.raises(CheckpointError) as caught:
        feature_row(adapter)
    assert caught.value.code == "non_finite" and f"layers.2.self_attn.q_proj.lora_{'AB'[side]}" in str(
        caught.value
    )


def conditioned(spread: float, seed: int = 0):
    """Factors whose product is tame while each is badly conditioned: B G and G⁻¹ A."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(8, 40)), rng.normal(size=(30, 8))
    u, v = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
    g = 10.0 ** np.linspace(-spread, spread, 8)
    return (v.T / g) @ (u.T @ a), b @ (u * g) @ v, np.linalg.svd(b @ a, compute_uv=False)[:8]


def test_qr_takes_over_where_products_lose_small_values():
    a, b, exact = conditioned(5.0)
    auto = singular_values(a, b)
    np.testing.assert_array_equal(auto, singular_values(a, b, method="qr"))
    np.testing.assert_allclose(auto, exact, rtol=1e-4)
    gram = singular_values(a, b, method="gram")
    assert np.abs(gram - exact).max() > 10 * np.abs(auto - exact).max()


def test_products_serve_ordinary_factors():
    a, b, exact = conditioned(0.5)
    np.testing.assert_array_equal(singular_values(a, b), singular_values(a, b, method="gram"))
    np.testing.assert_allclose(singular_values(a, b), exact, rtol=1e-10)


@pytest.mark.parametrize("method", ["auto", "gram", "qr"])
def test_dependent_rows_and_wide_ranks(method):
    rng = np.random.default_rng(0)
    row = rng.normal(size=(1, 12))
    a, b = np.repeat(row, 5, axis=0), rng.normal(size=(9, 5))
    exact = np.linalg.svd(b @ a, compute_uv=False)[:5]
    np.testing.assert_allclose(singular_values(a, b, method=method), exact, atol=1e-6 * exact[0])
    a, b = rng.normal(size=(20, 6)), rng.normal(size=(7, 20))
    values = singular_values(a, b, method=method)
    assert values.shape == (6,) and (np.diff(values) <= 0).all()
    np.testing.assert_allclose(values, np.linalg.svd(b @ a, compute_uv=False), rtol=1e-9)


def test_spectra_come_in_the_order_of_the_adapter(tmp_path):
    adapter = read_adapter(write_adapter(tmp_path / "a"), BASE)
    spectra = module_spectra(adapter)
    assert [s.name for s in spectra] == [m.name for m in adapter.modules]
    assert all(s.values.dtype == np.float64 and s.values.shape == (4,) for s in spectra)


def test_the_catalogue_is_fixed_and_complete(tmp_path):
    row = row_of(write_adapter(tmp_path / "a", random_pairs(types=("k",), layers=range(1))))
    assert tuple(row) == tuple(FEATURES) == feature_names()
    assert all(type(value) is float for value in row.values())
    assert len(feature_names(scope="cell")) == len(STATISTICS) * 21
    assert {info.family for info in FEATURES.values()} == {"norm", "shape", "mask", "depth"}
    assert set(feature_names(family="norm")) > {"fro_all_all", "spectral_down_late"}
    assert all(info.name == name and info.description for name, info in FEATURES.items())


def test_thirds_cover_every_layer_once():
    for layers in (1, 2, 3, 26, 30, 32):
        spectra = [ModuleSpectrum("x", "q", layer, np.ones(1)) for layer in range(layers)]
        row = row_from_spectra(spectra, layers)
        assert sum(row[f"fro_q_{third}"] ** 2 for third in THIRDS) == pytest.approx(layers)
        assert row["fro_q_all"] ** 2 == pytest.approx(layers)


def test_memory_stays_near_one_pair_of_factors(tmp_path):
    import tracemalloc

    name = module_name("up", 0)
    rng = np.random.default_rng(0)
    pairs = {
        name.replace(".0.", f".{layer}."): (rng.normal(size=(64, 4096)), rng.normal(size=(8192, 64)))
        for layer in range(12)
    }
    directory = write_adapter(tmp_path / "a", pairs, dtype="BF16", r=64)
    del pairs
    adapter = read_adapter(directory)
    tracemalloc.start()
    feature_row(adapter)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pair = max(module.pair_bytes for module in adapter.modules)
    # Two workers, each with a pair in bf16 and in float32, and one block in float64.
    assert peak < 2 * 3 * pair + (4 << 20)
    assert peak < 0.6 * (directory / "adapter_model.safetensors").stat().st_size


def test_the_analysis_needs_no_torch():
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None;"
        "import lora_spec.features, lora_spec.checkpoint, lora_spec.bench.features"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
