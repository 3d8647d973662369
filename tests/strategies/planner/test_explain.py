"""Explanations say what other choices would do, and what hinders them."""

import dataclasses
import json

import numpy as np
import pytest

from strategies.planner.explain import explain
from strategies.planner.joint import JointPlanner
from strategies.planner.problem import RESOURCES, evaluate
from tests.strategies.planner.test_joint import FETCH, RESIDENT, rotating_problem


def test_explain_changes_are_those_of_the_step():
    problem = rotating_problem([0, 1, 2], np.full(8, FETCH))
    columns = np.full(8, FETCH)
    columns[[0, 1]] = RESIDENT
    plan = evaluate(problem, columns, "local", 1.0)
    reasons = explain(problem, plan, 2)
    assert [option.strategy for option in reasons.options if option.serves] == ["fetch"]
    assert reasons.options[RESIDENT].step_change_s == pytest.approx(-1.0)
    assert reasons.options[2].step_change_s == pytest.approx(1.0)
    assert reasons.options[RESIDENT].hindrance == "does not fit: needs 10 bytes more, 0 are free"
    assert sum(seconds for _, seconds, _ in reasons.phases) == pytest.approx(plan.step_s)
    assert reasons.phases[0][2] == "device_memory"


def test_explain_text_and_json_say_the_same():
    planner = JointPlanner(horizon_steps=1000)
    problem = rotating_problem([0], np.full(8, FETCH))
    allowed = problem.allowed.copy()
    allowed[0, 3] = False
    problem = dataclasses.replace(problem, allowed=allowed)
    plan = planner.choose(problem)
    reasons = explain(problem, plan, 0, waiting=planner.waiting.get(0))
    text = reasons.as_text()
    assert text.startswith("adapter 0 has tokens in the coming steps; 20 bytes of device memory are free\n")
    assert "resident: the step would take 1000000.00 us less; 10 bytes on the device; waits until it pays: " in text
    assert "fetch (serves it): 0 bytes on the device" in text
    assert "split: the step would take 1000000.00 us longer; 0 bytes on the device; not allowed for it" in text
    assert "phase0 takes 1000000.0 us, bound by device memory" in text
    values = json.loads(json.dumps(reasons.as_json()))
    assert values["options"][3]["hindrance"] == "not allowed for it"
    assert values["phases"][0] == {"phase": "phase0", "seconds": 1.0, "bound_by": "device_memory"}


def test_explain_unknown_row_is_refused():
    problem = rotating_problem([0], np.full(8, FETCH))
    plan = evaluate(problem, np.full(8, FETCH), "local", 1.0)
    with pytest.raises(IndexError, match="row 8 is not an adapter of the problem: it has 8"):
        explain(problem, plan, 8)


def test_explain_a_resource_that_all_share_is_named_in_words():
    problem = rotating_problem([0], np.full(8, FETCH))
    shared = dataclasses.replace(problem, groups=(RESOURCES,))
    text = explain(shared, evaluate(shared, np.full(8, FETCH), "local", 1.0), 0).as_text()
    assert "bound by the machine as a whole: device, pool and link are one here" in text
    text = explain(problem, evaluate(problem, np.full(8, FETCH), "distributed", 0.0), 0).as_text()
    assert "+" not in text
