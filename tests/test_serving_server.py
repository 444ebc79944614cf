"""A real server with drafter adapters and a policy: what requests get, what is refused, what is counted."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving_server_models import make_pair, policy, speculative_config

from lora_spec.files import atomic_write_json
from lora_spec.measure.server import HOST, Client, Response, Server
from lora_spec.serving.counters import BASE, AcceptanceRow, acceptance_rows

pytestmark = pytest.mark.vllm

K = 4
DEPTHS = {"t0": None, "t1": 2, "t2": 0}
DRAFTERS = {"t1": "d1"}


class Served:
    """The server, its files, and every completion's own counts so far."""

    def __init__(self, server: Server, pair: dict[str, Any], policy_file: Path) -> None:
        self.server = server
        self.client: Client = server.client
        self.pair = pair
        self.policy_file = policy_file
        self._lock = threading.Lock()
        self.expected: dict[tuple[str, str, str], Counter] = {}

    def complete(self, model: str = "tiny", drafter: str | None = None, **more: Any) -> Response:
        body = {"model": model, "prompt": [1, 2, 3, 4, 5, 6], "max_tokens": 40, "temperature": 0} | more
        if drafter is not None:
            body["vllm_xargs"] = {"draft_lora": drafter}
        return self.client.post("/v1/completions", body)

    def told(self, model: str = "tiny", drafter: str | None = None, **more: Any) -> dict[str, Any]:
        """A completion's speculative metrics, also added to what the counters must show."""
        response = self.complete(model, drafter, **more)
        assert response.status == 200, response.body
        own = response.body["metrics"]["speculative_decoding"]
        depth = "engine" if own["draft_depth"] is None else str(own["draft_depth"])
        key = (BASE if model == "tiny" else model, own["draft_adapter"] or BASE, depth)
        with self._lock:
            self.expected.setdefault(key, Counter()).update(
                requests=1,
                draft_steps=own["num_spec_steps"],
                drafted_tokens=own["num_draft_tokens"],
                accepted_tokens=own["num_accepted_draft_tokens"],
            )
        return own

    def rows(self) -> dict[tuple[str, str, str], AcceptanceRow]:
        from prometheus_client.parser import text_string_to_metric_families

        text = self.client.get("/metrics").body
        rows = acceptance_rows(text_string_to_metric_families(text))
        assert all(row.labels.model == "tiny" for row in rows)
        return {(row.labels.target_adapter, row.labels.draft_adapter, row.labels.depth): row for row in rows}

    def alive(self) -> bool:
        return self.server.is_running() and self.complete().status == 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    pair = make_pair(folder)
    policy_file = folder / "policy.json"
    atomic_write_json(policy_file, policy(pair, DEPTHS, DRAFTERS))
    arguments = [
        *("--model", pair["target"], "--served-model-name", "tiny", "--dtype", "float32"),
        *("--max-model-len", "256", "--max-num-seqs", "16", "--enable-lora", "--max-lora-rank", "8"),
        *("--max-loras", "3", "--lora-modules", *(f"{n}={p}" for n, p in pair["target_adapters"].items())),
        *("--speculative-config", speculative_config(pair, policy_file, ["d0", "d1"], K)),
    ]
    environment = {"VLLM_PLUGINS": "lora_spec", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Server(arguments, folder / "server.log", environment=environment) as server:
        yield Served(server, pair, policy_file)


def test_each_response_tells_its_depth_and_drafter_adapter(served: Served) -> None:
    base = served.told()
    assert (base["draft_depth"], base["draft_adapter"]) == (None, None)
    assert base["num_draft_tokens"] == K * base["num_spec_steps"] > 0
    mapped = served.told("t1")
    assert (mapped["draft_depth"], mapped["draft_adapter"]) == (2, "d1")
    assert 0 < mapped["num_draft_tokens"] <= 2 * mapped["num_spec_steps"]
    asked = served.told("t1", "d0")
    assert (asked["draft_depth"], asked["draft_adapter"]) == (2, "d0")
    none = served.told("t1", "none")
    assert none["draft_adapter"] is None
    stopped = served.told("t2")
    assert (stopped["draft_depth"], stopped["num_draft_tokens"]) == (0, 0)


def test_counters_equal_the_sums_of_the_responses(served: Served) -> None:
    before = served.rows()
    served.expected.clear()
    kinds = [
        (model, drafter) for model in ("tiny", "t0", "t1", "t2") for drafter in (None, "d0", "d1", "none")
    ]
    with ThreadPoolExecutor(12) as clients:
        asked = [
            clients.submit(served.told, model, drafter, temperature=1.0, max_tokens=60, prompt=[7, 3, seed])
            for seed in range(2)
            for model, drafter in kinds
        ]
        for answer in asked:
            answer.result()
    after = served.rows()
    assert len(served.expected) >= 10
    for key, sums in served.expected.items():
        for name, value in sums.items():
            was = getattr(before[key], name) if key in before else 0
            assert getattr(after[key], name) - was == value, (key, name)
    assert sum(sums["accepted_tokens"] for sums in served.expected.values()) > 50
    for row in after.values():
        assert sum(row.accepted_tokens_per_position) == row.accepted_tokens
        assert list(row.accepted_tokens_per_position) == sorted(row.accepted_tokens_per_position)[::-1]
    of_two = after["t1", "d1", "2"]
    assert of_two.accepted_tokens_per_position[2:] == (0, 0)


def test_a_stop_string_loses_no_counts(served: Served) -> None:
    whole = served.complete().body["choices"][0]["text"].split()
    stop = whole[20]
    before = served.rows()[BASE, BASE, "engine"]
    served.expected.clear()
    own = served.told(stop=[stop])
    after = served.rows()[BASE, BASE, "engine"]
    assert own["num_draft_tokens"] > 0
    assert after.drafted_tokens - before.drafted_tokens == own["num_draft_tokens"]


def test_children_and_aborted_requests_count(served: Served) -> None:
    served.told(drafter="d0")
    before = served.rows()[BASE, "d0", "engine"]
    assert served.complete(drafter="d0", n=3, temperature=1.0).status == 200
    after = served.rows()[BASE, "d0", "engine"]
    assert after.requests - before.requests == 3
    assert after.drafted_tokens > before.drafted_tokens

    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 240, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "vllm_xargs": {"draft_lora": "d0"}}
    with contextlib.closing(http.client.HTTPConnection(HOST, served.client.port)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        stream = connection.getresponse()
        for _ in range(9):
            stream.readline()
        stream.close()
    end = time.monotonic() + 20
    while (now := served.rows()[BASE, "d0", "engine"]).requests == after.requests:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert now.requests - after.requests == 1
    assert now.drafted_tokens > after.drafted_tokens


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"vllm_xargs": {"draft_lora": "nobody"}}, 400, "unknown drafter adapter 'nobody'"),
        ({"vllm_xargs": {"draft_lora": ""}}, 400, "unknown drafter adapter ''"),
        ({"vllm_xargs": {"draft_lora": 3}}, 400, "must be a name"),
        ({"vllm_xargs": {"draft_lora": ["d0", "d1"]}}, 400, "must be a name"),
        ({"vllm_xargs": {"lora_spec": "x"}}, 400, "written by the server only"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"max_tokens": -1}, 400, ""),
    ],
    ids=str,
)
def test_malformed_requests_are_refused_and_the_server_lives(
    served: Served, body: dict[str, Any], status: int, says: str
) -> None:
    known = set(served.rows())
    response = served.complete(**body)
    assert response.status == status, response.body
    assert says in response.message
    assert "Traceback" not in response.message
    assert set(served.rows()) == known, "a refused request must make no label"
    assert served.alive()


def test_adapters_load_and_unload(served: Served) -> None:
    client, paths = served.client, served.pair["drafter_adapters"]

    def load(name: str, path: str, **more: Any) -> Response:
        return client.post("/v1/load_draft_lora_adapter", {"lora_name": name, "lora_path": path, **more})

    def listed() -> dict[str, str]:
        data = client.get("/v1/draft_lora_adapters").body["data"]
        return {item["id"]: item["content_hash"] for item in data}

    assert set(listed()) == {"d0", "d1"}
    assert served.complete(drafter="new").status == 400
    first = load("new", paths["d2"])
    assert first.status == 200, first.body
    assert listed()["new"] == first.body["content_hash"]
    with_first = served.told(drafter="new", temperature=0, prompt=[9, 8, 7], max_tokens=120)
    assert with_first["draft_adapter"] == "new"

    assert load("new", paths["d2"]).status == 200, "the same content again"
    taken = load("new", paths["d3"])
    assert taken.status == 409 and "other content" in taken.message
    second = load("new", paths["d3"], load_inplace=True)
    assert second.status == 200
    assert second.body["content_hash"] == listed()["new"] != first.body["content_hash"]
    with_second = served.told(drafter="new", temperature=0, prompt=[9, 8, 7], max_tokens=120)
    assert with_second["acceptance_histogram"] != with_first["acceptance_histogram"]

    def unload(name: str) -> Response:
        return client.post("/v1/unload_draft_lora_adapter", {"lora_name": name})

    in_use = unload("d1")
    assert in_use.status == 409 and "policy" in in_use.message
    assert unload("nobody").status == 404
    assert unload("new").status == 200
    assert set(listed()) == {"d0", "d1"}
    assert served.complete(drafter="new").status == 400
    assert served.alive()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"lora_name": "x", "lora_path": "no-such-folder"}, 404, "adapter folder not found"),
        ({"lora_name": "none", "lora_path": "d2"}, 400, "no drafter adapter may be called 'none'"),
        ({"lora_name": "x", "lora_path": "wrong_shape"}, 400, "hape"),
        ({"lora_name": "", "lora_path": "d2"}, 400, ""),
        ({"lora_name": "x" * 300, "lora_path": "d2"}, 400, ""),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "d2", "rank": 3}, 400, "rank"),
        (b'{"lora_name": ', 400, ""),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_named(served: Served, body: Any, status: int, says: str) -> None:
    if isinstance(body, dict) and (path := body.get("lora_path")):
        known = served.pair["drafter_adapters"] | {"wrong_shape": served.pair["wrong_shape"]}
        body = body | {"lora_path": known.get(path, path)}
    response = served.client.post("/v1/load_draft_lora_adapter", body)
    assert response.status == status, response.body
    assert says in response.message
    assert served.alive()


def test_a_changed_policy_holds_for_later_requests(served: Served) -> None:
    assert served.told("t2")["num_draft_tokens"] == 0
    atomic_write_json(served.policy_file, policy(served.pair, DEPTHS | {"t2": 3}, DRAFTERS | {"t2": "d0"}))
    try:
        time.sleep(1.0)
        now = served.told("t2")
        assert (now["draft_depth"], now["draft_adapter"]) == (3, "d0")
        assert now["num_draft_tokens"] > 0
        served.policy_file.write_text("{")
        time.sleep(1.0)
        assert served.told("t2")["draft_depth"] == 3, "a bad file keeps the old policy"
    finally:
        atomic_write_json(served.policy_file, policy(served.pair, DEPTHS, DRAFTERS))
