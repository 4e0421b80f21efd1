"""A rank's sequences behind a message: the same to the last bit, in few bytes."""

import pickle
from dataclasses import fields, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cohort.packing import pack
from cohort.packing.batch import TrainBatch
from cohort.records import TrainSequence
from selection import examples

_FLOATS = st.sampled_from([0.0, -0.0, 0.5, -1.0, 0.1, 1e-300, float("inf"), float("nan")])


@st.composite
def _batches(draw: st.DrawFn) -> TrainBatch:
    """Some groups, in whole micro-batches and in parts; per-token values differ, or are one number per sequence."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    repeats = {name: draw(st.booleans()) for name in ("sampling_logprobs", "advantages", "loss_weights", "returns")}
    has_returns = draw(st.booleans())
    sequences: list[TrainSequence] = []
    for group in range(draw(st.integers(0, 3))):
        prefix = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
        for _ in range(draw(st.integers(1, 4))):
            num_shared = draw(st.sampled_from([0, len(prefix)]))
            after = draw(st.lists(st.booleans(), min_size=1, max_size=20) | st.lists(st.just(True), min_size=1))
            size = sum(after)

            def values(name: str, size: int = size) -> np.ndarray:
                if repeats[name]:
                    return np.broadcast_to(np.asarray(draw(_FLOATS), dtype), size)
                return np.array(draw(st.lists(_FLOATS, min_size=size, max_size=size)), dtype)

            per_token = {name: values(name) for name in repeats if name != "returns"}
            own = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(after), max_size=len(after)))
            sequences.append(
                TrainSequence(
                    token_ids=np.array([*prefix, *own], np.int32),
                    loss_mask=np.array([False] * len(prefix) + after),
                    **per_token,
                    returns=values("returns") if has_returns and draw(st.booleans()) else np.zeros(0, dtype),
                    shared_prefix_tokens=num_shared,
                    index=len(sequences),
                    group=group,
                    trajectory=draw(st.integers(0, 9)),
                )
            )
    bounds = sorted(draw(st.lists(st.integers(0, len(sequences)), min_size=3, max_size=3)))
    first, second, third, rest = (
        tuple(sequences[start:end]) for start, end in zip([0, *bounds], [*bounds, None], strict=True)
    )
    return TrainBatch(
        micro_batches=(rest, ()),
        split_groups=((first, second), (third,)),
        micro_batch_tokens=7,
        num_trajectories=2,
        num_loss_tokens=3,
        num_over_budget=1,
        sequence_level=draw(st.booleans()),
    )


def _as_bits(value: object) -> object:
    return (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value


@given(_batches())
@examples(200)
def test_a_batch_is_the_same_behind_a_message_bit_for_bit(batch: TrainBatch) -> None:
    received = pickle.loads(pickle.dumps(batch))
    assert [[len(part) for part in group] for group in received.split_groups] == [
        [len(part) for part in group] for group in batch.split_groups
    ]
    assert list(map(len, received.micro_batches)) == list(map(len, batch.micro_batches))
    assert replace(received, micro_batches=(), split_groups=()) == replace(batch, micro_batches=(), split_groups=())
    for before, after in zip(batch.sequences, received.sequences, strict=True):
        for field in fields(before):
            assert _as_bits(getattr(before, field.name)) == _as_bits(getattr(after, field.name)), field.name


def test_a_message_has_few_bytes_per_token() -> None:
    """Literal: 4 bytes of each token, the prompt's once for both, and 4 of each logprob; the rest is for all tokens."""
    sequences = [
        replace(
            TrainSequence.single_turn(
                np.arange(1000, dtype=np.int32),
                np.arange(1000, dtype=np.int32),
                index=index,
                group=0,
                advantages=0.3 - index,
                loss_weights=1e-3,
            ),
            sampling_logprobs=np.linspace(-1, 0, 1000, dtype=np.float32),
        )
        for index in range(2)
    ]
    (batch,) = pack(sequences, micro_batch_tokens=10_000, share_prompts=True, padded=False)
    assert 3 * 4000 + 2 * 4000 < len(pickle.dumps(batch)) < 3 * 4000 + 2 * 4000 + 2000
