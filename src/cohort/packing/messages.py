"""A rank's sequences as few arrays, for a message. N sequences of L tokens, of which C are trained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cohort.records import FloatArray, IntArray, TrainSequence

_PER_TOKEN = ("sampling_logprobs", "advantages", "loss_weights", "returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """Sequences as few arrays. Nothing is rounded."""

    token_ids: IntArray  # of all sequences, but the prefix that a group shares only of its first one
    loss_masks: tuple[bytes | None, ...]  # [N] as bits; None: the last C tokens are trained
    per_token: Mapping[str, FloatArray]  # values of all sequences; [N, 1] if each has the same for all of its tokens
    num_tokens: tuple[int, ...]  # [N] L
    num_values: Mapping[str, tuple[int, ...]]  # [N] of each per-token field
    per_sequence: tuple[tuple[int, int, int, int], ...]  # [N] shared prefix tokens, index, group, trajectory

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> Self:
        """Pack sequences."""
        token_ids: list[IntArray] = []
        sent = set()
        for s in sequences:
            prefix = s.group, s.shared_prefix_tokens
            token_ids.append(s.token_ids[s.shared_prefix_tokens if prefix in sent else 0 :])
            sent.add(prefix)
        columns = {name: [getattr(s, name) for s in sequences] for name in _PER_TOKEN}
        return cls(
            token_ids=_concatenated(token_ids),
            loss_masks=tuple(map(_mask_bits, sequences)),
            per_token={name: _packed(arrays) for name, arrays in columns.items()},
            num_tokens=tuple(len(s.token_ids) for s in sequences),
            num_values={name: tuple(map(len, arrays)) for name, arrays in columns.items()},
            per_sequence=tuple((s.shared_prefix_tokens, s.index, s.group, s.trajectory) for s in sequences),
        )

    def unpack(self) -> list[TrainSequence]:
        """Return the sequences, whose arrays are views of those of all where they can."""
        per_token = {name: _unpacked(values, self.num_values[name]) for name, values in self.per_token.items()}
        prefixes: dict[tuple[int, int], IntArray] = {}
        sequences = []
        start = 0
        for length, bits, numbers in zip(self.num_tokens, self.loss_masks, self.per_sequence, strict=True):
            num_shared, index, group, trajectory = numbers
            prefix = prefixes.get((group, num_shared))
            end = start + length - (0 if prefix is None else num_shared)
            own = self.token_ids[start:end]
            start = end
            if prefix is None:
                prefixes[group, num_shared] = own[:num_shared]
            fields: dict[str, Any] = {name: next(values) for name, values in per_token.items()}
            sequences.append(
                TrainSequence(
                    token_ids=own if prefix is None else np.concatenate([prefix, own]),
                    loss_mask=_mask(bits, length, len(fields["loss_weights"])),
                    shared_prefix_tokens=num_shared,
                    index=index,
                    group=group,
                    trajectory=trajectory,
                    **fields,
                )
            )
        return sequences


def _packed(arrays: Sequence[FloatArray]) -> FloatArray:
    """Join arrays; if each repeats one number, return the numbers, [N, 1]."""
    is_repeated = arrays and all(values.strides == (0,) and len(values) for values in arrays)
    return np.stack([values[:1] for values in arrays]) if is_repeated else _concatenated(arrays)


def _unpacked(values: FloatArray, counts: Sequence[int]) -> Iterator[FloatArray]:
    if values.ndim == 2:
        return (np.broadcast_to(number, count) for number, count in zip(values, counts, strict=True))
    return (values[start:end] for start, end in pairwise(accumulate(counts, initial=0)))


def _mask_bits(s: TrainSequence) -> bytes | None:
    is_trained = s.loss_mask[len(s.token_ids) - s.num_loss_tokens :]
    return None if np.count_nonzero(is_trained) == len(is_trained) else np.packbits(s.loss_mask).tobytes()


def _mask(bits: bytes | None, length: int, num_trained: int) -> NDArray[np.bool_]:
    if bits is None:
        return np.arange(length) >= length - num_trained
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=length).astype(bool)


def _concatenated(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0)
