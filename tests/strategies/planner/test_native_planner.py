"""The planner's native functions against the numpy ones, which are the reference."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from strategies.native import planner_calls, unavailable
from strategies.planner import filling, folded, implementation, improve, prices, rounding, settled
from strategies.planner import problem as problems
from strategies.planner.decision import Decision
from strategies.planner.folded import Folded
from strategies.planner.optimizer import optimize
from strategies.planner.problem import violations
from strategies.planner.relaxation import Relaxation
from tests.strategies.planner.instances import random_instance

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no native planner: {unavailable()}")

SEEDS = range(60)


@pytest.fixture
def both(monkeypatch):
    """Runs a function natively, and in numpy alone."""

    def run(function):
        native = function()
        with monkeypatch.context() as patch:
            patch.setattr(implementation, "is_native", lambda: False)
            return native, function()

    return run


def relaxation_problem(seed, *, rows=None):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 120)) if rows is None else rows
    options, places, limits = int(rng.integers(1, 6)), int(rng.integers(1, 30)), int(rng.integers(0, 3))
    phase_of = np.concatenate([np.sort(rng.integers(0, min(places, 6), places)), np.full(limits, -1)])
    phase_of[:places] = np.unique(phase_of[:places], return_inverse=True)[1]
    allowed = rng.random((rows, options)) < 0.8
    allowed[np.arange(rows), rng.integers(0, options, rows)] = True
    work = rng.random((rows, options, places + limits)) * (rng.random((rows, options, places + limits)) < 0.5)
    work *= allowed[..., None] / max(rows, 1)
    shares = allowed / allowed.sum(axis=1, keepdims=True)
    limit = np.where(
        phase_of < 0, 1.1 * np.einsum("ns,nsp->p", shares, work) + 0.01, -0.3 * rng.random(places + limits)
    )
    cost = np.where(allowed, rng.random((rows, options)) / max(rows, 1), np.inf)
    return {"work": work, "cost": cost, "allowed": allowed, "phase_of": phase_of, "limit": limit}


def solve(problem, **options):
    others = {name: array for name, array in problem.items() if name != "work"}
    return Relaxation(problem["work"], **others).solve(**{"gap": 1e-4, **options})


def assert_same(native, reference):
    assert native.steps == reference.steps
    np.testing.assert_allclose(native.shares, reference.shares, atol=1e-6)
    np.testing.assert_allclose(native.prices, reference.prices, atol=1e-6)
    assert native.softness == pytest.approx(reference.softness, rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_relaxation_equals_numpy(seed, both):
    problem = relaxation_problem(seed)
    assert_same(*both(lambda: solve(problem)))


@pytest.mark.parametrize("seed", range(20))
def test_relaxation_rows_of_several_homes_equal_numpy(seed, both):
    """Rows load places of their home, and some that all share; homes come in no order."""
    problem, rng = relaxation_problem(seed, rows=90), np.random.default_rng(1000 + seed)
    problem["home"] = rng.choice([-1, 3, 4, 9], 90)
    of_place = rng.choice([-1, 3, 4, 9, 100], len(problem["phase_of"]))
    here = (of_place == problem["home"][:, None]) | (of_place == 100) | (problem["phase_of"] < 0)
    problem["work"] = problem["work"] * here[:, None]
    assert_same(*both(lambda: solve(problem)))


def test_relaxation_without_adapters_equals_numpy(both):
    problem = relaxation_problem(1, rows=0)
    native, reference = both(lambda: solve(problem))
    assert_same(native, reference)
    assert native.shares.shape == (0, problem["cost"].shape[1])


def test_relaxation_one_column_a_row_is_taken_whole(both):
    problem = relaxation_problem(2)
    problem["allowed"] = np.arange(problem["cost"].shape[1]) == np.zeros(len(problem["cost"]))[:, None]
    problem["work"] = problem["work"] * problem["allowed"][..., None]
    problem["cost"] = np.where(problem["allowed"], 0.01, np.inf)
    native, reference = both(lambda: solve(problem))
    assert_same(native, reference)
    np.testing.assert_allclose(native.shares, problem["allowed"], atol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_relaxation_limits_that_cannot_be_met_end_as_in_numpy(seed, both):
    problem = relaxation_problem(seed)
    problem["limit"] = np.where(problem["phase_of"] < 0, -1.0, problem["limit"])
    native, reference = both(lambda: solve(problem, max_steps=6))
    assert native.steps == reference.steps
    np.testing.assert_allclose(native.shares, reference.shares, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_relaxation_that_has_no_factor_ends_as_in_numpy(bad, both):
    problem = relaxation_problem(3)
    problem["work"] = problem["work"].copy()
    problem["work"][0, problem["allowed"][0].argmax()] = bad
    with np.errstate(all="ignore"):
        native, reference = both(lambda: solve(problem))
    assert native.steps == reference.steps <= 25
    np.testing.assert_allclose(native.shares, reference.shares, atol=1e-6)


def test_relaxation_arrays_of_any_layout_and_dtype_are_read_right():
    problem = relaxation_problem(4)
    problem["work"] = problem["work"].astype(np.float32)
    expected = solve({**problem, "work": problem["work"].astype(float)})
    problem["work"] = np.asfortranarray(problem["work"])
    problem["phase_of"], problem["allowed"] = (
        problem["phase_of"].astype(np.int32),
        np.asfortranarray(problem["allowed"]),
    )
    assert_same(solve(problem), expected)


def start(seed, *, n=None):
    """A problem, and a decision at random among what is allowed and fits it more or less."""
    problem = random_instance(seed, n=n)
    of = Folded(problem, fold_idle=False)
    rng = np.random.default_rng(seed)
    cheap = np.where(of.allowed, of.bytes, np.inf).argmin(axis=1)
    columns = np.where(rng.random(len(cheap)) < 0.7, cheap, rng.permuted(of.allowed, axis=1).argmax(axis=1))
    columns = np.where(of.allowed[of.rows, columns], columns, cheap)
    of_seed = Decision(of, columns, attention=seed % 2, fraction=float(rng.random()))
    improve.make_fit(of_seed, of.costs(of_seed.prices(200.0)), 0.0)
    return of_seed


def state(of):
    return of.loads, of.own, of.bytes, of.count, of.wanted


CHANGES = {
    "single_moves": lambda of, rows: improve.single_moves(of, rows, sharpness=None, rounds=4),
    "soft_single_moves": lambda of, rows: improve.single_moves(of, rows, sharpness=300.0, rounds=4),
    "exchanges": lambda of, rows: improve.exchanges(of, rows, sharpness=None, rounds=3),
    "soft_exchanges": lambda of, rows: improve.exchanges(of, rows, sharpness=1000.0, rounds=3),
    "wander": lambda of, rows: improve.wander(of, rows, sharpness=300.0, steps=30),
    "best_fraction": lambda of, rows: improve.best_fraction(of),
    "near": lambda of, rows: near(of, decided=True),
    "near_from_prices": lambda of, rows: near(of, decided=False),
    "near_mended": lambda of, rows: near(of, decided=True, enough=0.0),
    "near_levelled": lambda of, rows: near(of, decided=True, enough=0.0, bytes_count=True),
    "take_cheapest": lambda of, rows: improve.take_cheapest(of, random_costs(of)),
    "make_fit": lambda of, rows: improve.make_fit(overfull(of), at_random_prices(of)[1], 0.0),
}


def near(of, *, decided, enough=0.9, bytes_count=False):
    """Rounds shares of all, or none, at random prices in a node that some columns are not part of."""
    relaxed, total = at_random_prices(of)
    if decided:
        shares = np.random.default_rng(1).random(total.shape) * of.folded.allowed
        relaxed = relaxed._replace(shares=shares / shares.sum(axis=1, keepdims=True))
    node = prices.Node(of.attention, np.arange(total.shape[1]) != 1)
    byte_s = 3 * relaxed.prices.joint + of.value() / max(of.folded.most_bytes, 1.0) if bytes_count else 1e-12
    rounding.near(of, node, relaxed, total, byte_s=byte_s, enough_s=enough * of.value())


def random_costs(of):
    """[M, S], inf where not allowed, and for some rows where they are."""
    costs = np.where(of.folded.allowed, np.random.default_rng(2).random(of.folded.allowed.shape), np.inf)
    rows = np.flatnonzero(of.folded.allowed.sum(axis=1) > 1)[::5]
    costs[rows, of.columns[rows]] = np.inf
    return costs


def overfull(of):
    """Everyone where it takes most."""
    largest = np.where(of.folded.allowed, of.folded.bytes, -1.0).argmax(axis=1)
    of.take(Decision(of.folded, largest, attention=of.attention, fraction=of.wanted))
    return of


def at_random_prices(of):
    """Prices that are drawn, without shares, and the costs there."""
    rng = np.random.default_rng(len(of.columns))
    places = rng.random(len(of.loads))
    places /= np.add.reduceat(places, of.folded.starts)[of.folded.phase_of]
    byte = 0.1 * of.value() / max(of.folded.budget_bytes, 1.0)
    drawn = prices.Shares(prices.Prices(places, byte, 0.0, 1e-6), np.zeros(0), 0.5)
    total = of.folded.costs(places) + byte * of.folded.bytes
    return drawn, total


@pytest.mark.parametrize("name", CHANGES)
def test_change_equals_numpy(name, both):
    """The same moves, but for ties between those that are equally good."""
    others, changed = 0, 0
    for seed in SEEDS:
        rows = np.random.default_rng(seed).permutation(len(start(seed).columns))[:50]

        def run(seed=seed, rows=rows):
            of = start(seed)
            before = of.value()
            CHANGES[name](of, rows)
            return of, before

        (native, before), (reference, same) = both(run)
        assert before == pytest.approx(same, rel=1e-12)
        again = Decision(native.folded, native.columns, attention=native.attention, fraction=native.wanted)
        for found, expected in zip(state(native), state(again), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-6 if expected is again.bytes else 1e-12)
        changed += native.value() != before
        if native.attention != reference.attention or (native.columns != reference.columns).any():
            others += 1
            assert native.value() == pytest.approx(reference.value(), rel=1e-6)
        else:
            assert native.value() == pytest.approx(reference.value(), rel=1e-9)
            assert native.wanted == pytest.approx(reference.wanted, abs=1e-9)
    assert changed > len(SEEDS) / 3
    assert others <= len(SEEDS) / 10, "equal moves may be taken in another order, but few are equal"


def test_near_levels_before_it_mends(monkeypatch):
    """Without levelling numpy ends elsewhere than native does, with it in the same place."""
    ends = []
    for level in (rounding.level, lambda *args, **options: None):
        monkeypatch.setattr(implementation, "is_native", lambda: False)
        monkeypatch.setattr(rounding, "level", level)
        ends.append([])
        for seed in range(20):
            of = start(seed)
            CHANGES["near_levelled"](of, None)
            ends[-1].append(of.value())
    monkeypatch.undo()
    native = [start(seed) for seed in range(20)]
    for of in native:
        CHANGES["near_levelled"](of, None)
    found, (with_it, without) = np.array([of.value() for of in native]), np.array(ends)
    assert (np.isclose(found, with_it, rtol=1e-6)).sum() >= 18
    assert (~np.isclose(with_it, without, rtol=1e-6)).sum() >= 5


@pytest.mark.parametrize("name", CHANGES)
def test_change_without_rows_changes_nothing_that_rows_do(name):
    of = start(5)
    columns, no_rows = of.columns.copy(), np.zeros(0, int)
    if not name.startswith(("near", "make_fit", "take_cheapest")):
        CHANGES[name](of, no_rows)
        assert (of.columns == columns).all()


def test_copy_is_left_as_it_was_by_changes_of_the_other():
    for seed in (3, 11, 17):
        of = start(seed)
        before = of.value()
        kept = of.copy()
        improve.single_moves(of, of.folded.rows, sharpness=None, rounds=4)
        assert kept.value() == before
        of.take(kept)
        assert of.value() == before


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_a_problem_equal_numpy(seed, both):
    problem = random_instance(seed, n=80)

    def run():
        of = Folded(problem, fold_idle=False)
        sets = np.random.default_rng(seed).random((6, of.num_columns)) < 0.5
        sets[0] = False
        values = np.where(of.allowed, of.bytes, np.inf)
        return of.keep, of.work, of.base, of.fixed, folded.least_sums(values, of.active, sets)

    for native, reference in zip(*both(run), strict=True):
        np.testing.assert_allclose(native, reference, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("seed", range(20))
def test_places_that_matter_equal_numpy(seed, both):
    rng = np.random.default_rng(seed)
    starts, exists = np.array([0, 3, 4, 9]), rng.random(12) < 0.8
    exists[starts] = True
    loads = rng.integers(0, 5, (9, 12)).astype(float)  # some are as long as others
    native, reference = both(lambda: folded.that_matter(loads, exists, starts, 3))
    assert (native == reference).all()


def test_extremes_of_columns_that_are_allowed_equal_numpy(both):
    load, home = np.random.default_rng(0).random((6, 3, 4)), np.array([0, 2, 2, 0, 2])
    allowed = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1], [1, 1, 1], [1, 0, 0]], bool)
    native, reference = both(lambda: np.array(folded.extremes(load, np.array([0, 1, 2, 4, 5]), home, 3, allowed)))
    np.testing.assert_allclose(native, reference, rtol=1e-12)
    assert (native[:, 1] == 0).all(), "nobody is at home there"


@pytest.mark.parametrize("seed", SEEDS)
def test_relaxed_part_of_a_problem_equals_numpy(seed, both):
    """Some rows, each for a weight of them, at some places, in a node that not all columns are part of."""
    problem = random_instance(seed, n=70)
    of, rng = Folded(problem, fold_idle=False), np.random.default_rng(seed)
    rows = rng.permutation(len(of.rows))[: int(rng.integers(0, 50))]
    part = prices.Part(rows, 1.0 + rng.random(len(rows)), of.base * (1 + rng.random()), 0.1 * of.budget_bytes)
    node = prices.Node(seed % 2, rng.random(of.num_columns) < 0.7, whole=seed % 5 == 0, charged=seed % 3 > 0)
    places = np.flatnonzero((rng.random(len(of.base)) < 0.8) | np.isin(np.arange(len(of.base)), of.starts))
    noise = 1e-3 * rng.random((len(rows), of.num_columns)) if seed % 2 else None
    scale_s = max(float(of.longest(of.base)), 1e-3)

    def run():
        return prices.relaxed_part(of, node, part, places, scale_s=scale_s, gap=1e-4, noise=noise)

    native, reference = both(run)
    for found, expected, size in zip(native, reference, (1, 1e-9, 1e-9, scale_s, 1, 1), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("seed", SEEDS)
def test_fillings_equal_numpy(seed, both):
    problem = random_instance(seed)
    of = Folded(problem)
    fetch = problem.strategies.index("fetch") if seed % 3 else None
    (native, free), (reference, same) = both(lambda: filling.fillings(of, problem.current[of.live], fetch))
    assert (native == reference).all()
    assert free == pytest.approx(same, rel=1e-12, abs=1e-3)


def test_closest_and_pressing_rows_equal_numpy(both):
    for seed in SEEDS:
        of = start(seed)
        total = at_random_prices(of)[1]
        native, reference = both(lambda of=of, total=total: rounding.closest(of, total, 12))
        assert sorted(native) == sorted(reference)
        native, reference = both(lambda of=of: rounding.pressing(of, sharpness=300.0, number=9))
        assert len(set(native) & set(reference)) >= len(reference) - 1, "but for ties"


@pytest.mark.parametrize("seed", range(20))
def test_sample_equals_numpy(seed, both):
    of = Folded(random_instance(seed, n=150), fold_idle=False)
    native, reference = both(lambda: folded.sample(of, 20))
    assert len(np.unique(native)) == 40
    assert sorted(native[:20]) == sorted(reference[:20])
    assert (native[20:] == reference[20:]).mean() >= 0.9, "but for ties"


@pytest.mark.parametrize("seed", SEEDS)
def test_lower_bounds_equal_numpy(seed, both):
    of = start(seed)
    drawn, total = at_random_prices(of)
    at = drawn.prices._replace(adapters=drawn.prices.joint)
    among = prices.nodes(of.folded)
    native, reference = both(lambda: prices.lower_bounds(of.folded, at, total, among))
    assert native.shape == (len(among),)
    np.testing.assert_allclose(native, reference, rtol=1e-9, atol=1e-9 * of.value())


@pytest.mark.parametrize("seed", range(20))
def test_what_rows_of_a_problem_take_equals_numpy(seed, both):
    problem, rng = random_instance(seed, n=60), np.random.default_rng(seed)
    rows = rng.permutation(60)[: int(rng.integers(0, 60))]
    columns = problem.allowed[rows].argmax(axis=1)
    by_home = rng.random((problem.num_pool_devices + 1, int(np.prod(problem.load_s.shape[2:]))))

    def run():
        known = settled.settled_rows(problem, rows, problem.allowed.argmax(axis=1), by_home, byte=1e-12, sure=1.02)
        return *problems.chosen(problem, rows, columns), folded.own(problem, rows, 1e-6, 1e-15), *known

    for native, reference in zip(*both(run), strict=True):
        np.testing.assert_allclose(native, reference, rtol=1e-12, atol=1e-300)


def test_optimize_finds_plans_as_good_as_in_numpy(both):
    """Where equal moves come in another order other plans are found, no worse on average and never by much."""
    over = []
    for seed in SEEDS:
        problem = random_instance(seed)
        (native, duals), (reference, _) = both(lambda problem=problem: optimize(problem))
        assert violations(problem, native) == []
        assert duals.bound_s <= native.objective_s * (1 + 1e-6)
        over.append(native.objective_s / reference.objective_s - 1)
    over = np.array(over)
    assert (np.abs(over) <= 1e-6).mean() >= 0.9
    assert over.max() <= 0.01
    assert over.mean() <= 1e-3


def test_optimize_from_a_start_equals_numpy(both):
    for seed in range(20):
        problem = random_instance(seed)
        _, duals = optimize(problem)
        (native, _), (reference, _) = both(lambda problem=problem, duals=duals: optimize(problem, duals))
        assert native.objective_s == pytest.approx(reference.objective_s, rel=1e-6)


def test_optimize_with_native_kernels_switched_off_gives_the_same_plans():
    program = """
import json
from strategies.native import planner_calls, unavailable
from strategies.planner.optimizer import optimize
from tests.strategies.planner.instances import random_instance
def refuse(name): raise AssertionError(name)
planner_calls._function = refuse
assert unavailable()
print(json.dumps([optimize(random_instance(seed))[0].objective_s for seed in range(12)]))
"""
    environment = {**os.environ, "PLORA_NATIVE": "0"}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    for seed, expected in enumerate(json.loads(answer.stdout)):
        assert optimize(random_instance(seed))[0].objective_s == pytest.approx(expected, rel=1e-6)


def test_native_functions_are_called(monkeypatch):
    """What the others compare is not numpy with itself."""
    called, function = set(), planner_calls._function

    def note(name):
        called.add(name)
        return function(name)

    monkeypatch.setattr(planner_calls, "_function", note)
    for seed in (3, 11, 17, 28, 31):
        optimize(random_instance(seed))
    optimize(random_instance(7), optimize(random_instance(7))[1])
    improve.wander(start(3), np.arange(8), sharpness=None, steps=3)
    solve(relaxation_problem(1))
    assert called == set(planner_calls._ARGUMENTS)
