"""Step rewards as inputs of the advantage: on the last tokens of their turns, without changing the sum."""

import numpy as np
import pytest

from cohort.algorithms.assign import advantage_inputs, build_sequences
from cohort.records import ForwardOnlyOutputs, ModelCall, Prompt, ScoredGroup, Trajectory

WEIGHT = 2.0  # of the environment's reward


def call(context_ids: list[int], num_tokens: int, *, trained: bool = True) -> ModelCall:
    return ModelCall(
        context_ids=np.array(context_ids),
        token_ids=np.arange(10, 10 + num_tokens),
        sampling_logprobs=np.zeros(num_tokens),
        finish_reason="stop",
        policy_version=0,
        trained=trained,
    )


CONTINUED = (call([1], 2), call([1, 10, 11, 5], 3))
REWRITTEN = (call([1], 2), call([1, 5], 3))  # a sequence per call
WITH_AN_OPPONENT = (call([1], 2), call([1, 7], 4, trained=False), call([1, 10, 11, 5], 3))


@pytest.mark.parametrize(
    ("calls", "num_sequences"), [(CONTINUED, 1), (REWRITTEN, 2), (WITH_AN_OPPONENT, 1)], ids=["one", "two", "opponent"]
)
def test_step_rewards_are_on_the_last_tokens_of_their_turns(calls: tuple[ModelCall, ...], num_sequences: int):
    """The reward of the whole trajectory, 0.25 here, stays on the last token."""
    stepwise = Trajectory(
        calls=calls, messages=(), text="", end="answer", rewards={"Game": 1.0}, step_rewards=(0.5, 0.25)
    )
    plain = Trajectory(calls=CONTINUED, messages=(), text="", end="answer", rewards={"Game": 0.75})
    totals = np.array([WEIGHT * 1.0, WEIGHT * 0.75]) + 3.0  # 3.0 by another reward
    group = ScoredGroup(
        prompt=Prompt(id=0, epoch=0, content="", token_ids=np.array([1]), columns={}),
        trajectories=(stepwise, plain),
        rewards=totals,
        reward_parts={"Game": np.array([1.0, 0.75]), "other": np.array([3.0, 3.0])},
    )
    sequences = build_sequences([group])
    assert sum(s.trajectory == 0 for s in sequences) == num_sequences
    x = advantage_inputs([group], sequences, ForwardOnlyOutputs(), {"Game": WEIGHT, "other": 1.0}, {})
    np.testing.assert_allclose(
        x.token_rewards[0],
        [[0, WEIGHT * 0.5, 0, 0, WEIGHT * 0.25 + WEIGHT * 0.25 + 3.0], [0, 0, 0, 0, WEIGHT * 0.75 + 3.0]],
    )
    np.testing.assert_allclose(x.rewards[0], totals)
