"""Engine over fakes: adapters that come, go and are used meanwhile."""

import threading

import pytest

from plora_jax.adapters.adapter import Adapter, AdapterError
from plora_jax.engine import (
    AdapterExistsError,
    GenerationFailedError,
    SamplingParams,
    UnknownAdapterError,
)
from tests.plora_jax.engine_fakes import make_rig


def test_adapter_is_listed_with_what_is_known_of_it() -> None:
    rig = make_rig()
    rig.engine.load_adapter("b", "/adapters/b", pinned=True)
    rig.engine.load_adapter("a", "/adapters/a")
    rig.clock.time_s = 7.0
    rig.engine.submit([5], SamplingParams(n=2), adapter="b")
    rig.step(1)
    first, second = rig.engine.adapters()
    assert (first.name, first.path, first.tier, first.in_flight, first.last_used_s) == (
        "a",
        "/adapters/a",
        "pool",
        0,
        None,
    )
    assert (second.name, second.tier, second.pinned, second.in_flight) == ("b", "device", True, 2)
    assert (first.pinned, first.reason) == (False, None)
    assert (second.last_used_s, second.strategy, second.nbytes) == (7.0, "resident", 1000)
    assert rig.engine.stats().running_adapters == ("b",)


def test_unload_while_running_ends_undisturbed_and_frees_after_the_last() -> None:
    rig = make_rig()
    adapter_id = rig.load("a")
    running = rig.engine.submit([5], SamplingParams(max_tokens=6, seed=1), adapter="a")
    rig.step(2)

    rig.engine.unload_adapter("a")

    assert rig.engine.adapters() == []
    with pytest.raises(UnknownAdapterError):
        rig.engine.submit([5], SamplingParams(), adapter="a")
    assert adapter_id in rig.store.kept
    assert len(running.collect()[0].token_ids) == 6
    assert rig.store.kept == set()
    rig.check_all_given_back()


def test_unload_while_only_waiting_keeps_the_load_until_served() -> None:
    rig = make_rig(room=1)
    rig.load("a")
    rig.load("b")
    first = rig.engine.submit([5], SamplingParams(max_tokens=6), adapter="a")
    second = rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="b")
    rig.step(1)
    assert rig.engine.stats().waiting_adapters == ("b",)
    rig.engine.unload_adapter("b")
    rig.engine.unload_adapter("a")
    assert len(second.collect()[0].token_ids) == 2
    assert first.finished
    assert rig.store.kept == set()


def test_stats_name_the_adapters_of_requests_the_loop_has_not_seen_yet() -> None:
    rig = make_rig()
    rig.load("a")
    rig.engine._loop.post = lambda command: None  # the command that hands the request to the scheduler stays unread
    rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="a")
    assert rig.engine.stats().waiting == 1
    assert rig.engine.stats().waiting_adapters == ("a",)


def test_unload_unused_frees_at_once_and_unknown_is_an_error() -> None:
    rig = make_rig()
    rig.load("a")
    rig.engine.unload_adapter("a")
    assert rig.store.kept == set()
    with pytest.raises(UnknownAdapterError, match="'a'"):
        rig.engine.unload_adapter("a")


@pytest.mark.parametrize(("name", "why"), [("a", "already loaded"), ("base", "base model's name")])
def test_load_under_a_taken_name_is_refused(name: str, why: str) -> None:
    rig = make_rig()
    rig.load("a")
    with pytest.raises(AdapterExistsError, match=why):
        rig.engine.load_adapter(name, "/other")
    assert len(rig.store.kept) == 1


def test_load_inplace_new_requests_take_the_new_load_and_running_ones_keep_the_old() -> None:
    rig = make_rig()
    old = rig.load("a")
    running = rig.engine.submit([5], SamplingParams(max_tokens=4), adapter="a")
    rig.step(1)
    rig.engine.load_adapter("a", "/new", load_inplace=True)
    (new,) = rig.store.kept - {old}
    later = rig.engine.submit([5], SamplingParams(max_tokens=4), adapter="a")
    rig.step(1)
    assert [row.sequence.adapter_id for row in rig.executor.plans[-1].rows] == [old, new]
    running.collect()
    assert rig.store.kept == {new}
    later.collect()
    rig.check_all_given_back()


def test_load_that_is_unloaded_at_once_by_another_thread_still_says_what_was_loaded() -> None:
    rig = make_rig()
    lock = rig.engine._table._lock

    class UnloadedAtOnce:
        """Another thread unloads the adapter as soon as the lock under which it got its name is given back."""

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()
            if "a" in rig.engine._table._names and not rig.engine._table._loading:
                rig.engine._table._lock = lock
                rig.engine.unload_adapter("a")

    rig.engine._table._lock = UnloadedAtOnce()  # pyright: ignore[reportAttributeAccessIssue]
    assert rig.engine.load_adapter("a", "/a").name == "a"
    assert rig.store.kept == set()


def test_load_same_name_twice_at_once_reads_it_once() -> None:
    reading, proceed = threading.Event(), threading.Event()
    reads: list[str] = []

    def read(name: str, path: str) -> Adapter:
        reads.append(path)
        reading.set()
        assert proceed.wait(10)
        return Adapter(name, {}, {}, path)

    rig = make_rig(load_adapter=read)
    thread = threading.Thread(target=rig.engine.load_adapter, args=("a", "/1"))
    thread.start()
    assert reading.wait(10)
    with pytest.raises(AdapterExistsError, match="'a' is being loaded by another request"):
        rig.engine.load_adapter("a", "/2", load_inplace=True)
    # A request that runs meanwhile is not held up.
    assert rig.engine.submit([5], SamplingParams(max_tokens=2)).collect()
    proceed.set()
    thread.join()
    assert reads == ["/1"]
    assert [status.path for status in rig.engine.adapters()] == ["/1"]


def test_load_while_streams_run_writes_chunk_by_chunk_on_the_engine_s_thread() -> None:
    rig = make_rig()
    rig.store.chunks = 3
    rig.engine.start()
    running = rig.engine.submit([5], SamplingParams(max_tokens=20))
    rig.engine.load_adapter("a", "/a")
    assert rig.store.written_by == ["engine"] * 3
    assert len(rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="a").collect()[0].token_ids) == 2
    running.collect()
    rig.engine.shutdown()
    rig.check_all_given_back()


def test_load_that_fails_leaves_the_name_free_and_the_old_load_in_place() -> None:
    def read(name: str, path: str) -> Adapter:
        if path == "/bad":
            raise AdapterError("tensor x holds NaN")
        return Adapter(name, {}, {}, path)

    rig = make_rig(load_adapter=read)
    with pytest.raises(AdapterError, match="tensor x holds NaN"):
        rig.engine.load_adapter("a", "/bad")
    assert rig.engine.adapters() == []
    rig.engine.load_adapter("a", "/good")
    with pytest.raises(AdapterError, match="tensor x holds NaN"):
        rig.engine.load_adapter("a", "/bad", load_inplace=True)
    assert [status.path for status in rig.engine.adapters()] == ["/good"]


def test_adapter_that_never_fits_fails_its_request_alone() -> None:
    rig = make_rig(room=0)
    rig.load("a")
    cold = rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="a")
    base = rig.engine.submit([5], SamplingParams(max_tokens=2))
    assert len(base.collect()[0].token_ids) == 2
    with pytest.raises(GenerationFailedError, match="does not fit the device memory set aside for adapters"):
        cold.collect()
    rig.check_all_given_back()


def test_engine_without_a_store_refuses_adapters_and_serves_the_base() -> None:
    engine = make_rig(enable_lora=False).engine
    with pytest.raises(AdapterError, match="enable_lora=false"):
        engine.load_adapter("a", "/a")
    assert len(engine.submit([5], SamplingParams(max_tokens=2), adapter="base").collect()[0].token_ids) == 2
