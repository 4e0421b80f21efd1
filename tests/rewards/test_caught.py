"""Exceptions that a reward function catches: counted, and named if it gives every completion the same value."""

import contextlib
import json
import sys
from collections import Counter

import pytest

from cohort.config import RewardConfig
from cohort.rewards import RewardRunner, build_rewards
from cohort.rewards import caught as caught_module
from cohort.rewards.caught import caught_exceptions, describe_caught
from reward_samples import group


def line_of(function, offset):
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def converts(text):
    try:
        return float(text)
    except ValueError:
        return 0.0


def reads(text):
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)
    return None


def raises_again(text):
    try:
        try:
            raise LookupError(text)
        except LookupError:
            raise
        finally:
            len(text)
    except LookupError:
        return 0.0


def raises_another(text):
    try:
        try:
            return {}[text]
        except KeyError as error:
            raise RuntimeError(text) from error
    except RuntimeError:
        return 0.0


def generates():
    yield 1.0


CASES = [
    (lambda: [converts(text) for text in ("a", "1", "b")], {("ValueError", line_of(converts, 2)): 2}),
    (lambda: [reads(text) for text in ("", "1")], {("JSONDecodeError", line_of(reads, 2)): 1}),
    (lambda: raises_again("a"), {("LookupError", line_of(raises_again, 3)): 1}),
    (
        lambda: raises_another("a"),
        {("KeyError", line_of(raises_another, 3)): 1, ("RuntimeError", line_of(raises_another, 5)): 1},
    ),
    (lambda: [*generates(), next(iter([]), None), hasattr(1, "a")], {}),
    (lambda: json.dumps({"a": float("1")}), {}),
]


@pytest.fixture(params=["_traced", "_monitored"] if sys.version_info >= (3, 12) else ["_traced"])
def watch(request, monkeypatch):
    """Each way to watch that this Python has."""
    monkeypatch.setattr(caught_module, "_traced", getattr(caught_module, request.param))
    monkeypatch.setattr(caught_module, "_monitored", getattr(caught_module, request.param))


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize(("call", "expected"), CASES)
def test_each_exception_is_counted_once_at_the_line_that_raised_it(call, expected):
    for _ in range(2):
        with caught_exceptions() as caught:
            call()
        assert caught == expected


@pytest.mark.usefixtures("watch")
def test_what_is_not_caught_passes_and_nothing_is_watched_afterwards():
    with pytest.raises(ZeroDivisionError), caught_exceptions() as caught:
        converts("a")
        raise ZeroDivisionError
    assert caught == {}
    converts("a")
    assert caught == {} and sys.gettrace() is None
    if sys.version_info >= (3, 12):
        assert caught_module._NAME not in {sys.monitoring.get_tool(number) for number in range(6)}


def test_a_debugger_stays():
    """It watches by the same means."""
    seen = []

    def debugger(frame, event, argument):
        seen.append(event)

    sys.settrace(debugger)
    try:
        with caught_exceptions():
            converts("a")
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
    assert "call" in seen


@pytest.mark.parametrize(
    ("caught", "count", "value", "expected"),
    [
        ({("ValueError", "f.py:3"): 8}, 8, 0.0, "caught ValueError at f.py:3 for all 8 completions; it gave 0 to each"),
        ({("ValueError", "f.py:3"): 1}, 8, 0.5, "caught ValueError at f.py:3 once; it gave 0.5 to each of the 8"),
        (
            {("KeyError", "f.py:9"): 1, ("ValueError", "f.py:3"): 7},
            8,
            -1.0,
            "caught ValueError at f.py:3 7 times, and one other kind; it gave -1 to each of the 8",
        ),
        (
            {("A", "f.py:1"): 16, ("B", "f.py:1"): 2, ("C", "f.py:1"): 1},
            8,
            float("nan"),
            "caught A at f.py:1 for all 8 completions, and 2 other kinds; it left all of them unscored",
        ),
    ],
)
def test_the_warning(caught, count, value, expected):
    assert describe_caught("mine", Counter(caught), count, value).startswith(f"warning: reward 'mine' {expected}")


# --- in a run -------------------------------------------------------------------------------------------------------

FILE = """
import json

def accuracy(completions, **kwargs):
    rewards = []
    for completion in completions:
        try:
            rewards.append(float(json.loads(completion)["answer"]))
        except Exception:
            rewards.append(0.0)
    return rewards

async def later(completions, **kwargs):
    return accuracy(completions)
"""
LINE = FILE.splitlines().index('            rewards.append(float(json.loads(completion)["answer"]))') + 1
RIGHT = '{"answer": 1}'


@pytest.fixture
def path(tmp_path):
    (tmp_path / "grades.py").write_text(FILE)
    return tmp_path / "grades.py"


def told(functions, *steps):
    """What a runner tells in each step of a group with these completions."""
    runner, said = RewardRunner(functions), []
    for texts in steps:
        said.append([])
        runner.notify = said[-1].append
        runner.score([group("q", texts)], require_scores=False, during=f"step {len(said)}")
    return said


def load(path, name, **settings):
    return build_rewards([RewardConfig(use=f"{path}:{name}", **settings)], columns=[], max_completion_tokens=8)


@pytest.mark.parametrize(("name", "isolate"), [("accuracy", False), ("accuracy", True), ("later", True)])
def test_a_constant_reward_names_the_exception_once(path, name, isolate):
    first, *later = told(load(path, name, isolate=isolate), ["a", "b", "c"], ["a", "b", "c"])
    assert first == [
        f"warning: reward '{name}' caught JSONDecodeError at {path}:{LINE} for all 3 completions; it gave 0 to each of "
        "the 3 (step 1)"
    ]
    assert later == [[]]


@pytest.mark.parametrize("isolate", [False, True])
def test_what_a_function_logs_counts_once(path, isolate):
    """Also where it is called again, to see what it catches."""
    path.write_text(
        "calls = 0\ndef f(completions, log_metric):\n    global calls\n    calls += 1\n"
        "    log_metric('calls', calls)\n    return [0.0] * len(completions)\n"
    )
    runner = RewardRunner(load(path, "f", isolate=isolate))
    runner.score([group("q", ["a", "b"])])
    assert runner.take_logged({}) == {"calls": 1.0}


@pytest.mark.parametrize("isolate", [False, True])
def test_rewards_that_differ_and_later_calls_are_not_told_of(path, isolate):
    assert told(load(path, "accuracy", isolate=isolate), ["a", RIGHT], ["a", "b"]) == [[], []]


def test_several_functions_are_told_of_each(path):
    (one,) = load(path, "accuracy")
    (said,) = told([one, one], ["a", "b"])
    assert [text.split()[2] for text in said] == ["'accuracy'", "'accuracy_2'"]


def test_one_completion_says_nothing(path):
    assert told(load(path, "accuracy"), ["a"], ["a", "b"]) == [[], []]


def test_a_new_process_is_no_first_call(path):
    """A child process that has ended is followed by another."""
    path.write_text(
        "import os\n" + FILE.replace("    rewards = []", "    rewards = ['exit' in completions and os._exit(3)][1:]")
    )
    steps = told(load(path, "accuracy", isolate=True), ["a", RIGHT], ["exit", RIGHT], ["a", "b"])
    assert steps[0] == steps[2] == []
    assert "did not judge 2 completions" in steps[1][0]
