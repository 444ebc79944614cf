"""Cut prompt windows from built corpora and freeze them as files of token ids.

Held-out documents are taken in their (hashed) order. Short ones are joined with a newline, as messages of a
catalogue stand in a file. Each unit is cut into windows that do not overlap, and windows are dealt out
round-robin over the units, so that no document gives more than it must.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from lora_spec.errors import IntegrityError, MissingTierError, ParamsError
from lora_spec.files import atomic_write_bytes, atomic_write_text, sha256_bytes, sha256_file
from lora_spec.paths import rel
from lora_spec.substrate.corpora import read_documents, unit_interval
from lora_spec.substrate.extractors import Document
from lora_spec.substrate.prompts import (
    GENERAL,
    SCHEMA,
    ExtensionParams,
    FrozenFile,
    PromptParams,
    more_path,
    prompts_path,
)
from lora_spec.substrate.recipes import CorporaParams, extension_name

Encode = Callable[[str], list[int]]
Window = list[int]
Taken = set[tuple[int, ...]]
# A rest shorter than a window is lost at the end of each unit: documents of fewer windows than _SHORT are
# joined to units of about _JOINED, so that little of a small corpus is.
_SHORT = 10
_JOINED = 40


class Unit(NamedTuple):
    """Token ids of one document, or of several short ones joined."""

    name: str
    ids: list[int]


def load_encoder(tokenizer_json: Path) -> Encode:
    """Encoder of plain text (no special tokens) from a ``tokenizer.json``.

    Raises:
        MissingTierError: the file or the ``tokenizers`` package is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingTierError("the tokenizers package is missing", fix="Install the cpu tier") from error
    if not tokenizer_json.is_file():
        raise MissingTierError(
            "no tokenizer", where=rel(tokenizer_json), fix="Run `lora-spec pocket --execute`"
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def units(documents: Sequence[Document], encode: Encode, window: int) -> list[Unit]:
    """Units of at least ``window`` ids in document order; a short rest at the end is dropped."""
    made: list[Unit] = []
    held: list[Document] = []
    held_ids = 0

    def join() -> None:
        joined = encode("\n".join(document.text for document in held))
        if len(joined) >= window:
            made.append(Unit(held[0].doc, joined))

    for document in documents:
        ids = encode(document.text)
        if len(ids) >= window * _SHORT:
            made.append(Unit(document.doc, ids))
            continue
        held.append(document)
        held_ids += len(ids) + 1
        if held_ids >= window * _JOINED:
            join()
            held, held_ids = [], 0
    if held:
        join()
    return made


def deal(made: Sequence[Unit], window: int, taken: Taken) -> Iterator[Window]:
    """Windows round-robin over the units, each unit's in hashed order, none that is in ``taken``.

    What is yielded is added to ``taken``.
    """
    for row in zip_longest(*(_shuffled(unit, window) for unit in made)):
        for ids in row:
            if ids is not None and tuple(ids) not in taken:
                taken.add(tuple(ids))
                yield ids


def _shuffled(unit: Unit, window: int) -> list[Window]:
    starts = range(0, len(unit.ids) - window + 1, window)
    order = sorted(starts, key=lambda start: unit_interval(f"window:{unit.name}:{start}"))
    return [unit.ids[start : start + window] for start in order]


def _reserve(documents: list[Document], encode: Encode, window: int, count: int) -> Unit:
    """Take documents off the end until they give ``count`` windows, at most two each."""
    newline = encode("\n")
    ids: list[int] = []
    name = ""
    while len(ids) < count * window and documents:
        name, text = documents.pop()
        ids += encode(text)[: 2 * window] + newline
    return Unit(name, ids[: count * window])


def take(source: Iterator[Window], count: int, where: str) -> list[Window]:
    """The first ``count`` windows.

    Raises:
        ParamsError: the documents give fewer.
    """
    windows = [ids for _, ids in zip(range(count), source, strict=False)]
    if len(windows) < count:
        raise ParamsError(f"documents give {len(windows)} windows, {count} wanted", where=where)
    return windows


class _Sets:
    """Cut sets, compared with what was frozen; nothing is written before all are cut."""

    def __init__(self, params: PromptParams, tokenizer_sha256: str) -> None:
        self._params = params
        self._tokenizer_sha256 = tokenizer_sha256
        self._files: dict[Path, bytes] = {}
        self.sets: dict[str, FrozenFile] = dict(params.sets)
        self.more: dict[str, FrozenFile] = dict(params.more)

    def add(self, name: str, windows: list[Window], calibration: list[Window], *, more: bool = False) -> None:
        """Take one set, or with ``more`` the extension of one.

        Raises:
            IntegrityError: it was frozen with other windows.
        """
        data = render(name, self._params, self._tokenizer_sha256, windows, calibration)
        made = FrozenFile(sha256=sha256_bytes(data), eval=len(windows), calibration=len(calibration))
        if (self.more if more else self.sets).setdefault(name, made) != made:
            raise IntegrityError(
                "the windows cut now are not those that were frozen",
                where=f"{name}, extension" if more else name,
                fix="The code, a corpus or the tokenizer changed; to freeze anew, take the set out of "
                "params/prompts.yaml and discard what was measured on it",
            )
        self._files[more_path(name) if more else prompts_path(name)] = data

    def write(self, params_file: Path) -> None:
        """Write the files (those frozen before with equal bytes), then what they hash to."""
        for path, data in self._files.items():
            atomic_write_bytes(path, data)
        kept = params_file.read_text(encoding="utf-8").split("\ntokenizer_sha256:")[0].rstrip("\n")
        lines = ["", f"tokenizer_sha256: {self._tokenizer_sha256}"]
        for title, records in (("sets", self.sets), ("more", self.more)):
            lines += [f"{title}:"] if records else []
            for name, one in records.items():
                values = f"sha256: {one.sha256}, eval: {one.eval}, calibration: {one.calibration}"
                lines.append(f"  {name}: {{{values}}}")
        atomic_write_text(params_file, "\n".join([kept, *lines, ""]))


def freeze(
    corpora: CorporaParams, params: PromptParams, tokenizer_json: Path, params_file: Path
) -> Iterator[str]:
    """Cut the windows of every domain, of ``general`` and of the extensions; write them and their hashes.

    A set that was frozen before is cut again and compared, never replaced: what was measured on it stands.
    Yields each prompt set's name as it is cut. Deterministic: equal corpora and an equal tokenizer give equal
    bytes.

    Raises:
        MissingTierError: a corpus or the tokenizer is missing.
        ParamsError: a domain has too few held-out or calibration tokens.
        IntegrityError: a frozen set would come out otherwise now; nothing was written.
    """
    encode = load_encoder(tokenizer_json)
    sets = _Sets(params, sha256_file(tokenizer_json))
    everything: Taken = set()
    yield from _cut_sets(sets, corpora, params, encode, everything)
    if params.extension is not None:
        yield from _cut_more(sets, corpora, params.window, params.extension, encode, everything)
    sets.write(params_file)


def _cut_sets(
    sets: _Sets, corpora: CorporaParams, params: PromptParams, encode: Encode, everything: Taken
) -> Iterator[str]:
    general: list[list[Window]] = []
    for name, domain in corpora.domains.items():
        taken: Taken = set()
        documents = read_documents(name, "heldout")
        if domain.family != "controlled":
            # The last documents of the hashed order belong to the general set, so none serves both.
            reserved = _reserve(documents, encode, params.window, params.general)
            general.append(take(deal([reserved], params.window, taken), params.general, f"{name}: general"))
        heldout = units(documents, encode, params.window)
        eval_windows = take(deal(heldout, params.window, taken), params.eval, f"{name}: heldout")
        calibration = deal(
            units(read_documents(name, "calibration"), encode, params.window), params.window, taken
        )
        sets.add(name, eval_windows, take(calibration, params.calibration, f"{name}: calibration"))
        everything |= taken
        yield name
    sets.add(GENERAL, [ids for row in zip(*general, strict=True) for ids in row], [])
    yield GENERAL


def _cut_more(
    sets: _Sets,
    corpora: CorporaParams,
    window: int,
    extension: ExtensionParams,
    encode: Encode,
    taken: Taken,
) -> Iterator[str]:
    general: list[list[Window]] = []
    for name in corpora.extensions:
        corpus = extension_name(name)
        documents = read_documents(corpus, "heldout")
        reserved = _reserve(documents, encode, window, extension.general)
        general.append(take(deal([reserved], window, taken), extension.general, f"{corpus}: general"))
        if name in extension.domains:
            windows = deal(units(documents, encode, window), window, taken)
            sets.add(name, take(windows, extension.eval, corpus), [], more=True)
        yield corpus
    sets.add(GENERAL, [ids for row in zip(*general, strict=True) for ids in row], [], more=True)


def render(
    name: str,
    params: PromptParams,
    tokenizer_sha256: str,
    eval_windows: list[Window],
    calibration: list[Window],
) -> bytes:
    """The file of one prompt set: JSON with one window a line."""

    def rows(windows: list[Window]) -> str:
        inner = ",\n".join(json.dumps(ids, separators=(",", ":")) for ids in windows)
        return f"[\n{inner}\n]" if windows else "[]"

    head = {
        "schema": SCHEMA,
        "domain": name,
        "tokenizer_sha256": tokenizer_sha256,
        "window": params.window,
        "prompt": params.prompt,
    }
    lines = [f"{json.dumps(key)}:{json.dumps(value)}," for key, value in head.items()]
    lines += [f'"eval":{rows(eval_windows)},', f'"calibration":{rows(calibration)}']
    return ("{\n" + "\n".join(lines) + "\n}\n").encode()
