"""Actions over acceptance and load, regret, and abstention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.cost import load_profile
from lora_spec.errors import ParamsError
from lora_spec.gate import Action, DecisionReason, Interval, decide, load_gate_params

H100 = load_profile("h100-8b")
POCKET = load_profile("pocket-cpu")
PARAMS = load_gate_params()
REASON = DecisionReason(code="dora", sentence="No.")


def around(point: float, half_width: float = 0.0) -> Interval:
    return Interval(point=point, low=point - half_width, high=point + half_width)


@pytest.mark.parametrize(
    ("delta", "load", "action", "depth", "codes"),
    [
        (around(0.0, 0.05), 32, Action.GREEN, 4, ["default_depth_best"]),
        (around(0.1, 0.05), 1, Action.GREEN, 4, ["default_depth_best"]),
        (around(-0.25, 0.05), 32, Action.AMBER, 2, ["shorter_depth_pays"]),
        (around(0.0, 0.02), 192, Action.AMBER, 1, ["shorter_depth_pays", "same_without_effect"]),
        (around(-0.35, 0.05), 256, Action.RED, 0, ["no_depth_pays"]),
        (around(-0.1, 0.4), 192, Action.ABSTAIN, 0, ["interval_too_wide"]),
    ],
)
def test_all_four_actions_under_h100(
    delta: Interval, load: int, action: Action, depth: int, codes: list[str]
) -> None:
    decision = decide(delta, H100, load, PARAMS)
    assert (decision.action, decision.depth) == (action, depth)
    assert [reason.code for reason in decision.reasons] == codes
    assert decision.cost_profile == "h100-8b" and decision.evidence_class == "modelled"
    assert all(reason.sentence.endswith(".") for reason in decision.reasons)


@pytest.mark.parametrize("load", [1, 8, 32, 64])
@pytest.mark.parametrize("delta", [-0.4, 0.0, 0.05])
def test_everything_is_red_under_the_pocket_profile(delta: float, load: int) -> None:
    decision = decide(around(delta, 0.05), POCKET, load, PARAMS)
    assert decision.action is Action.RED
    assert [reason.code for reason in decision.reasons] == ["no_depth_pays", "same_without_effect"]


@settings(deadline=None, max_examples=50)
@given(st.floats(-0.6, 0.4), st.floats(0, 0.3), st.integers(1, 512))
def test_decision_equals_a_slow_search(point: float, half_width: float, load: int) -> None:
    delta = around(point, half_width)
    decision = decide(delta, H100, load, PARAMS)
    depths = range(H100.default_depth + 1)
    at_point = [float(H100.goodput(load, k, point)) for k in depths]
    best = max(depths, key=lambda k: at_point[k])
    expected = best if at_point[best] > (1 + PARAMS.min_gain) * at_point[-1] else H100.default_depth
    fine = np.linspace(delta.low, delta.high, 401)
    values = np.array([H100.goodput(load, k, fine) for k in depths])
    worst = float(np.max(1 - values[expected] / values.max(axis=0)))
    if worst > PARAMS.max_regret + 1e-3:
        assert decision.action is Action.ABSTAIN
    if worst < PARAMS.max_regret - 1e-3:
        assert decision.depth == expected and decision.action is not Action.ABSTAIN
        assert decision.regret is not None and decision.regret.high == pytest.approx(worst, abs=5e-3)
        assert 0.0 <= decision.regret.low <= decision.regret.point <= decision.regret.high
    assert [g.depth for g in decision.goodput] == list(depths)
    assert [g.tokens_per_s for g in decision.goodput] == pytest.approx(at_point)
    assert all(g.low <= g.tokens_per_s <= g.high for g in decision.goodput)


def test_the_default_stays_unless_another_depth_gains_enough() -> None:
    delta = around(-0.1)
    shorter = H100.goodput(32, 3, -0.1) / H100.goodput(32, 4, -0.1) - 1
    assert 0 < shorter < PARAMS.min_gain
    assert decide(delta, H100, 32, PARAMS).action is Action.GREEN
    assert decide(delta, H100, 32, PARAMS.model_copy(update={"min_gain": 0.0})).depth == 3


def test_reasons_to_abstain_win_over_any_prediction() -> None:
    decision = decide(around(0.0), H100, 32, PARAMS, [REASON])
    assert decision.action is Action.ABSTAIN and decision.depth == PARAMS.abstain_depth
    assert decision.reasons == (REASON,) and decision.regret is not None
    assert decision.regret.point == pytest.approx(
        1 - float(H100.goodput(32, 0)) / max(float(H100.goodput(32, k)) for k in range(5))
    )
    decision = decide(None, H100, 32, PARAMS, [REASON])
    assert decision.action is Action.ABSTAIN
    assert (decision.alpha, decision.delta_alpha, decision.regret, decision.goodput) == (None, None, None, ())
    with pytest.raises(ValueError, match="no reason"):
        decide(None, H100, 32, PARAMS)


@pytest.mark.filterwarnings("error")
def test_an_interval_without_end_abstains() -> None:
    decision = decide(around(0.0, 1e308), H100, 192, PARAMS)
    assert decision.action is Action.ABSTAIN and decision.reasons[0].code == "interval_too_wide"
    assert decide(around(-1e300), H100, 256, PARAMS).action is Action.RED


def test_alpha_is_the_profiles_base_moved_and_clipped() -> None:
    decision = decide(around(-0.9, 0.2), H100, 32, PARAMS)
    assert decision.alpha == Interval(point=0.0, low=0.0, high=0.0)
    decision = decide(around(-0.1, 0.02), H100, 32, PARAMS)
    assert decision.alpha_base == pytest.approx(0.573, abs=1e-3)
    assert decision.alpha is not None and decision.alpha.point == pytest.approx(decision.alpha_base - 0.1)


def test_load_outside_the_profile_is_an_error() -> None:
    with pytest.raises(ParamsError):
        decide(around(0.0), H100, 1000, PARAMS)


def test_json_form_is_stable() -> None:
    payload = decide(around(0.0, 0.05), H100, 32, PARAMS).model_dump(mode="json", by_alias=True)
    assert list(payload) == [
        "schema",
        "action",
        "depth",
        "reasons",
        "load",
        "cost_profile",
        "evidence_class",
        "default_depth",
        "alpha_base",
        "alpha",
        "delta_alpha",
        "goodput",
        "regret",
    ]
    assert payload["schema"] == "lora-spec-decision/1" and payload["action"] == "green"
    assert set(payload["goodput"][0]) == {"depth", "tokens_per_s", "low", "high"}
