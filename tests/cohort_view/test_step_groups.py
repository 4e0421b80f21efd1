"""Groups of a step: how rows are divided, sorted and counted."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.metrics.rollouts import rollout_metrics
from cohort.records import Prompt, ScoredGroup
from cohort_view import groups
from cohort_view.run import steps_around
from completions_files import RunFolder, a_row, answering, write_rows
from samples import NAN, answer
from selection import examples

steps, step, group = (answering(function) for function in (steps_around, groups.step, groups.group))
ROWS = [
    a_row(7, 1.0, length=4, advantage=1.0),
    a_row(7, 0.0, length=2, advantage=-1.0),
    a_row(3, 0.5, length=9, finish_reason="length"),
    a_row(3, 0.5 + 1e-12, length=9),
    a_row(8, None, length=1, policy_version=2),
    a_row(8, 0.25, length=2, policy_version=3),
]


@pytest.fixture
def run(tmp_path):
    write_rows(tmp_path, ROWS)
    return RunFolder(tmp_path)


def test_groups_of_a_step(run):
    found = step(run, 5)
    assert (found.num_groups, found.problems) == (3, [])
    first, equal, stale = found.groups
    assert (first.index, first.prompt_id, first.prompt, first.size) == (0, 7, "Question 7?", 2)
    assert (first.reward_mean, first.equal, first.length_mean) == (0.5, False, 3.0)
    assert first.reward_std == pytest.approx(0.5**0.5)  # unbiased
    assert (first.staleness, first.clipped, first.broken) == (0, 0, 0)
    assert (equal.equal, equal.clipped) == (True, 1)
    # an unscored completion does not count, and one reward alone is equal to itself
    assert (stale.equal, stale.reward_mean, stale.staleness) == (True, 0.25, 2)
    assert stale.rows == [{"row": 4, "reward": None, "end": "answer"}, {"row": 5, "reward": 0.25, "end": "answer"}]
    assert [row.end for row in equal.rows] == ["length", "answer"]


@pytest.mark.parametrize(
    ("sort", "descending", "order"),
    [
        ("order", True, [0, 1, 2]),
        ("spread", True, [0, 1, 2]),
        ("spread", False, [2, 1, 0]),
        ("length", True, [1, 0, 2]),
        ("equal", True, [1, 2, 0]),
        ("equal", False, [0, 1, 2]),
        ("staleness", True, [2, 0, 1]),
        ("reward", False, [2, 0, 1]),
    ],
)
def test_groups_are_sorted(run, sort, descending, order):
    found = step(run, 5, sort=sort, descending=descending)
    assert [g.index for g in found.groups] == order
    page = step(run, 5, sort=sort, descending=descending, offset=1, limit=1)
    assert ([g.index for g in page.groups], page.num_groups) == (order[1:2], 3)


def test_groups_without_a_value_come_last_either_way(tmp_path):
    write_rows(tmp_path, [a_row(1, None), a_row(2, 0.0), a_row(3, 1.0)])
    run = RunFolder(tmp_path)
    for descending, order in ((True, [2, 1, 0]), (False, [1, 2, 0])):
        assert [g.index for g in step(run, 5, sort="reward", descending=descending).groups] == order


def test_groups_of_one_prompt_next_to_each_other(tmp_path):
    """Prompts of two epochs can meet in a file."""
    write_rows(tmp_path, [a_row(1, float(i), group=i // 2) for i in range(4)] + [a_row(2, group=2)])
    found = step(RunFolder(tmp_path), 5).groups
    assert [(g.prompt_id, g.size) for g in found] == [(1, 2), (1, 2), (2, 1)]
    assert [c.row for c in group(RunFolder(tmp_path), 5, "step", 1).completions] == [2, 3]


def test_a_text_that_happens_to_be_json_is_no_chat(tmp_path):
    prompt = json.dumps([{"role": "user", "content": "Hello?"}])
    write_rows(tmp_path, [a_row(1, prompt=prompt), a_row(2, prompt=prompt, prompt_is_chat=True)])
    run = RunFolder(tmp_path)
    assert [group(run, 5, "step", i).prompt for i in range(2)] == [prompt, json.loads(prompt)]
    assert [g.prompt for g in step(run, 5).groups] == [prompt, "Hello?"]


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.1 + 1e-12, 1.0, NAN]), min_size=3, max_size=3), min_size=1, max_size=5
    )
)
@examples(60)
def test_equal_groups_and_spread_are_those_of_the_metrics(tmp_path_factory, rewards):
    path = tmp_path_factory.mktemp("run")
    rows = [a_row(p, None if np.isnan(r) else r) for p, of_group in enumerate(rewards) for r in of_group]
    write_rows(path, rows)
    found = step(RunFolder(path), 5).groups
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array([1]), columns={})
    metrics = rollout_metrics(
        [
            ScoredGroup(
                prompt=prompt, trajectories=(answer(prompt, [5]),) * 3, rewards=np.array(of_group), reward_parts={}
            )
            for of_group in rewards
        ]
    )
    assert np.mean([g.equal for g in found]) == pytest.approx(metrics["frac_reward_zero_std"])
    assert np.mean([g.reward_std or 0.0 for g in found]) == pytest.approx(metrics["reward_std"])


def test_a_groups_completions(run, tmp_path):
    found = group(run, 5, "step", 0)
    assert (found.prompt, [c.row for c in found.completions], found.problems) == ("Question 7?", [0, 1], [])
    first = found.completions[0]
    assert (first.reward, first.rewards, first.advantage, first.length) == (1.0, {"right": 1.0}, 1.0, 4)
    assert (first.end, found.prompt_id, found.answer) == ("answer", 7, "right 7")
    assert group(run, 5, "step", 3).problems == ["completions/step-000005.parquet has no group 3: it has 3."]


def test_turns_details_and_environment_of_a_completion(tmp_path):
    messages = [{"role": "assistant", "content": "a <b>\ud83d</b>"}, {"role": "tool", "content": "𝟙\x00"}]
    prompt = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}])
    row = a_row(1, 1.0, prompt=prompt, messages=json.dumps(messages), end="timeout", error="Boom")
    row |= {"prompt_is_chat": True}
    row |= {"details/code": '{"passed": 3, "of": NaN}', "environment/score": 2.5, "model_s": 0.5}
    write_rows(tmp_path, [row])
    run = RunFolder(tmp_path)
    assert step(run, 5).groups[0].prompt == "Hello?"
    assert step(run, 5).groups[0].broken == 1
    found = group(run, 5, "step", 0)
    assert found.prompt[0] == {"role": "system", "content": "Be brief."}
    one = found.completions[0]
    assert one.messages == [
        {"role": "assistant", "content": "a <b>\ufffd</b>"},
        {"role": "tool", "content": "𝟙\x00", "is_error": False},
    ]
    assert (one.end, one.error, one.model_s) == ("timeout", "Boom", 0.5)
    assert (one.environment, one.details["code"]["passed"]) == ({"score": 2.5}, 3)
    assert one.details["code"]["of"] is None


def test_tool_results_that_are_errors_are_marked_as_the_table_of_tool_calls_counts_them(tmp_path):
    messages = json.dumps([{"role": "tool", "content": text} for text in ("Error: no entry", "Errors: 0")])
    write_rows(tmp_path, [a_row(1, messages=messages, tool_errors=1), a_row(1, messages=messages, tool_errors=0)])
    found = group(RunFolder(tmp_path), 5, "step", 0).completions
    assert [[message.is_error for message in one.messages] for one in found] == [[True, False], [False, False]]


def test_long_texts_are_cut(tmp_path):
    long = a_row(1, prompt="p" * 200_001, completion="𝟙" * 5_000_000, answer="")
    chat = json.dumps([{"role": "user", "content": "c" * 200_001}])
    write_rows(tmp_path, [long, a_row(1, completion="short"), a_row(2, prompt=chat, prompt_is_chat=True, answer=None)])
    found, other = (group(RunFolder(tmp_path), 5, "step", index) for index in range(2))
    assert [(len(c.text), c.cut) for c in found.completions] == [(200_000, True), (5, False)]
    assert (len(found.prompt), found.prompt_cut, found.answer, found.answer_cut) == (200_000, True, "", False)
    assert (len(other.prompt[0].content), other.prompt_cut, other.answer) == (200_000, True, None)


def test_steps_are_listed_around_one(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for name in ("step-000002", "eval-000002", "replaced-000004", "step-1000000", "other", "step-x"):
        (folder / f"{name}.parquet").touch()
    found = steps(tmp_path)
    assert [(s.step, s.kinds) for s in found.steps] == [(2, ["step", "eval"]), (4, ["replaced"]), (1000000, ["step"])]
    assert (found.first, found.last) == (2, 1000000)
    for number in range(10, 400):
        (folder / f"step-{number:06d}.parquet").touch()
    shown = steps(tmp_path, 200).steps
    assert (len(shown), shown[0].step, shown[-1].step) == (200, 100, 299)
    assert steps(tmp_path / "none") == {"steps": [], "first": None, "last": None}
