"""The probe of a backend: what works here, and reports instead of exceptions where something does not."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from memory_pool import link, near_data
from memory_pool.probe import ProbeReport, WrongResultError, probe, try_copies, try_near_data


@dataclasses.dataclass(frozen=True)
class Backend:
    """A device of a backend that this machine has not."""

    platform: str
    kinds: tuple[str, ...] = ()
    fails: Exception | None = None

    def addressable_memories(self) -> list[SimpleNamespace]:
        if self.fails:
            raise self.fails
        return [SimpleNamespace(kind=kind) for kind in self.kinds]


def works(_: Any) -> float:
    return 12e-6


def refuses(_: Any) -> Any:
    raise RuntimeError("UNIMPLEMENTED: host compute\n  at length")


def is_wrong(function: Any) -> Any:
    return near_data(lambda *operands: function(*operands) * 2)


def test_probe_of_the_cpu_finds_near_data_compute_and_an_emulated_link():
    report = probe()
    assert report.near_data
    assert report.reads_pool
    assert report.problem is None
    assert {"device", "pinned_host"} <= set(report.memory_kinds)
    assert report.call_s is not None
    assert 0 < report.call_s < 1
    assert report.link_is_emulated
    text = report.as_text()
    assert text.startswith("cpu: memory kinds device, ")
    assert "; near-data functions work, " in text
    assert text.endswith("; link bytes are emulated: device and pool are the same memory")
    assert "\n" not in text


def test_probe_takes_the_device_it_is_given():
    assert probe(jax.local_devices()[-1]).near_data


def test_probe_of_a_backend_without_host_memory_says_what_is_emulated():
    report = probe(Backend("gpu", kinds=("device",)), near=works)
    assert report.near_data
    assert report.link_is_emulated
    assert report.as_text() == (
        "gpu: memory kinds device; the pool is emulated (the backend has no memory kind pinned_host): pool and device "
        "are the same memory: link bytes are counted, nothing moves; near-data functions run on the device, 12 us a "
        "call"
    )


def test_probe_of_a_backend_that_does_not_tell_its_memories_gives_its_error():
    report = probe(Backend("tpu", fails=NotImplementedError("no memories\nhere")), copies=refuses)
    assert report.memory_kinds == ()
    assert report.problem == "NotImplementedError: no memories"
    assert "memory kinds not told" in report.as_text()


def test_probe_without_near_data_compute_but_with_copies_says_what_serves():
    report = probe(Backend("gpu", kinds=("device", "pinned_host")), near=refuses, copies=lambda _: None)
    assert not report.near_data
    assert report.reads_pool
    assert report.as_text() == (
        "gpu: memory kinds device, pinned_host; near-data functions do not work: RuntimeError: UNIMPLEMENTED: host "
        "compute; what is in the pool is copied to the device block by block, and all is computed there; the link is "
        "real"
    )


def test_probe_where_the_pool_cannot_be_read_at_all_says_both_reasons():
    report = probe(Backend("gpu", kinds=("device", "pinned_host")), near=refuses, copies=refuses)
    assert not report.reads_pool
    assert report.as_text() == (
        "gpu: memory kinds device, pinned_host; near-data functions do not work: RuntimeError: UNIMPLEMENTED: host "
        "compute; nor can what is in the pool be copied to the device: RuntimeError: UNIMPLEMENTED: host compute; "
        "the link is real"
    )


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (refuses, "RuntimeError: UNIMPLEMENTED: host compute"),
        (lambda _: lambda *operands: refuses(operands), "RuntimeError: UNIMPLEMENTED: host compute"),
        (is_wrong, "WrongResultError: a near-data function gives other numbers than numpy"),
    ],
)
def test_probe_of_near_data_compute_that_fails_reports_why_and_tries_copies(wrap, says):
    report = probe(near=functools.partial(try_near_data, wrap=wrap))
    assert not report.near_data
    assert report.call_s is None
    assert says in (report.problem or "")
    assert "\n" not in report.as_text()
    assert report.reads_pool


def test_probe_near_data_compute_that_is_switched_off_is_not_tried(monkeypatch):
    monkeypatch.setenv("PLORA_NEAR_DATA", "0")
    report = probe()
    assert report.problem == "NotImplementedError: switched off by PLORA_NEAR_DATA=0"
    assert report.reads_pool


def test_probe_of_an_emulated_pool_runs_everything_on_the_device(monkeypatch):
    monkeypatch.setenv("PLORA_POOL", "device")
    report = probe()
    assert report.near_data
    assert "the pool is emulated (PLORA_POOL=device asks for it): pool and device are the same memory" in (
        report.as_text()
    )
    try_copies(jax.local_devices()[0])


def test_copies_that_bring_other_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(link, "write_block", lambda pool, block, at: pool)
    with pytest.raises(WrongResultError, match="a block that was copied into the pool comes back as other numbers"):
        try_copies(jax.local_devices()[0])


def test_probe_report_of_a_real_link_says_so():
    report = ProbeReport(platform="tpu", memory_kinds=("device", "pinned_host"), problem=None, call_s=12e-6)
    assert report.as_text() == (
        "tpu: memory kinds device, pinned_host; near-data functions work, 12 us a call; the link is real"
    )
