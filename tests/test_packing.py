"""The packer: the budget is a cap, and every token is scored exactly once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.batch import MicroBatch
from cohort.packing import pack
from tiny import random_sequences

LENGTHS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=8)), min_size=1, max_size=8
)


def test_whole_sequences_by_hand():
    (first, second) = random_sequences([(2, [3]), (1, [2])])
    batch = pack([first, second], micro_batch_tokens=100, pad_token_id=9, share_prompts=False)
    (micro_batch,) = batch.micro_batches
    # the last token of a sequence is never an input; shorter rows are padded on the right
    assert micro_batch.root_ids.tolist() == [first.token_ids[:4].tolist(), [*second.token_ids[:2].tolist(), 9, 9]]
    assert micro_batch.branch_ids.numel() == 0
    assert micro_batch.source.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.targets.tolist() == [*first.token_ids[2:].tolist(), *second.token_ids[1:].tolist()]
    assert micro_batch.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert micro_batch.advantages.tolist() == [first.advantage] * 3 + [second.advantage] * 2
    assert batch.padding_fraction == pytest.approx(2 / 8)
    assert (batch.num_scored_tokens, batch.num_sequences, batch.num_over_budget) == (5, 2, 0)


def test_shared_prompts_by_hand():
    a, b, c = random_sequences([(3, [1, 3]), (2, [2])])
    (micro_batch,) = pack([a, b, c], micro_batch_tokens=100, pad_token_id=9, share_prompts=True).micro_batches
    assert micro_batch.sequence_ids.tolist() == [1, 1, 1, 2, 2, 0]  # longest completion first
    assert micro_batch.root_ids.tolist() == [b.token_ids[:3].tolist(), [*c.token_ids[:2].tolist(), 9]]
    assert micro_batch.root_lengths.tolist() == [3, 2]
    assert micro_batch.branch_ids.tolist() == [b.token_ids[3:5].tolist(), [c.token_ids[2], 9], [9, 9]]
    assert micro_batch.branch_roots.tolist() == [0, 1, 0]
    # six root positions first: a prompt's last position predicts the first token of each of its completions
    assert micro_batch.source.tolist() == [2, 6, 7, 4, 8, 2]
    assert micro_batch.num_input_tokens == 3 + 2 + 2 + 1


@given(lengths=LENGTHS, budget=st.integers(1, 300), share_prompts=st.booleans(), seed=st.integers(0, 99))
def test_the_budget_is_a_cap_and_no_token_is_lost(lengths, budget, share_prompts: bool, seed: int):
    sequences = random_sequences(lengths)
    sequences = [sequences[i] for i in np.random.default_rng(seed).permutation(len(sequences))]
    batch = pack(sequences, micro_batch_tokens=budget, pad_token_id=0, share_prompts=share_prompts)
    for micro_batch in batch.micro_batches:
        assert micro_batch.num_padded_tokens <= budget or len(micro_batch.sequence_ids.unique()) == 1
        assert_sources_predict_targets(micro_batch, sequences)
    assert batch.num_over_budget == sum(len(s.token_ids) - 1 > budget for s in sequences)
    seen = torch.cat([m.sequence_ids for m in batch.micro_batches])
    targets = torch.cat([m.targets for m in batch.micro_batches])
    weights = torch.cat([m.loss_weights for m in batch.micro_batches])
    for n, sequence in enumerate(sequences):
        np.testing.assert_array_equal(targets[seen == n].numpy(), sequence.token_ids[sequence.num_prompt_tokens :])
        np.testing.assert_array_equal(weights[seen == n].numpy(), sequence.loss_weights)


def assert_sources_predict_targets(micro_batch: MicroBatch, sequences) -> None:
    """The input token at a source position is the one before the target in its sequence."""
    inputs = torch.cat([micro_batch.root_ids.flatten(), micro_batch.branch_ids.flatten()])
    for n in micro_batch.sequence_ids.unique().tolist():
        mine = micro_batch.sequence_ids == n
        before = sequences[n].token_ids[sequences[n].num_prompt_tokens - 1 : -1]
        np.testing.assert_array_equal(inputs[micro_batch.source[mine]].numpy(), before)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_sorting_keeps_padding_low(share_prompts: bool):
    rng = np.random.default_rng(0)
    lengths = [(int(p), rng.lognormal(4, 1, 8).clip(1, 500).astype(int).tolist()) for p in rng.integers(20, 60, 32)]
    batch = pack(random_sequences(lengths), micro_batch_tokens=4096, pad_token_id=0, share_prompts=share_prompts)
    assert batch.padding_fraction < 0.2


def test_shared_prompts_are_computed_once_where_they_fit():
    lengths = [(1000, [50] * 8), (1000, [40] * 8)]
    sequences = random_sequences(lengths)
    shared = pack(sequences, micro_batch_tokens=1400, pad_token_id=0, share_prompts=True)
    whole = pack(sequences, micro_batch_tokens=1400, pad_token_id=0, share_prompts=False)
    assert sum(m.num_padded_tokens for m in shared.micro_batches) == 2 * 1000 + 8 * 49 + 8 * 39
    assert sum(m.num_padded_tokens for m in whole.micro_batches) == 16 * 1000 + 8 * 49 + 8 * 39
