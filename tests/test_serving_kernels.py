"""The repaired expansion and the grouped LoRA kernels against plain oracles, without an engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

import torch  # noqa: E402

from lora_spec.bench import grouped_lora as bench  # noqa: E402
from lora_spec.serving import cpu_fixes, draft_seeds, grouped_lora  # noqa: E402


@pytest.fixture(autouse=True)
def _fixes_are_taken_back() -> Any:
    yield
    for module in (cpu_fixes, grouped_lora, draft_seeds):
        module.uninstall()


# --- expand ---


def _expand_oracle(x: torch.Tensor, totals: list[int], replace_from: float, replace_to: float) -> list[float]:
    counts = [b - a for a, b in pairwise([0, *totals])]
    values = [replace_to if v == replace_from else v for v in x.tolist()]
    return [v for v, n in zip(values, counts, strict=True) for _ in range(n)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 0.8125, 1.0, 40.0]), st.integers(0, 6)), min_size=1, max_size=9
    ),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]),
    st.sampled_from([(0, 1), (0, 0), (1, 7)]),
)
def test_expand_equals_the_oracle(rows, dtype, replacement):
    x = torch.tensor([value for value, _ in rows]).to(dtype)
    totals = np.cumsum([count for _, count in rows]).tolist()
    cu = torch.tensor(totals, dtype=torch.int32)
    out = cpu_fixes.expand_batch_to_tokens(x, cu, totals[-1], *replacement)
    assert out.dtype == dtype
    assert out.tolist() == _expand_oracle(x, totals, *replacement)


def test_stock_expansion_is_wrong_and_the_installed_one_is_used():
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.expand_batch_to_tokens
    assert cpu_fixes.stock_is_wrong()
    assert cpu_fixes.status() == "not installed"
    assert cpu_fixes.install() == cpu_fixes.install() == cpu_fixes.status() == "applied"
    assert rejection_sampler.expand_batch_to_tokens is cpu_fixes.expand_batch_to_tokens
    cpu_fixes.uninstall()
    assert rejection_sampler.expand_batch_to_tokens is stock


def test_it_steps_aside_where_stock_is_right(monkeypatch):
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    def right(output, x, cu, replace_from, replace_to, MAX_NUM_TOKENS=None):
        output.copy_(cpu_fixes.expand_batch_to_tokens(x, cu, len(output), replace_from, replace_to))

    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", right)
    stock = rejection_sampler.expand_batch_to_tokens
    assert cpu_fixes.install() == "not needed"
    assert rejection_sampler.expand_batch_to_tokens is stock


# --- grouped LoRA ---


def _naive(x, w, out, indices, columns, scale, add) -> torch.Tensor:
    """Row by row, in float64; base rows untouched."""
    want = out.double()
    w = w.squeeze(1) if w.dim() == 4 else w
    for row, adapter in enumerate(indices.tolist()):
        if adapter >= 0:
            product = scale * (w[adapter].double() @ x[row].double())[: columns.stop - columns.start]
            want[row, columns] = product + (want[row, columns] if add else 0)
    return want


def _close(have: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-2 if have.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(have.double(), want, rtol=tolerance, atol=tolerance)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-1, 2), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_grouped_kernels_equal_a_row_by_row_oracle(adapters, dtype, add, stacked, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, inputs, rank, width = len(adapters), 24, 8, 20

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    indices = torch.tensor(adapters)
    x = normal(rows, inputs).to(dtype)
    a, b = (normal(3, rank, inputs) / 5).to(dtype), (normal(3, width, rank) / 3).to(dtype)
    if stacked:
        a, b = a.unsqueeze(1), b.unsqueeze(1)

    shrunk = normal(rows, rank)  # float32, as vLLM's buffer
    want = _naive(x, a, shrunk, indices, slice(0, rank), 0.5, False)
    grouped_lora.bgmv_shrink(x, a, shrunk, indices, 0.5)
    assert shrunk.dtype == torch.float32
    _close(shrunk, want)

    for padding in (0, 3):  # the output may be wider, or the adapter padded
        y = normal(rows, width + padding).to(dtype)
        want = _naive(shrunk, b, y, indices, slice(0, width), 1.0, add)
        grouped_lora.bgmv_expand(shrunk, b, y, indices, add)
        _close(y, want)
    y = normal(rows, width - 4).to(dtype)
    want = _naive(shrunk, b, y, indices, slice(0, width - 4), 1.0, add)
    grouped_lora.bgmv_expand(shrunk, b, y, indices, add)
    _close(y, want)

    y = normal(rows, width + 9).to(dtype)
    want = _naive(shrunk, b, y, indices, slice(5, 5 + width), 1.0, add)
    grouped_lora.bgmv_expand_slice(shrunk, b, y, indices, 5, width, add)
    _close(y, want)


def test_stock_kernels_give_base_rows_the_last_adapter():
    x, w, indices = torch.ones(2, 4), torch.ones(2, 3, 4), torch.tensor([0, -1])
    stock, ours = torch.zeros(2, 3), torch.zeros(2, 3)
    grouped_lora.stock_kernels()["bgmv_shrink"](x, w, stock, indices, 1.0)
    grouped_lora.bgmv_shrink(x, w, ours, indices, 1.0)
    assert stock[1].tolist() == [4.0] * 3
    assert ours[1].tolist() == [0.0] * 3 and ours[0].tolist() == stock[0].tolist()


def test_segmented_kernels_follow():
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    stock = grouped_lora.stock_kernels()
    assert grouped_lora.install() == grouped_lora.install() == "applied"
    assert grouped_lora.stock_kernels() == stock
    assert punica_cpu.bgmv_shrink is grouped_lora.bgmv_shrink
    x, w, out = torch.ones(5, 4), torch.ones(2, 3, 4), torch.zeros(5, 3)
    starts, lengths = torch.tensor([0, 2]), torch.tensor([2, 3])
    lora_ops.sgmv_shrink(x, w, out, starts, lengths, torch.tensor([-1, 1]), 2, 3, 5, 2.0)
    assert out[:2].abs().sum() == 0 and out[2:].tolist() == [[8.0] * 3] * 3
    grouped_lora.uninstall()
    assert punica_cpu.bgmv_shrink is stock["bgmv_shrink"]


def test_the_grouped_kernels_are_at_least_three_times_as_fast():
    ratio = bench.run(repeats=3)["ratios"]["grouped_vs_stock_kernel"]
    assert ratio["value"] >= ratio["goal"] == 3


# --- drafts ---


def _step(seeds: list[int | None], positions: list[int]) -> draft_seeds._DraftStep:
    return draft_seeds._DraftStep(
        seeds=np.array([s or 0 for s in seeds], dtype=np.uint64),
        seeded=np.array([s is not None for s in seeds]),
        positions=np.array(positions),
    )


def test_a_row_draws_the_same_whatever_is_beside_it():
    torch.manual_seed(0)
    logits = torch.randn(6, 200)
    temperature = torch.full((6,), 0.8)
    args = ([11, 12, 13, 14, 15, 16], [5, 9, 5, 7, 80, 6])
    together, probabilities = draft_seeds.draw_drafts(logits, temperature, True, _step(*args))
    torch.testing.assert_close(probabilities, (logits / 0.8).softmax(-1))
    for row in range(6):
        step = _step([args[0][row]], [args[1][row]])
        alone, _ = draft_seeds.draw_drafts(logits[row : row + 1], temperature[:1], True, step)
        assert alone.item() == together[row].item()
        assert step.drawn == 1


def test_greedy_rows_draft_their_argmax_and_unseeded_rows_use_the_global_generator():
    logits = torch.zeros(3, 50)
    logits[0, 17] = 0.01
    temperature = torch.tensor([0.0, 1.0, 1.0])
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws += [
            draft_seeds.draw_drafts(logits, temperature, False, _step([5, 5, None], [1, 1, 1]))[0].tolist()
        ]
    free = draft_seeds.draw_drafts(logits, temperature, False, _step([5, 5, None], [1, 1, 1]))[0].tolist()
    assert draws[0] == draws[1] and draws[0][0] == 17
    assert free[:2] == draws[0][:2] and free[2] != draws[0][2]


def test_parallel_drafts_equal_sequential_ones():
    torch.manual_seed(1)
    logits = torch.randn(2, 3, 40)
    temperature = torch.tensor([0.7, 1.3])
    parallel, _ = draft_seeds.draw_drafts(logits.reshape(6, 40), temperature, True, _step([1, 2], [4, 4]))
    step = _step([1, 2], [4, 4])
    one_by_one = [draft_seeds.draw_drafts(logits[:, i], temperature, True, step)[0] for i in range(3)]
    assert parallel.view(2, 3).tolist() == torch.stack(one_by_one, dim=1).tolist()


@pytest.mark.parametrize("fused", [True, False])
def test_rows_are_drawn_from_their_softmax(fused, monkeypatch):
    import vllm._custom_ops  # noqa: F401  (loads the fused kernel)

    assert draft_seeds._has_fused_kernel(torch.zeros(1))
    if not fused:  # the path of devices without it
        monkeypatch.setattr(draft_seeds, "_has_fused_kernel", lambda logits: False)
    rows = 20000 if fused else 5000
    logits = torch.tensor([0.0, 1.0, -2.0, 2.5, 0.5])
    seeds = torch.from_numpy(
        draft_seeds.noise_seeds(np.zeros(rows, np.uint64), np.arange(rows), 0, draft_seeds.DRAFT_STREAM)
    )
    tokens = draft_seeds.sample_rows(logits.repeat(rows, 1), seeds)
    want = logits.softmax(-1).double()
    share = torch.bincount(tokens, minlength=5).double() / rows
    assert ((share - want).abs() < 5 * (want * (1 - want) / rows).sqrt()).all()


def test_the_draft_seed_of_a_request():
    from vllm import SamplingParams

    seed = draft_seeds.request_draft_seed
    assert seed(None) is seed(SamplingParams()) is None
    assert seed(SamplingParams(seed=3, extra_args={"draft_seed": 9})) == 9
    assert seed(SamplingParams(seed=3)) == seed(SamplingParams(seed=3, extra_args={"x": 1})) not in (3, None)
    assert seed(SamplingParams(seed=3)) != seed(SamplingParams(seed=4))
    assert (
        seed(SamplingParams(extra_args={"draft_seed": "nine"})) >= 0
    )  # a bad request must not stop the engine
