"""Held-out accuracy: intervals, pass@k and questions that flip."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort_view import evaluations
from cohort_view.evaluations import effective_trials, pass_at_k, wilson_interval
from completions_files import RunFolder, a_row, write_rows
from selection import examples


def write_evaluation(run_path, step, rewards_by_question, **columns):
    rows = [a_row(q, r, **columns) for q, rewards in rewards_by_question.items() for r in rewards]
    return write_rows(run_path, rows, kind="eval", step=step)


@pytest.mark.parametrize(
    ("share", "num", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),  # values of Wilson's formula as in R's prop.test(correct=FALSE)
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.953125, 256, 0.9199, 0.9730),
        (0.5, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(share, num, low, high):
    assert wilson_interval(share, num) == pytest.approx((low, high), abs=5e-5)


def test_completions_of_the_same_question_count_less():
    def trials(right, num):
        return effective_trials(np.array(right), np.array(num))

    assert trials([1, 0, 1, 1], [1, 1, 1, 1]) == pytest.approx(4)  # one completion each: Wilson by questions
    assert trials([4, 0, 4, 4], [4, 4, 4, 4]) == pytest.approx(4)  # all completions of a question agree
    assert trials([2, 2, 2, 2], [4, 4, 4, 4]) == 16  # questions do not differ
    assert trials([0, 0], [4, 4]) == 2
    assert trials([3, 1, 0], [3, 1, 0]) == 2  # a question without an intact completion
    assert 4 < trials([3, 1, 4, 2], [4, 4, 4, 4]) < 16


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda t: (t[0], min(t))), min_size=1, max_size=6))
@examples(100)
def test_pass_at_k_is_the_share_of_all_choices_of_k(questions):
    num, right = (np.array(values) for values in zip(*questions, strict=True))
    found = pass_at_k(right, num)
    assert set(found) == {str(k) for k in (1, 2, 4, num.max()) if k <= num.max()}
    for k, value in found.items():
        shares = [
            np.mean([min(chosen) < c for chosen in combinations(range(n), int(k))]) for n, c in questions if n >= int(k)
        ]
        assert value == pytest.approx(np.mean(shares))


def test_accuracy_and_flips_of_a_run(tmp_path):
    write_evaluation(tmp_path, 0, {1: [1.0], 2: [0.0], 3: [1.0], 4: [0.0]})
    write_evaluation(tmp_path, 5, {1: [1.0], 2: [1.0], 3: [0.0], 4: [None]})
    write_evaluation(tmp_path, 10, {1: [1.0], 2: [0.0], 5: [1.0]})
    found = evaluations.evaluations(RunFolder(tmp_path))
    assert [(p.step, p.accuracy, p.num, p.pass_at) for p in found.points] == [
        (0, 0.5, 4, {"1": 0.5}),
        (5, 0.5, 4, {"1": 0.5}),
        (10, 2 / 3, 3, {"1": 2 / 3}),
    ]
    assert (found.points[0].low, found.points[0].high) == pytest.approx(wilson_interval(0.5, 4))
    assert [(f.from_, f.to, f.num_gained, f.num_lost) for f in found.flips] == [(0, 5, 1, 1), (5, 10, 0, 1)]
    assert [(q.prompt_id, q.kind, q.right) for q in found.questions] == [
        (4, "never", [False, False, None]),
        (2, "lost", [False, True, False]),
        (3, "lost", [True, False, None]),
        (1, "always", [True, True, True]),
        (5, "always", [None, None, True]),
    ]
    assert found.problems == ()
    assert found.questions[1].prompt == "Question 2?"
    assert found.num_questions == {"never": 1, "lost": 2, "gained": 0, "always": 2}


def test_several_completions_per_question(tmp_path):
    write_evaluation(tmp_path, 0, {1: [1.0, 1.0, 0.0, 0.0], 2: [0.0, 0.0, 0.0, 1.0]})
    found = evaluations.evaluations(RunFolder(tmp_path))
    (point,) = found.points
    assert (point.accuracy, point.num, point.num_questions) == (0.375, 8, 2)
    assert point.pass_at == pytest.approx({"1": 0.375, "2": (1 - 1 / 6 + 0.5) / 2, "4": 1.0})
    assert [q.right for q in found.questions] == [[False], [True]]  # right: at least half


def test_success_is_what_the_configuration_says_and_broken_completions_do_not_count(tmp_path):
    rows = [
        a_row(1, 9.0, end="answer", **{"rewards/grade": 0.7}),
        a_row(1, 9.0, end="timeout", **{"rewards/grade": None}),
        a_row(2, 9.0, end="answer", **{"rewards/grade": 0.2}),
        a_row(3, 9.0, end="environment_error", **{"rewards/grade": None}),
    ]
    write_rows(tmp_path, rows, kind="eval", step=0)
    config = {"eval": {"success_reward": "grade", "success_threshold": 0.5, "num_samples": 2}}
    (point,) = evaluations.evaluations(RunFolder(tmp_path, config)).points
    assert (point.accuracy, point.num, point.num_questions) == (0.5, 2, 2)
    missing = evaluations.evaluations(
        RunFolder(tmp_path, {"eval": {"success_reward": "other", "success_threshold": 9.0}})
    )
    assert missing.points[0].accuracy == 1.0
    assert missing.problems[0].startswith("completions/eval-000000.parquet has no column 'rewards/other': success is ")


def test_all_questions_count_also_those_that_are_not_listed(tmp_path):
    shown = evaluations.QUESTIONS_SHOWN
    for step, right in ((0, 0.0), (5, 1.0), (10, 0.0)):
        write_evaluation(tmp_path, step, {i: [right * (i >= 17)] for i in range(17 + shown + 3)})
    found = evaluations.evaluations(RunFolder(tmp_path))
    assert found.num_questions == {"never": 17, "lost": shown + 3, "gained": 0, "always": 0}
    assert [q.kind for q in found.questions] == ["never"] * 17 + ["lost"] * shown


def test_only_new_files_are_read(tmp_path, monkeypatch):
    write_evaluation(tmp_path, 0, {1: [1.0]})
    evaluations.evaluations(RunFolder(tmp_path))
    read = []
    monkeypatch.setattr(
        evaluations,
        "_read",
        lambda path, name, *rule, real=evaluations._read: read.append(name) or real(path, name, *rule),
    )
    write_evaluation(tmp_path, 5, {1: [0.0]})
    assert len(evaluations.evaluations(RunFolder(tmp_path)).points) == 2
    assert read == ["completions/eval-000005.parquet"]
    write_evaluation(tmp_path, 0, {1: [0.0], 2: [0.0]})
    assert evaluations.evaluations(RunFolder(tmp_path)).points[0].accuracy == 0
    assert read == ["completions/eval-000005.parquet", "completions/eval-000000.parquet"]


def test_an_evaluation_that_only_metrics_remember_has_no_interval(tmp_path):
    class Table:
        steps = np.array([0, 5])

        def column(self, name):
            return np.array([0.25, np.nan])

    run = RunFolder(tmp_path)
    object.__setattr__(run, "metrics", type("Metrics", (), {"eval": Table()})())
    (point,) = evaluations.evaluations(run).points
    assert (point.step, point.accuracy, point.low, point.num) == (0, 0.25, None, None)


def test_a_damaged_evaluation_is_named_and_left_out(tmp_path):
    write_evaluation(tmp_path, 0, {1: [1.0]})
    path = write_evaluation(tmp_path, 5, {1: [1.0]})
    path.write_bytes(path.read_bytes()[:100])
    found = evaluations.evaluations(RunFolder(tmp_path))
    assert ([p.step for p in found.points], found.problems) == ([0], ("completions/eval-000005.parquet is truncated.",))
    assert evaluations.evaluations(RunFolder(tmp_path / "none")).points == []
