"""What the synthetic numbers are drawn from: everything follows from names and seeds."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np

from lora_spec.pool import without_update

TIER = "smoke"


def rng(*key: object) -> np.random.Generator:
    """A generator for whatever ``key`` names."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big"))


def content_hash(adapter: str) -> str:
    """Made-up identity of an adapter."""
    return hashlib.sha256(adapter.encode()).hexdigest()


def base_alpha(prompt_set: str) -> float:
    """Made-up α of the base arm."""
    return float(rng("base", prompt_set).uniform(0.45, 0.6))


zero_adapters = cache(without_update)
"""Adapters whose B stays zero, as the pool declares: they are the base."""


def effect(adapter: str | None, prompt_set: str) -> float:
    """Made-up change of α: mostly a loss on the own domain, a third of it elsewhere, sometimes a gain."""
    if adapter is None or adapter in zero_adapters():
        return 0.0
    own = float(rng("effect", adapter).choice([0.02, 0.0, -0.01, -0.06, -0.12, -0.18]))
    return own / 3 if prompt_set == "general" else own


def entropy_shift(adapter: str | None) -> float:
    """Made-up change of the target's entropy, nats."""
    return 0.0 if adapter is None else float(rng("entropy", adapter).normal(0.0, 0.3))


def drafter_entropy(prompt_set: str) -> float:
    """Made-up entropy of a drafter on a domain, nats."""
    return float(rng("drafter entropy", prompt_set).uniform(1.5, 3.5))


def frobenius(adapter: str) -> float:
    """Made-up size of the update, the larger the more it changes α."""
    if adapter in zero_adapters():
        return 0.0
    return (1.0 + 20.0 * abs(effect(adapter, "own"))) * float(rng("size", adapter).uniform(0.5, 1.5))
