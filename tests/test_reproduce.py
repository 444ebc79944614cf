"""The live rerun of a part of the screen: its choice and its verdicts; nothing is trained or served here."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from lora_spec.acceptance import label_table
from lora_spec.cli import build_app
from lora_spec.errors import EvidenceError, LoraSpecError
from lora_spec.features import FEATURES
from lora_spec.measure import reproduce
from lora_spec.measure.agreement import Report, Weights, compare_effects, compare_weights
from lora_spec.measure.collector import Collector
from lora_spec.measure.design import load_design
from lora_spec.measure.engine import Completion
from lora_spec.measure.rows import request_rows
from lora_spec.paths import cache_dir, examples_dir, results_dir
from lora_spec.pool import AdapterHashes, load_pool
from lora_spec.provenance import EvidenceClass, new_record, write_record
from lora_spec.substrate.adapters import trained_dir

NAMES = ["python-r16-all-s40", "german-r16-all-s40"]
DOMAINS = dict(zip(NAMES, ("python", "german"), strict=True))


def arm(adapter: str, domain: str, alpha: float, seed: int, prompts: Sequence[int]) -> pd.DataFrame:
    """Rows of 48 output tokens each, drafts accepted with probability ``alpha``."""
    rng = np.random.default_rng(seed)
    served = []
    for _ in prompts:
        steps = []
        while 1 + sum(steps) + len(steps) < 48:
            steps.append(int(np.argmin([*(rng.random(4) < alpha), False])))
        served.append(
            Completion(rng.integers(0, 99, 48).tolist(), "length", steps, [4] * len(steps), [], 0.0)
        )
    return request_rows(
        served,
        arm="adapted" if adapter else "base",
        adapter=adapter,
        prompt_set=domain,
        prompt_indices=prompts,
        decoding="t08",
        k=4,
    )


def screen(effects: dict[str, float], *, seed: int = 0, prompts: Sequence[int] = range(60)) -> pd.DataFrame:
    """Requests of some adapters and their base arms at α = 0.6."""
    frames = []
    for number, (name, effect) in enumerate(effects.items()):
        frames.append(arm("", DOMAINS[name], 0.6, 100 * seed + 2 * number, prompts))
        frames.append(arm(name, DOMAINS[name], 0.6 + effect, 100 * seed + 2 * number + 1, prompts))
    return pd.concat(frames, ignore_index=True)


def hashes(weights: str, flags: str = "avx2", recipe: str = "0") -> AdapterHashes:
    return AdapterHashes(
        recipe_sha256=recipe * 64, weights_sha256=weights * 64, content_hash=weights * 64, cpu_flags=flags
    )


def test_adapters_are_chosen_by_seed_and_family_whatever_the_order_they_come_in() -> None:
    recipes = load_pool()
    measured = [name for name, recipe in recipes.items() if recipe.steps > 0]
    chosen = reproduce.choose(recipes, measured, 5, seed=1)
    assert chosen == reproduce.choose(recipes, measured[::-1], 5, seed=1)
    assert chosen[:3] == reproduce.choose(recipes, measured, 3, seed=1)
    families = {recipe.family for recipe in recipes.values()}
    assert {recipes[name].family for name in chosen} == families and len(families) == 5
    assert any(reproduce.choose(recipes, measured, 3, seed=s) != chosen[:3] for s in range(2, 6))


def test_adapters_without_a_training_step_or_a_measurement_are_not_chosen() -> None:
    recipes = load_pool()
    untrained = [name for name, recipe in recipes.items() if recipe.steps == 0]
    assert reproduce.choose(recipes, [*untrained, *NAMES], 2, seed=0) in (NAMES, NAMES[::-1])
    with pytest.raises(LoraSpecError, match="3 adapters asked for, the committed evidence holds 2"):
        reproduce.choose(recipes, [*untrained, *NAMES], 3, seed=0)


def test_the_reduced_design_serves_the_committed_requests_again() -> None:
    full = load_design("phase2_screen.yaml")
    params = reproduce.load_reproduce_params()
    assert params.design == "phase2_screen.yaml"
    reduced = reproduce.reduced_design(full, NAMES, params)
    assert reduced.indices("python", "t08") == full.indices("python", "t08")[: params.own_prompts]
    assert params.own_prompts % full.engine.max_num_seqs == 0, "whole batches, as the committed ones began"
    assert reduced.requests("general") == 0
    for field in ("seed", "engine", "max_tokens", "target", "drafter", "num_speculative_tokens", "own"):
        assert getattr(reduced, field) == getattr(full, field)
    assert reduced.directory() != full.directory()


def test_the_same_run_again_agrees_exactly() -> None:
    committed = screen({NAMES[0]: -0.1, NAMES[1]: 0.02})
    rows = compare_effects(committed, committed.sample(frac=1.0, random_state=0), NAMES, z=3.0)
    assert rows["agrees"].all()
    assert (rows["difference"].abs() < 1e-12).all()
    assert (rows[["same_base", "same_adapted"]] == 1.0).all(axis=None)


def test_another_draw_of_the_same_effect_agrees_and_a_planted_shift_does_not() -> None:
    committed = screen({NAMES[0]: -0.1, NAMES[1]: -0.1})
    live = screen({NAMES[0]: -0.1, NAMES[1]: 0.1}, seed=1)
    rows = compare_effects(committed, live, NAMES, z=3.0).set_index("adapter")
    assert rows["agrees"].to_dict() == {NAMES[0]: True, NAMES[1]: False}
    assert (rows["same_adapted"] < 0.1).all()
    errors = [label_table(t).set_index("adapter")["delta_alpha_se"] for t in (committed, live)]
    for name in NAMES:
        assert rows.loc[name, "allowed"] == pytest.approx(3.0 * math.hypot(*(e[name] for e in errors)))


def test_fewer_prompts_are_compared_with_themselves() -> None:
    committed = screen({NAMES[0]: -0.1})
    live = committed[committed["prompt_index"] < 20]
    row = compare_effects(committed, live, NAMES[:1], z=3.0).iloc[0]
    assert row["difference"] == 0 and row["committed_se"] == row["live_se"]
    assert (row["same_base"], row["same_adapted"]) == (1.0, 1.0)


def test_changed_outputs_are_counted() -> None:
    committed = screen({NAMES[0]: -0.1})
    live = committed.copy()
    adapted = live.index[live["arm"] == "adapted"]
    live.loc[adapted[:15], "output_sha256"] = "other"
    row = compare_effects(committed, live, NAMES[:1], z=3.0).iloc[0]
    assert (row["same_base"], row["same_adapted"]) == (1.0, 0.75)


def test_evidence_on_other_prompts_is_not_compared() -> None:
    with pytest.raises(EvidenceError) as caught:
        compare_effects(
            screen({NAMES[0]: 0.0}), screen({NAMES[0]: 0.0}, prompts=range(30, 90)), NAMES[:1], z=3.0
        )
    assert caught.value.code == "other_prompts"
    with pytest.raises(EvidenceError, match="no live request"):
        compare_effects(screen(dict.fromkeys(NAMES, 0.0)), screen({NAMES[0]: 0.0}), NAMES, z=3.0)


def test_weights_agree_by_hash_or_on_another_cpu_by_features() -> None:
    before = dict.fromkeys(FEATURES, 2.0)
    near, far = before | {"fro_all_all": 2.08}, before | {"fro_all_all": 2.2}

    def agree(found: AdapterHashes, now: dict | None, recorded: AdapterHashes | None = hashes("a")) -> bool:
        return compare_weights(recorded, found, now and (before, now), tolerance=0.05).agree

    assert agree(hashes("a"), far)
    assert not agree(hashes("b"), before), "other weights on an equal CPU"
    assert agree(hashes("b", flags="neon"), near)
    assert not agree(hashes("b", flags="neon"), far)
    assert not agree(hashes("b", flags="neon"), None)
    assert not agree(hashes("a", recipe="1"), before), "hash of another recipe"
    assert not agree(hashes("a"), before, recorded=None)


@pytest.mark.parametrize("planted", [None, "effect", "weights"])
def test_the_command_fails_where_something_does_not_reproduce(
    planted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = screen(dict.fromkeys(NAMES, -0.1))
    live = screen({NAMES[0]: -0.1, NAMES[1]: 0.2 if planted == "effect" else -0.1}, seed=1)
    weights = {name: Weights("identical", agree=True) for name in NAMES}
    if planted == "weights":
        weights[NAMES[1]] = Weights("differ on an equal CPU", agree=False)
    params = reproduce.load_reproduce_params()
    design = reproduce.reduced_design(load_design(params.design), NAMES, params)
    plan = reproduce.Plan(params, design, committed, {}, Path("unused"))
    monkeypatch.setattr(reproduce, "plan_reproduction", lambda count: plan)
    effects = compare_effects(committed, live, NAMES, params.z)
    monkeypatch.setattr(reproduce, "run_reproduction", lambda plan, workers: Report(effects, weights))
    done = CliRunner().invoke(build_app(), ["reproduce", "--subset", "2", "--execute"])
    assert done.exit_code == (1 if planted else 0), done.output
    last = done.output.strip().splitlines()[-1]
    assert last == (f"NOT reproduced: {NAMES[1]}." if planted else "2 of 2 adapters reproduce.")


def test_without_execute_only_the_choice_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    params = reproduce.load_reproduce_params()
    design = reproduce.reduced_design(load_design(params.design), NAMES, params)
    plan = reproduce.Plan(params, design, pd.DataFrame(), {}, Path("unused"))
    monkeypatch.setattr(reproduce, "plan_reproduction", lambda count: plan)
    monkeypatch.setattr(reproduce, "run_reproduction", lambda *_, **__: pytest.fail("it ran"))
    done = CliRunner().invoke(build_app(), ["reproduce"])
    assert done.exit_code == 0 and all(name in done.output for name in NAMES)


def test_a_rerun_leaves_cache_and_evidence_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    before = cache_dir(), results_dir()
    (tmp_path / "cache" / "models").mkdir(parents=True)
    with pytest.raises(KeyError), reproduce.apart(tmp_path / "rerun"):
        assert cache_dir() == tmp_path / "rerun" / "cache" and results_dir() == tmp_path / "rerun" / "results"
        assert (cache_dir() / "models").resolve() == tmp_path / "cache" / "models"
        raise KeyError
    assert (cache_dir(), results_dir()) == before
    with reproduce.apart(tmp_path / "rerun"):
        pass


def test_a_rerun_trains_and_measures_apart_and_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a rerun but the training and the engine, which stand-ins replace."""
    name = "german-r8-qv-s80"
    monkeypatch.setitem(DOMAINS, name, "german")
    committed = screen({name: -0.1})
    trained: list[list[str]] = []

    def train(names: list[str], workers: int) -> None:
        trained.append(list(names))
        shutil.copytree(examples_dir() / name, trained_dir(name), dirs_exist_ok=True)

    def execute(self: Collector, *, workers: int, replace_stale: bool) -> None:
        assert self.design.adapters == [name] and "reproduce" in self.directory.parts
        for unit, rows in (
            ("base--german", committed["arm"] == "base"),
            (name, committed["arm"] == "adapted"),
        ):
            record = new_record(
                experiment="test",
                tier="pocket",
                phase="phase2",
                evidence_class=EvidenceClass.MEASURED,
                config={},
                seed=0,
                revisions={},
            )
            write_record(self.directory / f"{unit}.json", record, {"requests": committed[rows]})

    monkeypatch.setattr("lora_spec.substrate.adapters.train_adapters", train)
    monkeypatch.setattr(Collector, "execute", execute)
    params = reproduce.load_reproduce_params()
    design = reproduce.reduced_design(load_design(params.design), [name], params)
    plan = reproduce.Plan(params, design, committed, {}, tmp_path / "rerun")
    report = reproduce.run_reproduction(plan)
    assert report.reproduced == [name] and report.weights[name].says == "identical"
    assert trained == [[name]]
    weights = tmp_path / "rerun" / "cache" / "adapters" / name / "adapter_model.safetensors"
    assert weights.is_file()
    assert load_design(tmp_path / "rerun" / "design.yaml") == design
