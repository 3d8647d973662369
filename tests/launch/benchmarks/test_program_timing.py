"""Programs timed in their stride, round after round."""

from __future__ import annotations

import types
from typing import cast

import jax.numpy as jnp
import pytest

from launch.benchmarks.cold_pages import ColdPages
from launch.benchmarks.program_timing import measure
from launch.benchmarks.strategy_programs import Program


def test_every_round_goes_over_all_programs_and_the_second_call_counts(monkeypatch):
    """On a clock that only calls advance: the first of two takes 5 s, the second 1 s, later rounds longer."""
    clock, calls = [0.0], []

    def program(name: str) -> Program:
        def call() -> types.SimpleNamespace:
            first = not calls or calls[-1] != name or calls[-2:] == [name, name]
            calls.append(name)
            clock[0] += 5.0 if first else 1.0 + len(calls) / 1000
            return cast(types.SimpleNamespace, jnp.zeros(1))

        return Program(name, call, lambda: (), 100)  # pyright: ignore[reportArgumentType]

    cold = cast(ColdPages, types.SimpleNamespace(num_bytes=300, stream_s=lambda: 3.0))
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    told = []
    groups = [[program("a"), program("b")], [program("c")]]
    (a, b), (c,) = measure(groups, cold, runs=2, tell=lambda run, seconds: told.append(run))
    assert calls == ["a", "a", "b", "b", "c", "c"] * 3
    assert told == [0, 1, 2]
    assert [timing.program for timing in (a, b, c)] == ["a", "b", "c"]
    assert a.runs_s == pytest.approx((1.008, 1.014))
    assert c.runs_s == pytest.approx((1.012, 1.018))
    assert a.stream_bytes_per_s == (100.0, 100.0)
