"""What `train.micro_batch_tokens: auto` tries: the groups that the run will have."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.algorithms import build_algorithm
from cohort.learner import WorstCaseShard, find_budget
from cohort.learner.budget_search import _trial
from cohort.packing import collate, pack
from cohort.records import TrainSequence
from test_laws import ALGORITHMS, make_engine
from tiny import make_model, policy_of

SHARD = WorstCaseShard(prompt_tokens=50, completion_tokens=11, num_generations=4, num_sequences=10)
WHOLE = 2 * (50 + 4 * 10) + 50 + 2 * 10  # positions of all its sequences


def trial(tokens: int, *, shared: bool = True) -> tuple[TrainSequence, ...]:
    policy: Any = SimpleNamespace(shares_prompts=shared)
    return _trial(tokens, SHARD, policy)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tokens", [1, 50, 51, 60, 61, 90, 91, 139, 200, WHOLE])
def test_a_trial_has_as_many_positions_as_it_is_to_have(tokens: int, shared: bool):
    sequences = trial(tokens, shared=shared)
    assert len(collate(sequences, share_prompts=shared).input_ids) == tokens
    assert all(not s.loss_weights.any() for s in sequences)
    assert max(s.shared_prefix_tokens for s in sequences) <= 50
    assert max(s.num_loss_tokens for s in sequences) <= 11
    assert max(Counter(s.group for s in sequences).values()) <= (4 if shared else 1)


def test_a_trial_of_everything_is_the_largest_step():
    sequences = trial(10_000)
    assert list(Counter(s.group for s in sequences).values()) == [4, 4, 2]
    assert {(s.shared_prefix_tokens, s.num_loss_tokens) for s in sequences} == {(50, 11)}
    (batch,) = pack(sequences, micro_batch_tokens=WHOLE, share_prompts=True, padded=False)
    assert [len(piece) for piece in batch.all_micro_batches] == [10]


def test_the_budget_is_found_with_prompts_that_are_shared(monkeypatch: pytest.MonkeyPatch):
    """What a group costs more than its positions is seen: here, no room for three completions of a prompt."""
    engine = make_engine(policy_of(make_model()))
    loss = build_algorithm(ALGORITHMS["grpo"], max_completion_tokens=11).policy_loss
    fits = engine.fits

    def no_room_for_copies(sequences: Any, *args: Any, **kwargs: Any) -> bool:
        copies = sum(s.shared_prefix_tokens for s in sequences)
        return fits(sequences, *args, **kwargs) and copies < 150

    monkeypatch.setattr(engine, "fits", no_room_for_copies)
    assert 0.9 * 70 / 1.1 <= find_budget(engine, loss, shard=SHARD, max_tokens=600) <= 70
    monkeypatch.setattr(engine, "fits", fits)
    assert find_budget(engine, loss, shard=SHARD, max_tokens=600) == 600
