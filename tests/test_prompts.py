"""Frozen prompts: hashes, form, disjointness, and how windows are cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_spec.errors import IntegrityError, MissingTierError, ParamsError
from lora_spec.files import sha256_bytes
from lora_spec.substrate import freeze
from lora_spec.substrate.extractors import Document
from lora_spec.substrate.prompts import (
    GENERAL,
    load_prompt_params,
    load_prompts,
    more_path,
    prompts_path,
)
from lora_spec.substrate.recipes import load_corpora

PARAMS = load_prompt_params()


@pytest.fixture
def checkout(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prompt files that a test may damage."""
    shutil.copytree(root / "params", tmp_path / "params")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setenv("LORA_SPEC_ROOT", str(tmp_path))
    return tmp_path


def test_every_domain_has_prompts_and_enough_of_them() -> None:
    assert set(PARAMS.sets) == {*load_corpora().domains, GENERAL}
    assert (PARAMS.window, PARAMS.prompt) == (96, 32)
    for name in PARAMS.sets:
        loaded = load_prompts(name, PARAMS)
        assert len(loaded.eval) >= (64 if name == GENERAL else 128)
        assert len(loaded.calibration) >= (0 if name == GENERAL else 32)
        assert all(0 <= i < 49152 for window in loaded.eval + loaded.calibration for i in window)


def test_extensions_follow_the_windows_that_were_frozen_first(checkout: Path) -> None:
    for name, first in (("german", 128), ("shakespeare", 128), (GENERAL, 102)):
        before = load_prompts(name, PARAMS.model_copy(update={"more": {}}))
        loaded = load_prompts(name, PARAMS)
        assert len(before.eval) == first == PARAMS.sets[name].eval
        assert len(loaded.eval) - first == PARAMS.more[name].eval >= 208
        assert loaded.eval[:first] == before.eval and loaded.calibration == before.calibration
        path = more_path(name)
        path.write_bytes(path.read_bytes().replace(b",1", b",2", 1))
        with pytest.raises(IntegrityError, match="changed"):
            load_prompts(name, PARAMS)
        path.unlink()
        with pytest.raises(IntegrityError, match="missing"):
            load_prompts(name, PARAMS)


def test_no_window_is_repeated_within_a_set_or_across_sets() -> None:
    seen: dict[str, str] = {}
    for name in PARAMS.sets:
        loaded = load_prompts(name, PARAMS)
        for window in [*loaded.eval, *loaded.calibration]:
            digest = sha256_bytes(json.dumps(window).encode())
            assert digest not in seen, f"{name} repeats a window of {seen[digest]}"
            seen[digest] = name


def test_the_loader_needs_neither_torch_nor_tokenizers() -> None:
    code = (
        "import sys\nfor name in ('torch', 'tokenizers', 'transformers', 'vllm'): sys.modules[name] = None\n"
        "from lora_spec.substrate.prompts import load_prompts\nassert load_prompts('german').eval"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_changed_id_is_an_error(checkout: Path) -> None:
    path = prompts_path("german")
    data = path.read_bytes()
    assert load_prompts("german").domain == "german"
    path.write_bytes(data.replace(b",1", b",2", 1))
    with pytest.raises(IntegrityError, match="changed"):
        load_prompts("german")
    path.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        load_prompts("german")


@pytest.mark.parametrize("field", ["schema", "domain", "window", "prompt", "tokenizer_sha256", "eval"])
def test_a_file_of_another_form_is_an_error_even_with_its_hash(checkout: Path, field: str) -> None:
    content = json.loads(prompts_path("german").read_bytes())
    content[field] = content[field][1:] if isinstance(content[field], list | str) else content[field] + 1
    data = json.dumps(content).encode()
    prompts_path("german").write_bytes(data)
    frozen = PARAMS.sets["german"].model_copy(update={"sha256": sha256_bytes(data)})
    with pytest.raises(IntegrityError, match="form"):
        load_prompts("german", PARAMS.model_copy(update={"sets": {"german": frozen}}))


def test_an_unknown_set_is_a_parameter_error() -> None:
    with pytest.raises(ParamsError, match="unknown prompt set"):
        load_prompts("klingon")


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_windows_do_not_overlap_and_come_from_the_documents(lengths: list[int]) -> None:
    documents = [
        Document(f"d{i}", " ".join(f"w{i}-{j}" for j in range(length))) for i, length in enumerate(lengths)
    ]
    vocabulary: dict[str, int] = {}

    def unique(text: str) -> list[int]:
        return [
            vocabulary.setdefault(word, len(vocabulary))
            for word in text.replace("\n", " \n ").split(" ")
            if word
        ]

    windows = list(freeze.deal(freeze.units(documents, unique, 8), 8, set()))
    newline = vocabulary.get("\n")
    ids = [i for window in windows for i in window if i != newline]
    assert len(ids) == len(set(ids))
    assert all(len(window) == 8 for window in windows)
    assert sum(lengths) + len(lengths) - sum(map(len, windows)) < 8 * (len(lengths) + 1)


def test_windows_are_dealt_round_robin() -> None:
    made = [freeze.Unit(f"u{i}", list(range(i * 1000, i * 1000 + 40))) for i in range(3)]
    windows = list(freeze.deal(made, 10, set()))
    assert [window[0] // 1000 for window in windows] == [0, 1, 2] * 4
    assert windows != sorted(windows)
    assert list(freeze.deal(made, 10, {tuple(window) for window in windows})) == []


def test_too_few_windows_is_an_error() -> None:
    with pytest.raises(ParamsError, match="give 1 windows, 2 wanted"):
        freeze.take(iter([[1]]), 2, "x")


def test_a_missing_tokenizer_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(MissingTierError):
        freeze.load_encoder(tmp_path / "tokenizer.json")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> Path:
    """Made-up corpora behind every declared domain, and a stand-in tokenizer."""

    def documents(domain: str, split: str) -> list[Document]:
        return [
            Document(f"{domain}{i}", " ".join(f"{domain}-{split}-{i}-{j}" for j in range(500)))
            for i in range(90 if domain.endswith("_more") else 45 if split == "heldout" else 9)
        ]

    vocabulary: dict[str, int] = {}
    monkeypatch.setattr(freeze, "read_documents", documents)
    monkeypatch.setattr(
        freeze,
        "load_encoder",
        lambda path: lambda text: [vocabulary.setdefault(w, len(vocabulary)) for w in text.split()],
    )
    tokenizer = checkout / "tokenizer.json"
    tokenizer.write_text("{}")
    return tokenizer


def test_freezing_twice_gives_the_same_bytes_and_loadable_sets(built: Path, checkout: Path) -> None:
    params_file = checkout / "params" / "prompts.yaml"
    declared = load_corpora()
    few = {name: declared.domains[name] for name in ("german", "scripture", "upper_case")}
    more = {name: declared.extensions[name] for name in ("german", "scripture")}
    corpora = declared.model_copy(update={"domains": few, "extensions": more})
    nothing = {"sets": {}, "more": {}, "tokenizer_sha256": ""}
    results = []
    for params in (load_prompt_params().model_copy(update=nothing), None, None):
        params = params or load_prompt_params()
        list(freeze.freeze(corpora, params, built, params_file))
        names = [*few, GENERAL]
        paths = [prompts_path(name) for name in names] + [more_path("german"), more_path(GENERAL)]
        results.append([params_file.read_bytes(), *(path.read_bytes() for path in paths)])
    assert results[0] == results[1] == results[2]
    params = load_prompt_params()
    assert set(params.sets) == set(names) and set(params.more) == {"german", GENERAL}
    sets = {name: load_prompts(name, params) for name in names}
    general = sets.pop(GENERAL)
    assert len(general.eval) == 6 * 2 + 18 * 2
    assert len(sets["german"].eval) == 128 + 208 and len(sets["scripture"].eval) == 128
    ids = {i for loaded in sets.values() for window in loaded.eval for i in window}
    assert not ids & {i for window in general.eval for i in window}
    for loaded in sets.values():
        assert all(b == a + 1 for window in loaded.eval for a, b in pairwise(window))


def test_freezing_never_writes_over_a_frozen_set(built: Path, checkout: Path) -> None:
    before = {path: path.read_bytes() for path in (checkout / "params").rglob("*") if path.is_file()}
    with pytest.raises(IntegrityError, match=r"not those that were frozen \(german\)"):
        list(freeze.freeze(load_corpora(), load_prompt_params(), built, checkout / "params" / "prompts.yaml"))
    assert {path: path.read_bytes() for path in (checkout / "params").rglob("*") if path.is_file()} == before
