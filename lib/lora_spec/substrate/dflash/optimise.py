"""The training loop: anchors drawn, loss taken, parameters moved; saved and continued bit for bit.

It knows nothing of what the parameters are: ``weights_of`` turns them into a checkpoint's weights, so a
whole drafter and an adapter on one are trained alike. All randomness of a step follows from the seed and the
step's number.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_spec.errors import CheckpointError
from lora_spec.files import atomic_path
from lora_spec.substrate.dflash.config import TrainParams
from lora_spec.substrate.dflash.loss import block_loss, candidates, wanted_tokens
from lora_spec.substrate.dflash.model import Shape, block_hidden
from lora_spec.substrate.dflash.prompts import unit_seed

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Rows = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Material:
    """What is learnt from.

    Attributes:
        tokens: int64 [sequences, length].
        lengths: valid tokens of each, int64 [sequences].
        rows: taps, most probable tokens and their log-probabilities of the sequences asked for (see
            ``TapStore.rows``).
        first: first position an anchor may have: where the target's own tokens begin.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    rows: Rows
    first: int


@dataclass(frozen=True)
class Reader:
    """How the drafter meets its target: embeddings, output matrix, and the embedding of masks.

    ``embedding`` and ``head`` are [vocabulary, hidden] in the dtype to compute in.
    """

    shape: Shape
    embedding: torch.Tensor
    head: torch.Tensor
    mask_token_id: int

    def drafted(
        self, weights: Tensors, taps: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor, drafts: int
    ) -> torch.Tensor:
        """Hidden states of the drafted positions, [batch, anchors, drafts, hidden].

        They are contiguous: a product with a slice would copy the output matrix for every block.
        """
        import torch

        mask = self.embedding[self.mask_token_id]
        known = self.embedding[tokens.gather(1, anchors)].unsqueeze(2)
        block = torch.cat([known, mask.expand(*anchors.shape, drafts, -1)], dim=2)
        return block_hidden(weights, self.shape, taps, block, anchors)[:, :, 1:].contiguous()


def draw_anchors(
    lengths: torch.Tensor, first: int, last: int, count: int, generator: torch.Generator
) -> torch.Tensor:
    """``count`` distinct positions in [first, last] of each sequence, int64 [batch, count], ascending.

    Those that a token follows are preferred; where a sequence has too few, the others have no weight in the
    loss.
    """
    import torch

    positions = torch.arange(first, last + 1)
    keys = torch.rand(len(lengths), len(positions), generator=generator)
    keys = keys.masked_fill(positions + 1 >= lengths.unsqueeze(1), -1.0)
    return first + keys.topk(count, dim=1).indices.sort(dim=1).values


def batch_numbers(sequences: int, batch: int, step: int, seed: int) -> list[int]:
    """Sequences of ``step`` (from 0): shuffled passes over all of them, one after the other."""
    places = range(step * batch, (step + 1) * batch)
    return [_shuffled(sequences, place // sequences, seed)[place % sequences] for place in places]


@functools.lru_cache(maxsize=4)
def _shuffled(sequences: int, epoch: int, seed: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(unit_seed(seed, f"epoch-{epoch}"))
    return torch.randperm(sequences, generator=generator).tolist()


def rate_factor(step: int, params: TrainParams) -> float:
    """Factor on the learning rate at 0-based ``step``: linear warm-up times a cosine to ``final_rate``."""
    fall = 0.5 * (1 + math.cos(math.pi * step / params.steps))
    return min(1.0, (step + 1) / params.warmup_steps) * (params.final_rate + (1 - params.final_rate) * fall)


def hot_tokens(material: Material, count: int) -> torch.Tensor:
    """The ``count`` commonest tokens that the target wrote, int64, ties by number."""
    import torch

    at = torch.arange(material.tokens.shape[1])
    written = material.tokens[(at >= material.first) & (at < material.lengths.unsqueeze(1))]
    return torch.bincount(written).argsort(descending=True, stable=True)[:count]


@dataclass
class Trainer:
    """A training run.

    Attributes:
        parameters: leaves that are trained, float32.
        weights_of: parameters to the checkpoint's weights, differentiable.
        history: one mapping a checkpoint: ``step``, mean ``loss`` since the last one, and what was reported.
        seconds: CPU time of all steps, over restarts.
    """

    parameters: dict[str, torch.Tensor]
    weights_of: Callable[[Tensors], Tensors]
    reader: Reader
    material: Material
    params: TrainParams
    seed: int
    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch

        for parameter in self.parameters.values():
            parameter.requires_grad_()
        matrices = [p for p in self.parameters.values() if p.dim() == 2]
        others = [p for p in self.parameters.values() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": self.params.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=self.params.learning_rate, betas=self.params.betas)
        self.hot = hot_tokens(self.material, self.params.hot)

    def loss(self, step: int) -> torch.Tensor:
        """Loss of one step's batch at the parameters as they are."""
        import torch

        params, material = self.params, self.material
        generator = torch.Generator().manual_seed(unit_seed(self.seed, f"step-{step}"))
        numbers = batch_numbers(len(material.tokens), params.batch, step, self.seed)
        drafts = params.drafts[step % len(params.drafts)]
        tokens, lengths = material.tokens[numbers], material.lengths[numbers]
        last = tokens.shape[1] - 1 - drafts
        anchors = draw_anchors(lengths, material.first, last, params.anchors, generator)
        taps, top_ids, top_logprobs = material.rows(numbers)
        wanted = wanted_tokens(
            tokens, lengths, anchors, top_ids, top_logprobs, drafts=drafts, decay=params.position_decay
        )
        chosen = candidates(wanted, self.hot, len(self.reader.head), params.random, generator)
        hidden = self.reader.drafted(self.weights_of(self.parameters), taps, tokens, anchors, drafts)
        return block_loss(hidden, self.reader.head, wanted, chosen, distill=params.distill.weight)

    def run(self, checkpoint: Path, report: Callable[[Trainer], dict[str, Any]]) -> None:
        """Train to the last step, saving to ``checkpoint`` on the way.

        Args:
            report: asked at every checkpoint; its answer goes into the history.

        Raises:
            CheckpointError: the loss is not finite.
        """
        import torch

        losses: list[float] = []
        started = time.process_time()
        while self.step < self.params.steps:
            loss = self.loss(self.step)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise CheckpointError(f"the loss is not finite at step {self.step + 1}")
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.params.max_grad_norm)
            for group in self.optimiser.param_groups:
                group["lr"] = self.params.learning_rate * rate_factor(self.step, self.params)
            self.optimiser.step()
            self.step += 1
            if self.step % self.params.save_every == 0 or self.step == self.params.steps:
                self.seconds += time.process_time() - started
                entry = {"step": self.step, "loss": round(sum(losses) / len(losses), 5)}
                self.history.append(entry | report(self))
                self.save(checkpoint)
                losses, started = [], time.process_time()

    def save(self, path: Path) -> None:
        """Write parameters, optimiser and history to one file, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {}
        for name, parameter in self.parameters.items():
            state = self.optimiser.state[parameter]
            tensors[f"parameter.{name}"] = parameter.detach()
            tensors[f"first.{name}"], tensors[f"second.{name}"] = state["exp_avg"], state["exp_avg_sq"]
        values = {"step": self.step, "seconds": self.seconds, "history": self.history}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"state": json.dumps(values)})

    def load(self, path: Path) -> None:
        """Continue from a file of :meth:`save`."""
        import torch
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()["state"])
            for name, parameter in self.parameters.items():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"parameter.{name}"))
                self.optimiser.state[parameter] = {
                    "step": torch.tensor(float(values["step"])),
                    "exp_avg": file.get_tensor(f"first.{name}"),
                    "exp_avg_sq": file.get_tensor(f"second.{name}"),
                }
        self.step, self.seconds, self.history = values["step"], values["seconds"], values["history"]
