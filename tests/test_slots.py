"""Which waiting requests may join a batch that mixes few drafter adapters: a small scheduler around it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.serving.slots import Slots


@dataclass
class Simulation:
    """First come, first served, `seats` requests at a time; each runs `length` steps, or up to that many."""

    slots: Slots
    seats: int = 8
    length: int = 4
    lengths: random.Random | None = None
    waiting: list[tuple[str, str | None]] = field(default_factory=list)
    running: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    clock: int = 0

    def step(self) -> None:
        self.clock += 1
        known = {request for request, _ in self.waiting} | set(self.running)
        self.slots.begin_step(known)
        for request, adapter in list(self.waiting):
            if len(self.running) == self.seats:
                break
            if self.slots.admits(request, adapter, [a for a, _ in self.running.values()]):
                self.waiting.remove((request, adapter))
                length = self.lengths.randint(1, self.length) if self.lengths else self.length
                self.running[request] = (adapter, length)
                self.started[request] = self.clock
        mixed = {a for a, _ in self.running.values()} - {None}
        assert len(mixed) <= self.slots.limit
        self.running = {r: (a, left - 1) for r, (a, left) in self.running.items() if left > 1}

    def run(self, requests: Sequence[tuple[str, str | None]], limit: int = 10_000) -> None:
        self.waiting += requests
        while self.waiting:
            self.step()
            assert self.clock < limit, f"still waiting: {self.waiting}"


@given(
    st.lists(st.sampled_from([None, "a", "b", "c", "d"]), max_size=40),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 6),
)
@settings(max_examples=200)
def test_everyone_is_served_and_adapters_keep_their_order(adapters, limit, patience, seats) -> None:
    requests = [(f"r{i}", adapter) for i, adapter in enumerate(adapters)]
    run = Simulation(Slots(limit, patience), seats=seats)
    run.run(requests)
    assert set(run.started) == {request for request, _ in requests}
    for adapter in {*adapters}:
        order = [run.started[request] for request, own in requests if own == adapter]
        assert order == sorted(order)


def test_within_the_limit_nobody_waits() -> None:
    run = Simulation(Slots(3))
    run.run([("0", "a"), ("1", "b"), ("2", None), ("3", "c"), ("4", "a")])
    assert set(run.started.values()) == {1}


def test_a_full_batch_is_overtaken_by_its_own_adapters_and_by_the_base() -> None:
    run = Simulation(Slots(1, patience=10))
    run.run([("a0", "a"), ("b0", "b"), ("a1", "a"), ("base", None)])
    assert {name: run.started[name] for name in ("a0", "a1", "base")} == {"a0": 1, "a1": 1, "base": 1}
    assert run.started["b0"] == 5


@pytest.mark.parametrize("patience", [0, 3, 20])
def test_a_stream_of_other_requests_starves_nobody(patience) -> None:
    run = Simulation(Slots(1, patience), length=4)
    run.waiting = [("a0", "a"), ("b", "b")]
    for i in range(1, 60):
        run.step()
        run.waiting.append((f"a{i}", "a"))
    # held back for its patience, then until the batch has run empty
    assert run.started["b"] <= 1 + patience + 1 + run.length


def test_the_base_drafter_is_never_held_back() -> None:
    run = Simulation(Slots(1, patience=0), length=50)
    run.waiting = [("a0", "a"), ("b", "b")]
    run.step(), run.step()
    run.waiting += [("a1", "a"), ("base", None)]
    run.step()
    assert run.started["base"] == 3 and "a1" not in run.started


def test_a_long_queue_does_not_shrink_the_batch() -> None:
    requests = [(f"r{i}", "ab"[i % 2]) for i in range(400)]
    run = Simulation(Slots(1, patience=16), length=20, lengths=random.Random(0))
    run.run(requests)
    # In 8 seats without any limit: 400 * 10.5 / 8 = 525 steps; one request at a time: 4200.
    assert run.clock < 800


def test_requests_that_are_gone_are_forgotten() -> None:
    slots = Slots(1, patience=2)
    for _ in range(3):
        slots.begin_step({"b", "a1"})
        assert not slots.admits("b", "b", ["a"])
    assert not slots.admits("a1", "a", ["a"])  # b waited too long
    slots.begin_step({"a1"})  # b was cancelled
    assert slots.admits("a1", "a", ["a"])
    slots.begin_step({"b", "a1"})
    assert not slots.admits("b", "b", ["a"]) and slots.admits("a2", "a", ["a"])
