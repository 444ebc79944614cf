"""Run one vLLM engine in a process of its own, from a spec in JSON.

Engines cannot be shut down and started again reliably in one process, and stock behaviour has to be seen
without the fixes, so each engine of a test gets a fresh process. Importing vLLM takes most of the time of a
tiny engine: one process imports it once, installs nothing, and forks for each engine.

SPEC: `fixes` (names, see lora_spec.serving), `hooks` (names `module:function` in this folder, called with the
spec before the engine is built), `engine` (keywords of LLM), and either `calls`: a list of calls of
`generate`, each a list of requests {prompt, params, lora}, or `script`: `module:function`, called with the
engine and `args`. OUT: `status` of the fixes, and per call a list of {tokens, accepted, drafted}, or what the
script returned.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
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
TIMEOUT_S = 1200
# What every engine imports, and none of the modules that repairs touch.
IMPORTED = (
    "vllm",
    "vllm.compilation.backends",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online",
    "vllm.transformers_utils.configs",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)

_forker: subprocess.Popen[str] | None = None


def run_engine(
    folder: Path,
    *,
    engine: dict[str, Any],
    calls: list[Any] | None = None,
    fixes: Sequence[str],
    plugin: str | None = None,
    hooks: Sequence[str] = (),
    script: str | None = None,
    args: Any = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the calls, or the script, in a fresh process; `folder` keeps the spec, the answer and the log.

    With `plugin` (a value of LORA_SPEC_SERVING) the engine core gets a further process of its own, as a
    server's does, where only vLLM's plugin loading can install the fixes. `env` adds variables.

    Raises:
        RuntimeError: the process failed; the message is the end of its log.
    """
    folder.mkdir(exist_ok=True, parents=True)
    spec = {"engine": engine, "calls": calls or [], "fixes": list(fixes)}
    spec |= {"hooks": list(hooks), "script": script, "args": args}
    files = {name: str(folder / name) for name in ("spec.json", "out.json", "log.txt")}
    Path(files["spec.json"]).write_text(json.dumps(spec))
    served = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "LORA_SPEC_SERVING": plugin} if plugin else {}
    code = _run_forked({"files": files, "env": {**served, **(env or {})}})
    if code:
        raise RuntimeError(Path(files["log.txt"]).read_text()[-4000:])
    return json.loads(Path(files["out.json"]).read_text())


def _run_forked(job: dict[str, Any]) -> int:
    global _forker
    if _forker is None or _forker.poll() is not None:
        _forker = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **ENV},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(_forker.stdin.close)  # it ends with its input
    _forker.stdin.write(json.dumps(job) + "\n")
    _forker.stdin.flush()
    if not select.select([_forker.stdout], [], [], TIMEOUT_S)[0]:
        _forker.kill()
        raise RuntimeError(f"no answer in {TIMEOUT_S} s: {job['files']['log.txt']}")
    answer = _forker.stdout.readline()
    if not answer:
        raise RuntimeError(f"the forking process is gone: {job['files']['log.txt']}")
    return int(answer)


def _serve() -> None:
    """Import vLLM, then fork for each line of the input, and answer with the child's exit status."""
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints to the standard output
    os.dup2(2, 1)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # vLLM collects garbage several times while it starts

    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(job)
        status = os.waitpid(child, 0)[1]
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _child(job: dict[str, Any]) -> None:
    log = os.open(job["files"]["log.txt"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1), os.dup2(log, 2)
    code = 1
    try:
        os.environ.update(job["env"])
        _main(job["files"]["spec.json"], job["files"]["out.json"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)  # not the forking process's exit handlers


def _named(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _main(spec_path: str, out_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())

    from lora_spec import serving

    installed = serving.install_all(spec["fixes"])
    for hook in spec["hooks"]:
        _named(hook)(spec)

    from vllm import LLM

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
            "num_gpu_blocks_override": 512,  # filling a gigabyte of K/V with zeros takes seconds
            "seed": 0,
            **spec["engine"],
        }
    )
    out: dict[str, Any] = {"status": installed}
    if spec["script"]:
        out["script"] = _named(spec["script"])(llm, spec["args"])
    else:
        loras: dict[str, Any] = {}
        out["calls"] = [generate(llm, call, loras) for call in spec["calls"]]
    Path(out_path).write_text(json.dumps(out))


def generate(
    llm: Any,
    call: list[dict[str, Any]],
    loras: dict[str, Any],
    see: Callable[[Any], dict[str, Any]] = lambda output: answer(output.outputs[0]),
) -> list[dict[str, Any]]:
    """One call of `generate`; `loras` remembers the adapters of the engine's earlier calls by path."""
    made = [make_request(request, loras) for request in call]
    outputs = llm.generate(
        [prompt for prompt, _, _ in made],
        [params for _, params, _ in made],
        lora_request=[lora for _, _, lora in made] if loras else None,
        use_tqdm=False,
    )
    return [see(output) for output in outputs]


def make_request(request: dict[str, Any], loras: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, sampling parameters and target adapter of one request, as vLLM takes them."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    path = request.get("lora")
    if path and path not in loras:
        loras[path] = LoRARequest(Path(path).name, len(loras) + 1, path)
    params = SamplingParams(detokenize=False, ignore_eos=True, **request["params"])
    return {"prompt_token_ids": request["prompt"]}, params, loras[path] if path else None


def answer(completion: Any) -> dict[str, Any]:
    """What a test sees of a completion."""
    metrics = completion.spec_decode_metrics
    return {
        "tokens": list(completion.token_ids),
        "accepted": metrics.per_step_accepted if metrics else [],
        "drafted": metrics.per_step_drafted if metrics else [],
    }


if __name__ == "__main__":
    _serve()
