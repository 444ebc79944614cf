"""Seeds follow from identities and positions, and stay apart."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_spec import serving
from lora_spec.errors import EngineError
from lora_spec.serving import seeds


def test_derived_seeds_are_pinned():
    # Published outputs depend on these: a change here changes every sampled token.
    assert serving.derive_draft_seed(0, "python-r8", [1, 2, 3], "adapted") == 2897131703312328250
    assert serving.derive_target_seed(0, "python-r8", [1, 2, 3], "adapted") == 5221403456999343646


@given(st.integers(), st.text(max_size=8), st.lists(st.integers(0, 50000), max_size=8), st.text(max_size=4))
def test_derived_seeds_are_63_bit_and_domains_differ(seed, adapter, prompt, arm):
    draft = serving.derive_draft_seed(seed, adapter, prompt, arm)
    target = serving.derive_target_seed(seed, adapter, prompt, arm)
    assert 0 <= draft < 2**63 and 0 <= target < 2**63 and draft != target
    assert draft == serving.derive_draft_seed(seed, adapter, np.array(prompt, dtype=np.int64), arm)


def test_every_part_counts():
    calls = [
        (0, "a", [1, 2], "x"),
        (1, "a", [1, 2], "x"),
        (0, "b", [1, 2], "x"),
        (0, None, [1, 2], "x"),
        (0, "a", [12], "x"),
        (0, "a", "1,2", "x"),
        (0, "a", [1, 2], "y"),
        (0, "ax", [1, 2], ""),
    ]
    assert len({serving.derive_draft_seed(*call) for call in calls}) == len(calls)
    assert serving.derive_draft_seed(0, None, [1], "x") == serving.derive_draft_seed(0, "", [1], "x")


def test_noise_seeds_are_distinct_and_row_wise():
    request = np.repeat(np.arange(50, dtype=np.uint64), 40)
    position = np.tile(np.arange(40), 50)
    per_index = [seeds.noise_seeds(request, position, i, seeds.DRAFT_STREAM) for i in range(4)]
    target = seeds.noise_seeds(request, position, 0, seeds.TARGET_STREAM)
    everything = np.concatenate([*per_index, target])
    assert len(np.unique(everything)) == len(everything) and everything.min() >= 0
    assert (
        len(np.unique(everything & 0xFFFFFFFF)) >= len(everything) - 3
    )  # torch's CPU generator keeps 32 bits
    shuffled = np.random.default_rng(0).permutation(len(request))
    again = seeds.noise_seeds(request[shuffled], position[shuffled], 2, seeds.DRAFT_STREAM)
    np.testing.assert_array_equal(again, per_index[2][shuffled])


def test_noise_seed_bits_are_balanced():
    bits = seeds.noise_seeds(np.full(4000, 7, np.uint64), np.arange(4000), 0, seeds.DRAFT_STREAM)
    ones = np.array([(bits >> b & 1).mean() for b in range(63)])
    assert np.abs(ones - 0.5).max() < 4.5 * 0.5 / np.sqrt(4000)


def test_importing_the_room_imports_neither_vllm_nor_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; import lora_spec.serving as s; "
        "print(sorted(set(s.status().values())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['not installed']"


def test_the_plugin_is_inert_unless_asked(monkeypatch):
    installed, watching = [], []
    monkeypatch.setattr(serving, "install_all", lambda fixes: installed.append(tuple(fixes)))
    monkeypatch.setattr("lora_spec.serving.plugin.watch", lambda: watching.append(True))
    monkeypatch.delenv("LORA_SPEC_SERVING_ACTIVE", raising=False)
    for value in (None, "", "0", " "):
        monkeypatch.delenv(serving.ENV, raising=False)
        if value is not None:
            monkeypatch.setenv(serving.ENV, value)
        serving.register()
    assert installed == []
    assert len(watching) == 4, "it looks at the arguments of engines, and nothing else"
    for value in ("1", "all", "expand, draft_seeds"):
        monkeypatch.setenv(serving.ENV, value)
        serving.register()
    assert installed == [serving.FIXES, serving.FIXES, ("expand", "draft_seeds")]


def test_unknown_fixes_are_refused():
    with pytest.raises(EngineError, match="unknown serving fix"):
        serving.install_all(["expnad"])
