"""The target's continuations of prompts of one length, a batch at a time (torch, transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lora_spec.errors import MissingTierError
from lora_spec.substrate.dflash.prompts import Prompt

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def load_target(directory: Path) -> Any:
    """The target in bfloat16 for inference, on one thread with deterministic kernels.

    Raises:
        MissingTierError: torch or transformers is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingTierError(
            f"the drafter's data needs {error.name}", fix="install the cpu tier: pip install -e '.[cpu]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, local_files_only=True, attn_implementation="sdpa"
    )
    return model.eval().requires_grad_(False)


def continue_prompts(
    model: Any, prompts: Sequence[Prompt], count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue a batch of prompts of one length by up to ``count`` tokens, each at its own temperature.

    Returns:
        Token ids, int64 [batch, prompt + count], and lengths, int64 [batch]: prompt and continuation up to
        and with the end-of-text token, after which a row repeats that token.
    """
    import torch
    from transformers import DynamicCache

    end = model.config.eos_token_id
    rows = torch.tensor([prompt.ids for prompt in prompts])
    temperatures = torch.tensor([prompt.temperature for prompt in prompts]).unsqueeze(1)
    lengths = torch.full((len(prompts),), rows.shape[1])
    running = torch.ones(len(prompts), dtype=torch.bool)
    cache, fed = DynamicCache(), rows
    for _ in range(count):
        with torch.inference_mode():
            logits = model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        following = _draw(logits, temperatures, generator)
        following[~running] = end
        lengths += running
        running &= following != end
        fed = following.unsqueeze(1)
        rows = torch.cat([rows, fed], dim=1)
    return rows, lengths


def _draw(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token a row, int64 [batch]: argmax where the temperature is 0, else sampled."""
    import torch

    drawn = logits.argmax(-1)
    hot = temperatures.squeeze(1) > 0
    if hot.any():
        weights = (logits[hot].float() / temperatures[hot]).softmax(-1)
        drawn[hot] = torch.multinomial(weights, 1, generator=generator).squeeze(1)
    return drawn
