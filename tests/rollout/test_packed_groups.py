"""Groups as messages: what is read is what was written."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cohort.records import ModelCall, Prompt, RolloutGroup, Trajectory, TurnStats
from cohort.rollout.workers.packed_groups import read_group, read_message, write_group
from selection import examples

PROMPT = Prompt(id=3, epoch=0, content="q", token_ids=np.array([1, 2, 3]), columns={})
IDS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def a_call(context: list[int], sampled: list[int], trained: bool) -> ModelCall:
    return ModelCall(
        context_ids=np.array(context),
        token_ids=np.array(sampled, np.int32),
        sampling_logprobs=-np.arange(len(sampled), dtype=np.float32),
        finish_reason="stop",
        policy_version=len(context),
        trained=trained,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Calls that continue what was before, or part of it: a history that was rewritten, or another conversation."""
    before, calls = PROMPT.token_ids.tolist(), []
    for _ in range(draw(st.integers(1, 5))):
        kept = draw(st.sampled_from([len(before), len(before) - 1, 1, 0]))
        new = draw(IDS if kept == 0 else st.lists(st.integers(1, 5), max_size=4))
        calls.append(a_call([*before[:kept], *new], draw(IDS), draw(st.booleans())))
        before = [*calls[-1].context_ids.tolist(), *calls[-1].token_ids.tolist()]
    return Trajectory(calls=tuple(calls), messages=({"role": "user"},), text="t", end="answer", stats=TurnStats())


@examples(200, quick=50)
@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_a_group_is_read_as_it_was_written(written: list[Trajectory]):
    group = RolloutGroup(prompt=PROMPT, trajectories=tuple(written))
    read = read_group(read_message(write_group(7, group, is_held=False)), PROMPT, environment=lambda index: None)
    for one, other in zip(read.trajectories, written, strict=True):
        assert (one.messages, one.text, one.end, one.stats) == (other.messages, other.text, other.end, other.stats)
        for call, expected in zip(one.calls, other.calls, strict=True):
            for name in ("context_ids", "token_ids", "sampling_logprobs"):
                assert np.array_equal(getattr(call, name), getattr(expected, name)), name
            for name in ("finish_reason", "policy_version", "trained"):
                assert getattr(call, name) == getattr(expected, name), name
