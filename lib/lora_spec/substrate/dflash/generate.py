"""The target's continuations of prompts of one length, a batch at a time (torch, transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lora_spec.substrate.dflash.prompts import Prompt
from lora_spec.substrate.torch_tier import import_torch

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def load_target(directory: Path) -> Any:
    """The target in bfloat16 for inference, on one thread with deterministic kernels.

    Raises:
        MissingTierError: torch or transformers is not installed.
    """
    torch, transformers = import_torch("the drafter's data")
    compute_alike()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, local_files_only=True, attn_implementation="sdpa"
    )
    return model.eval().requires_grad_(False)


def compute_alike() -> None:
    """One thread and deterministic kernels, so that a run can be repeated bit for bit.

    Fresh memory is not filled: that takes a tenth of the time, and nothing here reads it.
    """
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def continue_prompts(
    model: Any, prompts: Sequence[Prompt], count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue a batch of prompts of one length by up to ``count`` tokens, each at its own temperature.

    Returns:
        Token ids, int64 [batch, prompt + count], and lengths, int64 [batch]: prompt and continuation up to
        and with the end-of-text token, after which a row repeats that token.
    """
    import torch

    end = model.config.eos_token_id
    rows = torch.tensor([prompt.ids for prompt in prompts])
    temperatures = torch.tensor([prompt.temperature for prompt in prompts]).unsqueeze(1)
    lengths = torch.full((len(prompts),), rows.shape[1])
    running = torch.ones(len(prompts), dtype=torch.bool)
    cache, fed = _make_cache(model.config.num_hidden_layers, rows.shape[1] + count), rows
    for _ in range(count):
        with torch.inference_mode():
            # Rows of the last position first: a product with a slice would copy the matrix for every row.
            last = model.model(fed, past_key_values=cache).last_hidden_state[:, -1].contiguous()
            logits = model.lm_head(last)
        following = _draw(logits, temperatures, generator)
        following[~running] = end
        lengths += running
        running &= following != end
        fed = following.unsqueeze(1)
        rows = torch.cat([rows, fed], dim=1)
    return rows, lengths


def _make_cache(layers: int, capacity: int) -> Any:
    """A cache of keys and values that is allocated once.

    The usual one is joined anew for every token: that takes a third of the time, and gigabytes of freed
    memory that the allocator keeps.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class Allocated(DynamicLayer):
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                batch, heads, _, size = key_states.shape
                self.rooms = [key_states.new_empty(batch, heads, capacity, size) for _ in range(2)]
                self.is_initialized, start = True, 0
            else:
                start = self.keys.shape[-2]
            stop = start + key_states.shape[-2]
            for room, states in zip(self.rooms, (key_states, value_states), strict=True):
                room[:, :, start:stop] = states
            self.keys, self.values = (room[:, :, :stop] for room in self.rooms)
            return self.keys, self.values

    return Cache(layers=[Allocated() for _ in range(layers)])


def _draw(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token a row, int64 [batch]: argmax where the temperature is 0, else sampled."""
    import torch

    drawn = logits.argmax(-1)
    hot = temperatures.squeeze(1) > 0
    if hot.any():
        weights = (logits[hot].float() / temperatures[hot]).softmax(-1)
        drawn[hot] = torch.multinomial(weights, 1, generator=generator).squeeze(1)
    return drawn
