"""From engine completions to the rows of a unit's ``requests`` table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pandas as pd

from lora_spec.acceptance import al_emitted, al_vllm, censor_requests
from lora_spec.measure.engine import Completion


def token_sha256(tokens: Sequence[int]) -> str:
    """Hex sha256 over the tokens as little-endian int32."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def unique_ratio(tokens: Sequence[int]) -> float:
    """Distinct tokens / tokens: low where an output loops. NaN of an empty output."""
    return len(set(tokens)) / len(tokens) if len(tokens) else float("nan")


def request_rows(
    completions: Sequence[Completion],
    *,
    arm: str,
    adapter: str,
    prompt_set: str,
    prompt_indices: Sequence[int],
    decoding: str,
    k: int,
) -> pd.DataFrame:
    """One row a request, in order; counts of the last draft step are censored at emission.

    Raises:
        EvidenceError: counts that contradict the output.
    """
    steps = [c.steps_accepted for c in completions]
    drafted = [c.steps_drafted for c in completions]
    lengths = [len(c.tokens) for c in completions]
    counts = censor_requests(steps, lengths, k, drafted)
    return pd.DataFrame(
        {
            "arm": arm,
            "adapter": adapter,
            "prompt_set": prompt_set,
            "prompt_index": np.asarray(prompt_indices, dtype=np.int32),
            "decoding": decoding,
            "k": np.int8(k),
            "steps_accepted": [np.asarray(s, dtype=np.int8) for s in steps],
            "drafted": np.asarray([sum(d) for d in drafted], dtype=np.int32),
            "output_tokens": np.asarray(lengths, dtype=np.int32),
            "finish_reason": [c.finish_reason for c in completions],
            "output_sha256": [token_sha256(c.tokens) for c in completions],
            "tokens": [np.asarray(c.tokens, dtype=np.int32) for c in completions],
            "accepted_emitted": counts["accepted_emitted"].to_numpy(dtype=np.int32),
            "rejections": counts["rejections"].to_numpy(dtype=np.int32),
            "al_vllm": [al_vllm(sum(s), len(s)) for s in steps],
            "al_emitted": [al_emitted(n, len(s)) for n, s in zip(lengths, steps, strict=True)],
            "unique_ratio": np.asarray([unique_ratio(c.tokens) for c in completions], dtype=np.float32),
            "latency_s": np.asarray([c.latency_s for c in completions], dtype=np.float32),
        }
    )
