"""From model calls to token sequences: joined where the past is unchanged, and no token is trained twice."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.algorithms import assign, build_sequences
from cohort.errors import TrainingError
from cohort.records import ModelCall, Prompt, RolloutGroup, TokenSequence, TrainSequence, Trajectory, join_calls
from selection import examples


def call(context: list[int], sampled: list[int], *, trained: bool = True, version: int = 0) -> ModelCall:
    """A call whose logprobs are the negative token ids."""
    return ModelCall(
        context_ids=np.array(context, dtype=np.int64),
        token_ids=np.array(sampled, dtype=np.int64),
        sampling_logprobs=-np.array(sampled, dtype=np.float64),
        finish_reason="stop",
        policy_version=version,
        trained=trained,
    )


def written(sequence: TokenSequence | TrainSequence) -> list[int]:
    """Token ids, those that are trained negative."""
    np.testing.assert_array_equal(sequence.sampling_logprobs, -sequence.token_ids[sequence.loss_mask])
    return np.where(sequence.loss_mask, -sequence.token_ids, sequence.token_ids).tolist()


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], []),
        ([call([1, 2], [3, 4])], [[1, 2, -3, -4]]),
        # a tool's answer, or a user's, stands between two calls
        ([call([1], [2, 3]), call([1, 2, 3, 9, 9], [4])], [[1, -2, -3, 9, 9, -4]]),
        # nothing stands between them
        ([call([1], [2]), call([1, 2], [3])], [[1, -2, -3]]),
        # history rewritten: reasoning dropped, or all of it summarized
        ([call([1], [2, 3]), call([1, 3, 9], [4])], [[1, -2, -3], [1, 3, 9, -4]]),
        ([call([1], [2, 3]), call([7], [4]), call([7, 4, 8], [5])], [[1, -2, -3], [7, -4, 8, -5]]),
        # one token of the past is another one: a prefix of equal length is not enough
        ([call([1], [2, 3]), call([1, 2, 4], [5])], [[1, -2, -3], [1, 2, 4, -5]]),
        # the past is shortened
        ([call([1], [2, 3]), call([1, 2], [4])], [[1, -2, -3], [1, 2, -4]]),
        # two answers to one context
        ([call([1], [2]), call([1], [2])], [[1, -2], [1, -2]]),
        # two threads in turn: trained tokens stay in the order in which they were sampled
        (
            [call([1], [2]), call([5], [6]), call([1, 2, 9], [3]), call([5, 6, 9], [7])],
            [[1, -2], [5, -6], [1, 2, 9, -3], [5, 6, 9, -7]],
        ),
        # calls of others are context, where the policy has seen them
        ([call([1], [2], trained=False)], []),
        ([call([1], [2]), call([1, 2], [8], trained=False), call([1, 2, 8], [3])], [[1, -2, 8, -3]]),
        ([call([1], [2]), call([1, 2], [8], trained=False), call([1, 2, 9], [3])], [[1, -2, 9, -3]]),
    ],
)
def test_calls_to_sequences(calls: list[ModelCall], expected: list[list[int]]):
    assert [written(sequence) for sequence in join_calls(calls)] == expected


@examples(200)
@given(data=st.data())
def test_every_sampled_token_is_trained_exactly_once_after_what_the_model_saw(data: st.DataObject):
    """Of calls that continue, shorten or rewrite the past at random, with few different tokens."""
    token_lists = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    past, calls = [1], []
    for _ in range(data.draw(st.integers(1, 6))):
        kept = data.draw(st.integers(1, len(past)))
        context = past[:kept] + data.draw(st.lists(st.integers(1, 3), max_size=2))
        calls.append(call(context, data.draw(token_lists)))
        past = context + calls[-1].token_ids.tolist()
    sequences = join_calls(calls)
    trained = [(s.token_ids[:n].tolist(), s.token_ids[n]) for s in sequences for n in np.flatnonzero(s.loss_mask)]
    sampled = [
        (c.context_ids.tolist() + c.token_ids[:n].tolist(), token) for c in calls for n, token in enumerate(c.token_ids)
    ]
    assert sorted(trained) == sorted(sampled)
    assert all(s.loss_mask[-1] and not s.loss_mask[0] for s in sequences)


def trajectory(*calls: ModelCall) -> Trajectory:
    return Trajectory(calls=calls, messages=(), text="", end="answer")


def test_what_a_trajectory_says_of_all_its_calls():
    several = trajectory(
        call([1], [2, 3], version=7), call([1, 2, 3, 9], [8], trained=False), call([5], [4], version=8)
    )
    assert several.sampled_token_ids.tolist() == [2, 3, 4]
    assert several.sampling_logprobs.tolist() == [-2, -3, -4]
    assert (several.policy_version, several.finish_reason) == (7, "stop")
    opponent = replace(call([5], [4], trained=False), finish_reason="length")
    assert trajectory(call([1], [2]), opponent).finish_reason == "stop", "of the last trained call"
    assert trajectory(opponent).finish_reason == "length" and trajectory(opponent).sampled_token_ids.tolist() == []


def test_sequences_share_the_prompt_that_they_begin_with():
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array([1, 2]), columns={})
    members = (
        trajectory(call([1, 2], [3]), call([1, 2, 3, 9], [4]), call([1, 2, 9], [5]), call([7, 7, 7], [6])),
        trajectory(call([1], [2])),  # has sampled what is the prompt for others
        trajectory(call([1, 2], [3], trained=False)),
        trajectory(call([1, 2], [3])),
    )
    sequences = build_sequences([RolloutGroup(prompt=prompt, trajectories=members)] * 2)
    first = [
        ([1, 2, -3, 9, -4], 2, 0),
        ([1, 2, 9, -5], 2, 0),
        ([7, 7, 7, -6], 0, 0),
        ([1, -2], 0, 1),
        ([1, 2, -3], 2, 3),
    ]
    found = [(written(s), s.shared_prefix_tokens, s.trajectory) for s in sequences]
    assert found == first + [(tokens, shared, trajectory + 4) for tokens, shared, trajectory in first]
    assert [s.index for s in sequences] == list(range(10)) and [s.group for s in sequences] == [0] * 5 + [1] * 5


def test_sequences_share_what_they_begin_with_if_an_environment_writes_their_contexts():
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array([1, 2]), columns={})
    members = (
        trajectory(call([1, 7, 8, 5], [3]), call([1, 7, 8, 9], [4]), call([1, 7], [5])),
        trajectory(call([1, 7, 8, 6], [3], trained=False), call([1, 7, 8, 6, 5], [3])),
        Trajectory(calls=(call([1], [2]),), messages=(), text="", end="timeout"),
    )
    sequences = build_sequences([RolloutGroup(prompt=prompt, trajectories=members)])
    assert [(written(s), s.shared_prefix_tokens) for s in sequences] == [
        ([1, 7, 8, 5, -3], 3),
        ([1, 7, 8, 9, -4], 3),
        ([1, 7, -5], 0),
        ([1, 7, 8, 6, 5, -3], 3),
    ]


def test_a_call_without_tokens_is_refused():
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array([1]), columns={})
    with pytest.raises(TrainingError, match="a completion has no tokens"):
        build_sequences([RolloutGroup(prompt=prompt, trajectories=(trajectory(call([1], [])),))])


def test_a_trajectory_without_calls_is_refused_unless_it_broke_before_the_first():
    with pytest.raises(ValueError, match="ended with 'answer' must have at least one model call"):
        trajectory()
    broken = Trajectory(calls=(), messages=(), text="", end="environment_error")
    assert (broken.finish_reason, broken.policy_version, broken.sampled_token_ids.tolist()) == (None, None, [])


def test_broken_trajectories_have_no_sequences():
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array([1]), columns={})
    broken = Trajectory(calls=(call([1], [2]), call([1, 2], [])), messages=(), text="", end="timeout")
    (sequence,) = build_sequences([RolloutGroup(prompt=prompt, trajectories=(broken, trajectory(call([1], [3]))))])
    assert (sequence.trajectory, written(sequence)) == (1, [1, -3])


_floats = st.sampled_from([0.0, -0.0, 0.5, -1.0, 0.1, 1e-300, float("inf"), float("nan")])


@pytest.mark.parametrize("prompt_tokens", [1, 3])
def test_completions_of_a_prompt_have_the_sequences_of_any_trajectory(
    prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(*lengths: int, also: tuple[Trajectory, ...] = ()) -> RolloutGroup:
        prompt = Prompt(id=0, epoch=0, content="", token_ids=np.arange(5, 5 + prompt_tokens), columns={})
        calls = [call(prompt.token_ids.copy(), range(10, 10 + n)) for n in lengths]
        return RolloutGroup(prompt=prompt, trajectories=(*map(trajectory, calls), *also))

    broken = Trajectory(calls=(), messages=(), text="", end="timeout")
    groups = [group(4, 1, 2), group(3), group(2, 2, also=(broken,)), group(5, also=(trajectory(call([1, 2], [3])),))]
    fast = build_sequences(groups)
    monkeypatch.setattr(assign, "_is_completion", lambda *_: False)
    naive = build_sequences(groups)
    assert len(fast) == len(naive) > 1
    for one, other in zip(fast, naive, strict=True):
        for field in fields(one):
            a, b = (np.asarray(getattr(s, field.name)) for s in (one, other))
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), field.name
