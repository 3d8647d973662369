"""Engine over fakes: functions that run between two steps while another thread waits for them."""

import threading
import time
from collections.abc import Callable

import pytest

from plora_jax.engine import EngineDeadError, SamplingParams, loop
from tests.plora_jax.engine_fakes import Rig, make_rig


def gated_rig() -> tuple[Rig, threading.Event, threading.Event]:
    """A running engine whose every step waits: `reached` says that one does, `proceed` lets it go."""
    rig = make_rig()
    reached, proceed = threading.Event(), threading.Event()

    def hold(plan: object) -> None:
        reached.set()
        assert proceed.wait(10)
        proceed.clear()

    rig.executor.before_step = hold
    rig.engine.start()
    return rig, reached, proceed


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs a function in a thread of its own; what it returns or raises goes into the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize("threaded", [False, True])
def test_between_steps_returns_what_the_function_returns_and_raises_what_it_raises(threaded: bool) -> None:
    rig = make_rig()
    if threaded:
        rig.engine.start()

    def broken() -> None:
        raise ValueError("bad chunk")

    where = rig.engine._loop.run_between_steps(threading.current_thread)
    assert where.name == ("engine" if threaded else threading.current_thread().name)
    with pytest.raises(ValueError, match="bad chunk"):
        rig.engine._loop.run_between_steps(broken)
    assert len(rig.engine.submit([5], SamplingParams(max_tokens=2)).collect()[0].token_ids) == 2
    rig.engine.shutdown()


@pytest.mark.parametrize("threaded", [False, True])
def test_between_steps_from_the_engine_s_own_thread_runs_at_once(threaded: bool) -> None:
    rig = make_rig()
    if threaded:
        rig.engine.start()
    run = rig.engine._loop.run_between_steps
    assert run(lambda: run(lambda: 7)) == 7
    rig.engine.shutdown()


def test_between_steps_runs_one_function_a_step_while_sequences_run() -> None:
    rig, reached, proceed = gated_rig()
    generation = rig.engine.submit([5], SamplingParams(max_tokens=20))
    assert reached.wait(10)
    steps_seen: list[int] = []
    threads = [
        in_thread(lambda: rig.engine._loop.run_between_steps(lambda: steps_seen.append(len(rig.executor.plans))))[0]
        for _ in range(4)
    ]
    wait_until(lambda: len(rig.engine._loop._tasks) == 4)
    while not generation.finished:
        proceed.set()
        time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert steps_seen == [1, 2, 3, 4]
    rig.engine.shutdown()
    rig.check_all_given_back()


def test_between_steps_never_runs_within_a_step() -> None:
    rig, reached, proceed = gated_rig()
    generation = rig.engine.submit([5], SamplingParams(max_tokens=1))
    assert reached.wait(10)
    thread, outcome = in_thread(lambda: rig.engine._loop.run_between_steps(lambda: "ran"))
    thread.join(0.05)
    assert outcome == []
    proceed.set()
    thread.join(10)
    assert outcome == ["ran"]
    generation.collect()
    rig.engine.shutdown()


def test_between_steps_when_the_engine_dies_meanwhile_raises_instead_of_hanging() -> None:
    rig, reached, proceed = gated_rig()
    rig.executor.fail_with = RuntimeError("device lost")
    generation = rig.engine.submit([5], SamplingParams())
    assert reached.wait(10)
    rig.engine._loop._failed_steps = loop.MAX_FAILED_STEPS - 1
    thread, outcome = in_thread(lambda: rig.engine._loop.run_between_steps(lambda: "ran"))
    wait_until(lambda: len(rig.engine._loop._tasks) == 1)
    proceed.set()
    thread.join(10)
    (error,) = outcome
    assert isinstance(error, EngineDeadError)
    assert "device lost" in str(error)
    assert list(generation)[-1].finish_reason == "error"
    with pytest.raises(EngineDeadError, match="device lost"):
        rig.engine._loop.run_between_steps(lambda: "ran")


def test_between_steps_when_the_engine_shuts_down_meanwhile_raises_instead_of_hanging() -> None:
    rig, reached, proceed = gated_rig()
    rig.engine.submit([5], SamplingParams())
    assert reached.wait(10)
    thread, outcome = in_thread(lambda: rig.engine._loop.run_between_steps(lambda: "ran"))
    wait_until(lambda: len(rig.engine._loop._tasks) == 1)
    shutdown, _ = in_thread(rig.engine.shutdown)
    wait_until(lambda: rig.engine._loop._closing)
    proceed.set()
    thread.join(10)
    shutdown.join(10)
    (error,) = outcome
    assert isinstance(error, EngineDeadError)
    assert "was shut down" in str(error)
    with pytest.raises(EngineDeadError, match="was shut down"):
        rig.engine.load_adapter("a", "/a")
    assert rig.engine.adapters() == []
    rig.check_all_given_back()
