"""Questions: how often each was right, and the accuracy of evaluations with intervals and pass@k."""

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort_view import questions
from cohort_view.evaluations import effective_trials, pass_at_k, wilson_interval
from completions_files import RunFolder, a_row, answering, write_rows
from selection import examples

listed, of_one = answering(questions.questions), answering(questions.question)


def write_questions(run_path, step, rewards_by_question, *, kind="eval", **columns):
    rows = [a_row(q, r, **columns) for q, rewards in rewards_by_question.items() for r in rewards]
    return write_rows(run_path, rows, kind=kind, step=step)


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


def test_accuracy_and_questions_of_a_run(tmp_path):
    write_questions(tmp_path, 0, {1: [1.0], 2: [0.0], 3: [1.0], 4: [0.0], 6: [0.0]})
    write_questions(tmp_path, 5, {1: [1.0], 2: [1.0], 3: [0.0], 4: [None], 6: [1.0]})
    write_questions(tmp_path, 10, {1: [1.0], 2: [0.0], 5: [1.0]})
    found = listed(RunFolder(tmp_path), "eval")
    assert [(p.step, p.accuracy, p.pass_at) for p in found.points] == [
        (0, 0.4, {"1": 0.4}),
        (5, 0.6, {"1": 0.6}),
        (10, 2 / 3, {"1": 2 / 3}),
    ]
    assert (found.points[0].low, found.points[0].high) == pytest.approx(wilson_interval(0.4, 5))
    assert found.steps == [0, 5, 10]
    assert [(q.prompt_id, q.state, q.right, q.seen, q.last_step, q.last_share) for q in found.questions] == [
        (4, "never", [0, 0, None], 2, 5, 0),
        (2, "lost", [0, 1, 0], 3, 10, 0),
        (3, "lost", [1, 0, None], 2, 5, 0),
        (6, "now", [0, 1, None], 2, 5, 1),
        (1, "always", [1, 1, 1], 3, 10, 1),
        (5, "always", [None, None, 1], 1, 10, 1),
    ]
    assert (found.problems, found.total, found.kind) == ([], 6, "eval")
    assert (found.questions[1].prompt, found.questions[1].last_answer) == ("Question 2?", "answer to 2")
    assert found.num_questions == {"never": 1, "rarely": 0, "lost": 2, "now": 1, "always": 2, "unscored": 0}


@pytest.mark.parametrize(
    ("arguments", "expected", "total"),
    [
        ({"show": "lost"}, [2, 3], 2),
        ({"show": "unscored"}, [], 0),
        ({"sort": "changes"}, [2, 3, 6, 1, 4, 5], 6),
        ({"sort": "seen", "limit": 2}, [1, 2], 6),
        ({"sort": "share", "limit": 4}, [2, 3, 4, 1], 6),
        ({"offset": 1, "limit": 2}, [2, 3], 6),
        ({"show": "always", "offset": 1}, [5], 2),
    ],
)
def test_questions_are_filtered_sorted_and_sent_in_pages(tmp_path, arguments, expected, total):
    write_questions(tmp_path, 0, {1: [1.0], 2: [0.0], 3: [1.0], 4: [0.0], 6: [0.0]})
    write_questions(tmp_path, 5, {1: [1.0], 2: [1.0], 3: [0.0], 4: [None], 6: [1.0]})
    write_questions(tmp_path, 10, {1: [1.0], 2: [0.0], 5: [1.0]})
    found = listed(RunFolder(tmp_path), "eval", **arguments)
    assert ([q.prompt_id for q in found.questions], found.total) == (expected, total)


def test_a_question_with_several_completions_is_right_if_at_least_half_are(tmp_path):
    rewards = {1: [1.0, 1.0, 0.0, 0.0], 2: [0.0, 0.0, 0.0, 1.0], 3: [0.0] * 4, 4: [None] * 4}
    write_questions(tmp_path, 3, rewards)
    found = listed(RunFolder(tmp_path), "eval")
    (point,) = found.points
    assert (point.accuracy, point.num_questions) == (3 / 16, 4)
    assert point.pass_at == pytest.approx({"1": 3 / 16, "2": (1 - 1 / 6 + 0.5) / 4, "4": 0.5})
    assert {q.prompt_id: (q.state, q.last_share) for q in found.questions} == {
        1: ("always", 0.5),
        2: ("rarely", 0.25),
        3: ("never", 0),
        4: ("unscored", 0),
    }


def test_training_prompts_and_one_question_at_all_its_times(tmp_path):
    write_questions(tmp_path, 1, {7: [0.0, 0.0], 8: [1.0, 1.0]}, kind="step")
    write_questions(tmp_path, 2, {9: [0.0, 0.0], 7: [0.0, 0.5, 1.0]}, kind="step")
    write_questions(tmp_path, 2, {7: [1.0]}, kind="eval")  # another question: of other data
    run = RunFolder(tmp_path)
    found = listed(run, "step")
    assert ([(q.prompt_id, q.state) for q in found.questions], found.points) == (
        [(9, "never"), (7, "rarely"), (8, "always")],
        [],
    )
    question = of_one(run, "step", 7)
    assert (question.prompt_id, question.prompt, question.answer) == (7, "Question 7?", "right 7")
    assert [(t.step, t.kind, t.group, t.num, t.num_right, t.reward_mean, t.best) for t in question.times] == [
        (2, "step", 1, 3, 1, 0.5, {"row": 4, "end_of_text": "answer to 7", "end": "answer"}),
        (1, "step", 0, 2, 0, 0, {"row": 0, "end_of_text": "answer to 7", "end": "answer"}),
    ]
    assert of_one(run, "step", 1).problems == ["No completions of question 1."]


def test_a_prompt_that_is_a_chat_and_the_end_of_its_answer(tmp_path):
    chat = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]'
    write_questions(tmp_path, 1, {1: [1.0]}, prompt=chat, prompt_is_chat=True, completion="x " * 100 + "\n\n42 ")
    run = RunFolder(tmp_path)
    (question,) = listed(run, "eval").questions
    assert (question.prompt, question.last_answer) == ("Hello?", ("x " * 100 + "42")[-80:])
    assert of_one(run, "eval", 1).prompt == json.loads(chat)


def test_an_open_question_has_its_whole_prompt(tmp_path):
    write_questions(tmp_path, 1, {1: [0.0, 1.0], 2: [1.0]}, prompt="p" * 1000)
    write_questions(tmp_path, 2, {1: [0.0]}, prompt="p" * 200_001, answer=None)
    run = RunFolder(tmp_path)
    assert [len(question.prompt) for question in listed(run, "eval").questions] == [400, 400]
    whole, cut = of_one(run, "eval", 2), of_one(run, "eval", 1)
    assert (whole.prompt, whole.prompt_cut, whole.answer) == ("p" * 1000, False, "right 2")
    assert (len(cut.prompt), cut.prompt_cut, cut.answer) == (200_000, True, None)


def test_evaluations_without_completions_have_the_accuracy_of_the_metrics(tmp_path):
    write_questions(tmp_path, 5, {1: [1.0]})
    rows = [
        {"step": step, "kind": "eval", "eval/accuracy": accuracy}
        for step, accuracy in ((0, 0.25), (5, 0.5), (10, 0.75))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunFolder(tmp_path)
    points = listed(run, "eval").points
    assert [(p.step, p.accuracy, p.low is None, p.num_questions) for p in points] == [
        (0, 0.25, True, None),
        (5, 1.0, False, 1),
        (10, 0.75, True, None),
    ]
    assert listed(run, "step").points == []


def test_columns_of_many_steps_are_shares_of_all_steps_since_the_column_before(tmp_path):
    for step in range(1, 121):
        write_questions(tmp_path, step, {1: [float(step % 4 == 0)], step + 1: [1.0]}, kind="step")
    found = listed(RunFolder(tmp_path), "step", sort="seen", limit=2)
    assert found.steps == list(range(2, 121, 2))
    assert [q.right for q in found.questions] == [[0, 0.5] * 30, [1] + [None] * 59]


def test_success_is_what_the_configuration_says_and_broken_completions_do_not_count(tmp_path):
    rows = [
        a_row(1, 9.0, end="answer", **{"rewards/grade": 0.7}),
        a_row(1, 9.0, end="timeout", **{"rewards/grade": None}),
        a_row(2, 9.0, end="answer", **{"rewards/grade": 0.2}),
        a_row(3, 9.0, end="environment_error", **{"rewards/grade": None}),
    ]
    write_rows(tmp_path, rows, kind="eval", step=0)
    found = listed(RunFolder(tmp_path, {"eval": {"success_reward": "grade", "success_threshold": 0.5}}), "eval")
    assert [(point.accuracy, point.num_questions) for point in found.points] == [(0.5, 2)]
    assert {q.prompt_id: q.state for q in found.questions} == {1: "always", 2: "never", 3: "unscored"}
    missing = listed(RunFolder(tmp_path, {"eval": {"success_reward": "other"}}), "eval")
    assert missing.problems == ["completions/eval-000000.parquet cannot be read: it has no column 'rewards/other'."]


def test_only_new_files_are_read(tmp_path, monkeypatch):
    write_questions(tmp_path, 0, {1: [1.0]})
    run = RunFolder(tmp_path)
    listed(run, "eval")
    read = []
    real = questions._read
    monkeypatch.setattr(questions, "_read", lambda run, name, *rule: read.append(name) or real(run, name, *rule))
    write_questions(tmp_path, 5, {1: [0.0]})
    assert len(listed(run, "eval").points) == len(listed(run, "eval").points) == 2
    assert read == ["completions/eval-000005.parquet"]


def test_a_damaged_evaluation_is_named_and_left_out(tmp_path):
    write_questions(tmp_path, 0, {1: [1.0]})
    path = write_questions(tmp_path, 5, {1: [1.0]})
    path.write_bytes(path.read_bytes()[:100])
    found = listed(RunFolder(tmp_path), "eval")
    assert ([point.step for point in found.points], len(found.problems)) == ([0], 1)
    assert found.problems[0].startswith("completions/eval-000005.parquet cannot be read: Parquet magic bytes not found")
    assert listed(RunFolder(tmp_path / "none"), "eval").questions == []
    for step in range(10, 17):
        (tmp_path / f"completions/eval-{step:06d}.parquet").touch()
    assert listed(RunFolder(tmp_path), "eval").problems[4:] == [
        "completions/eval-000013.parquet cannot be read: Parquet file size is 0 bytes.",
        "3 more files cannot be read.",
    ]
