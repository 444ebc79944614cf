"""Seeds that follow from what a request is, and noise seeds that follow from where a draw happens.

Nothing here needs torch or vllm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

_DRAFT = "lora-spec/draft-seed/1"
_TARGET = "lora-spec/target-seed/1"
_FALLBACK = "lora-spec/draft-seed-from-request-seed/1"

# Distinct constants keep the streams of one seed apart even when a caller gives both sides the same number.
DRAFT_STREAM = 0x6C6F72612D647266
TARGET_STREAM = 0x6C6F72612D746774

_MASK = (1 << 64) - 1


def _hash63(domain: str, parts: Sequence[object]) -> int:
    """First 63 bits of sha256 over the domain tag and the parts as JSON."""
    data = json.dumps([domain, *parts], separators=(",", ":")).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1


def _plain(prompt: str | Sequence[int]) -> str | list[int]:
    return prompt if isinstance(prompt, str) else [int(token) for token in prompt]


def derive_draft_seed(seed: int, adapter: str | None, prompt: str | Sequence[int], arm: str) -> int:
    """Seed of a request's draft noise, for `SamplingParams.extra_args["draft_seed"]`.

    Args:
        seed: seed of the experiment.
        adapter: name of the adapter; None and "" mean the base model.
        prompt: the prompt's token ids, or any text that names the prompt.
        arm: what tells repeated requests apart ("base", "adapted", a decoding, a repetition).

    Returns:
        An integer in [0, 2**63): sha256, tagged apart from `derive_target_seed`.
    """
    return _hash63(_DRAFT, [int(seed), adapter or "", _plain(prompt), arm])


def derive_target_seed(seed: int, adapter: str | None, prompt: str | Sequence[int], arm: str) -> int:
    """Seed of a request's target noise, for `SamplingParams.seed`. See `derive_draft_seed`."""
    return _hash63(_TARGET, [int(seed), adapter or "", _plain(prompt), arm])


def draft_seed_from_request_seed(seed: object) -> int:
    """Draft seed of a request that carries only `SamplingParams.seed`, or a draft seed that is no integer."""
    return _hash63(_FALLBACK, [str(seed)])


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): uint64 -> uint64, a bijection."""
    x = x.astype(np.uint64, copy=True)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def noise_seeds(seeds: np.ndarray, positions: np.ndarray, index: np.ndarray | int, stream: int) -> np.ndarray:
    """One noise seed a row, a pure function of its arguments.

    Args:
        seeds: uint64 [n], the rows' request seeds.
        positions: int64 [n], where in its sequence each row draws.
        index: which draw at that position (int, or int64 [n]).
        stream: `DRAFT_STREAM` or `TARGET_STREAM`.

    Returns:
        int64 [n], each in [0, 2**63).
    """
    h = mix64(seeds.astype(np.uint64) ^ np.uint64(stream))
    h = mix64(h + np.asarray(positions).astype(np.uint64))
    h = mix64(h + np.asarray(index).astype(np.uint64))
    return (h >> np.uint64(1)).astype(np.int64)


def as_uint64(seed: int) -> int:
    """A request's seed (any int64) as an unsigned 64-bit number."""
    return int(seed) & _MASK
