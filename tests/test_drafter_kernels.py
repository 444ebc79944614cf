"""The drafter's LoRA kernels against the plain formula, for any mixture of rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lora_spec.serving import drafter_kernels  # noqa: E402

pytestmark = pytest.mark.torch

SLOTS, RANK, INPUTS = 3, 4, 10


def module(outs: tuple[int, ...], seed: int = 0) -> SimpleNamespace:
    """A wrapped layer as vLLM makes it, with an adapter of half the rank in the last slot."""
    generator = torch.Generator().manual_seed(seed)
    a = [torch.randn(SLOTS, 1, RANK, INPUTS, generator=generator) for _ in outs]
    b = [torch.randn(SLOTS, 1, out, RANK, generator=generator) for out in outs]
    for down in a:
        down[-1, :, 2:] = 0
    return SimpleNamespace(lora_a_stacked=tuple(a), lora_b_stacked=tuple(b))


def expected(y: torch.Tensor, x: torch.Tensor, layer: SimpleNamespace, slots: np.ndarray) -> torch.Tensor:
    y = y.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            delta = [
                b[slot, 0] @ (a[slot, 0] @ x[row])
                for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            ]
            y[row] += torch.cat(delta)
    return y


@settings(deadline=None, max_examples=60)
@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=12),
    outs=st.sampled_from([(6,), (6, 2, 2), (5, 5)]),
    columns=st.sampled_from([0, drafter_kernels.MAX_COLUMNS]),
)
def test_each_row_gets_its_own_adapter_and_base_rows_nothing(slots, outs, columns):
    layer = module(outs)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(slots), INPUTS, generator=generator)
    y = torch.randn(len(slots), sum(outs), generator=generator)
    slots = np.array(slots)
    wanted = expected(y, x, layer, slots)
    packed = drafter_kernels.lay_out(layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_kernels, "MAX_COLUMNS", columns)
        rows = drafter_kernels.sort_rows(slots, SLOTS, RANK)
    assert (rows.mask is not None) == (columns > 0 and len(set(slots.tolist()) - {-1}) > 1)
    before = y.clone()
    drafter_kernels.add(y, x, packed, rows)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    base = torch.from_numpy(slots < 0)
    assert torch.equal(y[base], before[base])


def test_what_is_written_to_a_slot_is_what_is_multiplied():
    layer = module((6, 2))
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    packed = drafter_kernels.lay_out(layer)
    for old, new in zip((*a, *b), (*layer.lora_a_stacked, *layer.lora_b_stacked), strict=True):
        assert torch.equal(old, new)
    layer.lora_a_stacked[1][2, 0, :1].fill_(7.0)
    layer.lora_b_stacked[0][1] = 0
    assert (packed.down[2, 1, 0] == 7).all() and not packed.up[0][:, 1].any()
    assert packed.up[0][:, 0].any() and not (packed.down[1] == 7).any()


@pytest.mark.parametrize("slots", [[0, 0], [0, 1]])
def test_rows_of_another_forward_are_refused(slots):
    rows = drafter_kernels.sort_rows(np.array(slots), SLOTS, RANK)
    packed = drafter_kernels.lay_out(module((6,)))
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"2 rows for {count} rows"):
            drafter_kernels.add(torch.zeros(count, 6), torch.zeros(count, INPUTS), packed, rows)


@pytest.mark.parametrize("slots", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_bfloat16_is_as_exact_as_stock(slots):
    from lora_spec.serving.grouped_lora import bgmv_expand_slice, bgmv_shrink

    exact, layer = module((6, 2, 2)), module((6, 2, 2))
    layer.lora_a_stacked = tuple(a.bfloat16() for a in layer.lora_a_stacked)
    layer.lora_b_stacked = tuple(b.bfloat16() for b in layer.lora_b_stacked)
    exact.lora_a_stacked = tuple(a.float() for a in layer.lora_a_stacked)
    exact.lora_b_stacked = tuple(b.float() for b in layer.lora_b_stacked)
    x = torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = torch.zeros(4, 10, dtype=torch.bfloat16)
    wanted = expected(y.float(), x.float(), exact, np.array(slots))
    stock = y.clone()
    start = 0
    for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        hidden = torch.zeros(4, RANK)
        bgmv_shrink(x, a, hidden, torch.tensor(slots))
        bgmv_expand_slice(hidden, b, stock, torch.tensor(slots), start, b.shape[2])
        start += b.shape[2]
    drafter_kernels.add(
        y, x, drafter_kernels.lay_out(layer), drafter_kernels.sort_rows(np.array(slots), SLOTS, RANK)
    )
    error = {name: (got.float() - wanted).norm() for name, got in (("ours", y), ("stock", stock))}
    assert error["ours"] <= 1.5 * error["stock"] + 1e-6
    assert error["ours"] < 0.02 * wanted.norm()
