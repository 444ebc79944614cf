"""The DFlash drafter without torch: parameters, which prompts it learns from, what counts as done."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.errors import EvidenceError, LoraSpecError, MissingTierError, ParamsError
from lora_spec.measure import dflash as evaluation
from lora_spec.measure import dflash_card
from lora_spec.measure.engine import Completion
from lora_spec.measure.rows import request_rows
from lora_spec.models import load_models
from lora_spec.params import read_yaml, validate
from lora_spec.paths import params_dir
from lora_spec.provenance import Record, load_record, new_record, write_record
from lora_spec.substrate import model_folders, pocket
from lora_spec.substrate.corpora import load_corpora
from lora_spec.substrate.dflash import data, export, prompts
from lora_spec.substrate.dflash.config import DataParams, DflashParams, load_dflash
from lora_spec.substrate.dflash.weights import drafter_shape
from lora_spec.substrate.extractors import Document
from lora_spec.substrate.prompts import load_prompts


def values(**changes: object) -> dict:
    """The declared parameters with some of the data's changed."""
    declared = read_yaml(params_dir() / "dflash.yaml")
    train = declared["train"] | {"anchors": 2, "drafts": [2]}
    return declared | {"data": declared["data"] | changes, "train": train}


def params(**changes: object) -> DflashParams:
    small = {"sequences": 24, "shard": 8, "batch": 4, "prompt": 4, "generated": 4}
    return validate(DflashParams, values(**(small | changes)), where="test")


# What is declared.


def test_declared_data_covers_every_open_domain_and_temperature() -> None:
    declared = load_dflash()
    open_domains = {n for n, d in load_corpora().domains.items() if d.family != "controlled"}
    assert set(declared.data.mixture) == open_domains <= set(declared.data.domains)
    plan = list(prompts.schedule(declared.data))
    assert len(plan) == declared.data.sequences
    counts = Counter(plan)
    for domain in declared.data.domains:
        of_domain = {t: counts[domain, t] for t in declared.data.temperatures}
        total = sum(of_domain.values())
        assert total >= 0.8 * declared.data.sequences / len(declared.data.domains)
        assert of_domain[0.0] == pytest.approx(total / 2, abs=1)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("model", {"taps": []}),
        ("model", {"taps": [5, 5]}),
        ("model", {"taps": [13, 5]}),
        ("train", {"drafts": []}),
        ("train", {"drafts": [0]}),
        ("train", {"anchors": 60}),
        ("train", {"steps": 0}),
        ("train", {"position_decay": 1.5}),
        ("train", {"distill": {"top": 8, "weight": -1.0}}),
        ("train", {"optimiser": "sgd"}),
    ],
)
def test_bad_training_is_refused(section: str, changes: dict) -> None:
    declared = read_yaml(params_dir() / "dflash.yaml")
    with pytest.raises(ParamsError):
        validate(DflashParams, declared | {section: declared[section] | changes}, where="test")


@pytest.mark.parametrize("changes", [{"taps": [5, 30]}, {"mask_token_id": 49152}])
def test_a_drafter_that_does_not_fit_its_target_is_refused(changes: dict) -> None:
    declared = read_yaml(params_dir() / "dflash.yaml")
    made = validate(DflashParams, declared | {"model": declared["model"] | changes}, where="test")
    with pytest.raises(ParamsError, match="outside the target"):
        drafter_shape(made)


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": 7},
        {"batch": 3},
        {"temperatures": []},
        {"temperatures": [-0.1]},
        {"domains": []},
        {"mixture_every": 1},
        {"prompt": 0},
        {"learning": 1},
    ],
)
def test_bad_data_is_refused(changes: dict) -> None:
    with pytest.raises(ParamsError):
        params(**changes)


def test_an_unrecorded_domain_is_refused_by_name() -> None:
    with pytest.raises(ParamsError, match="klingon"):
        prompts.corpora_sha256(params(domains=["german", "klingon"]).data)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 12), st.integers(1, 5), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)
)
def test_schedule_takes_turns(every: int, domains: int, temperatures: list[float]) -> None:
    names = tuple(f"d{n}" for n in range(domains))
    made = DataParams(
        sequences=120,
        shard=120,
        batch=120,
        prompt=4,
        generated=4,
        temperatures=tuple(temperatures),
        domains=names,
        mixture=("mixed",),
        mixture_every=every,
    )
    plan = list(prompts.schedule(made))
    mixed = [domain == "mixed" for domain, _ in plan]
    assert [n for n, m in enumerate(mixed) if m] == list(range(every - 1, 120, every))
    own = Counter(domain for domain, _ in plan if domain != "mixed")
    assert max(own.values()) - min(own.values()) <= 1
    for name in (*names, "mixed"):
        drawn = [t for domain, t in plan if domain == name]
        assert drawn == [temperatures[n % len(temperatures)] for n in range(len(drawn))]


# Prompts come from training documents alone.


@pytest.fixture
def made_corpora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """Documents of numbers instead of the corpora; returns the (domain, split) that were read."""
    read: list[tuple[str, str]] = []

    def read_documents(name: str, split: str) -> list[Document]:
        read.append((name, split))
        offset = 1000 if name == "german" else 20000
        return [
            Document(f"{name}-{n}", " ".join(str(offset + 80 * n + i) for i in range(80))) for n in range(9)
        ]

    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prompts, "read_documents", read_documents)
    monkeypatch.setattr(prompts, "require_model", lambda key: tmp_path)
    monkeypatch.setattr(prompts, "load_encoder", lambda path: lambda text: [int(w) for w in text.split()])
    monkeypatch.setattr(prompts, "_check_corpus", lambda name, recorded: None)
    return read


def small(**changes: object) -> DflashParams:
    return params(**({"domains": ["german", "python"], "mixture": ["python"]} | changes))


def test_only_training_documents_are_read(made_corpora: list[tuple[str, str]]) -> None:
    made = prompts.training_prompts(small())
    assert {split for _, split in made_corpora} == {"train"}
    assert len(made) == len({prompt.ids for prompt in made}) == 24
    assert all((prompt.ids[0] >= 20000) == (prompt.domain == "python") for prompt in made)


def test_prompts_are_cut_once_and_then_read(made_corpora: list[tuple[str, str]]) -> None:
    first = prompts.training_prompts(small())
    made_corpora.clear()
    assert prompts.training_prompts(small()) == first
    assert not made_corpora
    prompts.training_prompts(small(prompt=5))
    assert made_corpora


def test_no_prompt_of_a_frozen_window_is_learnt(
    made_corpora: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {prompt.ids for prompt in prompts.training_prompts(small()) if prompt.domain == "german"}
    frozen = load_prompts("german")
    frozen.eval[:2] = [[*ids, *frozen.eval[0][4:]] for ids in sorted(seen)[:2]]
    monkeypatch.setattr(prompts, "load_prompts", lambda name: frozen)
    cut = prompts._cut(small(), [domain for domain, _ in prompts.schedule(small().data)])
    assert not {tuple(ids) for ids in cut.tolist()} & set(sorted(seen)[:2])


def test_a_small_corpus_gives_shifted_windows(made_corpora: list[tuple[str, str]]) -> None:
    made = prompts.training_prompts(small(sequences=360, shard=360, domains=["german"]))
    german = [prompt.ids for prompt in made if prompt.domain == "german"]
    assert len(german) == len(set(german)) == 324
    assert {ids[0] % 4 for ids in german} == {0, 2}
    with pytest.raises(ParamsError, match="german: train"):
        prompts.training_prompts(small(sequences=960, shard=960, domains=["german"]))


def test_heldout_prompts_begin_frozen_windows() -> None:
    declared = load_dflash()
    made = prompts.heldout_prompts(declared)
    window = load_prompts("python").eval[declared.heldout.start]
    assert tuple(window[: declared.data.prompt]) in {p.ids for p in made if p.domain == "python"}
    assert {p.temperature for p in made} == {0.0}
    assert {p.domain for p in made} == {*declared.data.domains, "general"}


# Records.


def write_unit(made: DflashParams, name: str, rows: list[list[int]], **results: object) -> data.Sequences:
    tokens = np.zeros((len(rows), made.data.length), dtype=np.uint16)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    lengths = np.asarray([len(row) for row in rows], dtype=np.int32)
    sequences = data.Sequences(
        tokens, lengths, ["german"] * len(rows), np.float32([0, 0.8] * (len(rows) // 2))
    )
    whole = new_record(
        experiment="dflash_data",
        tier="pocket",
        phase="phase2",
        evidence_class="measured",
        config=data.unit_config(made, name),
        seed=1,
        revisions=data.unit_revisions(made, name),
        results=results,
    )
    write_record(data.unit_path(name), whole, {data.TABLE: data._frame(sequences)})
    return sequences


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LORA_SPEC_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


def test_sequences_come_back_as_written(results: Path) -> None:
    made = params()
    rows = [[5, 6, 7, 8, 49151, 2], [1, 2, 3, 4, 5, 6, 7, 8]]
    written = write_unit(made, "shard-00", rows)
    loaded = data.load_sequences(made, ["shard-00", "shard-00"])
    assert np.array_equal(loaded.tokens, np.concatenate([written.tokens] * 2))
    assert loaded.lengths.tolist() == [6, 8, 6, 8]
    assert loaded.domains == ["german"] * 4
    assert loaded.temperatures.tolist() == pytest.approx([0, 0.8, 0, 0.8])


def test_a_missing_or_changed_shard_is_not_read(results: Path) -> None:
    made = params()
    with pytest.raises(EvidenceError, match="to do"):
        data.load_sequences(made, ["shard-00"])
    write_unit(made, "shard-00", [[1, 2, 3, 4, 5, 6]] * 2)
    assert data.find_unit_problem(made, "shard-00") is None
    assert data.find_unit_problem(params(generated=5), "shard-00") == "made from other parameters"
    assert data.find_unit_problem(made, "shard-01") == "to do"
    table = next(data.unit_path("shard-00").parent.glob("*.parquet"))
    table.write_bytes(table.read_bytes()[:-1] + b"?")
    assert "does not match" in str(data.find_unit_problem(made, "shard-00"))


def test_shards_and_heldout_depend_on_their_own_parameters() -> None:
    made, other = params(), params(temperatures=[1.0], mixture_every=3)
    assert data.unit_config(made, "shard-00") != data.unit_config(other, "shard-00")
    assert data.unit_config(made, data.HELDOUT) == data.unit_config(other, data.HELDOUT)
    assert data.unit_names(made) == ["shard-00", "shard-01", "shard-02", "heldout"]
    assert prompts.unit_seed(1, "shard-00") != prompts.unit_seed(1, "shard-01")


def test_committed_shards_are_those_of_the_parameters() -> None:
    made = load_dflash()
    present = [name for name in data.unit_names(made) if data.unit_path(name).exists()]
    assert not [p for n in present if (p := data.find_unit_problem(made, n))]
    for name in present:
        assert load_record(data.unit_path(name)).results["generated_tokens"] > 0


# The trained drafter as a model of the project.


def test_its_config_is_what_the_engine_and_the_registry_expect() -> None:
    made = load_dflash()
    config = export.engine_config(made)
    shape = drafter_shape(made)
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [5, 13, 21, 26, 29]}
    assert "layer_types" not in config  # full attention without causality
    entry = load_models().model(made.drafter)
    assert entry.geometry.model_dump().items() <= config.items()
    assert shape.matrices()["fc.weight"] == (576, 5 * 576)
    assert sum(rows * columns for rows, columns in shape.matrices().values()) == 8_736_768


MODELS_TEXT = """\
models:
  first:
    status: unfrozen
    files:
      a: kept
  drafter:
    title: a drafter  # with a comment
    status: unfrozen
    geometry:
      hidden_size: 8
    source:
      kind: trained
      target: first

  last:
    status: unfrozen
pairs: {}
"""


def test_freezing_pins_one_entry_and_keeps_the_rest() -> None:
    pins = {"model.safetensors": "b" * 64, "config.json": "a" * 64}
    text = export.pinned_text(MODELS_TEXT, "drafter", pins, 17)
    before, after = yaml.safe_load(MODELS_TEXT), yaml.safe_load(text)
    frozen = {"status": "frozen", "files": pins, "bytes": 17}
    assert after["models"].pop("drafter") == before["models"].pop("drafter") | frozen
    assert after == before
    assert "# with a comment" in text and "\n\n  last:" in text
    again = export.pinned_text(text, "drafter", pins | {"config.json": "c" * 64}, 18)
    assert yaml.safe_load(again)["models"]["drafter"]["files"]["config.json"] == "c" * 64
    assert again.count("files:") == 2 and again.count("bytes:") == 1
    with pytest.raises(ParamsError, match="other"):
        export.pinned_text(MODELS_TEXT, "other", pins, 17)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the real parameters, but for the drafter's pins, and without the drafter."""
    shutil.copytree(params_dir(), tmp_path / "params")
    (tmp_path / "pyproject.toml").touch()
    models = tmp_path / "params" / "models.yaml"
    content = yaml.safe_load(models.read_text())
    entry = content["models"][load_dflash().drafter]
    entry["status"] = "unfrozen"
    for pin in {"files", "bytes"} & set(entry):
        del entry[pin]
    models.write_text(yaml.safe_dump(content, sort_keys=False))
    monkeypatch.setenv("LORA_SPEC_ROOT", str(tmp_path))
    return tmp_path


def test_a_drafter_is_used_only_as_it_was_pinned(checkout: Path) -> None:
    made = load_dflash()
    with pytest.raises(LoraSpecError, match="train it first"):
        export.freeze_drafter(made)
    folder = checkout / "examples" / "drafters" / made.drafter
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(export.engine_config(made)))
    (folder / "model.safetensors").write_bytes(b"weights")
    export.freeze_drafter(made)
    entry = load_models().model(made.drafter)
    assert entry.status == "frozen" and entry.bytes == 7
    assert model_folders.require_model(made.drafter) == folder
    assert made.drafter not in pocket.pocket_keys(load_models())  # nothing to build
    (folder / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(MissingTierError, match="pinned"):
        model_folders.require_model(made.drafter)


def test_an_unpinned_drafter_is_not_used(checkout: Path) -> None:
    made = load_dflash()
    folder = checkout / "examples" / "drafters" / made.drafter
    with pytest.raises(MissingTierError, match="not built"):
        model_folders.require_model(made.drafter)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(export.engine_config(made)))
    (folder / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(MissingTierError, match="not pinned"):
        model_folders.require_model(made.drafter)


# Evaluation and card.


def evaluated_table() -> pd.DataFrame:
    """Two prompts of two sets: one always accepts all four drafts, the other none."""
    completions = {
        "german": [Completion(list(range(11)), "length", [4, 4], [4, 4], [], 0.1)] * 2,
        "python": [Completion([7] * 5, "length", [0] * 4, [4] * 4, [], 0.1)] * 2,
    }
    frames = [
        request_rows(
            done, arm="base", adapter="none", prompt_set=name, prompt_indices=[0, 1], decoding="greedy", k=4
        )
        for name, done in completions.items()
    ]
    return pd.concat(frames, ignore_index=True)


def test_acceptance_is_pooled_by_set_and_over_all() -> None:
    found = evaluation.acceptance_rows(evaluated_table(), evaluation.load_evaluation())["greedy"]
    assert found["german"]["al_emitted"] == 5.0 and found["python"]["al_emitted"] == 1.0
    assert found["all"]["al_emitted"] == pytest.approx((20 + 8) / (4 + 8), abs=1e-4)
    assert found["all"]["low"] <= found["all"]["al_emitted"] <= found["all"]["high"]
    assert found["german"]["low"] == found["german"]["high"] == 5.0
    assert found["python"]["survival"] == [0.0]


@pytest.mark.parametrize(
    "changes", [{"decodings": {}}, {"decodings": {"t": -1.0}}, {"max_tokens": 0}, {"goal": 2}]
)
def test_a_bad_evaluation_is_refused(changes: dict) -> None:
    declared = read_yaml(params_dir() / "dflash_evaluation.yaml")
    with pytest.raises(ParamsError):
        validate(evaluation.EvaluationParams, declared | changes, where="test")


def test_every_set_has_the_prompts_of_the_evaluation_and_training_reports_on_others() -> None:
    made, declared = load_dflash(), evaluation.load_evaluation()
    chosen = evaluation.evaluation_prompts(made, declared.prompts)
    assert len(chosen) == declared.prompts.count * (len(made.data.domains) + 1)
    assert not {tuple(ids) for _, _, ids in chosen} & {prompt.ids for prompt in prompts.heldout_prompts(made)}


def test_the_card_states_the_records_numbers(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = params()
    for name in data.unit_names(made):
        write_unit(made, name, [[1, 2, 3, 4, 5, 6]] * 2, generated_tokens=1234)
    monkeypatch.setattr(dflash_card, "drafter_weights_sha256", lambda params: "f" * 64)
    training = record(
        {"parameters": 8741, "cpu_seconds": 6000.0, "history": [{"step": 1, "accuracy": [0.456, 0.2]}]}
    )
    text = dflash_card.card_text(made, training, None)
    assert "8,741" in text and "3,702 tokens" in text and "45.6%" in text and "100 CPU-minutes" in text
    assert "Not measured yet" in text and "f" * 64 in text
    declared = evaluation.load_evaluation()
    acceptance = evaluation.acceptance_rows(evaluated_table(), declared)
    config = {
        "sets": ["german", "python"],
        "evaluation": declared.model_dump(mode="json") | {"decodings": {"greedy": 0.0}},
    }
    gaps = [{"request": 1, "position": 3, "gap_nats": 0.12}, {"request": 2, "position": 5, "gap_nats": 0.4}]
    lossless = {"requests": 4, "identical": 2, "max_gap_nats": 0.4, "divergences": gaps}
    lossless |= {"float32": {"asked": [2], "requests": 1, "identical": 1}}
    measured = record({"acceptance": acceptance, "lossless": lossless}, config)
    text = dflash_card.card_text(made, training, measured)
    assert "| german | 5.00 [5.00, 5.00] |" in text and "2 of 4" in text and "0.12 nats" in text
    assert "1 of 1 gave the target's output" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines() if line[:1] not in ("|", "-")) <= 110


def record(results: dict, config: dict | None = None) -> Record:
    return new_record(
        experiment="made",
        tier="pocket",
        phase="phase2",
        evidence_class="smoke",
        config=config or {},
        seed=0,
        revisions={},
        results=results,
    )


def test_the_plan_runs_nothing(results: Path, cli) -> None:
    done = cli("dflash", "data")
    assert done.returncode == 0
    assert "shard-24" in done.stdout and "nothing was run" in done.stdout
    assert not results.exists()
