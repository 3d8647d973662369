"""Who gets which strategy: the problem, what a plan is worth, and the policies that choose one."""

from strategies.planner.explain import Explanation, Option, explain
from strategies.planner.implementation import prepare
from strategies.planner.joint import JointPlanner, Waiting
from strategies.planner.load import AdapterLoad
from strategies.planner.optimizer import Duals, optimize
from strategies.planner.policies import FixedPolicy, LruPolicy, PaperManager, Policy
from strategies.planner.problem import (
    NOWHERE,
    RESOURCES,
    STRIPED,
    KvChoice,
    Plan,
    PlanError,
    PlanProblem,
    evaluate,
    violations,
)

__all__ = [
    "NOWHERE",
    "RESOURCES",
    "STRIPED",
    "AdapterLoad",
    "Duals",
    "Explanation",
    "FixedPolicy",
    "JointPlanner",
    "KvChoice",
    "LruPolicy",
    "Option",
    "PaperManager",
    "Plan",
    "PlanError",
    "PlanProblem",
    "Policy",
    "Waiting",
    "evaluate",
    "explain",
    "optimize",
    "prepare",
    "violations",
]
