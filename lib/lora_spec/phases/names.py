"""What readers of a paper see for the identifiers of tables: adapters, domains, decodings, traffic."""

from __future__ import annotations

import re

import pandas as pd

from lora_spec.phases.evidence import DECODINGS, TRAFFIC

_ACRONYMS = {word: word.upper() for word in ("c", "csv", "html", "json", "mlp", "sql", "xml")} | {
    "javascript": "JavaScript"
}
_MODULES = {"all": "all modules", "qv": "q and v", "k": "k only", "o": "o only", "down": "down only"}
_PARTS = (
    (re.compile(r"r(\d+)"), r"rank \1"),
    (re.compile(r"s(\d+)of(\d+)"), r"\1 of \2 steps"),
    (re.compile(r"s(\d+)"), r"\1 steps"),
    (re.compile(r"seed(\d+)"), r"seed \1"),
    (re.compile(r"layer(\d+)"), r"layer \1"),
    (re.compile(r"layers(\d+)to(\d+)"), r"layers \1–\2"),
    (re.compile(r"(ranks|alphas)"), r"own \1"),
)
_VERDICTS = {"down": "lower", "up": "higher", "none": "not told"}


def domain_name(domain: str) -> str:
    """``word_prefix`` as "Word prefix", ``sql`` as "SQL"."""
    words = [_ACRONYMS.get(word, word) for word in re.split(r"[-_]", domain)]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def adapter_name(adapter: str) -> str:
    """An adapter of the pool in words: ``german-r16-all-s40`` as "German, rank 16, all modules, 40 steps".

    Names that are not built that way (rank after the domain) are left as they are. Different names stay
    different.
    """
    parts = adapter.split("-")
    rank = next((i for i, part in enumerate(parts) if re.fullmatch(r"r\d+", part)), 0)
    if rank == 0:
        return adapter
    told = [domain_name("-".join(parts[:rank]))]
    for part in parts[rank:]:
        for pattern, words in _PARTS:
            if pattern.fullmatch(part):
                told.append(pattern.sub(words, part))
                break
        else:
            told.append(_MODULES.get(part, _ACRONYMS.get(part, part)))
    return ", ".join(told)


def words(table: pd.DataFrame) -> dict[str, str]:
    """What to print for the text cells of ``table``, for ``tables.save_table``."""
    found = dict(DECODINGS) | TRAFFIC
    for column, name in (("domain", domain_name), ("adapter", adapter_name)):
        if column in table:
            found |= {value: name(value) for value in table[column]}
    if "moved" in table:
        found |= _VERDICTS
    if "reason" in table:
        found |= {code: code.replace("_", " ") for code in table["reason"]}
    return found
