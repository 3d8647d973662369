import numpy as np
import pytest

from launch.benchmarks.policies_figures import median_figures, run_figures
from launch.benchmarks.policies_traffic import Traffic
from launch.benchmarks.policies_watch import Step
from launch.flags import StartError


class Watched:
    def __init__(self, steps, link_bytes=0):
        self.steps, self.link_bytes = steps, link_bytes


def traffic(requests=8, period=8):
    return Traffic(
        adapters=np.zeros(requests, int),
        new_tokens=np.ones(requests, int),
        prompts=np.zeros((requests, 1), int),
        by_popularity=np.array([[0, 1, 2], [2, 1, 0], [1, 0, 2]])[: -(-requests // period)],
        period_requests=period,
    )


def step(seconds, served, *, settled=True, started=1, rows=None, prefill=0, planned_s=None, predicted_s=None, moved=0):
    return Step(
        seconds=seconds,
        settled=settled,
        started=started,
        rows=len(served) if rows is None else rows,
        served=tuple(served),
        prefill_tokens=prefill,
        moved_pages=moved,
        planned_s=planned_s,
        predicted_s=predicted_s,
    )


def figures(steps, *, link_bytes=0, concurrency=4, of=None, room=2):
    return run_figures(
        Watched(steps, link_bytes),
        concurrency=concurrency,
        traffic=of or traffic(),
        index_of={10: 0, 11: 1, 12: 2},
        sizes=[1, 1, 1],
        room=room,
    )


NEAR, SPLIT = (10, "near_data"), (11, "split")


def test_figures_weigh_steps_by_their_tokens_and_keep_prompts_apart():
    steps = [
        step(1.0, [NEAR, NEAR, SPLIT, SPLIT], planned_s=0.5, predicted_s=0.8, moved=3),
        step(3.0, [NEAR, NEAR], rows=4, prefill=20, predicted_s=9.0),
        step(2.0, [NEAR, SPLIT], rows=4, predicted_s=1.0, moved=2),
    ]
    got = figures(steps, link_bytes=80)
    assert got.streams == 4
    assert got.itl_s == got.latency_s == pytest.approx((4 * 1.0 + 2 * 2.0) / 6)
    assert got.all_itl_s == pytest.approx((4 * 1.0 + 2 * 3.0 + 2 * 2.0) / 8)
    assert (got.itl_p50_s, got.tokens, got.tokens_per_s) == (1.0, 8, pytest.approx(8 / 6))
    assert got.on_device == 3 / 8
    assert got.by_strategy == {"resident": 0, "fetch": 0, "near_data": 5 / 8, "split": 3 / 8}
    assert got.link_bytes_per_token == 10
    assert (got.plans, got.plan_s, got.copied_pages) == (1, 0.5, 5)
    assert got.predicted_s == pytest.approx(0.9)
    assert got.first_quarter is got.last_quarter is None


def test_first_steps_of_a_turn_count_in_no_time_but_in_all_else():
    steps = [
        step(9.0, [SPLIT, SPLIT], settled=False, planned_s=0.5, predicted_s=7.0, moved=3),
        step(1.0, [NEAR, NEAR], predicted_s=0.8),
    ]
    got = figures(steps, link_bytes=80, concurrency=2)
    assert (got.itl_s, got.latency_s, got.all_itl_s, got.tokens_per_s, got.predicted_s) == (1.0, 1.0, 1.0, 2.0, 0.8)
    assert (got.tokens, got.on_device, got.link_bytes_per_token) == (4, 0.5, 20)
    assert (got.plans, got.plan_s, got.copied_pages) == (1, 0.5, 3)
    with pytest.raises(StartError, match="no step of a run only decoded"):
        figures(steps[:1])


def test_streams_that_wait_for_room_count_in_the_latency():
    got = figures([step(1.0, [NEAR, NEAR])])
    assert (got.streams, got.itl_s, got.latency_s, got.all_latency_s) == (2, 1.0, 2.0, 2.0)


def test_quarters_follow_the_popular_adapters_of_each_period():
    # Periods of 4 requests; 0 and 1 are the popular of the first, 2 and 1 those of the second, which fit the device.
    near, split, other = (12, "near_data"), (12, "split"), (10, "resident")
    steps = [
        step(1.0, [SPLIT], started=2),  # the first period is not whole
        step(1.0, [near, near, other], started=5),
        step(1.0, [split], started=6),
        step(1.0, [split, split, split, near, other], started=8),
        step(1.0, [near], started=9),
    ]
    got = figures(steps, of=traffic(12, 4))
    assert (got.first_quarter, got.last_quarter) == (0.0, 0.75)


def test_run_without_a_step_that_only_decodes_is_refused():
    with pytest.raises(StartError, match="no step of a run only decoded: raise --requests or --new_tokens"):
        figures([step(1.0, [NEAR], prefill=3)])


def test_median_is_of_each_figure_for_itself():
    slow, fast = (figures([step(seconds, [NEAR])], link_bytes=seconds) for seconds in (3.0, 1.0))
    got = median_figures([slow, fast, fast._replace(link_bytes_per_token=2.0, predicted_s=5.0)])
    assert (got.itl_s, got.link_bytes_per_token, got.predicted_s, got.plan_s) == (1.0, 2.0, 5.0, None)
    assert got.by_strategy["near_data"] == 1.0
