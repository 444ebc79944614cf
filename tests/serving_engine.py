"""Run one in-process vLLM engine in a process of its own: `python serving_engine.py SPEC.json OUT.json`.

Engines cannot be shut down and started again reliably in one process, and stock behaviour has to be seen
without the fixes, so each engine test runs this script. SPEC: `fixes` (names, see lora_spec.serving),
`engine` (keywords of LLM), `calls`: a list of calls of `generate`, each a list of requests {prompt, params,
lora}. OUT: per call a list of {tokens, accepted, drafted}; `status` of the fixes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def run_engine(
    folder: Path, *, engine: dict[str, Any], calls: list[Any], fixes: Sequence[str], plugin: str | None = None
) -> dict[str, Any]:
    """Run the calls in a fresh process; `folder` keeps the spec and the answer.

    With `plugin` (a value of LORA_SPEC_SERVING) the engine core gets a further process of its own, as a
    server's does, where only vLLM's plugin loading can install the fixes.
    """
    folder.mkdir(exist_ok=True)
    spec, out = folder / "spec.json", folder / "out.json"
    spec.write_text(json.dumps({"engine": engine, "calls": calls, "fixes": list(fixes)}))
    served = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "LORA_SPEC_SERVING": plugin} if plugin else {}
    done = subprocess.run(
        [sys.executable, __file__, str(spec), str(out)],
        env={**os.environ, **ENV, **served},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(out.read_text())


def _main(spec_path: str, out_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())

    from lora_spec import serving

    installed = serving.install_all(spec["fixes"])

    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "generation_config": "vllm",
            "max_model_len": 256,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096,
            "seed": 0,
            **spec["engine"],
        }
    )
    loras: dict[str, Any] = {}
    answers = []
    for call in spec["calls"]:
        requests = []
        for request in call:
            path = request.get("lora")
            if path and path not in loras:
                loras[path] = LoRARequest(Path(path).name, len(loras) + 1, path)
            requests.append(loras[path] if path else None)
        outputs = llm.generate(
            [{"prompt_token_ids": r["prompt"]} for r in call],
            [SamplingParams(detokenize=False, ignore_eos=True, **r["params"]) for r in call],
            lora_request=requests if loras else None,
            use_tqdm=False,
        )
        answers.append([_answer(output.outputs[0]) for output in outputs])
    Path(out_path).write_text(json.dumps({"status": installed, "calls": answers}))


def _answer(completion: Any) -> dict[str, Any]:
    metrics = completion.spec_decode_metrics
    return {
        "tokens": list(completion.token_ids),
        "accepted": metrics.per_step_accepted if metrics else [],
        "drafted": metrics.per_step_drafted if metrics else [],
    }


if __name__ == "__main__":
    _main(*sys.argv[1:])
