"""The drafter's trained parameters, and the checkpoint's weights they stand for.

Two things are trained otherwise than they are stored. Taps differ in size by orders of magnitude between
channels (up to 28,288 in one at the first token), so ``fc`` is trained for taps divided by each channel's
root mean square, and the division is folded into its columns. And one ``k_norm`` serves all layers: vLLM 0.32
norms the context's keys of all layers with the first layer's weight on CPU, silently (docs/research_log.md,
12); with equal weights that is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lora_spec.errors import ParamsError
from lora_spec.models import load_models
from lora_spec.substrate.dflash.config import DflashParams
from lora_spec.substrate.dflash.model import Shape

if TYPE_CHECKING:
    import torch

K_NORM = "k_norm.weight"


def drafter_shape(params: DflashParams) -> Shape:
    """Shape of the declared drafter.

    Raises:
        ParamsError: it does not fit its target.
    """
    models, model = load_models(), params.model
    drafter, target = models.model(params.drafter).geometry, models.model(params.target).geometry
    if drafter is None or target is None:
        raise ParamsError("drafter and target need a geometry", where="params/models.yaml")
    if (drafter.hidden_size, drafter.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ParamsError(
            "the drafter must have its target's hidden size and vocabulary", where=params.drafter
        )
    if max(model.taps) >= target.num_hidden_layers or model.mask_token_id >= target.vocab_size:
        raise ParamsError("a tap or the mask token is outside the target", where="params/dflash.yaml: model")
    sizes = drafter.model_dump(exclude={"vocab_size", "tie_word_embeddings"})
    return Shape(**sizes, taps=len(model.taps), rms_norm_eps=model.rms_norm_eps, rope_theta=model.rope_theta)


def _shared(name: str) -> bool:
    return name.endswith("k_norm.weight")


def initial_parameters(
    shape: Shape, final_norm: torch.Tensor, *, std: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Parameters to train, float32: random matrices, norms of ones.

    Args:
        final_norm: start of the last norm, [hidden].
        std: standard deviation of matrices, but for ``fc`` (1/√inputs).
    """
    import torch

    parameters = {}
    for name, (rows, columns) in shape.matrices().items():
        spread = 1 / math.sqrt(columns) if name == "fc.weight" else std
        parameters[name] = torch.randn(rows, columns, generator=generator) * spread
    for name, size in shape.norms().items():
        parameters[K_NORM if _shared(name) else name] = torch.ones(size)
    parameters["norm.weight"] = final_norm.float().clone()
    return parameters


def checkpoint_weights(
    parameters: Mapping[str, torch.Tensor], shape: Shape, scale: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The weights that ``parameters`` stand for, as a checkpoint stores them and the forward pass takes them.

    Differentiable: training and the exported drafter compute with the very same numbers.

    Args:
        scale: what taps are divided by in training, float32 [taps * hidden].
    """
    weights = {}
    for name in [*shape.matrices(), *shape.norms()]:
        parameter = parameters[K_NORM if _shared(name) else name]
        weights[name] = (parameter / scale if name == "fc.weight" else parameter).to(dtype)
    return weights


def tap_scale(taps: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Root mean square of every channel over valid positions but the first, float32 [channels].

    The first token of a text is left out: its outliers would be all that the scale shows.

    Args:
        taps: [sequences, length, channels]. lengths: valid positions of each sequence.
    """
    import torch

    at = torch.arange(taps.shape[1])
    chosen = taps[(at >= 1) & (at < lengths.unsqueeze(1))]
    return chosen.float().square().mean(0).sqrt().clamp_min(1e-6)
