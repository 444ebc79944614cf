"""Adapter training: recipes, data order, determinism, what is written, and what counts as done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import make_tiny_llama

from lora_spec.errors import CheckpointError, MissingTierError, ParamsError
from lora_spec.files import sha256_file
from lora_spec.models import load_models
from lora_spec.params import validate
from lora_spec.paths import examples_dir, params_dir
from lora_spec.pool import MODULES, Pool, Recipe, Training, load_pool, load_pool_file, load_recorded_hashes
from lora_spec.substrate import adapters, train
from lora_spec.substrate.corpora import load_corpora
from lora_spec.substrate.extractors import Document

TEXTS = [f"line {number} of a made-up text that repeats itself, {number * 7919}" for number in range(60)]
"""Documents of about 50 byte tokens each."""


def recipe(**changes: object) -> Recipe:
    values = {
        "name": "tiny-r2-all-s3",
        "domain": "german",
        "family": "language",
        "modules": "all",
        "rank": 2,
        "alpha": 4,
        "learning_rate": 0.01,
        "steps": 3,
        "seed": 5,
        "licence": "Apache-2.0",
    }
    return Recipe(**(values | changes))


def training(**changes: object) -> Training:
    values = load_pool_file().training.model_dump() | {"block_tokens": 32}
    return Training(**(values | changes))


# What is declared.


def test_pool_covers_domains_families_and_ranks() -> None:
    pool = load_pool()
    assert len(pool) >= 64
    assert len({r.domain for r in pool.values()}) >= 20
    assert {r.family for r in pool.values()} == {"language", "code", "structured", "register", "controlled"}
    ranks = {r.rank for r in pool.values()}
    assert (min(ranks), max(ranks)) == (2, 64)
    assert {r.modules for r in pool.values()} == set(MODULES)
    assert any(r.rslora for r in pool.values())


def test_pool_agrees_with_the_corpora_and_the_base() -> None:
    pool, domains = load_pool_file(), load_corpora().domains
    for r in pool.adapters:
        assert domains[r.domain].family == r.family
        steps = f"s{r.steps}" if r.schedule_steps is None else f"s{r.steps}of{r.schedule_steps}"
        name = f"{r.domain.replace('_', '-')}-r{r.rank}-{r.modules}-{steps}"
        assert r.name == name or r.name.startswith(f"{name}-")
    assert load_models().model(pool.training.base).status == "frozen"


def test_recorded_hashes_belong_to_declared_recipes() -> None:
    pool = load_pool_file()
    for name, hashes in load_recorded_hashes().items():
        assert hashes.recipe_sha256 == pool.recipe_sha256(name), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 1}, "unknown parameter adapters.0.learning_rat"),
        ({"rank": 0}, "adapters.0.rank"),
        ({"rank": "eight"}, "adapters.0.rank"),
        ({"modules": "everything"}, "adapters.0.modules"),
        ({"name": "../up"}, "adapters.0.name"),
        ({"domain": "a/b"}, "adapters.0.domain"),
        ({"learning_rate": float("nan")}, "adapters.0.learning_rate"),
        ({"name": "python-r16-all-s40"}, "declared twice"),
        ({"family": "language"}, "two families"),
    ],
)
def test_damaged_pool_is_one_clear_error(change: dict[str, object], message: str) -> None:
    data = yaml.safe_load((params_dir() / "adapter_pool.yaml").read_text())
    data["adapters"][0] |= change
    with pytest.raises(ParamsError) as caught:
        validate(Pool, data, where="params/adapter_pool.yaml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_adapter_is_one_clear_error(cli) -> None:
    done = cli("adapters", "--only", "nope")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "lora-spec: error: unknown adapter 'nope' (params/adapter_pool.yaml). known: "
    )
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_every_value_of_a_recipe_changes_its_identity() -> None:
    pool = load_pool_file()
    first = pool.adapters[0]
    changes = {
        "rank": 16,
        "alpha": 8,
        "seed": 7,
        "steps": 13,
        "learning_rate": 0.1,
        "rslora": True,
        "modules": "mlp",
        "layers": (3,),
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 2},
    }
    hashes = {pool.recipe_sha256(first.name)}
    for key, value in changes.items():
        changed = first.model_copy(update={key: value})
        hashes.add(Pool(training=pool.training, adapters=(changed,)).recipe_sha256(first.name))
    assert len(hashes) == 1 + len(changes)


# Data order and schedule.


@given(st.integers(1, 20), st.integers(0, 70), st.integers(0, 2**31))
def test_block_order_is_whole_passes(blocks: int, wanted: int, seed: int) -> None:
    order = list(train.block_order(blocks, wanted, seed))
    assert len(order) == wanted
    assert order == list(train.block_order(blocks, wanted, seed))
    for start in range(0, wanted - blocks + 1, blocks):
        assert sorted(order[start : start + blocks]) == list(range(blocks))
    assert len(set(order[-(wanted % blocks) :])) == wanted % blocks or wanted % blocks == 0


def test_a_corpus_shorter_than_a_block_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="shorter than one training block"):
        list(train.block_order(0, 4, 1))


@given(st.integers(1, 200), st.floats(0, 1))
def test_learning_rate_rises_then_falls_and_is_never_zero(steps: int, warmup: float) -> None:
    factors = [train.learning_rate_factor(step, steps, warmup) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert max(factors) == 1


# What is on disk.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_plan_trains_nothing(cache: Path) -> None:
    states = adapters.plan_adapters()
    assert [state.recipe.name for state in states] == list(load_pool())
    assert all(state.problem == "not trained" for state in states)
    # A checkpoint costs nothing beside the end of its run, and what it takes to get there alone.
    notes = {state.recipe.name: state.note for state in states}
    for state in states:
        assert (state.cpu_seconds == 0) == (state.recipe.schedule_steps is not None), state.recipe.name
    (alone,) = adapters.plan_adapters(["german-r32-all-s30of120"])
    assert alone.note == notes["german-r32-all-s30of120"] == "checkpoint of german-r32-all-s120"
    assert alone.cpu_seconds > 0
    assert notes["html-r16-all-s0"] == "control: no update" and notes["german-r8-qv-s80"] == ""
    assert notes["python-r8-all-s32-seed212"] == "one of 3 seeds"
    assert not cache.exists()


def test_plan_shows_whole_names_where_there_is_no_terminal(cli) -> None:
    done = cli("adapters")
    assert done.returncode == 0
    for name in load_pool():
        assert f" {name} " in done.stdout


def test_the_queue_trains_each_run_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = []
    monkeypatch.setattr(adapters, "run_queue", lambda given, **_: units.extend(given))
    for name in {r.domain for r in load_pool().values()}:
        adapters.corpus_path(name).parent.mkdir(parents=True)
        adapters.corpus_path(name).write_text("")
    adapters.train_adapters()
    trained = [name for unit in units for name in unit.argv[3:]]
    assert sorted(trained) == sorted(load_pool())
    by_name = {unit.name: unit.argv[3:] for unit in units}
    assert by_name["c-r32-all-s100"] == ["c-r32-all-s25of100", "c-r32-all-s100"]
    assert not any(unit.is_done() for unit in units)


def test_missing_corpus_is_named_before_anything_runs(cache: Path) -> None:
    with pytest.raises(MissingTierError, match="corpora --execute --only german"):
        adapters.train_adapters(["german-r16-all-s40"])
    assert not cache.exists()


def test_what_counts_as_done(cache: Path) -> None:
    pool = load_pool_file()
    name = pool.adapters[0].name
    directory = adapters.trained_dir(name)

    def problem() -> str | None:
        return adapters.find_adapter_problem(directory, name, pool)

    directory.mkdir(parents=True)
    assert problem() == "no readable lora_spec.json"
    side = train.side_values(pool, pool.adapters[0])
    side |= {"weights_sha256": "0" * 64, "corpus_sha256": "0" * 64, "content_hash": "0" * 64}
    write = (directory / "lora_spec.json").write_text
    write(json.dumps(side | {"recipe_sha256": "0" * 64}))
    assert problem() == "trained from another recipe"
    write(json.dumps(side | {"base": {"name": "x", "weights_sha256": "0" * 64}}))
    assert problem() == "trained on another base"
    write(json.dumps(side))
    assert problem() == "incomplete"
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"x")
    assert problem() == "its weights were changed"
    side["weights_sha256"] = sha256_file(directory / "adapter_model.safetensors")
    write(json.dumps(side))
    assert problem() is None
    corpus = adapters.corpus_path(pool.adapters[0].domain)
    corpus.parent.mkdir(parents=True)
    corpus.write_text("another corpus")
    assert problem() == "trained on another corpus"


def test_examples_are_done_adapters_of_the_pool() -> None:
    pool = load_pool_file()
    for directory in sorted(examples_dir().iterdir()):
        assert adapters.read_side_file(directory)["recipe_sha256"] == pool.recipe_sha256(directory.name)
        assert sum(path.stat().st_size for path in directory.iterdir()) < 2_000_000
        recorded = load_recorded_hashes()[directory.name]
        assert sha256_file(directory / "adapter_model.safetensors") == recorded.weights_sha256
        assert {path.name for path in directory.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "lora_spec.json",
        }


# Training, on a model of a few kilobytes.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny")


def run(base: Path, **changes: object) -> train.Trained:
    return train.train(recipe(**changes), training(), base, TEXTS, base_name="org/tiny")


@pytest.mark.torch
def test_blocks_carry_the_end_of_each_document(base: Path) -> None:
    blocks = train.pack_blocks(base / "tokenizer.json", ["ab", "c", "dddd"], 257, 3)
    assert [len(block) for block in blocks] == [3, 3, 3]
    assert blocks[0][2] == blocks[1][1] == 257


@pytest.mark.torch
def test_training_is_deterministic_and_the_seed_matters(base: Path, tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate([5, 5, 6]):
        out = tmp_path / str(number)
        out.mkdir()
        train.save(run(base, seed=seed), out, {})
        digests.append(sha256_file(out / "adapter_model.safetensors"))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.torch
def test_same_weights_in_another_process(base: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "import test_train as t\nfrom lora_spec.substrate.train import save\n"
        "out = Path(sys.argv[2]); out.mkdir(); save(t.run(Path(sys.argv[1])), out, {})"
    )
    here = tmp_path / "here"
    here.mkdir()
    train.save(run(base), here, {})
    there = tmp_path / "there"
    subprocess.run([sys.executable, "-c", code, str(base), str(there)], cwd=Path(__file__).parent, check=True)
    assert (there / "adapter_model.safetensors").read_bytes() == (
        here / "adapter_model.safetensors"
    ).read_bytes()
    assert (there / "adapter_config.json").read_bytes() == (here / "adapter_config.json").read_bytes()


@pytest.mark.torch
def test_what_is_written(base: Path, tmp_path: Path) -> None:
    import torch

    trained = run(base, modules="qv", rslora=True)
    train.save(trained, tmp_path, {"name": "x"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "lora_spec.json",
    ]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (
        config["use_rslora"] and config["r"] == 2 and config["lora_alpha"] == 4 and config["inference_mode"]
    )
    assert str(base) not in "".join(path.read_text(errors="ignore") for path in tmp_path.iterdir())
    assert len(trained.tensors) == 4 * 2 * 2
    assert all(tensor.dtype == torch.float32 for tensor in trained.tensors.values())
    assert any(tensor.abs().max() > 0 for name, tensor in trained.tensors.items() if "lora_B" in name)
    side = json.loads((tmp_path / "lora_spec.json").read_text())
    assert side["weights_sha256"] == sha256_file(tmp_path / "adapter_model.safetensors")
    assert len(trained.losses) == 3


@pytest.mark.torch
def test_written_adapter_is_what_peft_reads(base: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained = run(base, learning_rate=0.05, steps=8)
    train.save(trained, tmp_path, {})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids).logits
        after = PeftModel.from_pretrained(model, tmp_path)(ids).logits
    assert (before - after).abs().max() > 1e-3


def stops_of(base: Path, stops: list[int], **changes: object) -> list[train.Trained]:
    return list(train.train_run(recipe(**changes), stops, training(), base, TEXTS, base_name="org/tiny"))


@pytest.mark.torch
def test_a_checkpoint_is_the_state_of_its_run_at_that_step(base: Path) -> None:
    import torch

    middle, end = stops_of(base, [4, 8], name="tiny-r2-all-s8", steps=8)
    alone = run(base, name="tiny-r2-all-s4of8", steps=4, schedule_steps=8)
    short = run(base, steps=4)
    assert alone.losses == middle.losses == end.losses[:4]
    assert all(torch.equal(alone.tensors[key], tensor) for key, tensor in middle.tensors.items())
    assert any(not torch.equal(end.tensors[key], tensor) for key, tensor in middle.tensors.items())
    # A run of four steps has another schedule, so it is no checkpoint.
    assert any(not torch.equal(short.tensors[key], tensor) for key, tensor in middle.tensors.items())


@pytest.mark.torch
def test_a_run_is_trained_once_and_a_lost_checkpoint_comes_back_equal(
    base: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = recipe(name="tiny-r2-all-s4", steps=4)
    middle = recipe(name="tiny-r2-all-s2of4", steps=2, schedule_steps=4)
    pool = Pool(training=training(), adapters=(end, middle, recipe(name="tiny-r2-all-s3")))
    corpus = adapters.corpus_path("german")
    corpus.parent.mkdir(parents=True)
    corpus.write_text("made up")
    monkeypatch.setattr(train, "load_pool_file", lambda: pool)
    monkeypatch.setattr(train, "require_model", lambda name: base)
    monkeypatch.setattr(train, "read_documents", lambda *_: [Document(text, text) for text in TEXTS])
    names = [end.name, middle.name]
    with pytest.raises(ParamsError, match="adapters of one run"):
        train.train_named([*names, "tiny-r2-all-s3"])
    said: list[str] = []
    train.train_named(names, said.append)
    assert sum(line.startswith("step 1/") for line in said) == 1
    assert all(
        adapters.find_adapter_problem(adapters.trained_dir(name), name, pool) is None for name in names
    )
    weights = [adapters.trained_dir(name) / "adapter_model.safetensors" for name in names]
    before = [path.read_bytes() for path in weights]
    weights[1].write_bytes(b"damaged")
    made = weights[0].stat().st_mtime_ns
    said.clear()
    train.train_named(names, said.append)
    assert [path.read_bytes() for path in weights] == before
    assert weights[0].stat().st_mtime_ns == made and "step 2/2" in " ".join(said)
    said.clear()
    train.train_named(names, said.append)
    assert said == [f"{middle.name}: done before", f"{end.name}: done before"]


@pytest.mark.torch
def test_no_steps_is_exactly_no_update(base: Path, tmp_path: Path) -> None:
    trained = run(base, steps=0)
    assert trained.losses == [] and trained.final_loss is None
    for name, tensor in trained.tensors.items():
        assert (tensor.abs().max() == 0) == ("lora_B" in name), name
    train.save(trained, tmp_path, {})
    side = json.loads((tmp_path / "lora_spec.json").read_text())
    assert side["first_loss"] is None and side["final_loss"] is None and len(side["content_hash"]) == 64


@pytest.mark.torch
def test_patterns_give_ranks_and_scales_as_peft_resolves_them(base: Path, tmp_path: Path) -> None:
    from lora_spec.checkpoint import read_adapter

    patterns = {"rank_pattern": {"down_proj": 3, "q_proj": 1}, "alpha_pattern": {"q_proj": 7}}
    train.save(run(base, **patterns), tmp_path, {})
    for module in read_adapter(tmp_path).modules:
        kind = module.name.split(".")[-1]
        rank = {"down_proj": 3, "q_proj": 1}.get(kind, 2)
        assert module.rank == rank, module.name
        assert module.scale == pytest.approx({"q_proj": 7}.get(kind, 4) / rank), module.name
        assert module.engine_scale == module.scale


@pytest.mark.torch
def test_layers_restrict_what_is_adapted(base: Path) -> None:
    names = list(run(base, layers=(1, 3)).tensors)
    assert {name.split(".layers.")[1].split(".")[0] for name in names} == {"1", "3"}
    assert len(names) == 2 * 7 * 2
    with pytest.raises(ParamsError, match="layer 4 does not exist: the base has 4"):
        run(base, layers=(1, 4))


@pytest.mark.torch
def test_training_lowers_the_loss(base: Path) -> None:
    losses = run(base, learning_rate=0.05, steps=60).losses
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.torch
def test_diverging_training_is_an_error(base: Path) -> None:
    settings = training().model_copy(update={"max_grad_norm": float("inf")})
    wild = recipe().model_copy(update={"learning_rate": 1e30, "steps": 6})
    with pytest.raises(CheckpointError, match="loss is not finite at step"):
        train.train(wild, settings, base, TEXTS, base_name="org/tiny")
