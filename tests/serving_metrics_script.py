"""What `test_serving_metrics.py` runs inside an engine's process."""

from __future__ import annotations

from typing import Any


def watch(spec: dict[str, Any]) -> None:
    """The plugin as vLLM's plugin loading would start it."""
    from lora_spec.serving import plugin

    plugin.watch()


def requests(llm: Any, args: Any) -> dict[str, Any]:
    """A mixed batch, a request with three children, and a request whose counting fails."""
    from serving_models import prompts
    from vllm import SamplingParams

    from lora_spec.serving import metrics

    def generate(names: list[str | None], **params: Any) -> list[Any]:
        return llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts(len(names))],
            [
                SamplingParams(
                    detokenize=False,
                    ignore_eos=True,
                    extra_args=None if name is None else {"draft_lora": name},
                    **{"temperature": 0.0, "max_tokens": 200} | params,
                )
                for name in names
            ],
            use_tqdm=False,
        )

    def rows() -> list[dict[str, Any]]:
        return [row.as_dict() for row in metrics.acceptance_by_adapter()]

    names = [None, "one", "two", "one", None, "two"]
    outputs = generate(names)
    found: dict[str, Any] = {
        "requests": [
            {"name": name, "metrics": output.outputs[0].spec_decode_metrics.to_dict()}
            for name, output in zip(names, outputs, strict=True)
        ],
        "rows": rows(),
    }
    generate(["one"], n=3, temperature=1.0)
    found["rows_after_n_3"] = rows()

    def broken(*args: Any) -> None:
        raise RuntimeError("no counting today")

    metrics.counters().observe = broken
    (output,) = generate(["two"], max_tokens=20)
    found["tokens_with_broken_counters"] = len(output.outputs[0].token_ids)
    return found
