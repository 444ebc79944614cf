"""Expected tokens, step times, and profiles that reproduce the points they were derived from."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.cost import CostProfile, PassCost, expected_tokens, load_profile, shifted_survival
from lora_spec.errors import ParamsError
from lora_spec.params import validate

PROFILES = ("h100-8b", "pocket-cpu")


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 0.999), st.integers(0, 12))
def test_expected_tokens_is_the_geometric_sum(alpha: float, k: int) -> None:
    assert float(expected_tokens(alpha, k)) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-9)


def test_expected_tokens_at_the_ends_and_over_arrays() -> None:
    assert float(expected_tokens(1.0, 4)) == 5.0
    assert float(expected_tokens(0.0, 4)) == 1.0
    assert expected_tokens(np.array([[0.0, 0.5], [1.0, 0.5]]), 2).tolist() == [[1.0, 1.75], [3.0, 1.75]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=7), st.floats(-1, 1))
def test_shifted_survival(conditional: list[float], delta: float) -> None:
    survival = np.cumprod(conditional)
    moved = shifted_survival(survival, delta)
    assert np.all((moved >= 0) & (moved <= 1)) and np.all(np.diff(moved) <= 1e-12)
    by_hand = np.cumprod([min(1.0, max(0.0, c + delta)) for c in conditional])
    assert moved == pytest.approx(by_hand, abs=1e-9)
    assert shifted_survival(survival, 0.0) == pytest.approx(survival)


def test_a_curve_of_equal_rates_is_the_geometric_case() -> None:
    profile = load_profile("h100-8b")
    flat = profile.acceptance.model_copy(update={"survival": tuple(0.6**i for i in range(1, 8))})
    for k in range(8):
        assert float(flat.expected_tokens(k, -0.2)) == pytest.approx(float(expected_tokens(0.4, k)))
    assert flat.alpha_base == pytest.approx(0.6)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_reproduce_their_anchors(name: str) -> None:
    profile = load_profile(name)
    assert profile.anchors
    for anchor in profile.anchors:
        tokens = anchor.tokens_per_step or float(profile.acceptance.expected_tokens(anchor.depth))
        step = profile.step_ms(anchor.load, anchor.depth, adapter=anchor.adapter, configured=False)
        assert step / tokens == pytest.approx(anchor.ms_per_token, rel=anchor.tolerance), anchor


def test_base_acceptance_of_the_profiles() -> None:
    h100 = load_profile("h100-8b").acceptance
    assert float(h100.expected_tokens(7)) == pytest.approx(2.33, abs=0.01)  # the published acceptance length
    accepted = sum(h100.survival or ())
    assert h100.alpha_base == pytest.approx(accepted / (accepted + 1 - 0.014))
    assert float(load_profile("pocket-cpu").acceptance.expected_tokens(4)) == pytest.approx(2.138, abs=1e-3)


@pytest.mark.parametrize("name", PROFILES)
def test_goodput_grows_with_acceptance_and_step_time_with_load(name: str) -> None:
    profile = load_profile(name)
    delta = np.linspace(-0.5, 0.4, 19)
    for k in range(1, profile.default_depth + 1):
        goodput = profile.goodput(8, k, delta)
        assert goodput.shape == delta.shape and np.all(np.diff(goodput) > 0)
        assert profile.step_ms(9, k) > profile.step_ms(8, k) > profile.step_ms(8, k - 1)
    assert np.ptp(profile.goodput(8, 0, delta)) == 0.0


def test_the_cpu_drafter_never_pays() -> None:
    profile = load_profile("pocket-cpu")
    for load in (1, 8, 32, 64):
        plain = float(profile.goodput(load, 0))
        assert all(float(profile.goodput(load, k)) < plain for k in range(1, profile.default_depth + 1))


def test_speculation_pays_at_low_load_and_stops_paying_at_high_load() -> None:
    profile = load_profile("h100-8b")

    def gain(load: int, k: int, delta: float = 0.0) -> float:
        return float(profile.goodput(load, k, delta) / profile.goodput(load, 0))

    assert gain(1, 7) > 1.5
    assert gain(60, 7) > 1.0 > gain(64, 7)
    assert gain(112, 4) > 1.0 > gain(120, 4)
    assert 1.0 < gain(256, 1) < 1.1 and gain(256, 1, -0.15) < 1.0


def test_block_drafters_draft_once_and_autoregressive_ones_k_times() -> None:
    block = load_profile("h100-8b")
    serial = block.model_copy(update={"drafter": block.drafter.model_copy(update={"kind": "autoregressive"})})
    assert serial.draft_ms(1, 4) == pytest.approx(4 * serial.draft.ms(1, 1))
    assert block.draft_ms(1, 4) < 1.01 * block.draft_ms(1, 1)
    assert block.draft_ms(1, 0) == 0.0


def test_disabled_speculation_is_not_free_and_adapters_cost() -> None:
    profile = load_profile("h100-8b")
    plain = profile.step_ms(8, 0, configured=False)
    assert profile.step_ms(8, 0) == pytest.approx(plain * (1 + profile.disabled_overhead))
    assert plain == pytest.approx(
        profile.target_lora.factor * profile.step_ms(8, 0, adapter=False, configured=False)
    )


def test_saturation_starts_where_it_says() -> None:
    cost = PassCost(
        fixed_ms=1, per_request_ms=0.1, per_token_ms=0.01, saturation_tokens=10, saturated_per_token_ms=1
    )
    assert cost.ms(5, 2) == pytest.approx(1 + 0.5 + 0.05)
    assert cost.ms(5, 3) == pytest.approx(1 + 0.5 + 0.1 + 5)


@pytest.mark.parametrize("load", [0, 513])
def test_load_outside_the_profile(load: int) -> None:
    with pytest.raises(ParamsError) as error:
        load_profile("h100-8b").check_load(load)
    assert error.value.code == "load"


@pytest.mark.parametrize("name", ["no-such", "../gate", "h100-8b/../h100-8b", ""])
def test_unknown_profiles_are_named(name: str) -> None:
    with pytest.raises(ParamsError, match="h100-8b, pocket-cpu"):
        load_profile(name)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("acceptance", {"source": "x"}, "survival or alpha"),
        ("acceptance", {"source": "x", "alpha": 0.5, "survival": [0.5]}, "survival or alpha"),
        ("acceptance", {"source": "x", "survival": [0.5, 0.6, 0.1, 0.1]}, "must not increase"),
        ("acceptance", {"source": "x", "survival": [0.5]}, "shorter than default_depth"),
        ("acceptance", {"source": "x", "alpha": 1.5}, "acceptance.alpha"),
        ("load", {"minimum": 4, "default": 2, "maximum": 8}, "does not hold"),
        ("disabled_overhead", -0.1, "disabled_overhead"),
        ("evidence_class", "guessed", "evidence_class"),
        ("speed", 1, "unknown parameter speed"),
    ],
)
def test_profiles_are_strict(root, path: str, value: object, match: str) -> None:
    data = yaml.safe_load((root / "params/cost_profiles/h100-8b.yaml").read_text())
    data[path] = value
    with pytest.raises(ParamsError, match=re.escape(match)):
        validate(CostProfile, data, where="test")
