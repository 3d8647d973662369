"""Who gets which strategy: the problem, what a plan is worth, and the policies that choose one."""

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
    "KvChoice",
    "Plan",
    "PlanError",
    "PlanProblem",
    "evaluate",
    "violations",
]
