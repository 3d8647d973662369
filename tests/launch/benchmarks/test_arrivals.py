"""Traces: what is read, what is kept, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from launch.benchmarks.arrivals import Arrival, read_trace, replay
from launch.benchmarks.case import ThroughputCase, jobs_of_replays
from launch.flags import StartError

LINES = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:17:46.6805900,8,1",
]


@pytest.fixture
def trace(tmp_path):
    """As the Azure files are: CRLF, seven digits of a second, no final newline."""
    file = tmp_path / "trace.csv"
    file.write_bytes("\r\n".join(LINES).encode())
    return read_trace(str(file))


def test_trace_is_read_in_order_of_time_from_its_first_request(trace):
    assert [a[1:] for a in trace] == [(374, 44), (396, 109), (8, 1)]
    assert [a.at_s for a in trace] == pytest.approx([0.0, 4.314579, 120.0])


def test_replay_drops_what_the_context_does_not_hold_and_counts_it(trace):
    sent = replay(trace, scale=1.0, minutes=None, max_tokens=420)
    assert ([a.prompt_tokens for a in sent.arrivals], sent.dropped) == ([374, 8], 1)
    assert replay(trace, scale=1.0, minutes=1.0, max_tokens=None).arrivals == trace[:2]
    late = replay(trace, scale=1.0, minutes=None, max_tokens=100)
    assert (late.arrivals, late.dropped) == ([Arrival(0.0, 8, 1)], 2)


def test_replay_drops_requests_without_a_token_and_counts_them():
    trace = [Arrival(0.0, 5, 0), Arrival(1.0, 0, 5), Arrival(2.0, 5, 5)]
    sent = replay(trace, scale=1.0, minutes=None, max_tokens=None)
    assert (sent.arrivals, sent.dropped) == ([Arrival(0.0, 5, 5)], 2)


@pytest.mark.parametrize(("scale", "count"), [(1.0, 1000), (0.5, 500), (0.02, 20), (0.0151, 15)])
def test_replay_keeps_its_share_evenly_over_the_trace(scale, count):
    trace = [Arrival(float(i), 1, 1) for i in range(1000)]
    kept = replay(trace, scale=scale, minutes=None, max_tokens=None).arrivals
    assert len(kept) == count
    gaps = {round(b.at_s - a.at_s) for a, b in itertools.pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1


def test_jobs_of_a_trace_warm_up_at_once_and_then_keep_its_times():
    sent = [Arrival(float(i), 3, 2) for i in range(20)]
    runs = jobs_of_replays(ThroughputCase(), sent, ["a", "b"], ids_range=(5, 9))
    first, second, third = (next(runs) for _ in range(3))
    assert (len(first), {job.at_s for job in first}) == (8, {0.0})
    assert [job.at_s for job in second] == [job.at_s for job in third] == [float(i) for i in range(20)]
    assert [job.model for job in second[:3]] == ["a", "b", "a"]
    assert {token for job in second for token in job.prompt_ids} <= {5, 6, 7, 8}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: "),
        ("a,b\n1,2\n", "has no column 'TIMESTAMP': it must be CSV with TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,2,3\n", "is not CSV with the columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path, text, says):
    file = tmp_path / "x.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(StartError) as caught:
        read_trace(str(file))
    assert says in str(caught.value)
    assert "--trace " in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trace_scale": 0.0}, "--trace_scale must be above 0 and at most 1, got 0.0"),
        ({"trace": "x", "trace_minutes": -1.0}, "--trace_minutes must be above 0, got -1.0"),
        ({"trace_scale": 0.5}, "--trace_scale and --trace_minutes need --trace: name the file"),
        ({"trace": "x", "concurrency": 4}, "--concurrency has no use with --trace"),
    ],
)
def test_options_of_a_trace_that_cannot_be_are_refused(options, says):
    with pytest.raises(StartError) as caught:
        ThroughputCase(**options).validate()
    assert says in str(caught.value)
