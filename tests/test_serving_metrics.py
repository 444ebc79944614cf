"""Acceptance by adapter: what is counted, under which labels, and that it equals the requests' own counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_spec.serving.counters import (
    BASE,
    OTHER,
    AcceptanceCounters,
    AcceptanceRow,
    Labels,
    acceptance_rows,
)

prometheus_client = pytest.importorskip("prometheus_client")


def counted(*observations: tuple[Labels, list[int], int], **kwargs: Any) -> list[AcceptanceRow]:
    """Rows as a client of GET /metrics would read them."""
    from prometheus_client.parser import text_string_to_metric_families

    registry = prometheus_client.CollectorRegistry()
    counters = AcceptanceCounters(registry, **kwargs)
    for labels, histogram, drafted in observations:
        counters.observe(labels, histogram, drafted)
    text = prometheus_client.generate_latest(registry).decode()
    return acceptance_rows(text_string_to_metric_families(text))


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12).map(
    lambda pairs: [(min(accepted, drafted), drafted) for accepted, drafted in pairs]
)


@given(requests=st.lists(st.tuples(st.sampled_from(["a", "b"]), STEPS), max_size=6))
def test_sums_are_those_of_the_draft_steps(requests: list[tuple[str, list[tuple[int, int]]]]) -> None:
    observations, expected = [], {}
    for name, steps in requests:
        histogram = [sum(accepted == j for accepted, _ in steps) for j in range(5)]
        labels = Labels.of(name, None, None, "m")
        observations.append((labels, histogram, sum(drafted for _, drafted in steps)))
        expected.setdefault(labels, []).append(steps)
    rows = {row.labels: row for row in counted(*observations)}
    assert rows.keys() == expected.keys()
    for labels, of_requests in expected.items():
        row, steps = rows[labels], [step for one in of_requests for step in one]
        assert row.requests == len(of_requests)
        assert row.draft_steps == len(steps)
        assert row.drafted_tokens == sum(drafted for _, drafted in steps)
        assert row.accepted_tokens == sum(accepted for accepted, _ in steps)
        for position in range(4):
            at_least = sum(accepted > position for accepted, _ in steps)
            assert row.accepted_tokens_per_position[position] == at_least


def test_labels_of_a_plain_request() -> None:
    assert Labels.of("", None, None, "m") == Labels(BASE, BASE, "engine", "m")
    assert Labels.of("german", "draft", 0, "m") == Labels("german", "draft", "0", "m")


def test_an_adapter_called_like_none_is_told_from_none() -> None:
    for name in ("base", "other", " base ", " "):
        labels = Labels.of(name, name, None, "m")
        assert labels.target_adapter == labels.draft_adapter and labels.target_adapter.endswith(" (adapter)")


def test_a_request_that_drafted_nothing_is_a_request_with_zeros() -> None:
    (row,) = counted((Labels.of(None, None, 0, "m"), [], 0))
    assert (row.requests, row.draft_steps, row.drafted_tokens, row.accepted_tokens) == (1, 0, 0, 0)


def test_the_number_of_series_is_bounded_and_nothing_is_lost() -> None:
    many = [(Labels.of(f"t{i}", f"d{i}", 2, "m"), [1, 0, 2], 6) for i in range(50)]
    rows = counted(*many, *many, max_combinations=8)
    assert len(rows) == 9
    (rest,) = [row for row in rows if row.labels.target_adapter == OTHER]
    assert rest.labels == Labels(OTHER, OTHER, "2", "m")
    assert rest.requests == 2 * 42
    assert sum(row.accepted_tokens for row in rows) == 100 * 4
    assert all(row.requests == 2 for row in rows if row is not rest)


@given(name=st.text(max_size=300))
def test_any_name_can_be_written_out(name: str) -> None:
    (row,) = counted((Labels.of(name + "\ud800\n", name, None, 'm"'), [0, 1], 1))
    assert row.accepted_tokens == 1
    assert len(row.labels.target_adapter) <= 128


@pytest.mark.vllm
def test_stamped_metrics_keep_counts_and_can_be_pickled() -> None:
    import pickle

    from vllm.entrypoints.generate.base.protocol import SpeculativeDecodingMetrics
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    from lora_spec.serving.request_metrics import StampedSpecDecodeMetrics
    from lora_spec.serving.stamp import DraftAdapter, Stamp

    plain = RequestSpecDecodeMetrics.new(4)
    plain.observe(4, 3, detailed=True)
    stamped = StampedSpecDecodeMetrics.of(plain, Stamp(DraftAdapter("german", "x", "ab" * 32), 2))
    told = pickle.loads(pickle.dumps(stamped)).to_dict()
    assert told == plain.to_dict() | {"draft_adapter": "german", "draft_depth": 2}
    body = SpeculativeDecodingMetrics(**told).model_dump()
    assert (body["draft_adapter"], body["draft_depth"]) == ("german", 2)
    assert body["num_accepted_draft_tokens"] == 3


@pytest.fixture(scope="module")
def engine_answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Requests of one mixed batch on an engine with drafter adapters, and what was counted."""
    from serving_engine import run_engine
    from serving_models import perturbed, save, tiny_llama

    from lora_spec.measure.tiny_models import save_random_adapter

    folder = tmp_path_factory.mktemp("metrics")
    target = tiny_llama(0)
    drafter = perturbed(target, 0.2)
    adapters = {
        name: save_random_adapter(drafter.state_dict(), folder / name, seed=seed, size=0.3)
        for name, seed in (("one", 1), ("two", 2))
    }
    return run_engine(
        folder / "run",
        engine={
            "model": save(target, folder / "target"),
            "served_model_name": "tiny",
            "speculative_config": {
                "method": "draft_model",
                "model": save(drafter, folder / "drafter"),
                "num_speculative_tokens": 4,
                "draft_lora": {"adapters": adapters},
            },
        },
        fixes=(),
        hooks=["serving_metrics_script:watch"],
        script="serving_metrics_script:requests",
    )


@pytest.mark.vllm
def test_counters_equal_the_requests_own_counts(engine_answer: dict[str, Any]) -> None:
    expected: dict[str, Counter] = {}
    for request in engine_answer["script"]["requests"]:
        own = request["metrics"]
        sums = expected.setdefault(request["name"] or BASE, Counter())
        sums["requests"] += 1
        sums["draft_steps"] += own["num_spec_steps"]
        sums["drafted_tokens"] += own["num_draft_tokens"]
        sums["accepted_tokens"] += own["num_accepted_draft_tokens"]
        assert own["draft_adapter"] == request["name"]
        assert own["draft_depth"] is None
    rows = {row["draft_adapter"]: row for row in engine_answer["script"]["rows"]}
    assert rows.keys() == expected.keys() == {BASE, "one", "two"}
    for name, sums in expected.items():
        row = rows[name]
        assert sums["accepted_tokens"] > 50
        assert {key: row[key] for key in sums} == dict(sums)
        assert sum(row["accepted_tokens_per_position"]) == row["accepted_tokens"]
        assert (row["target_adapter"], row["depth"], row["model"]) == (BASE, "engine", "tiny")
    rates = {name: sums["accepted_tokens"] / sums["drafted_tokens"] for name, sums in expected.items()}
    assert len(set(rates.values())) == 3, "adapters that change nothing prove nothing"


@pytest.mark.vllm
def test_children_of_one_request_count_each(engine_answer: dict[str, Any]) -> None:
    before, after = engine_answer["script"]["rows"], engine_answer["script"]["rows_after_n_3"]
    assert sum(r["requests"] for r in after) - sum(r["requests"] for r in before) == 3
    assert sum(r["drafted_tokens"] for r in after) > sum(r["drafted_tokens"] for r in before)


@pytest.mark.vllm
def test_broken_counters_do_not_break_serving(engine_answer: dict[str, Any], tmp_path: Path) -> None:
    assert engine_answer["script"]["tokens_with_broken_counters"] == 20
