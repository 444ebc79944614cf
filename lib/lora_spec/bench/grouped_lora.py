"""How much faster the grouped CPU LoRA kernels are than vLLM's own, at the shapes of SmolLM2-135M."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from lora_spec.errors import EngineError

# Inputs and output slices of one decoder layer: q|k|v, o, gate|up, down.
SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (576, (576, 192, 192)),
    (576, (576,)),
    (576, (1536, 1536)),
    (1536, (576,)),
)
ROWS = 32
RANK = 64
GOAL = 3.0


def run(repeats: int = 9) -> dict[str, Any]:
    """Time the LoRA work of one decoder layer with vLLM's kernels and with the grouped ones, in turn.

    32 rows of one rank-64 adapter in bf16, each slice shrunk and expanded as vLLM's CPU wrapper does it.

    Args:
        repeats: rounds; each times stock, then grouped, and the ratio is that of the medians.

    Returns:
        {"ratios": {"grouped_vs_stock_kernel": {"value", "goal", "sense"}},
        "seconds_per_layer": {side: median}}.

    Raises:
        EngineError: the two sides disagree beyond bf16 rounding.
    """
    import torch

    from lora_spec.serving import grouped_lora

    sides: dict[str, dict[str, Callable[..., None]]] = {
        "stock": grouped_lora.stock_kernels(),
        "grouped": {kernel.__name__: kernel for kernel in grouped_lora.KERNELS},
    }
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    layer = [
        (
            normal(ROWS, inputs),
            [
                (normal(1, RANK, inputs) / inputs**0.5, normal(1, width, RANK) / RANK**0.5)
                for width in outputs
            ],
        )
        for inputs, outputs in SHAPES
    ]
    indices = torch.zeros(ROWS, dtype=torch.long)

    def apply(kernels: dict[str, Callable[..., None]]) -> list[torch.Tensor]:
        results = []
        for x, slices in layer:
            y = x.new_zeros(ROWS, sum(b.shape[1] for _, b in slices))
            offset = 0
            for a, b in slices:
                shrunk = torch.zeros(ROWS, RANK)
                kernels["bgmv_shrink"](x, a, shrunk, indices, 1.0)
                kernels["bgmv_expand_slice"](shrunk, b, y, indices, offset, b.shape[1], True)
                offset += b.shape[1]
            results.append(y)
        return results

    for ours, theirs in zip(apply(sides["grouped"]), apply(sides["stock"]), strict=True):
        if not torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2):
            raise EngineError("the grouped kernels disagree with vLLM's", where=f"shape {tuple(ours.shape)}")

    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, kernels in sides.items():
            start = time.perf_counter()
            apply(kernels)
            times[side].append(time.perf_counter() - start)
    seconds = {side: statistics.median(values) for side, values in times.items()}
    ratio = {"value": seconds["stock"] / seconds["grouped"], "goal": GOAL, "sense": ">="}
    return {"ratios": {"grouped_vs_stock_kernel": ratio}, "seconds_per_layer": seconds}
