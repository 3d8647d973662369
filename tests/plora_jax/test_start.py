import threading

import pytest

from plora_jax.engine.start import AbandonedError, Beside, Progress, StagesInTurn


class Said(Progress):
    def __init__(self):
        self.calls = []

    def stage(self, name):
        self.calls.append(name)

    def advance(self, done, total):
        self.calls.append((done, total))


def test_stages_side_by_side_are_told_one_after_the_other():
    said = Said()
    stages = StagesInTurn(said, "weights", "programs")
    stages.advance("weights", 1, 2)
    stages.advance("programs", 1, 4)
    stages.advance("weights", 2, 2)
    stages.advance("programs", 2, 4)
    stages.end("weights")
    stages.advance("programs", 3, 4)
    assert said.calls == ["weights", (1, 2), (2, 2), "programs", (2, 4), (3, 4)]


def test_stage_that_ends_before_its_turn_is_told_when_that_comes():
    said = Said()
    stages = StagesInTurn(said, "weights", "programs")
    stages.advance("programs", 4, 4)
    stages.end("programs")
    assert said.calls == ["weights"]
    stages.end("weights")
    assert said.calls == ["weights", "programs", (4, 4)]


def test_beside_runs_meanwhile_and_returns():
    met = threading.Barrier(2, timeout=10)
    with Beside(lambda go_on: met.wait() * 0 + 5) as work:
        met.wait()
        assert work.result() == 5


def test_beside_that_failed_says_so_when_it_is_checked():
    def fail(go_on):
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        _check_on(Beside(fail))


def test_block_that_fails_abandons_what_goes_on_beside_it():
    began, ended = threading.Event(), []

    def work(go_on):
        try:
            while True:
                began.set()
                go_on()
        except AbandonedError:
            ended.append(True)
            raise

    with pytest.raises(KeyError):
        _fail_beside(work, began)
    assert ended == [True]


def _check_on(work: Beside) -> None:
    with work:
        while True:
            work.check()


def _fail_beside(work, began: threading.Event) -> None:
    with Beside(work):
        began.wait(10)
        raise KeyError
