"""Phase 1 by depth and position: pairing, intervals, and what must not change any number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from lora_spec.acceptance import pooled_rates
from lora_spec.errors import EvidenceError
from lora_spec.measure.design import load_design
from lora_spec.phases import depths, effect, evidence, names
from lora_spec.phases.parameters import EffectParameters
from lora_spec.pool import load_pool

SMOKE = EffectParameters(tier="smoke", evidence_class="smoke")
LIMITS = effect.thresholds()


@pytest.fixture(scope="module")
def loaded(smoke_results):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_SPEC_RESULTS", str(smoke_results))
        return evidence.load_phase(SMOKE, "phase1", "effect")


def tables(found):
    return {
        "effect": effect.effect_table(found, LIMITS),
        "depths": depths.depth_table(found),
        "positions": depths.position_table(found),
    }


def test_every_row_is_there_once_and_only_the_primary_one_decides(loaded):
    design = load_design(effect.DESIGN)
    effects = effect.effect_table(loaded, LIMITS)
    key = effects[["adapter", "traffic", "decoding", "k"]]
    assert not key.duplicated().any()
    assert len(key) == len(design.adapters) * 2 * len(design.decodings) * len(design.all_depths)
    decided = effect.primary(effects)
    assert set(zip(decided["traffic"], decided["decoding"], decided["k"], strict=True)) == {
        ("own", "t08", design.num_speculative_tokens)
    }


def test_permuted_rows_change_no_number(loaded):
    shuffled = replace(loaded, requests=loaded.requests.sample(frac=1, random_state=7))
    for name, table in tables(shuffled).items():
        pd.testing.assert_frame_equal(table, tables(loaded)[name])


def test_an_unrelated_adapter_changes_no_number_of_the_others(loaded):
    requests = loaded.requests
    twin = requests[requests["adapter"] == "german-r16-all-s40"].assign(adapter="another")
    more = replace(loaded, requests=pd.concat([twin, requests], ignore_index=True))
    for name, table in tables(more).items():
        rest = table[table["adapter"] != "another"].reset_index(drop=True)
        pd.testing.assert_frame_equal(rest, tables(loaded)[name])


def test_rates_by_depth_are_the_pooled_ones(loaded):
    by_depth = depths.depth_table(loaded).set_index(["adapter", "arm", "k"])
    effects = effect.effect_table(loaded, LIMITS)
    for row in effects[(effects["traffic"] == "own") & (effects["decoding"] == "t08")].itertuples():
        requests = loaded.requests
        own = requests[
            (requests["prompt_set"] == row.domain)
            & (requests["decoding"] == "t08")
            & (requests["k"] == row.k)
            & requests["adapter"].isin(["", row.adapter])
        ]
        for arm, table in own.groupby("arm"):
            found = by_depth.loc[(row.adapter, arm, row.k)]
            rates = pooled_rates(table)
            assert found["alpha"] == pytest.approx(rates.alpha)
            assert found["al"] == pytest.approx(rates.al_emitted)
            assert found["al_low"] < found["al"] < found["al_high"]
        both = by_depth.loc[(row.adapter, "adapted − base", row.k)]
        assert both["alpha"] == pytest.approx(row.delta)


def test_a_depth_does_not_differ_from_itself_and_intervals_of_changes_hold_the_change(loaded):
    by_depth = depths.depth_table(loaded)
    primary = by_depth[by_depth["k"] == 4]
    assert (primary[["change", "change_low", "change_high"]] == 0.0).all(axis=None)
    assert by_depth["change"].between(by_depth["change_low"], by_depth["change_high"]).all()
    assert "AL, which depends on k" in depths.depth_sentence(by_depth, 0.95)
    assert depths.depth_sentence(primary, 0.95).startswith("One depth was measured, k = 4")


def test_alpha_of_independent_drafts_does_not_depend_on_the_depth_but_al_does(loaded):
    # The synthetic drafts are accepted independently, so that only noise may tell the depths apart.
    by_depth = depths.depth_table(loaded, level=0.999)
    alike = (by_depth["change_low"] <= 0) & (by_depth["change_high"] >= 0)
    assert alike.all()
    arms = by_depth[by_depth["arm"] != "adapted − base"]
    al = arms.pivot_table(index=["adapter", "arm"], columns="k", values="al")
    assert (al[6] > al[2]).all()


def test_an_arm_that_stopped_early_is_compared_on_its_own_prompts(loaded):
    requests = loaded.requests
    few = requests["adapter"].eq("german-r16-all-s40") & requests["prompt_index"].gt(140)
    cut = replace(loaded, requests=requests[~few])
    one = effect.effect_table(cut, LIMITS).query("adapter == 'german-r16-all-s40' and traffic == 'own'")
    assert set(one["n"]) == {13}
    other = effect.effect_table(cut, LIMITS).query("adapter != 'german-r16-all-s40'")
    whole = effect.effect_table(loaded, LIMITS).query("adapter != 'german-r16-all-s40'")
    pd.testing.assert_frame_equal(other.reset_index(drop=True), whole.reset_index(drop=True))


def test_an_adapter_without_its_base_arm_is_refused(loaded):
    requests = loaded.requests
    bare = replace(loaded, requests=requests[~((requests["arm"] == "base") & (requests["k"] == 6))])
    with pytest.raises(EvidenceError) as error:
        effect.effect_table(bare, LIMITS)
    assert error.value.code == "missing_base_control" and "k = 6" in str(error.value)


def test_records_of_two_designs_are_refused(loaded):
    name, record = next(iter(loaded.records.items()))
    config = record.config | {"design": record.config["design"] | {"num_speculative_tokens": 3}}
    mixed = replace(loaded, records=loaded.records | {name: record.model_copy(update={"config": config})})
    with pytest.raises(EvidenceError) as error:
        effect.effect_table(mixed, LIMITS)
    assert error.value.code == "k_mismatch"


def test_prompts_that_the_screen_uses_are_told(loaded):
    requests = loaded.requests
    moved = requests.assign(prompt_index=requests["prompt_index"] - requests["prompt_index"].min())
    sentence = effect.prompts_sentence(replace(loaded, requests=moved))
    assert "none of them" not in sentence and "are among those of params/phase2_screen.yaml" in sentence


def test_conditional_rates_by_hand():
    base = {"prompt_set": "german", "decoding": "t08", "k": 2, "output_tokens": 6, "finish_reason": "length"}
    rows = [
        base
        | {
            "arm": arm,
            "adapter": name,
            "prompt_index": i,
            "steps_accepted": np.array(steps, dtype=np.int8),
            "drafted": 2 * len(steps),
            "accepted_emitted": sum(steps),
            "rejections": sum(a < 2 for a in steps),
        }
        for arm, name, many in (
            ("base", "", [[2, 1], [1, 2]]),
            ("adapted", "one", [[0, 1, 1], [1, 0, 1]]),
        )
        for i, steps in enumerate(many)
    ]
    for row in rows:
        row["output_tokens"] = 1 + sum(row["steps_accepted"]) + len(row["steps_accepted"])
    table = depths.position_table(evidence.PhaseEvidence(SMOKE.stamp, {}, pd.DataFrame(rows)))
    found = table.set_index(["arm", "position"])
    assert found.loc[("base", 1), "rate"] == 1.0
    assert found.loc[("base", 2), "rate"] == 0.5
    assert found.loc[("adapted", 1), "rate"] == pytest.approx(4 / 6)
    assert found.loc[("adapted", 2), "rate"] == 0.0
    assert found.loc[("adapted", 2), "at_risk"] == 4
    assert "+" not in depths.position_sentence(table).split("positions")[0]


def test_adapters_are_told_in_words_that_stay_apart():
    pool = list(load_pool())
    told = [names.adapter_name(name) for name in pool]
    assert len(set(told)) == len(pool)
    assert names.adapter_name("sql-r16-mlp-s20of80") == "SQL, rank 16, MLP, 20 of 80 steps"
    assert names.adapter_name("word-prefix-r2-qv-s8-seed3") == "Word prefix, rank 2, q and v, 8 steps, seed 3"
    assert names.adapter_name("somebody/some-lora") == "somebody/some-lora"
    frame = pd.DataFrame({"adapter": ["c-r8-all-s4"], "domain": ["upper_case"], "moved": ["none"]})
    words = names.words(frame)
    assert words["upper_case"] == "Upper case" and words["t08"] == "T = 0.8" and words["none"] == "not told"
