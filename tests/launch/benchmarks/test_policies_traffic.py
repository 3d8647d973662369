import numpy as np
import pytest

from launch.benchmarks.policies_traffic import KINDS, make_traffic

OPTIONS = {
    "requests": 2000,
    "adapters": 100,
    "skew": 1.0,
    "drift_requests": 500,
    "prompt_tokens": 3,
    "new_tokens": 7,
    "ids_range": (10, 20),
}


def traffic(kind, seed=0, **changes):
    return make_traffic(kind, seed=seed, **{**OPTIONS, **changes})


def share_of_popular(adapters, by_popularity):
    return float(np.isin(adapters, by_popularity[:10]).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_is_a_function_of_its_seed(kind):
    for one, two in zip(traffic(kind), traffic(kind), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (traffic(kind).adapters != traffic(kind, seed=1).adapters).any()


def test_traffic_has_lengths_around_the_mean_and_prompts_in_range():
    made = traffic("uniform")
    assert (made.new_tokens.min(), made.new_tokens.max()) == (4, 10)
    assert made.new_tokens.mean() == pytest.approx(7, rel=0.05)
    assert (made.prompts.min(), made.prompts.max(), made.prompts.shape) == (10, 19, (2000, 3))
    job = made.jobs([f"n{i}" for i in range(100)])[5]
    assert (job.model, job.new_tokens) == (f"n{made.adapters[5]}", made.new_tokens[5])
    assert job.prompt_ids == made.prompts[5].tolist()


def test_uniform_traffic_asks_for_all_alike_and_skewed_by_a_power_law():
    uniform, skewed = traffic("uniform"), traffic("skewed")
    assert share_of_popular(uniform.adapters, uniform.by_popularity[0]) == pytest.approx(0.1, abs=0.03)
    law = 1 / np.arange(1, 101)
    assert share_of_popular(skewed.adapters, skewed.by_popularity[0]) == pytest.approx(
        law[:10].sum() / law.sum(), abs=0.04
    )
    assert len(skewed.by_popularity) == 1


def test_drifting_traffic_has_other_popular_adapters_in_each_period():
    made = traffic("drifting")
    periods = np.split(made.adapters, 4)
    assert len(made.by_popularity) == 4
    assert all(share_of_popular(p, order) > 0.5 for p, order in zip(periods, made.by_popularity, strict=True))
    assert all(share_of_popular(p, made.by_popularity[0]) < 0.35 for p in periods[1:])
