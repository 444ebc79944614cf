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
from lora_spec.substrate.prompts import GENERAL, SCHEMA, FrozenFile, PromptParams, prompts_path
from lora_spec.substrate.recipes import CorporaParams

Encode = Callable[[str], list[int]]
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


def deal(made: Sequence[Unit], window: int, taken: set[tuple[int, ...]]) -> Iterator[list[int]]:
    """Windows round-robin over the units, each unit's in hashed order, none that is in ``taken``.

    What is yielded is added to ``taken``.
    """
    for row in zip_longest(*(_shuffled(unit, window) for unit in made)):
        for ids in row:
            if ids is not None and tuple(ids) not in taken:
                taken.add(tuple(ids))
                yield ids


def _shuffled(unit: Unit, window: int) -> list[list[int]]:
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


def take(source: Iterator[list[int]], count: int, where: str) -> list[list[int]]:
    """The first ``count`` windows.

    Raises:
        ParamsError: the documents give fewer.
    """
    windows = [ids for _, ids in zip(range(count), source, strict=False)]
    if len(windows) < count:
        raise ParamsError(f"documents give {len(windows)} windows, {count} wanted", where=where)
    return windows


def freeze(
    corpora: CorporaParams, params: PromptParams, tokenizer_json: Path, params_file: Path
) -> Iterator[str]:
    """Cut the windows of every domain and of ``general``, write the sets that are new, and record the hashes.

    A set that was frozen before is cut again and compared, never written over: what was measured on it
    stands. Yields each prompt set's name as it is done. Deterministic: equal corpora and an equal tokenizer
    give equal bytes.

    Raises:
        MissingTierError: a corpus or the tokenizer is missing.
        ParamsError: a domain has too few held-out or calibration tokens.
        IntegrityError: a frozen set would come out otherwise now.
    """
    encode = load_encoder(tokenizer_json)
    tokenizer_sha256 = sha256_file(tokenizer_json)
    records: dict[str, FrozenFile] = {}
    general: list[list[list[int]]] = []

    def write(name: str, eval_windows: list[list[int]], calibration: list[list[int]]) -> None:
        data = render(name, params, tokenizer_sha256, eval_windows, calibration)
        made = FrozenFile(sha256=sha256_bytes(data), eval=len(eval_windows), calibration=len(calibration))
        if params.sets.get(name, made) != made:
            raise IntegrityError(
                "the windows cut now are not those that were frozen",
                where=name,
                fix="The code, a corpus or the tokenizer changed; to freeze anew, take the set out of "
                "params/prompts.yaml and discard what was measured on it",
            )
        if name not in params.sets:
            atomic_write_bytes(prompts_path(name), data)
        records[name] = made

    for name, domain in corpora.domains.items():
        taken: set[tuple[int, ...]] = set()
        documents = read_documents(name, "heldout")
        if domain.family != "controlled":
            # The last documents of the hashed order belong to the general set, so none serves both.
            reserved = _reserve(documents, encode, params.window, params.general)
            general.append(take(deal([reserved], params.window, taken), params.general, f"{name}: general"))
        heldout = units(documents, encode, params.window)
        eval_windows = take(deal(heldout, params.window, taken), params.eval, f"{name}: heldout")
        calibration = units(read_documents(name, "calibration"), encode, params.window)
        write(
            name,
            eval_windows,
            take(deal(calibration, params.window, taken), params.calibration, f"{name}: calibration"),
        )
        yield name
    write(GENERAL, [ids for row in zip(*general, strict=True) for ids in row], [])
    yield GENERAL
    kept = params_file.read_text(encoding="utf-8").split("\ntokenizer_sha256:")[0].rstrip("\n")
    lines = [f"tokenizer_sha256: {tokenizer_sha256}", "sets:"]
    # The order of the file stays; what is new follows.
    for name, record in (params.sets | records).items():
        lines.append(
            f"  {name}: {{sha256: {record.sha256}, eval: {record.eval}, calibration: {record.calibration}}}"
        )
    atomic_write_text(params_file, kept + "\n\n" + "\n".join(lines) + "\n")


def render(
    name: str,
    params: PromptParams,
    tokenizer_sha256: str,
    eval_windows: list[list[int]],
    calibration: list[list[int]],
) -> bytes:
    """The file of one prompt set: JSON with one window a line."""

    def rows(windows: list[list[int]]) -> str:
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
