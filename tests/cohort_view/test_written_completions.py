"""The page's readers read what runs write."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from cohort.records import ForwardOnlyOutputs, Prompt, ScoredGroup, TrainSequence, Trajectory, TurnStats
from cohort.run.completions import write_completions_file
from cohort.run.tokens import prepare_tokens_file
from cohort_view import groups, tokens
from cohort_view.search.search import Match, Search, columns, search
from completions_files import RunFolder, answering
from samples import NAN, answer

completion = answering(tokens.completion)

PROMPT = Prompt(id=4, epoch=0, content=[{"role": "user", "content": "2 + 2?"}], token_ids=np.array([1, 2]), columns={})
FIRST = answer(PROMPT, [5, 6], logprobs=[-0.5, -0.25], version=3).calls[0]
SECOND = replace(
    FIRST, context_ids=np.array([1, 2, 5, 6, 30]), token_ids=np.array([7]), sampling_logprobs=np.array([-1.0])
)
PLAYED = Trajectory(
    calls=(FIRST, SECOND),
    messages=({"role": "assistant", "content": "4"},),
    text="4",
    end="max_turns",
    metrics={"score": 3.0},
    stats=TurnStats(tool_calls=1, model_s=0.5),
)
BROKEN = Trajectory(calls=(), messages=(), text="", end="environment_error", error="Boom", stats=TurnStats())
GROUP = ScoredGroup(
    prompt=PROMPT,
    trajectories=(PLAYED, BROKEN),
    rewards=np.array([1.0, NAN]),
    reward_parts={"right": np.array([1.0, NAN])},
    answer="4",
)
SEQUENCE = TrainSequence(
    token_ids=np.array([1, 2, 5, 6, 30, 7]),
    loss_mask=np.array([False, False, True, True, False, True]),
    sampling_logprobs=np.array([-0.5, -0.25, -1.0]),
    advantages=np.full(3, 2.0),
    loss_weights=np.full(3, 0.125),
    shared_prefix_tokens=2,
    index=0,
    group=0,
    trajectory=0,
)


@pytest.fixture
def run(tmp_path):
    write_completions_file(tmp_path / "completions/step-000005.parquet", step=5, groups=[GROUP], sequences=[SEQUENCE])
    outputs = ForwardOnlyOutputs(logprobs={0: np.array([-0.5, -0.5, -2.0])})
    file = tmp_path / "tokens/step-000005.parquet"
    prepare_tokens_file(file, num_trajectories=2, sequences=[SEQUENCE], outputs=outputs, with_context=True)()
    return RunFolder(tmp_path, {"rollout": {"num_generations": 2}})


def test_a_step_and_a_group(run):
    step = answering(groups.step)(run, 5)
    (row,) = step.groups
    assert (row.prompt_id, row.prompt, row.size, row.broken, row.staleness) == (4, "2 + 2?", 2, 1, 1)
    assert (row.reward_mean, row.length_mean) == (1.0, 3.0)  # broken ones do not count
    assert step.problems == []
    group = answering(groups.group)(run, 5, "step", 0)
    played, broken = group.completions
    assert (group.prompt, group.prompt_id, group.answer) == ([{"role": "user", "content": "2 + 2?"}], 4, "4")
    assert (played.end, played.environment, played.model_s) == ("max_turns", {"score": 3.0}, 0.5)
    assert (played.messages, played.advantage) == ([{"role": "assistant", "content": "4"}], 2.0)
    assert (broken.end, broken.error, broken.reward, broken.length) == ("environment_error", "Boom", None, 0)


def test_a_row_s_source_can_be_searched_for(run):
    def found(where: str) -> list[int]:
        return [event.row for event in search(run, Search(where=where), lambda: False) if isinstance(event, Match)]

    assert "source" not in [column.name for column in columns(run)]
    rows = ({"source": "math"}, {"source": "code"}, {"source": ["a", "b"]})
    of_sources = [replace(GROUP, prompt=replace(PROMPT, columns=row)) for row in rows]
    write_completions_file(run.path / "completions/step-000005.parquet", step=5, groups=of_sources)
    assert "source" in [column.name for column in columns(run)]
    assert found("source == 'math'") == [0, 1]
    assert found("source != 'math'") == [2, 3]
    assert found("source is None and end == 'max_turns'") == [4]  # no text


def test_tokens_with_what_training_knew_of_them(run):
    found = completion(run, 5, "step", 0)
    (sequence,) = found.sequences
    assert (found.recorded, found.trained) == (True, True)
    assert (sequence.prompt.ids, sequence.tokens.ids) == ([1, 2], [5, 6, 30, 7])
    assert sequence.loss_mask == [True, True, False, True]
    assert sequence.sampling_logprobs == [-0.5, -0.25, None, -1.0]
    assert sequence.logprobs == [-0.5, -0.5, None, -2.0]
    expected = [1.0, pytest.approx(exp(-0.25), rel=1e-5), None, pytest.approx(exp(-1), rel=1e-5)]
    assert sequence.ratios == expected
    assert (sequence.advantages, sequence.loss_weights) == ([2.0, 2.0, 0.0, 2.0], [0.125, 0.125, 0.0, 0.125])
    broken = completion(run, 5, "step", 1)
    assert (broken.sequences, broken.trained) == ([], None)
