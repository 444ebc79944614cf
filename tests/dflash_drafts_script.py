"""What a DFlash drafter drafts in stock vLLM: ``python dflash_drafts_script.py ORDER ANSWER`` (JSON files).

Of the order: ``target``, ``drafter`` (folders), ``prompts``, ``k``, ``max_tokens``. The answer has one entry
a prompt: ``tokens``, the greedy output, and ``drafts``, pairs of the last known token and what was drafted
after it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lora_spec.measure.design import EngineParams
from lora_spec.measure.engine import prepare_process


def main(order_file: str, answer_file: str) -> None:
    order = json.loads(Path(order_file).read_text())
    prepare_process(
        EngineParams(dtype="float32", max_num_seqs=1, max_model_len=256, kv_cache_gib=1, threads=1)
    )
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    drafts: list[tuple[int, list[int]]] = []
    propose = SpecDecodeBaseProposer.propose

    def watched(self, *args, **kwargs):
        proposed = propose(self, *args, **kwargs)
        drafts.extend(zip(kwargs["next_token_ids"].tolist(), proposed.tolist(), strict=True))
        return proposed

    SpecDecodeBaseProposer.propose = watched
    llm = LLM(
        model=order["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        enable_prefix_caching=False,
        generation_config="vllm",
        max_model_len=256,
        max_num_seqs=1,
        speculative_config={
            "method": "dflash",
            "model": order["drafter"],
            "num_speculative_tokens": order["k"],
        },
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False
    )
    answer = []
    for prompt in order["prompts"]:
        drafts.clear()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer.append({"tokens": list(output.outputs[0].token_ids), "drafts": list(drafts)})
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
