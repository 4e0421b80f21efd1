"""The math reward: verdicts, and a worker that is killed, hangs, dies or is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from builtin_rewards import Builtin
from cohort.errors import UserError
from cohort.rewards import RewardRunner
from cohort.rewards.math import gold_text, plain_verdict
from cohort.rewards.math_worker import grade, latex_of_gold
from cohort.rewards.math_workers import MathWorkers
from reward_samples import MESSAGES, group, reward
from waiting import PATIENCE_S, is_running, until


@pytest.fixture
def math_reward():
    f = Builtin("math")
    yield f
    f.close()


CASES = [
    ("42", "I do not know", "answer_unparsable"),
    ("who knows", r"\boxed{7}", "gold_unparsable"),
    ("7", "12 345 " * 20_000 + "\n7", "correct"),
    ("7", r"\boxed{7} " + "so it is. " * 5_000, "correct"),
    ("7", r"\boxed{" + "+1" * 1001 + "}", "answer_unparsable"),
]


@pytest.mark.parametrize(("gold", "text", "verdict"), CASES, ids=[f"{gold}-{text:.20}" for gold, text, _ in CASES])
def test_math_verdicts(gold, text, verdict):
    assert grade(gold, text) == verdict


def test_gold_forms():
    assert [gold_text(a) for a in ("#1 .. 2+2=4\n#### 4 ", 4, 4.5, None)] == ["4", "4", "4.5", ""]
    assert [latex_of_gold(g) for g in (r"\frac12", "$5$", "3 apples", r"4 \text{ metres}")] == [
        r"$\frac12$",
        "$5$",
        "3 apples",
        r"$4 \text{ metres}$",
    ]
    with pytest.raises(UserError, match=r"column 'solution' holds \[1\] \(list\)"):
        gold_text([1], "solution")


@pytest.mark.parametrize("gold", ["0", "42", "-7", "100000"])
@pytest.mark.parametrize("answer", ["0", "42", "-7", "999999999999", "-0", "007", "4.2", "x"])
@pytest.mark.parametrize("form", ["%s", " %s\n", r"\boxed{%s}", "Line\n5 is (not) it, 1/2: \\boxed{ %s }.\n"])
def test_the_fast_path_gives_the_workers_verdict(gold, answer, form):
    fast = plain_verdict(gold, form % answer)
    assert fast == (grade(gold, form % answer) if answer in ("0", "42", "-7", "999999999999") else None)


@pytest.mark.parametrize(
    "text",
    ["", "42.0", "about 42", r"\boxed{42}%", r"$5 \boxed{42}", r"\boxed{1} \boxed{42}", r"final answer \boxed{42}"],
)
def test_the_fast_path_leaves_the_rest_to_the_worker(text):
    assert plain_verdict("42", text) is None


def test_math_in_the_runner(math_reward):
    runner = RewardRunner([reward(math_reward, name="math")])
    scored = runner.score(
        [
            group(MESSAGES, [r"\boxed{\frac{1}{2}}", "0.25", "?"], answer="so\n#### 0.5"),
            group("q", ["7"], prompt_id=1, answer="who knows"),
        ]
    )
    np.testing.assert_array_equal(np.concatenate([s.rewards for s in scored]), [1.0, 0.0, 0.0, np.nan])
    assert runner.counts() == {"math/answer_unparsable": 1, "math/gold_unparsable": 1}


def test_plain_answers_need_no_worker():
    f = Builtin("math", workers=MathWorkers(["/does/not/exist"]))
    assert f([r"\boxed{5}", "6", "6"], answer=[5, "5", None]) == [1.0, 0.0, None]
    assert f.last_counts == {"gold_unparsable": 1}


def test_a_killed_worker_is_replaced_and_nothing_is_lost():
    f = Builtin("math", workers=MathWorkers(count=1))
    assert f(["0.5", "\ud800 \x00\n 0.5"], answer=["1/2", "1/2"]) == [1.0, 1.0]
    first = f.workers.pids
    os.kill(first[0], signal.SIGKILL)
    assert f(["0.5"], answer=["1/2"]) == [1.0]
    assert f.workers.pids != first
    assert f.last_counts == {}
    f.close()


FAKE_WORKER = """
import os, sys, time
from cohort.processes.child import serve

folder = sys.argv[1]

def answer(request):
    if request is None:
        return None
    if request["text"] == "hang":
        time.sleep(600)
    if request["text"] == "die":
        os._exit(7)
    if request["text"] == "die once" and not os.path.exists(f"{folder}/died"):
        open(f"{folder}/died", "w").close()
        os.kill(os.getpid(), 9)
    if request["text"] == "babble":
        os.write(int(sys.argv[-1]), bytes(4))
    if request["text"].startswith("meet"):  # two at the same time
        open(f"{folder}/{request['text']}", "w").close()
        while len([name for name in os.listdir(folder) if name.startswith("meet")]) < 2:
            time.sleep(0.01)
    with open(f"{folder}/graded", "a") as file:
        print(request["text"], file=file)
    return "correct"

serve(answer)
"""


@pytest.fixture
def fake_reward(tmp_path):
    def make(count=1, **options):
        rewards.append(Builtin("math", workers=MathWorkers([*command, str(tmp_path)], count=count), **options))
        return rewards[-1]

    rewards, command = [], [sys.executable, "-c", FAKE_WORKER]
    yield make
    for f in rewards:
        f.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_hung_answer_is_not_graded_but_counted_and_the_next_is_graded(fake_reward, count):
    f = fake_reward(count)
    rewards = f(["a", "hang", "hang", "b"], answer=["g"] * 4, deadline_s=0.5)
    assert rewards == [1.0, None, None, 1.0]  # the same answer twice waits once
    assert f.last_counts == {"timeout": 2}


def test_a_worker_that_dies_of_an_answer(fake_reward):
    f = fake_reward()
    assert f(["die once", "die", "babble", "b"], answer=["g"] * 4) == [1.0, None, None, 1.0]
    assert f.last_counts == {"crashed": 2}


def test_answers_are_graded_at_the_same_time_each_once_and_in_order(fake_reward, tmp_path):
    f = fake_reward(2)
    texts = ["meet 1", "a", "meet 2", "die", "a", "meet 1", "b"]
    assert f(texts, answer=["g"] * 7, deadline_s=PATIENCE_S) == [1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert sorted((tmp_path / "graded").read_text().splitlines()) == ["a", "b", "meet 1", "meet 2"]


def test_a_call_that_is_interrupted_ends_at_once(fake_reward):
    f = fake_reward(2, budget_s=PATIENCE_S)
    f(["a"], answer=["g"])  # starts a worker

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            f(["hang", "b", "c"], answer=["g"] * 3, deadline_s=PATIENCE_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert f.workers.pids == []
    assert f(["a", "d"], answer=["g"] * 2) == [1.0, 1.0]


def test_a_worker_killed_while_it_works(fake_reward):
    f = fake_reward()
    f(["a"], answer=["g"])
    killer = threading.Timer(0.2, lambda pid: os.kill(pid, signal.SIGKILL), f.workers.pids)
    killer.start()
    # Graded again by a second worker, which hangs on it too, until the deadline.
    assert f(["hang"], answer=["g"], deadline_s=0.6) == [None]
    assert f.last_counts == {"timeout": 1}


def test_the_budget_ends_a_call_of_many_slow_answers(fake_reward):
    f = fake_reward(budget_s=0.4)
    assert f(["hang", "b", "c"], answer=["g"] * 3) == [None, None, None]
    assert f.last_counts == {"timeout": 1, "out_of_time": 2}


def test_answers_that_are_sent_together_are_each_graded_once(tmp_path):
    """Also behind one that hangs, one that its worker dies of, and one that two die of."""
    workers = MathWorkers([sys.executable, "-c", FAKE_WORKER, str(tmp_path)], count=1)
    texts = ["a", "hang", "b", "die once", "c", "die", "d", "babble", "e"]
    graded = workers.grade([("g", text) for text in texts], deadline_s=0.5)
    bad = {"hang": "timeout", "die": "crashed", "babble": "crashed"}
    assert graded == [bad.get(text, "correct") for text in texts]
    assert (tmp_path / "graded").read_text().split("\n")[:3] == ["a", "b", "die once"]
    late = workers.grade([("g", "a"), ("g", "hang"), ("g", "b")], deadline_s=600, end=time.monotonic() + 0.5)
    assert late == ["correct", "timeout", "out_of_time"]
    workers.close()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            [sys.executable, "-c", "import sys; sys.exit('no math-verify here')"],
            ["it ended with exit code 1", "no math-verify"],
        ),
        ([sys.executable, "-c", "import time; time.sleep(60)"], ["not ready within 0.3 s"]),
    ],
)
def test_a_worker_that_does_not_start_is_an_error(command, words):
    f = Builtin("math", workers=MathWorkers(command, start_timeout_s=0.3 if "ready" in words[0] else 600))
    with pytest.raises(UserError) as caught:
        RewardRunner([reward(f, name="math")]).score([group("p", ["x = 1"], answer="1")])
    for word in ["reward 'math'", "failed to start", *words]:
        assert word in str(caught.value)


def test_the_workers_do_not_outlive_their_parent():
    """Also while they work."""
    program = """
        import os, threading
        from concurrent.futures import ThreadPoolExecutor
        from cohort.rewards.math_workers import MathWorkers
        workers = MathWorkers(count=2)
        with ThreadPoolExecutor(2) as threads:
            grade = lambda text: workers.grade([("1/2", text)], deadline_s=600)[0]
            print(*threads.map(grade, ["0.5", "$0.50$"]), *workers.pids, flush=True)
            threading.Timer(0.3, os.kill, [os.getpid(), 9]).start()
            workers.grade([("1", "$9^{9^{9^{9}}}$")], deadline_s=600)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=600, check=False
    )
    *verdicts, pid, other = done.stdout.split()
    assert done.returncode == -signal.SIGKILL and verdicts == ["correct"] * 2
    until(lambda: not any(map(is_running, (int(pid), int(other)))))
