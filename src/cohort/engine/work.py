"""What is left to compute of a step on this rank, and how ranks agree on what to do next.

Every rank runs the same passes at the same time, as each of them is a sequence of collectives. A pass is a micro-batch,
or the prompt of a stream: forward when it is opened, backward when all parts of the streams that are open have been
computed. A rank without a stream opens nothing in particular then, and goes on with its micro-batches meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from cohort import stopping
from cohort.batch import TrainBatch
from cohort.distributed import Ranks
from cohort.engine.accumulation import Done
from cohort.records import IntArray, TrainSequence

Sequences = tuple[TrainSequence, ...]


class Turn(IntEnum):
    """What all ranks do at the same time. The largest of their wishes is done."""

    NOTHING = 0
    CLOSE = 1  # backward of the open prompts
    COMPUTE = 2  # a micro-batch, or a part of a stream
    OPEN = 3  # forward of prompts
    STOP = 4  # the run was asked to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Sequences to compute together; none where the rank only keeps step."""

    sequences: Sequences = ()
    done: Done = frozenset()  # whose gradient of it has been added already
    in_stream: bool = False  # goes on from the open prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A group whose prompt is computed once and whose completions are computed in parts."""

    prompt: IntArray  # [P] token ids
    parts: tuple[Piece, ...]
    done: Done = frozenset()  # whose gradient has been added already, the prompt's included


class Work:
    """The streams and micro-batches of a rank that are not computed yet."""

    def __init__(self, batch: TrainBatch, repack: Callable[[Sequences], TrainBatch]):
        """Of a batch.

        Args:
            batch: to compute.
            repack: sequences to a batch for one rank, under the budget of the moment.
        """
        self._repack = repack
        self._micro_batches = deque(Piece(sequences=sequences) for sequences in batch.micro_batches)
        self._streams = deque(_stream(parts) for parts in batch.streams)
        self._is_open = False  # on all ranks or none
        self._current: Stream | None = None  # that this rank has open
        self._parts: deque[Piece] = deque()  # of it

    def agree(self, ranks: Ranks, *, may_stop: bool = False) -> Turn:
        """What all ranks do next.

        Args:
            ranks: all that do it.
            may_stop: nothing is lost by leaving the rest undone; the same on every rank.
        """
        if may_stop and stopping.requested():
            wish = Turn.STOP
        elif self._is_open:
            wish = Turn.COMPUTE if self._parts else Turn.CLOSE
        elif self._streams:
            wish = Turn.OPEN
        else:
            wish = Turn.COMPUTE if self._micro_batches else Turn.NOTHING
        return Turn(int(ranks.largest(wish)))

    def open(self) -> Stream | None:
        """The stream whose prompt is to be opened; None where this rank has no more."""
        self._is_open, self._current = True, self._streams.popleft() if self._streams else None
        self._parts = deque(self._current.parts if self._current else ())
        return self._current

    def close(self) -> Stream | None:
        """The stream whose parts are through; None where this rank had none open."""
        stream, self._is_open, self._current = self._current, False, None
        return stream

    def next(self) -> Piece:
        """What this rank computes now."""
        if self._parts:
            return self._parts.popleft()
        if self._current is not None or not self._micro_batches:  # beside an open prompt is no room for more
            return Piece()
        return self._micro_batches.popleft()

    def split(self, failed: Piece | None = None) -> None:
        """Split what is left under a budget that has become smaller.

        Args:
            failed: to be computed again, before anything else.
        """
        parts, streams, micro_batches = self._parts, self._streams, self._micro_batches
        if failed is not None:
            (parts if failed.in_stream else micro_batches).appendleft(failed)
        self._parts = deque(smaller for part in parts for smaller in self._split_part(part))
        self._streams, self._micro_batches = deque(), deque()
        for stream in streams:
            smaller = tuple(piece for part in stream.parts for piece in self._split_part(part))
            self._streams.append(replace(stream, parts=smaller))
        for piece in micro_batches:
            batch = self._repack(piece.sequences)
            self._streams.extend(_stream(parts, piece.done) for parts in batch.streams)
            self._micro_batches.extend(Piece(sequences=s, done=piece.done) for s in batch.micro_batches)

    def _split_part(self, part: Piece) -> Iterable[Piece]:
        batch = self._repack(part.sequences)
        for sequences in batch.pieces:
            yield Piece(sequences=sequences, done=part.done, in_stream=True)


def _stream(parts: Sequence[Sequences], done: Done = frozenset()) -> Stream:
    first = parts[0][0]
    prompt = first.token_ids[: first.num_prompt_tokens]
    return Stream(prompt=prompt, parts=tuple(Piece(sequences=s, done=done, in_stream=True) for s in parts), done=done)
