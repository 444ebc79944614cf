"""`lora-spec freeze`: what the hub says is locked whole or not at all, and merged into what is declared."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_spec import hub as hub_module
from lora_spec.errors import NetworkError, ParamsError
from lora_spec.frozen import LOCK_FILE, load_lock
from lora_spec.hub import HubRepo
from lora_spec.models import HubSource, load_models
from lora_spec.pool_paper import load_paper_pool
from lora_spec.revisions import freeze, hub_items
from lora_spec.tier_plan import plan_tier

ROOT = Path(__file__).resolve().parents[1]
LICENCES = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3.1",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3.2",
    "nvidia/llama-3.1-nemoguard-8b-content-safety": "other",
}
NAMED = {
    "llama-hub-content-safety": (16, "Meta-Llama-3.1-8B-Instruct"),
    "llama-hub-yara": (32, "Llama-3.1-8B-Instruct"),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own whose parameters may be written."""
    shutil.copytree(ROOT / "params", tmp_path / "params")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setenv("LORA_SPEC_ROOT", str(tmp_path))
    return tmp_path / "params"


def commit(repo: str) -> str:
    return hashlib.sha1(repo.encode()).hexdigest()


class FakeHub:
    """A hub on which everything that is declared exists as declared."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.changed: dict[str, dict[str, Any]] = {}
        self.offline_after: int | None = None
        self.licences = dict(LICENCES)

    def repo(self, name: str, revision: str | None) -> HubRepo:
        if self.offline_after is not None and len(self.asked) >= self.offline_after:
            raise NetworkError("the hub cannot be asked: ConnectError", where=name)
        self.asked.append(name)
        files = {
            "model.safetensors": (1000, hashlib.sha256(name.encode()).hexdigest()),
            "original/model.safetensors": (5000, "0" * 64),
            "README.md": (10, None),
        }
        return HubRepo(commit(name), self.licences.get(name, "apache-2.0"), files)

    def read_json(self, name: str, file: str, revision: str) -> dict[str, Any]:
        assert revision == commit(name), "read at the commit that is locked"
        found = self._config(name) if file == "config.json" else self._adapter_config(name)
        return found | self.changed.get(name, {})

    def _config(self, name: str) -> dict[str, Any]:
        for entry in load_models().models.values():
            if isinstance(entry.source, HubSource) and entry.source.repo == name and entry.geometry:
                return entry.geometry.model_dump() | {"rope_theta": 1.0}
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "vocab_size": 99}
        return shape | {"num_attention_heads": 4, "num_key_value_heads": 2}

    def _adapter_config(self, name: str) -> dict[str, Any]:
        slot = next(s for s in load_paper_pool()[0].slots if getattr(s, "repo", None) == name)
        rank, base = NAMED[slot.name]
        return {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": ALL,
            "base_model_name_or_path": f"meta-llama/{base}",
            "modules_to_save": None,
        }


@pytest.fixture
def fake() -> FakeHub:
    return FakeHub()


def test_nothing_committed_claims_a_revision_that_no_program_looked_up() -> None:
    for item in hub_items():
        assert item.state in ("unfrozen", "open"), item


def test_what_is_looked_up_is_locked_and_merged(params: Path, fake: FakeHub) -> None:
    declared = {name: (params / name).read_bytes() for name in ("models.yaml", "adapter_pool_paper.yaml")}
    report = freeze(fake)
    # the licence of one adapter says nothing, and nobody has read it
    assert list(report.left) == ["llama-hub-content-safety"] and "licence" in report.left.popitem()[1]
    assert {name: (params / name).read_bytes() for name in declared} == declared, "comments and all"
    models = load_models()
    llama = models.model("llama-3.1-8b-instruct")
    assert llama.status == "frozen" and llama.source.revision == commit(llama.source.repo)
    assert list(llama.files) == ["model.safetensors"] and llama.bytes == 1000
    assert llama.licence == "Llama-3.1-Community", "the declared licence stays"
    drafter = models.model("gpt-oss-120b-dflash")
    assert drafter.licence == "apache-2.0" and drafter.geometry.num_hidden_layers == 5
    assert drafter.geometry.head_dim == 16
    assert load_paper_pool()[1]["llama-hub-yara"].config["r"] == 32
    left = [item.name for item in hub_items() if item.state == "unfrozen"]
    assert left == ["llama-hub-content-safety"]
    assert not any("not looked up" in line and "yara" in line for line in plan_tier("paper").unfrozen)


def test_what_is_frozen_stays_whatever_the_hub_has_now(params: Path, fake: FakeHub) -> None:
    freeze(fake, tier="colab")
    before = (params / LOCK_FILE).read_bytes()
    assert set(load_lock().models) == {"qwen2.5-1.5b-instruct", "qwen2.5-0.5b-instruct"}
    fake.asked.clear()
    assert freeze(fake, tier="colab").frozen == [] and fake.asked == []
    assert (params / LOCK_FILE).read_bytes() == before
    freeze(fake)
    assert "Qwen/Qwen2.5-1.5B-Instruct" not in fake.asked
    assert set(load_lock().models) > {"qwen2.5-1.5b-instruct", "llama-3.1-8b-instruct"}


@pytest.mark.parametrize("after", [0, 3])
def test_without_the_network_nothing_is_written(params: Path, fake: FakeHub, after: int) -> None:
    fake.offline_after = after
    with pytest.raises(NetworkError, match="ConnectError"):
        freeze(fake)
    assert not (params / LOCK_FILE).exists() and not list(params.glob(".*"))


@pytest.mark.parametrize(
    ("repo", "change", "says"),
    [
        ("vtriple/Llama-3.1-8B-yara", {"r": 64}, "rank 64"),
        ("vtriple/Llama-3.1-8B-yara", {"target_modules": ["q_proj"]}, "modules q_proj"),
        ("vtriple/Llama-3.1-8B-yara", {"use_dora": True}, "DoRA"),
        ("vtriple/Llama-3.1-8B-yara", {"peft_type": "LOHA"}, "LOHA"),
        ("vtriple/Llama-3.1-8B-yara", {"modules_to_save": ["lm_head"]}, "lm_head"),
        ("vtriple/Llama-3.1-8B-yara", {"base_model_name_or_path": "other/base"}, "other/base"),
        ("Qwen/Qwen2.5-7B-Instruct", {"hidden_size": 3585}, "hidden_size 3584"),
    ],
)
def test_what_is_not_as_declared_stays_unfrozen_and_is_named(params, fake, repo, change, says) -> None:
    fake.changed[repo] = change
    report = freeze(fake)
    name = next(item.name for item in hub_items() if item.repo == repo)
    assert says in report.left[name]
    assert name not in load_lock().models and name not in load_lock().adapters
    assert len(report.frozen) > 5, "the others are not held up"


def test_another_licence_than_declared_is_named(params: Path, fake: FakeHub) -> None:
    fake.licences["openai/gpt-oss-120b"] = "cc-by-nc-4.0"
    assert "cc-by-nc-4.0" in freeze(fake).left["gpt-oss-120b"]


def test_a_lock_of_another_repository_is_refused(params: Path, fake: FakeHub) -> None:
    freeze(fake)
    text = (params / "models.yaml").read_text()
    (params / "models.yaml").write_text(text.replace("repo: openai/gpt-oss-120b", "repo: openai/gpt-oss-20b"))
    with pytest.raises(ParamsError, match="frozen gpt-oss-120b is openai/gpt-oss-120b"):
        load_models()


def test_a_damaged_lock_is_one_clear_error(params: Path, cli) -> None:
    (params / LOCK_FILE).write_text("schema: lora-spec-frozen/1\nmodels: {x: {repo: a/b}}\n")
    done = cli("freeze")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and LOCK_FILE in done.stderr


def test_the_command_plans_unless_told_to_execute(params: Path, cli, fake, monkeypatch) -> None:
    monkeypatch.setattr(hub_module, "Hub", lambda: pytest.fail("the hub was asked"))
    done = cli("freeze")
    assert done.returncode == 0 and "to look up" in done.stdout and not (params / LOCK_FILE).exists()
    monkeypatch.setattr(hub_module, "Hub", lambda: fake)
    done = cli("freeze", "--execute", "--tier", "colab")
    assert done.returncode == 0 and "2 frozen now" in done.stdout and (params / LOCK_FILE).is_file()
    done = cli("freeze", "--execute")
    assert done.returncode == 2 and "llama-hub-content-safety" in done.stderr
    assert cli("freeze", "--tier", "pocket").returncode == 2


def test_every_failure_of_the_client_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class GatedRepoError(Exception):
        pass

    assert "accept its licence" in str(hub_module._refused("a/b", GatedRepoError("x\ny")))
    offline = hub_module._refused("a/b", ConnectionError("no route"))
    assert offline.code == NetworkError.default_code and "\n" not in str(offline)
