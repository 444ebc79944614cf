"""The paper tier is declared whole, checked by the plan, and not run while parts of it are unsettled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from lora_spec.errors import LoraSpecError, ParamsError
from lora_spec.measure.design import load_design
from lora_spec.models import load_models
from lora_spec.pool import load_pool
from lora_spec.pool_paper import HubSlot, OwnSlot, load_paper_pool
from lora_spec.tier_plan import plan_tier, refuse_to_execute

ROOT = Path(__file__).resolve().parents[1]
DESIGNS = sorted(
    path.relative_to(ROOT / "params").as_posix() for path in (ROOT / "params/paper").glob("*.yaml")
)


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own whose parameters may be written."""
    shutil.copytree(ROOT / "params", tmp_path / "params")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setenv("LORA_SPEC_ROOT", str(tmp_path))
    return tmp_path / "params"


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) >= 1
    file.write_text(text.replace(old, new, 1))


def test_the_plan_is_consistent_and_says_that_nothing_was_run() -> None:
    plan = plan_tier("paper")
    assert plan.problems == [] and plan.evidence_class == "contract"
    roles = {screen.role: screen for screen in plan.screens}
    assert set(roles) == {"screen", "confirm", "block_drafter", "appendix"}
    assert roles["screen"].own >= 36 and roles["screen"].domains >= 12 and roles["screen"].families == 5
    assert all(screen.measure_gpu_h > 0 and screen.train_gpu_h > 0 for screen in plan.screens)
    pairs = {load_models().pair(screen.pair).evidence for screen in plan.screens}
    assert pairs == {"contract"}


def test_every_design_of_the_tier_belongs_to_a_pair() -> None:
    assert sorted(screen.design for screen in plan_tier("paper").screens) == DESIGNS
    assert {load_design(name).tier for name in DESIGNS} == {"paper"}


def test_own_recipes_are_complete_and_public_adapters_have_no_invented_revision() -> None:
    pool, frozen = load_paper_pool()
    assert frozen == {}
    own = [slot for slot in pool.slots if isinstance(slot, OwnSlot)]
    assert len({pool.recipe_sha256(slot.name) for slot in own}) == len(own)
    assert len({slot.seed for slot in own}) == len(own)
    for slot in pool.slots:
        if isinstance(slot, HubSlot):
            assert slot.repo or "PEFT" in slot.wanted.criteria, slot.name
    assert not {slot.name for slot in pool.slots} & set(load_pool())


def test_rank_and_modules_do_not_tell_the_strength() -> None:
    slots = [s for s in load_paper_pool()[0].of_pair("paper-screen") if isinstance(s, OwnSlot)]
    for steps in sorted({slot.steps for slot in slots}):
        same = [slot for slot in slots if slot.steps == steps]
        for field in ("rank", "modules"):
            counts = Counter(getattr(slot, field) for slot in same)
            assert len(counts) == 4 and max(counts.values()) - min(counts.values()) <= 1, (steps, field)


def test_execution_is_refused_with_all_that_is_missing(cli) -> None:
    missing = plan_tier("paper").unfrozen
    with pytest.raises(LoraSpecError) as refused:
        refuse_to_execute("paper")
    assert refused.value.code == "unfrozen"
    assert all(line in str(refused.value) for line in missing) and len(missing) > 20
    for command in (
        ("measure", "paper/screen.yaml"),
        ("score", "paper/confirm.yaml"),
        ("adapters", "--tier", "paper"),
    ):
        done = cli(*command, "--execute")
        assert done.returncode == 2 and missing[0] in done.stderr, command
        done = cli(*command)
        assert done.returncode == 0 and missing[0] in done.stdout, command


def test_the_command_prints_the_plan_as_text_and_as_json(cli) -> None:
    text = cli("plan")
    assert text.returncode == 0 and "contract" in text.stdout and "Unfrozen" in text.stdout
    made = json.loads(cli("plan", "--json").stdout)
    assert made["evidence_class"] == "contract" and made["problems"] == []
    assert {item["state"] for item in made["items"]} == {"unfrozen", "open"}
    assert cli("plan", "--tier", "colab").returncode == 0
    wrong = cli("plan", "--tier", "pocket")
    assert wrong.returncode == 2 and "pocket" in wrong.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (
            "paper/screen.yaml",
            "target: llama-3.1-8b-instruct",
            "target: qwen2.5-7b-instruct",
            "target qwen2.5",
        ),
        ("paper/screen.yaml", "  - llama-hub-sql\n", "", "llama-hub-sql on one side only"),
        ("paper/screen.yaml", "tier: paper", "tier: colab", "tier colab"),
        (
            "adapter_pool_paper.yaml",
            "domain: german, family: language",
            "domain: german, family: code",
            "family language",
        ),
        ("adapter_pool_paper.yaml", "domain: polish,", "domain: welsh,", "no corpus of domain welsh"),
        (
            "models.yaml",
            "method: dflash\n    evidence: contract",
            "method: dflash\n    evidence: measured",
            "claims class",
        ),
    ],
)
def test_contradictions_are_problems_of_the_plan(params, cli, file, old, new, says) -> None:
    change(params / file, old, new)
    assert any(says in problem for problem in plan_tier("paper").problems)
    assert cli("plan").returncode == 2
    with pytest.raises(ParamsError):
        refuse_to_execute("paper")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: llama-german-r32-qv-s150", "name: llama-german-r16-all-s50", "declared twice"),
        ("pair: paper-screen,\n     domain: c,", "pair: paper-nowhere,\n     domain: c,", "undeclared pair"),
        (
            "repo: vtriple/Llama-3.1-8B-yara",
            "repo: nvidia/llama-3.1-nemoguard-8b-content-safety",
            "fills two slots",
        ),
        ("repo: vtriple/Llama-3.1-8B-yara", "repo: no-owner", "repo"),
        ("rank: [4, 128]", "rank: [128, 4]", "wants a rank"),
        ("licence: null", "licence: null\n    revision: main", "revision"),
    ],
)
def test_a_damaged_pool_is_one_clear_error(params, cli, old, new, says) -> None:
    change(params / "adapter_pool_paper.yaml", old, new)
    done = cli("plan")
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_everything_settled_still_does_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_spec import tier_plan

    monkeypatch.setattr(tier_plan, "plan_tier", lambda tier: tier_plan.TierPlan(tier, []))
    with pytest.raises(LoraSpecError) as refused:
        refuse_to_execute("paper")
    assert refused.value.code == "no_runner"
