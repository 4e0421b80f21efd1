"""Built-in rewards as functions, without torch."""

from functools import cache

from cohort.rewards.load_rewards import BUILTINS, RewardContext
from cohort.rewards.math import MathWorkers
from cohort.sandbox import SharedSandbox

math_workers = cache(MathWorkers)  # they take a second to start


def load_builtin(name, *, sandbox=None):
    """A built-in reward for completions of up to 100 tokens; all that grade answers share worker processes."""
    function = BUILTINS[name](RewardContext(max_completion_tokens=100, sandbox=sandbox or SharedSandbox()))
    grader = getattr(function, "grader", getattr(function, "_grader", None))
    if grader is not None:
        grader.workers = math_workers()
    return function
