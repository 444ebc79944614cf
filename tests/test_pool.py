"""The adapter pool as declared: runs, controls, identities, and recipes that make no sense."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from lora_spec.errors import ParamsError
from lora_spec.params import validate
from lora_spec.paths import params_dir
from lora_spec.pool import Pool, load_pool_file, load_recorded_hashes, runs_of

POOL = load_pool_file()


def changed(name: str, **changes: object) -> Pool:
    """The pool with some values of one recipe replaced."""
    data = yaml.safe_load((params_dir() / "adapter_pool.yaml").read_text())
    (entry,) = [entry for entry in data["adapters"] if entry["name"] == name]
    entry |= changes
    return validate(Pool, data, where="params/adapter_pool.yaml")


def test_later_fields_leave_the_identity_of_older_recipes_alone() -> None:
    # Recorded before schedule_steps, layers and the patterns existed.
    older = "c-r16-mlp-s40", "sql-r64-attention-s24"
    recorded = load_recorded_hashes()
    for name in older:
        assert POOL.recipe_sha256(name) == recorded[name].recipe_sha256
        assert set(POOL.recipe_dict(name)) == {
            "alpha",
            "domain",
            "family",
            "learning_rate",
            "licence",
            "modules",
            "name",
            "rank",
            "rslora",
            "seed",
            "steps",
            "training",
        }
    assert POOL.recipe_dict("german-r32-all-s30of120")["schedule_steps"] == 120


def test_every_domain_can_be_left_out_and_families_stay_told_apart() -> None:
    domains = Counter(recipe.domain for recipe in POOL.adapters)
    assert min(domains.values()) >= 2
    families = {recipe.domain: recipe.family for recipe in POOL.adapters}
    assert min(Counter(families.values()).values()) >= 3


def test_checkpoints_share_a_run_and_nothing_else_does() -> None:
    runs = runs_of(POOL.adapters)
    pairs = [members for members in runs.values() if len(members) > 1]
    assert len(pairs) >= 3
    for members in pairs:
        assert [recipe.steps for recipe in members] == sorted({recipe.steps for recipe in members})
        assert members[-1].schedule_steps is None and members[-1].run == members[-1].name
        assert {recipe.seed for recipe in members} == {members[0].seed}
    # Seeds tell runs apart, so no two share a data order by accident.
    assert len({members[0].seed for members in runs.values()}) == len(runs)


def test_some_recipes_differ_by_the_seed_alone() -> None:
    same = Counter(str(recipe.model_dump(exclude={"name", "seed"})) for recipe in POOL.adapters)
    assert sum(count >= 3 for count in same.values()) >= 2


def test_there_are_controls_of_no_and_of_tiny_effect() -> None:
    assert [recipe.name for recipe in POOL.adapters if recipe.steps == 0] == ["html-r16-all-s0"]
    tiny = POOL.recipe("csv-r2-qv-s4")
    assert tiny.alpha / tiny.rank < 1 and tiny.learning_rate == min(r.learning_rate for r in POOL.adapters)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("german-r32-all-s30of120", {"schedule_steps": 20}, "steps must be from 1 to 19"),
        ("german-r32-all-s30of120", {"schedule_steps": 30}, "steps must be from 1 to 29"),
        ("german-r32-all-s30of120", {"steps": 0}, "steps must be from 1 to 119"),
        ("german-r32-all-s30of120", {"schedule_steps": 60}, "must contain -s30of60"),
        ("german-r32-all-s30of120", {"seed": 1}, "run german-r32-all-s120 differ in more than steps"),
        ("german-r32-all-s30of120", {"rank": 8}, "run german-r32-all-s120 differ in more than steps"),
        ("german-r8-all-s40-layer13", {"layers": []}, "layers"),
        ("german-r8-all-s40-layer13", {"layers": [-1]}, "layers"),
        ("german-r8-all-s40-layer13", {"layers": [3, 2]}, "layers must rise"),
        ("german-r8-all-s40-layer13", {"layers": [2, 2]}, "layers must rise"),
        ("json-r8-all-s40-ranks", {"rank_pattern": {"lm_head": 4}}, "'lm_head' matches none of down_proj"),
        ("html-r16-mlp-s40-alphas", {"alpha_pattern": {"q_proj": 4}}, "'q_proj' matches none of down_proj"),
        ("json-r8-all-s40-ranks", {"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj"),
        ("html-r16-all-s0", {"steps": -1}, "steps"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError) as caught:
        changed(name, **change)
    assert message in str(caught.value) and "\n" not in str(caught.value)
