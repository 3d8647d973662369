"""The probe of a backend: what works here, and reports instead of exceptions where something does not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from memory_pool import near_data
from memory_pool.probe import ProbeReport, probe


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


def test_probe_of_the_cpu_finds_near_data_compute_and_an_emulated_link():
    report = probe()
    assert report.near_data
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


def test_probe_of_a_backend_without_host_memory_says_what_is_left_out():
    report = probe(Backend("gpu", kinds=("device",)))
    assert not report.near_data
    assert report.call_s is None
    assert report.as_text() == (
        "gpu: memory kinds device; near-data functions do not work: the backend has no memory kind pinned_host; "
        "pages in the pool cannot be read, so only what is on the device serves; there is no link"
    )


def test_probe_of_a_backend_that_does_not_tell_its_memories_gives_its_error():
    report = probe(Backend("tpu", fails=NotImplementedError("no memories\nhere")))
    assert report.memory_kinds == ()
    assert report.problem == "NotImplementedError: no memories"
    assert "memory kinds not told" in report.as_text()


def refuses(_: Any) -> Any:
    raise RuntimeError("UNIMPLEMENTED: host compute\n  at length")


def is_wrong(function: Any) -> Any:
    return near_data(lambda *operands: function(*operands) * 2)


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (refuses, "RuntimeError: UNIMPLEMENTED: host compute"),
        (lambda _: lambda *operands: refuses(operands), "RuntimeError: UNIMPLEMENTED: host compute"),
        (is_wrong, "WrongResultError: a near-data function gives other numbers than numpy"),
    ],
)
def test_probe_of_near_data_compute_that_fails_reports_why(wrap, says):
    report = probe(wrap=wrap)
    assert not report.near_data
    assert report.call_s is None
    assert says in (report.problem or "")
    assert "\n" not in report.as_text()


def test_probe_report_of_a_real_link_says_so():
    report = ProbeReport(platform="tpu", memory_kinds=("device", "pinned_host"), problem=None, call_s=12e-6)
    assert report.as_text() == (
        "tpu: memory kinds device, pinned_host; near-data functions work, 12 us a call; the link is real"
    )
