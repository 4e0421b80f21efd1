"""Micro-batches: the budget is a cap, every token is scored exactly once, and it sees what is before it and no more."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.packing import collate, pack
from cohort.packing.batch import MicroBatch
from cohort.packing.segments import NO_PARENT, AttentionMetadata, PaddedBlock, build_attention_metadata
from cohort.records import TrainSequence
from selection import examples
from tiny import random_sequences

LENGTHS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=8)), min_size=1, max_size=8
)


def test_whole_sequences_by_hand():
    first, second = random_sequences([(2, [3]), (1, [2])])
    row = collate([first, second], share_prompts=False)
    # the last token of a sequence is never an input
    assert row.input_ids.tolist() == [*first.token_ids[:4].tolist(), *second.token_ids[:2].tolist()]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert row.logit_positions.tolist() == [1, 2, 3, 4, 5]
    assert row.labels.tolist() == [*first.token_ids[2:].tolist(), *second.token_ids[1:].tolist()]
    assert row.trajectory_ids.tolist() == [0, 0, 0, 1, 1]
    for field in ("advantages", "sampling_logprobs", "loss_weights"):
        assert getattr(row, field).tolist() == [*getattr(first, field), *getattr(second, field)]
    (own,) = row.attn_metadata.padded.causal
    assert own.positions.tolist() == [[0, 1, 2, 3], [4, 5, 5, 5]]
    assert own.padding_mask.int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert row.attn_metadata.padded.prefix == ()


def test_shared_prompts_by_hand():
    a, b, c, d, e = random_sequences([(3, [1, 3, 2]), (2, [2]), (1, [1])])
    row = collate([e, b, d, c, a], share_prompts=True)
    assert row.trajectory_ids.tolist() == [0, 1, 1, 1, 2, 2, 3, 3, 4]
    # e whole; the prompt of b, c and a; b; c; nothing of a, whose one token is not an input; d whole
    parts = [e.token_ids[:1], b.token_ids[:3], b.token_ids[3:5], c.token_ids[3:4], d.token_ids[:3]]
    assert row.input_ids.tolist() == np.concatenate(parts).tolist()
    assert row.position_ids.tolist() == [0, 0, 1, 2, 3, 4, 3, 0, 1, 2]
    # the prompt's last position predicts the first token of each of its completions
    assert row.logit_positions.tolist() == [0, 3, 4, 5, 8, 9, 3, 6, 3]
    (own,), (block,) = row.attn_metadata.padded.causal, row.attn_metadata.padded.prefix
    assert own.positions.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 5], [6, 6, 6], [7, 8, 9]]
    assert (block.queries.starts, block.queries.lengths) == ((4,), (3,))
    assert (block.keys.starts, block.keys.lengths) == ((1,), (3,))


def test_an_empty_micro_batch_is_one_token_that_nothing_is_scored_after():
    row = collate([], share_prompts=True)
    assert row.input_ids.shape == row.position_ids.shape == (1,)
    of_loss_tokens = (row.logit_positions, row.labels, row.sampling_logprobs, row.advantages, row.loss_weights)
    assert [len(x) for x in (*of_loss_tokens, row.trajectory_ids)] == [0] * 6
    assert row.logit_positions.dtype == row.labels.dtype == torch.int64 and row.loss_weights.dtype == torch.float64


@examples(100)
@given(
    lengths=LENGTHS,
    budget=st.integers(1, 300),
    layout=st.sampled_from(["shared", "packed", "padded"]),
    dp_size=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_the_budget_is_a_cap_and_no_token_is_lost(lengths, budget: int, layout: str, dp_size: int, seed: int):
    sequences = random_sequences(lengths)
    shuffled = [sequences[i] for i in np.random.default_rng(seed).permutation(len(sequences))]
    batches = pack(
        shuffled,
        micro_batch_tokens=budget,
        dp_size=dp_size,
        share_prompts=layout == "shared",
        padded=layout == "padded",
    )
    assert len(batches) == dp_size and len({len(b.micro_batches) for b in batches}) == 1
    for batch in batches:
        assert batch.num_trajectories == len(sequences)
        assert batch.num_loss_tokens == sum(s.num_loss_tokens for s in sequences)
        assert batch.num_over_budget == sum(len(s.token_ids) - 1 > budget for s in sequences)
    seen = []
    for mine in (m for batch in batches for m in batch.micro_batches):
        row = collate(mine, share_prompts=layout == "shared")
        longest = max((len(s.token_ids) - 1 for s in mine), default=1)
        positions = longest * len(mine) if layout == "padded" else len(row.input_ids)
        assert positions <= budget or len(mine) <= 1
        assert_every_token_is_scored(row, mine)
        seen += [s.index for s in mine]
    assert sorted(seen) == list(range(len(sequences)))


def assert_every_token_is_scored(row: MicroBatch, sequences: tuple[TrainSequence, ...]) -> None:
    """A source is the token before its target, at its position; and it sees exactly those before it."""
    sees = visible(row.attn_metadata)
    for i, s in enumerate(sequences):
        mine = row.trajectory_ids == i
        np.testing.assert_array_equal(row.labels[mine].numpy(), s.token_ids[s.loss_mask])
        np.testing.assert_array_equal(row.loss_weights[mine].numpy(), s.loss_weights)
        last = np.flatnonzero(s.loss_mask) - 1
        np.testing.assert_array_equal(row.position_ids[row.logit_positions[mine]].numpy(), last)
        for source, position in zip(row.logit_positions[mine].tolist(), last, strict=True):
            np.testing.assert_array_equal(row.input_ids[sees[source]].numpy(), s.token_ids[: position + 1])
            np.testing.assert_array_equal(row.position_ids[sees[source]].numpy(), np.arange(position + 1))


def visible(attn_metadata: AttentionMetadata) -> list[list[int]]:
    """For each token of a row the positions that it attends to, as attention reads the segments. Prefix: -P .. -1."""
    row = torch.arange(attn_metadata.num_tokens)
    sees: list[list[int]] = [[] for _ in row]
    for own in attn_metadata.padded.causal:
        for b, tokens in enumerate(without_padding(own, row)):
            assert tokens == list(range(own.starts[b], own.starts[b] + own.lengths[b]))
            for i, token in enumerate(tokens):
                assert not sees[token]  # each token is taken once
                sees[token] = tokens[: i + 1]
    for block in attn_metadata.padded.prefix:
        prefix = [list(range(-attn_metadata.prefix_tokens, 0))]
        roots = prefix if block.from_cache else without_padding(block.keys, row)
        for branches, root in zip(without_padding(block.queries, row), roots, strict=True):
            for token in branches:
                sees[token] = root + sees[token]
    return sees


def without_padding(block: PaddedBlock, row: torch.Tensor) -> list[list[int]]:
    taken = block.take(row)
    padding = torch.zeros_like(taken, dtype=torch.bool) if block.padding_mask is None else block.padding_mask
    return [tokens[~pad].tolist() for tokens, pad in zip(taken, padding, strict=True)]


@examples(50)
@given(tree=st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 300), max_size=4)), min_size=1, max_size=4))
def test_a_token_sees_its_root_and_what_is_before_it_in_its_segment(tree):
    lengths, roots, expected = [], [], []
    for root_length, branch_lengths in tree:
        root, start = len(lengths), sum(lengths)
        expected += [list(range(start, start + i + 1)) for i in range(root_length)]
        lengths, roots = [*lengths, root_length], [*roots, NO_PARENT]
        for length in branch_lengths:
            own = sum(lengths)
            prompt = list(range(start, start + root_length))
            expected += [prompt + list(range(own, own + i + 1)) for i in range(length)]
            lengths, roots = [*lengths, length], [*roots, root]
    attn_metadata = build_attention_metadata(lengths, roots)
    assert visible(attn_metadata) == expected
    assert all(
        len(own.starts) == 1 or max(own.lengths) <= 64 for own in attn_metadata.padded.causal
    )  # padding is bounded


def test_shared_prompts_are_computed_once_where_they_fit():
    sequences = random_sequences([(1000, [50] * 8), (1000, [40] * 8)])

    def num_tokens(share_prompts: bool) -> int:
        (batch,) = pack(sequences, micro_batch_tokens=1400, share_prompts=share_prompts, padded=False)
        return sum(len(collate(m, share_prompts=share_prompts).input_ids) for m in batch.micro_batches)

    assert num_tokens(True) == 2 * 1000 + 8 * 49 + 8 * 39
    assert num_tokens(False) == 16 * 1000 + 8 * 49 + 8 * 39


def test_nothing_to_train_on_is_no_micro_batch():
    (batch,) = pack([], micro_batch_tokens=10, share_prompts=True, padded=False)
    assert (batch.micro_batches, batch.num_trajectories, batch.num_loss_tokens) == ((), 0, 0)
