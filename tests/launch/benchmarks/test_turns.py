import threading

from launch.benchmarks.turns import Turns


def steps_of(turns, counts):
    """Lets each engine make so many steps from a thread of its own; returns who made them, in order."""
    made = []

    def run(engine, count):
        for _ in range(count):
            turns.take(engine)
            made.append(engine)
        turns.leave(engine)

    threads = [threading.Thread(target=run, args=entry, daemon=True) for entry in enumerate(counts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), made
    return made


def test_engines_alternate_turn_by_turn():
    assert steps_of(Turns(3, steps=2), [4, 4, 4]) == [0, 0, 1, 1, 2, 2] * 2


def test_step_knows_how_many_of_its_turn_come_before_it():
    turns, found = Turns(2, steps=3), []

    def run():
        found.extend(turns.take(1) for _ in range(5))
        turns.leave(1)

    other = threading.Thread(target=run, daemon=True)
    other.start()
    before = [turns.take(0) for _ in range(3)]
    turns.leave(0)
    other.join(timeout=20)
    assert before == [0, 1, 2]
    assert found == [0, 1, 2, 3, 4], "one that is alone has no other turn"


def test_engine_that_left_is_not_waited_for():
    assert steps_of(Turns(3, steps=2), [6, 1, 3]) == [0, 0, 1, 2, 2, 0, 0, 2, 0, 0]


def test_last_engine_goes_on_alone():
    assert steps_of(Turns(1, steps=2), [5]) == [0] * 5


def test_engine_without_a_step_hands_its_turn_on():
    assert steps_of(Turns(2, steps=3), [0, 2]) == [1, 1]


def test_engine_that_left_is_not_held_up():
    turns = Turns(2, steps=1)
    turns.leave(1)
    turns.take(0)
    turns.take(1)
