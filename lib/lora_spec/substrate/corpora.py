"""Domain corpora out of pinned packages: plan, build, and read the cached documents.

A domain's documents are put in one order by the hash of their names, near-duplicates are dropped, the rest
is kept up to a size, and each goes to train, calibration or held-out by the same hash. So a rebuild gives the
same bytes anywhere, and ``params/corpora.yaml`` records what they hash to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lora_spec.errors import IntegrityError, MissingTierError
from lora_spec.files import atomic_dir, atomic_write_json, atomic_write_text, sha256_bytes, sha256_file
from lora_spec.paths import cache_dir, rel
from lora_spec.substrate import fetch
from lora_spec.substrate.archives import Limits, Member, read_members
from lora_spec.substrate.extractors import EXTRACTORS, TRANSFORMS, Document
from lora_spec.substrate.extractors.common import cut, normalise
from lora_spec.substrate.recipes import (
    SPLITS,
    CorporaParams,
    Domain,
    Split,
    load_corpora,
    recipe_sha256,
    select,
)

__all__ = [  # load_corpora and SPLITS belong to what callers of this module need
    "SPLITS",
    "build",
    "is_built",
    "load_corpora",
    "plan",
    "read_documents",
]

SCHEMA = "lora-spec-corpus/1"
_SHINGLE = 8
_TOKENS = re.compile(r"\w+|[^\w\s]")


def domain_dir(domain: str) -> Path:
    """Where a domain's three files and its manifest lie."""
    return cache_dir() / "corpora" / domain


def plan(params: CorporaParams, only: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """One row a source that the wanted domains need: package, version, MB, licence, domains, cached."""
    names = select(params, only)
    rows = []
    for key, source in params.sources.items():
        users = [n for n in names if any(s.source == key for s in params.corpora[n].sources)]
        if users:
            rows.append(
                {
                    "package": source.package,
                    "version": source.version,
                    "MB": round(source.bytes / 1e6, 1),
                    "licence": source.licence,
                    "domains": ", ".join(users),
                    "cached": fetch.is_cached(source.wheel),
                }
            )
    return rows


def is_built(params: CorporaParams, name: str) -> bool:
    """Whether the cache holds this domain, made by this recipe, with every file intact."""
    directory = domain_dir(name)
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        return manifest["recipe_sha256"] == recipe_sha256(params, name) and all(
            sha256_file(directory / f"{split}.jsonl") == manifest["splits"][split]["sha256"]
            for split in SPLITS
        )
    except (OSError, ValueError, KeyError):
        return False


def build(params: CorporaParams, only: Iterable[str] | None = None, workers: int = 1) -> Iterator[str]:
    """Fetch and build what is missing of the wanted domains; yields each domain's name as it is done.

    Raises:
        NetworkError: a wheel is neither cached nor to be had.
        IntegrityError: a wheel or a built file does not have its pinned hash.
    """
    names = select(params, only)
    missing = [name for name in names if not is_built(params, name)]
    yield from (name for name in names if name not in missing)
    keys = {s.source for name in missing for s in params.corpora[name].sources}
    fetch.fetch_all([params.sources[key].wheel for key in sorted(keys)], workers)
    later = [n for n in missing if params.corpora[n].of or params.corpora[n].extends]
    waves = ([n for n in missing if n not in later], later)
    for wave in waves:
        if workers > 1 and len(wave) > 1:
            with ProcessPoolExecutor(max_workers=workers) as pool:
                yield from pool.map(build_domain, [params] * len(wave), wave)
        else:
            yield from (build_domain(params, name) for name in wave)


def build_domain(params: CorporaParams, name: str) -> str:
    """Build one domain from cached wheels (or from the built domain it is of) and verify its bytes."""
    domain = params.corpora[name]
    if domain.of is not None:
        transform = TRANSFORMS[str(domain.transform)]
        documents = {
            split: [Document(d.doc, transform(d.text)) for d in read_documents(domain.of, split)]
            for split in SPLITS
        }
    else:
        members: list[Member] = []
        for chosen in domain.sources:
            path = fetch.archives_dir() / params.sources[chosen.source].filename
            members += read_members(path, chosen.source, chosen.include, chosen.exclude, Limits())
        extracted = EXTRACTORS[str(domain.extractor)](members, **domain.options)
        before = (
            [] if domain.extends is None else [d for s in SPLITS for d in read_documents(domain.extends, s)]
        )
        documents = assign_splits(domain, choose(domain, extracted, before))
    _write(params, name, documents)
    return name


def unit_interval(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone (first 8 bytes of its sha256)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def choose(domain: Domain, documents: Iterable[Document], before: Iterable[Document] = ()) -> list[Document]:
    """Cut, order by hashed name, drop near-duplicates, and keep up to ``max_chars`` characters.

    A document is a near-duplicate when more than ``near_duplicate`` of its distinct shingles (runs of 8 words
    or signs) occur in documents kept before it, or in those of ``before``; shorter documents count as one.
    """
    ordered = sorted(documents, key=lambda d: (unit_interval(f"order:{d.doc}"), d.doc))
    seen: set[str] = set()
    kept: list[Document] = []
    names: set[str] = set()
    for document in before:
        seen |= _shingles(document.text)
        names.add(document.doc)
    total = 0
    for document in ordered:
        text = normalise(cut(document.text, domain.max_document_chars))
        shingles = _shingles(text)
        if not shingles or document.doc in names:
            continue
        if len(shingles & seen) > domain.near_duplicate * len(shingles):
            continue
        if total + len(text) > domain.max_chars:
            break
        seen |= shingles
        names.add(document.doc)
        kept.append(Document(document.doc, text))
        total += len(text)
    return kept


def _shingles(text: str) -> set[str]:
    words = _TOKENS.findall(text.lower())
    if not words:
        return set()
    return {" ".join(words[i : i + _SHINGLE]) for i in range(max(1, len(words) - _SHINGLE + 1))}


def assign_splits(domain: Domain, documents: Iterable[Document]) -> dict[str, list[Document]]:
    """Put each document into one split by the hash of its name."""
    splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for document in documents:
        at = unit_interval(f"split:{document.doc}")
        if at < domain.heldout_share:
            splits["heldout"].append(document)
        elif at < domain.heldout_share + domain.calibration_share:
            splits["calibration"].append(document)
        else:
            splits["train"].append(document)
    return splits


def read_documents(domain: str, split: Split | str) -> list[Document]:
    """Documents of one split of a built domain, in file order, checked against the manifest's hash.

    Raises:
        MissingTierError: the domain is not built.
        IntegrityError: the file is damaged.
    """
    directory = domain_dir(domain)
    path = directory / f"{split}.jsonl"
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        data = path.read_bytes()
    except OSError as error:
        raise MissingTierError(
            "corpus not built", where=rel(path), fix=f"Run `lora-spec corpora --execute --only {domain}`"
        ) from error
    if sha256_bytes(data) != manifest["splits"][split]["sha256"]:
        raise IntegrityError(
            "corpus file does not match its manifest",
            where=rel(path),
            fix="Delete its folder and build it again",
        )
    return [Document(**json.loads(line)) for line in data.decode("utf-8").split("\n") if line]


def record_outputs(params: CorporaParams, path: Path) -> None:
    """Write the hashes of the built corpora as the last section of the parameter file at ``path``.

    Raises:
        MissingTierError: a domain is not built.
    """
    lines = ["output_sha256:"]
    for name in params.corpora:
        if not is_built(params, name):
            raise MissingTierError(
                "corpus not built", where=name, fix="Run `lora-spec corpora --execute` first"
            )
        splits = json.loads((domain_dir(name) / "manifest.json").read_text(encoding="utf-8"))["splits"]
        lines += [f"  {name}:", *(f"    {split}: {splits[split]['sha256']}" for split in SPLITS)]
    kept = path.read_text(encoding="utf-8").split("\noutput_sha256:\n")[0].rstrip("\n")
    atomic_write_text(path, kept + "\n\n" + "\n".join(lines) + "\n")


def _write(params: CorporaParams, name: str, documents: dict[str, list[Document]]) -> None:
    domain = params.corpora[name]
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "domain": name,
        "family": domain.family,
        "recipe_sha256": recipe_sha256(params, name),
        "sources": {
            s.source: {
                k: getattr(params.sources[s.source], k) for k in ("package", "version", "sha256", "licence")
            }
            for s in domain.sources
        },
        "of": domain.of or domain.extends,
        "splits": {},
    }
    files = {}
    for split in SPLITS:
        lines = [json.dumps(d._asdict(), ensure_ascii=False) + "\n" for d in documents[split]]
        files[split] = "".join(lines).encode()
        manifest["splits"][split] = {
            "sha256": sha256_bytes(files[split]),
            "documents": len(lines),
            "characters": sum(len(d.text) for d in documents[split]),
        }
    recorded = params.output_sha256.get(name)
    if recorded is not None:
        for split in SPLITS:
            if manifest["splits"][split]["sha256"] != getattr(recorded, split):
                raise IntegrityError(
                    "rebuilt corpus differs from the recorded one",
                    where=f"{name}/{split}.jsonl",
                    fix="The code or the recipe changed: this domain's adapters and prompts no longer fit it",
                )
    with atomic_dir(domain_dir(name)) as directory:
        for split in SPLITS:
            (directory / f"{split}.jsonl").write_bytes(files[split])
        atomic_write_json(directory / "manifest.json", manifest)
