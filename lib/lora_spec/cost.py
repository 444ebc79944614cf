"""What a speculation depth costs and yields: tokens per second by load, depth and change of acceptance.

Goodput(B, k) = B · E(k) / step time(B, k), with B concurrent requests and E the expected tokens of a draft
step. A profile (``params/cost_profiles/<name>.yaml``) holds the numbers, their source and their evidence
class.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from lora_spec.errors import ParamsError
from lora_spec.params import StrictModel, load_params
from lora_spec.paths import params_dir
from lora_spec.provenance import EvidenceClass

Milliseconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
FloatArray = NDArray[np.float64]


def expected_tokens(alpha: ArrayLike, k: int) -> FloatArray:
    """E(α, k) = (1 - α^(k+1)) / (1 - α) = Σ_{i=0..k} α^i tokens per draft step, k + 1 at α = 1.

    Leviathan et al. 2023, eq. 1: drafts are accepted independently with probability α.

    Args:
        alpha: acceptance probability in 0..1, any shape.
        k: depth, 0 or more.
    """
    base = np.asarray(alpha, dtype=np.float64)[..., None]
    return (base ** np.arange(k + 1)).sum(axis=-1)


def shifted_survival(survival: ArrayLike, delta: ArrayLike) -> FloatArray:
    """Survival curve after every conditional acceptance rate moved by ``delta`` (clipped to 0..1).

    Args:
        survival: s_1..s_K, shape (K,), not increasing.
        delta: change of the acceptance probability, shape (...).

    Returns:
        float64 of shape (..., K).
    """
    s = np.asarray(survival, dtype=np.float64)
    before = np.concatenate([[1.0], s[:-1]])
    conditional = np.divide(s, before, out=np.zeros_like(s), where=before > 0)
    moved = np.clip(conditional + np.asarray(delta, dtype=np.float64)[..., None], 0.0, 1.0)
    return np.cumprod(moved, axis=-1)


class Drafter(StrictModel):
    """``autoregressive``: one pass a draft token. ``block``: one pass a draft step, however many tokens are
    kept.
    """

    key: str
    kind: Literal["autoregressive", "block"]


class Acceptance(StrictModel):
    """Acceptance of the pair without an adapter: a measured survival curve, or α̂ alone."""

    survival: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    alpha: Share | None = None
    source: str

    @model_validator(mode="after")
    def _one_of_them(self) -> Acceptance:
        if (self.survival is None) == (self.alpha is None):
            raise ValueError("give survival or alpha, one of them")
        if self.survival and any(later > earlier for earlier, later in pairwise(self.survival)):
            raise ValueError("survival must not increase")
        return self

    @property
    def alpha_base(self) -> float:
        """α̂ = Σ s_i / (Σ s_i + 1 - s_K): accepted over accepted plus steps with a rejection."""
        if self.alpha is not None:
            return self.alpha
        accepted = sum(self.survival or ())
        return accepted / (accepted + 1.0 - (self.survival or (0.0,))[-1])

    def expected_tokens(self, k: int, delta: ArrayLike = 0.0) -> FloatArray:
        """Tokens per draft step at depth ``k`` when acceptance moves by ``delta``, in its shape."""
        if self.survival is None:
            return expected_tokens(
                np.clip(self.alpha_base + np.asarray(delta, dtype=np.float64), 0.0, 1.0), k
            )
        return 1.0 + shifted_survival(self.survival, delta)[..., :k].sum(axis=-1)


class PassCost(StrictModel):
    """Time of one forward pass over B requests with n tokens each.

    fixed + per_request · B + per_token · B · (n - 1) + saturated_per_token · max(0, B · n -
    saturation_tokens); the last term is the extra cost of a token where the pass is bound by arithmetic.
    """

    fixed_ms: Milliseconds
    per_request_ms: Milliseconds
    per_token_ms: Milliseconds = 0.0
    saturation_tokens: Annotated[int, Field(ge=1)] | None = None
    saturated_per_token_ms: Milliseconds = 0.0

    def ms(self, load: float, tokens: int) -> float:
        """Milliseconds at ``load`` requests with ``tokens`` tokens each."""
        time = self.fixed_ms + self.per_request_ms * load + self.per_token_ms * load * (tokens - 1)
        if self.saturation_tokens is not None:
            time += self.saturated_per_token_ms * max(0.0, load * tokens - self.saturation_tokens)
        return time


class LoraCost(StrictModel):
    """What a target adapter does to a pass: factor · time + per_request · B + per_token · B · n."""

    factor: Annotated[float, Field(ge=1.0)] = 1.0
    per_request_ms: Milliseconds = 0.0
    per_token_ms: Milliseconds = 0.0
    source: str


class Anchor(StrictModel):
    """A published or measured point that the profile must reproduce; depth 0 is an engine without
    speculation.
    """

    load: Annotated[int, Field(ge=1)]
    depth: Annotated[int, Field(ge=0)]
    adapter: bool = False
    ms_per_token: Annotated[float, Field(gt=0.0)]
    tokens_per_step: Annotated[float, Field(ge=1.0)] | None = None
    tolerance: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.005
    origin: Literal["published", "measured"]


class LoadRange(StrictModel):
    """Concurrent requests the profile speaks about."""

    minimum: Annotated[int, Field(ge=1)]
    default: Annotated[int, Field(ge=1)]
    maximum: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _ordered(self) -> LoadRange:
        if not self.minimum <= self.default <= self.maximum:
            raise ValueError("minimum <= default <= maximum does not hold")
        return self


class CostProfile(StrictModel):
    """One hardware, target and drafter: see the class's fields and the comments in the file."""

    schema_: Literal["lora-spec-cost-profile/1"] = Field(alias="schema")
    name: str
    title: str
    evidence_class: EvidenceClass
    source: str
    derivation: str
    drafter: Drafter
    default_depth: Annotated[int, Field(ge=1, le=32)]
    acceptance: Acceptance
    verify: PassCost
    draft: PassCost
    disabled_overhead: Annotated[float, Field(ge=0.0, lt=1.0)]
    disabled_overhead_source: str
    target_lora: LoraCost
    load: LoadRange
    anchors: tuple[Anchor, ...] = ()

    @model_validator(mode="after")
    def _depth_is_covered(self) -> CostProfile:
        survival = self.acceptance.survival
        if survival is not None and len(survival) < self.default_depth:
            raise ValueError("survival is shorter than default_depth")
        return self

    def check_load(self, load: int) -> None:
        """Refuse a load that the profile does not cover.

        Raises:
            ParamsError: (code ``load``).
        """
        if not self.load.minimum <= load <= self.load.maximum:
            raise ParamsError(
                f"load {load} is outside what profile {self.name} covers",
                fix=f"use {self.load.minimum} to {self.load.maximum} concurrent requests",
                code="load",
            )

    def target_ms(self, load: float, tokens: int, adapter: bool) -> float:
        """One pass of the target over ``load`` requests with ``tokens`` tokens each, in milliseconds."""
        time = self.verify.ms(load, tokens)
        if adapter:
            lora = self.target_lora
            time = lora.factor * time + lora.per_request_ms * load + lora.per_token_ms * load * tokens
        return time

    def draft_ms(self, load: float, k: int) -> float:
        """Drafting k tokens for each of ``load`` requests, in milliseconds."""
        if k == 0:
            return 0.0
        return k * self.draft.ms(load, 1) if self.drafter.kind == "autoregressive" else self.draft.ms(load, k)

    def step_ms(self, load: float, k: int, *, adapter: bool = True, configured: bool = True) -> float:
        """One engine step in milliseconds.

        Args:
            load: concurrent requests. k: depth.
            adapter: whether the requests use a target adapter.
            configured: whether the engine was started with speculation. If so, k = 0 is its disabled path,
                which costs ``disabled_overhead`` more than an engine without speculation.
        """
        time = self.draft_ms(load, k) + self.target_ms(load, k + 1, adapter)
        return time * (1.0 + self.disabled_overhead) if k == 0 and configured else time

    def goodput(self, load: float, k: int, delta: ArrayLike = 0.0, *, adapter: bool = True) -> FloatArray:
        """Output tokens per second of all requests together; same shape as ``delta`` (change of α)."""
        return (
            1000.0 * load * self.acceptance.expected_tokens(k, delta) / self.step_ms(load, k, adapter=adapter)
        )


def load_profile(name: str) -> CostProfile:
    """Read ``params/cost_profiles/<name>.yaml``.

    Raises:
        ParamsError: no such profile (the message lists those there are), or not valid.
    """
    directory = params_dir() / "cost_profiles"
    known = sorted(path.stem for path in directory.glob("*.yaml"))
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or name not in known:
        raise ParamsError(
            f"unknown cost profile {name!r}", fix=f"known: {', '.join(known)}", code="cost_profile"
        )
    profile = load_params(CostProfile, directory / f"{name}.yaml")
    if profile.name != name:
        raise ParamsError(
            f"profile is called {profile.name!r} inside", where=f"params/cost_profiles/{name}.yaml"
        )
    return profile
