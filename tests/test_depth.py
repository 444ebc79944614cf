"""Speculation depth per request in real vLLM engines: what is drafted changes, what is said never does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving_engine import run_engine
from serving_models import VOCAB, perturbed, prompts, save, speculation, tiny_llama
from test_serving_engine import TEMPERATURE, exact_joint, tv_and_limit

from lora_spec.errors import EngineError
from lora_spec.measure.tiny_models import merged_llama, save_random_adapter, tiny_dflash, tiny_eagle3
from lora_spec.serving import derive_target_seed
from lora_spec.serving.stamp import Stamp

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

SCHEDULER = "lora_spec.serving.scheduler.ServingScheduler"
K = 4
FIXES = ("expand", "grouped_lora", "draft_seeds", "shared_embeddings")
# None: no stamp at all, as stock serves it.
DEPTHS = (0, 1, 2, 4, None, 9)


class Models:
    """A target and its drafters, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_llama()
        self.target = save(self.model, folder / "target")
        self.drafter = save(perturbed(self.model, 0.15), folder / "drafter")
        self.dflash = tiny_dflash().save(folder / "dflash")
        self.eagle3 = tiny_eagle3().save(folder / "eagle3")

    def run(
        self, name: str, calls: list[Any], *, hook: str = "hook", script: str = "calls", **engine: Any
    ) -> Any:
        """The script in an engine of its own."""
        return run_engine(
            self.folder / name,
            engine={"model": self.target, **engine},
            fixes=FIXES,
            hooks=[f"serving_depth_script:{hook}"] if "scheduler_cls" in engine else [],
            script=f"serving_depth_script:{script}",
            args=calls,
        )["script"]

    def plain(self, requests: list[dict], **engine: Any) -> list[list[int]]:
        """Tokens without speculation."""
        return tokens(self.run("plain", [requests], **engine)[0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("depth"))


def ask(prompt: list[int], depth: int | None = None, tokens: int = 64, **params: Any) -> dict:
    """A request; greedy unless `params` say otherwise, and without a stamp where the depth is None."""
    made = {"temperature": 0.0, "max_tokens": tokens, **params}
    if depth is not None:
        made["extra_args"] = Stamp(depth=depth).to_extra_args(made.get("extra_args"))
    return {"prompt": prompt, "params": made}


def tokens(call: dict) -> list[list[int]]:
    return [a["tokens"] for a in call["answers"]]


def accepted(call: dict) -> int:
    return sum(sum(a["accepted"]) for a in call["answers"])


def drafted(call: dict) -> list[set[int]]:
    """For each request the numbers of drafts that its draft steps had."""
    return [set(a["drafted"]) for a in call["answers"]]


def places(call: dict) -> dict[str, int]:
    """The engine's name of each request -> its place in the call."""
    names = {name for step in call["steps"] for name in step["requests"]}
    return {name: i for i, name in enumerate(sorted(names, key=lambda name: int(name.split("-")[0])))}


def serving(models: Models, method: str, **changes: Any) -> dict[str, Any]:
    """Keywords of an engine with the scheduler."""
    keys = {
        "draft_model": speculation(models.drafter, K)["speculative_config"],
        "self": speculation(models.target, K)["speculative_config"],
        "dflash": {"method": "dflash", "model": models.dflash, "num_speculative_tokens": K},
        "eagle3": {"method": "eagle3", "model": models.eagle3, "num_speculative_tokens": K},
        "ngram": {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 2},
    }[method]
    return {
        "speculative_config": keys | changes.pop("speculative", {}),
        "per_request_spec_decode_metrics": "detailed",
        "scheduler_cls": SCHEDULER,
        **changes,
    }


@pytest.fixture(scope="module")
def questions() -> list[list[int]]:
    return prompts(24)


@pytest.fixture(scope="module")
def said(models: Models, questions: list[list[int]]) -> list[list[int]]:
    """Without speculation, in the same batch."""
    return models.plain([ask(prompt) for prompt in questions])


METHODS = ("draft_model", "dflash", "eagle3", "ngram")


@pytest.fixture(scope="module", params=METHODS)
def served(request: pytest.FixtureRequest, models: Models, questions: list[list[int]]) -> dict[str, Any]:
    """Six calls in one engine of each method."""
    cells = {
        "mixed": [ask(p, DEPTHS[i % len(DEPTHS)]) for i, p in enumerate(questions)],
        "full": [ask(p) for p in questions],
        "shallow": [ask(p, 1 + i % 2) for i, p in enumerate(questions)],
        "none": [ask(p, 0) for p in questions],
        "full again": [ask(p) for p in questions],
        # the ones without drafts end first, those with some end last
        "some": [ask(p, 0 if i % 2 else 3, 8 if i % 2 else 64) for i, p in enumerate(questions)],
    }
    done = models.run(request.param, list(cells.values()), **serving(models, request.param))
    return {"method": request.param, **dict(zip(cells, done, strict=True))}


def test_every_method_has_something_accepted(served) -> None:
    for cell in ("mixed", "full", "shallow", "full again"):
        assert accepted(served[cell]) >= 50, cell


def test_outputs_are_those_without_speculation(served, said) -> None:
    for cell in ("mixed", "full", "shallow", "none", "full again"):
        assert tokens(served[cell]) == said, cell
    assert tokens(served["some"]) == [t[:8] if i % 2 else t for i, t in enumerate(said)]


def test_what_is_drafted_follows_the_depths(served) -> None:
    numbers = drafted(served["mixed"])
    for i, seen in enumerate(numbers):
        depth = DEPTHS[i % len(DEPTHS)]
        limit = K if depth is None else min(depth, K)
        if served["method"] == "ngram":  # drafts what it finds
            assert all(n <= limit for n in seen)
        else:
            assert seen == ({limit} if limit else set())
    deepest = [max(seen, default=0) for seen in numbers]
    assert {0, 1, 2, 4} <= set(deepest)
    # Cut, not drafted otherwise: a request accepts first what it does at full depth, up to its own.
    if served["method"] != "ngram":
        for i, (cut, full) in enumerate(
            zip(served["mixed"]["answers"], served["full"]["answers"], strict=True)
        ):
            limit = min(DEPTHS[i % len(DEPTHS)] or K, K)
            if cut["accepted"]:
                assert cut["accepted"][0] == min(full["accepted"][0], limit)


def test_a_drafter_of_one_draft_a_pass_drafts_as_deep_as_the_deepest_request(served) -> None:
    shallow, one_by_one = served["shallow"], served["method"] != "dflash"
    place = places(shallow)
    deepest = [max(1 + place[name] % 2 for name in step["requests"]) for step in shallow["steps"]]
    assert 2 in deepest and len(shallow["drafter_runs"]) == len(deepest)
    assert shallow["drafter_runs"] == (deepest if one_by_one else [K] * len(deepest))
    assert set(served["full"]["drafter_runs"]) == {K}


def test_a_batch_of_depth_0_does_not_run_the_drafter(served) -> None:
    none = served["none"]
    assert none["drafter_runs"] == [] and all(not a["drafted"] for a in none["answers"])
    assert all(step["skipped"] and step["depth"] == 0 for step in none["steps"])
    # nothing else is skipped, and after it drafting goes on as before
    assert not any(step["skipped"] for step in served["full"]["steps"])
    assert served["full again"]["answers"] == served["full"]["answers"]
    assert served["full again"]["drafter_runs"] == served["full"]["drafter_runs"]


def test_the_drafter_runs_while_anyone_drafts(served) -> None:
    some = served["some"]
    assert len(some["drafter_runs"]) == len(some["steps"]) and not any(s["skipped"] for s in some["steps"])
    assert all(not a["drafted"] for a in some["answers"][1::2])
    assert all(a["drafted"] for a in some["answers"][::2]) or served["method"] == "ngram"


# --- prefix caching ---

BLOCK = 32


@pytest.fixture(scope="module", params=["hook", "hook_without_key"])
def cached(request: pytest.FixtureRequest, models: Models) -> dict[str, Any]:
    """A drafter equal to its target, with the prefix cache, with and without the key of undrafted blocks."""
    prompt, other = prompts(2, 3 * BLOCK + 9, seed=3)
    cells = {
        "undrafted": [ask(prompt, 0)],
        "then drafted": [ask(prompt, 4)],
        "again": [ask(prompt, 4)],
        "another, drafted": [ask(other, 4)],
        "then undrafted": [ask(other, 0)],
    }
    engine = serving(models, "self", enable_prefix_caching=True, block_size=BLOCK)
    done = models.run(request.param, list(cells.values()), hook=request.param, **engine)
    return {"key": request.param == "hook", **dict(zip(cells, done, strict=True))}


def test_blocks_that_nobody_drafted_for_are_not_reused_for_drafting(cached) -> None:
    first = cached["then drafted"]["answers"][0]
    assert cached["undrafted"]["drafter_runs"] == []
    assert sum(first["drafted"]) >= 20
    assert (first["accepted"] == first["drafted"]) is cached["key"]  # the drafter is the target
    assert first["tokens"] == cached["undrafted"]["answers"][0]["tokens"]


def test_cached_blocks_of_a_depth_are_reused(cached) -> None:
    again = cached["again"]["answers"][0]
    assert again["tokens"] == cached["then drafted"]["answers"][0]["tokens"]
    if cached["key"]:
        assert again["accepted"] == again["drafted"] == cached["then drafted"]["answers"][0]["drafted"]
    drafted_, undrafted = cached["another, drafted"], cached["then undrafted"]
    assert drafted_["answers"][0]["accepted"] == drafted_["answers"][0]["drafted"]
    assert undrafted["answers"][0]["tokens"] == drafted_["answers"][0]["tokens"]
    assert undrafted["drafter_runs"] == []


def test_a_request_that_joins_with_one_new_token_is_not_padded_with_drafts(models) -> None:
    # Stock fills such a request up with drafts of token -1: counted as drafted, and the whole batch loses its
    # draft probabilities for that step.
    prompt = prompts(1, 2 * BLOCK + 1, seed=5)[0]
    calls = [[ask(prompt, 2, temperature=0.8, seed=1)]] * 2
    engine = serving(models, "self", enable_prefix_caching=True, block_size=BLOCK)
    ours = models.run("joins", calls, **engine)[1]
    assert [len(t) for step in ours["steps"][:1] for t in step["drafts"].values()] == []
    assert drafted(ours) == [{2}] and ours["answers"][0]["accepted"] == ours["answers"][0]["drafted"]
    stock = {key: value for key, value in engine.items() if key != "scheduler_cls"}
    padded = models.run("stock joins", calls, **stock)[1]["answers"][0]
    assert padded["drafted"][0] == K and padded["accepted"][0] == 0


# --- chunked prefill, preemption, sampling, dynamic depth ---


def test_chunked_prefill_and_preemption_change_nothing(models) -> None:
    long = prompts(8, 90, seed=7)
    requests = [ask(p, DEPTHS[i % len(DEPTHS)], 48) for i, p in enumerate(long)]
    engine = {"block_size": BLOCK, "max_num_batched_tokens": 96}
    want = models.plain(requests, **engine)
    # 19 blocks can be used: 6 requests join with 3 each, and each needs 5 in the end.
    done = models.run(
        "tight", [requests], **serving(models, "draft_model", num_gpu_blocks_override=20, **engine)
    )
    assert done[0]["preempted"] and any(len(step["requests"]) < 8 for step in done[0]["steps"])
    assert tokens(done[0]) == want and accepted(done[0]) >= 50
    for i, seen in enumerate(drafted(done[0])):
        limit = min(K if DEPTHS[i % len(DEPTHS)] is None else DEPTHS[i % len(DEPTHS)], K)
        assert all(n <= limit for n in seen) and max(seen, default=0) == limit


def test_the_control_of_a_drafter_equal_to_its_target_holds_when_sampling(models, questions) -> None:
    requests = [
        ask(p, DEPTHS[i % len(DEPTHS)], temperature=0.8, seed=100 + i) for i, p in enumerate(questions)
    ]
    done = models.run("control", [requests], **serving(models, "self"))[0]
    assert accepted(done) >= 150
    for i, a in enumerate(done["answers"]):
        limit = min(K if DEPTHS[i % len(DEPTHS)] is None else DEPTHS[i % len(DEPTHS)], K)
        assert a["accepted"] == a["drafted"] and set(a["drafted"]) == ({limit} if limit else set())


def test_sampled_tokens_follow_the_target_at_every_depth(models) -> None:
    prompt, count = prompts(1, seed=5)[0], 3000
    requests = []
    for i in range(count):
        seed = derive_target_seed(0, "", prompt, str(i))
        requests.append(ask(prompt, i % (K + 1), 4, temperature=TEMPERATURE, seed=seed))
    engine = serving(models, "draft_model", max_num_seqs=256)
    done = models.run("distribution", [requests], **engine)[0]
    assert accepted(done) >= 500
    joint = exact_joint(SimpleNamespace(target=models.model), prompt, 4)
    drawn = np.array(tokens(done))
    for name, rows in {"all": slice(None), "some drafts": np.arange(count) % (K + 1) > 0}.items():
        for i in range(4):
            others = tuple(axis for axis in range(4) if axis != i)
            seen = np.bincount(drawn[rows, i], minlength=VOCAB)
            tv, limit = tv_and_limit(seen, joint.sum(axis=others))
            assert tv < limit, f"{name}, token {i + 1}: TV {tv:.4f}, limit {limit:.4f}"


def test_dynamic_depth_is_a_bound_too_and_keeps_the_drafters_cache_whole(models, questions, said) -> None:
    # Up to 2 requests: 3 drafts; more: none, by the batch size, which is no request's own depth.
    dynamic = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 64, 0]]}
    some = questions[:4]
    requests = [ask(p, 4, 64 if i < 2 else 12) for i, p in enumerate(some)]
    requests[1] = ask(some[1], 1)
    engine = serving(models, "self", speculative=dynamic)
    done = models.run("dynamic", [requests, [ask(some[0], 0)]], **engine)
    large = [step for step in done[0]["steps"] if len(step["requests"]) > 2]
    small = [step for step in done[0]["steps"] if len(step["requests"]) <= 2]
    assert large and small
    assert not any(step["skipped"] for step in done[0]["steps"])
    assert {step["depth"] for step in large} == {0} and {step["depth"] for step in small} <= {3, 1}
    assert len(done[0]["drafter_runs"]) == len(done[0]["steps"])
    # The drafter kept up while nobody drafted: as the target itself, it is right every time.
    assert done[0]["answers"][0]["accepted"] == done[0]["answers"][0]["drafted"]
    assert drafted(done[0])[:2] == [{3}, {1}]
    assert [t[: len(w)] for t, w in zip(said, tokens(done[0]), strict=False)] == tokens(done[0])
    assert done[1]["drafter_runs"] == [] and all(step["skipped"] for step in done[1]["steps"])


# --- slots ---


@pytest.fixture(scope="module")
def drafters(models: Models) -> dict[str, str]:
    """Four adapters of the drafter."""
    state = perturbed(models.model, 0.15).state_dict()
    return {
        f"d{i}": save_random_adapter(state, models.folder / f"d{i}", seed=20 + i, size=0.3) for i in range(4)
    }


def slotted(models: Models, drafters: dict[str, str], **engine: Any) -> dict[str, Any]:
    draft_lora = {"adapters": drafters, "max_rank": 8, "max_slots": 2, "max_cached": 4}
    made = serving(models, "draft_model", speculative={"draft_lora": draft_lora}, **engine)
    return made | {"scheduler_cls": None}


def choosing(questions: list[list[int]]) -> list[dict]:
    """d0 to d3 and the base drafter in turn, of unequal length."""
    made = []
    for i, prompt in enumerate(questions * 2):
        params = {"extra_args": {"draft_lora": "none" if i % 5 == 4 else f"d{i % 5}"}}
        made.append(ask(prompt, None, 8 + 5 * (i % 7), **params))
    return made


def starts(done: dict) -> dict[int, int]:
    """Step in which each request of a call joined, by its place in the call."""
    place = places(done)
    return {place[name]: number for number, step in enumerate(done["steps"]) for name in step["new"]}


def test_a_batch_never_mixes_more_drafter_adapters_than_slots(models, drafters, questions) -> None:
    requests = choosing(questions)
    engine = slotted(models, drafters, max_num_seqs=12)
    done = models.run("slots", [requests], **engine)[0]
    mixes = [len(step["adapters"]) for step in done["steps"]]
    assert max(mixes) == 2 and {name for step in done["steps"] for name in step["adapters"]} == set(drafters)
    assert [len(t) for t in tokens(done)] == [r["params"]["max_tokens"] for r in requests]
    want = models.plain([{**r, "params": {**r["params"], "extra_args": None}} for r in requests])
    assert tokens(done) == want and accepted(done) >= 50
    began = starts(done)
    assert len(began) == len(requests)
    for kind in range(5):
        own = [began[i] for i in range(len(requests)) if i % 5 == kind]
        assert own == sorted(own)
    base = [i for i in range(len(requests)) if i % 5 == 4]
    assert began[base[0]] == 0  # needs no slot


def test_priorities_hold_among_those_that_wait_for_a_slot(models, drafters, questions) -> None:
    # d0 and d1 take the slots; d3 and d2 wait, and d2 has the better priority though it came last.
    names = ["d0", "d1", "d3", "d2"]
    requests = [
        ask(p, None, 24, extra_args={"draft_lora": n}) for p, n in zip(questions, names, strict=False)
    ]
    engine = slotted(models, drafters, scheduling_policy="priority")
    args = {"requests": requests, "priorities": [0, 0, 9, 5]}
    done = models.run("priority", args, script="with_priorities", **engine)
    began = starts(done)
    assert began[0] == began[1] == 0 < began[3] <= began[2]
    assert max(len(step["adapters"]) for step in done["steps"]) == 2
    assert [len(t) for t in tokens(done)] == [24] * 4


# --- the policy file ---


def policy(default: dict | None = None, base: int | None = None, **adapters: dict) -> str:
    import json

    reasons = [{"code": "made_up", "sentence": "Made up."}]
    made = {
        "schema": "lora-spec-policy/1",
        "base_model": "made/up",
        "default": default or {},
        "base": {"depth": base},
        "adapters": {name: entry | {"reasons": reasons} for name, entry in adapters.items()},
    }
    return json.dumps(made)


def test_a_new_policy_holds_for_requests_that_come_after_it(models, questions, said) -> None:
    path = models.folder / "policy.json"
    path.write_text(policy(base=4))
    engine = serving(models, "draft_model", speculative={"depth_policy": str(path)}) | {"scheduler_cls": None}
    args = {"prompts": questions, "texts": [policy(base=1), "{ broken", policy(base=0), policy()]}
    done = models.run("reload", args, script="reload", **engine)
    assert [set(done[str(i)]["drafted"]) for i in range(5)] == [{4}, {1}, {1}, set(), {4}]
    assert [done[str(i)]["tokens"] for i in range(5)] == [t[:40] for t in said[:5]]


def test_each_target_adapter_has_its_own_depth(models, questions) -> None:
    from lora_spec.checkpoint import content_hash

    state = models.model.state_dict()
    paths = {
        n: save_random_adapter(state, models.folder / n, seed=s, size=0.3) for s, n in enumerate("tuvw", 40)
    }
    held = {n: {"content_hash": content_hash(paths[n])} for n in "tuv"}
    file = models.folder / "adapters.json"
    file.write_text(
        policy(
            {"depth": 2},
            base=3,
            t=held["t"] | {"action": "red", "depth": 0},
            u=held["u"] | {"action": "amber", "depth": 1},
            # made for other files than the ones that are served
            v={"content_hash": "0" * 64, "action": "amber", "depth": 1},
        )
    )
    kinds = [*"tuvw", None]
    requests = [{**ask(p), "lora": paths.get(kinds[i % 5])} for i, p in enumerate(questions)]
    engine = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
    speculative = serving(models, "draft_model", speculative={"depth_policy": str(file)}, **engine)
    done = models.run("per adapter", [requests], **speculative | {"scheduler_cls": None})[0]
    depths = {"t": set(), "u": {1}, "v": {2}, "w": {2}, None: {3}}
    assert [seen for seen in drafted(done)] == [depths[kinds[i % 5]] for i in range(len(requests))]
    assert tokens(done) == models.plain(requests, **engine) and accepted(done) >= 50
    log = (models.folder / "per adapter" / "log.txt").read_text()
    assert log.count("entry for adapter v does not hold") == 1
    merged = save(merged_llama(models.model, paths["u"]), models.folder / "merged")
    alone = models.plain([ask(questions[1])], model=merged)
    assert alone[0] == tokens(done)[1]


# --- what it refuses ---


def test_async_scheduling_and_engines_without_speculation_are_refused() -> None:
    from lora_spec.serving.scheduler import ServingScheduler

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=True), speculative_config=SimpleNamespace()
    )
    with pytest.raises(EngineError, match="async scheduling") as error:
        ServingScheduler(config)
    assert error.value.code == "async_scheduling"
    config.scheduler_config.async_scheduling, config.speculative_config = False, None
    with pytest.raises(EngineError, match="without speculative decoding"):
        ServingScheduler(config)


def test_the_mark_goes_with_the_step_to_another_process() -> None:
    import pickle

    from vllm.v1.core.sched.output import SchedulerOutput

    from lora_spec.serving.drafting import is_without_drafting, mark_without_drafting

    output = SchedulerOutput.make_empty()
    assert not is_without_drafting(output)
    mark_without_drafting(output)
    assert is_without_drafting(pickle.loads(pickle.dumps(output)))
