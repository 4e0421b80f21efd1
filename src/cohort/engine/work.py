"""What is left to compute of a step on this rank, and how ranks agree on what to do next.

Every rank runs the same passes at the same time, as each of them is a sequence of collectives. A pass is a micro-batch,
or the prompt of a stream: forward when it is opened, backward when all parts of the streams that are open have been
computed. A rank without a stream opens nothing in particular then, and goes on with its micro-batches meanwhile.
"""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from cohort import stopping
from cohort.batch import TrainBatch
from cohort.distributed import Ranks
from cohort.records import IntArray, TrainSequence

Sequences = tuple[TrainSequence, ...]


class Turn(IntEnum):
    """What all ranks do at the same time. The largest of their wishes is done."""

    NOTHING = 0
    CLOSE = 1  # backward of the open prompts
    COMPUTE = 2  # a micro-batch, or a part of a stream
    OPEN = 3  # forward of prompts
    START_AGAIN = 4  # with smaller micro-batches: a rank has run out of memory
    STOP = 5  # the run was asked to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Sequences to compute together; none where the rank only keeps step."""

    sequences: Sequences = ()
    in_stream: bool = False  # goes on from the open prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A group whose prompt is computed once and whose completions are computed in parts."""

    prompt: IntArray  # [P] token ids
    parts: tuple[Sequences, ...]

    @classmethod
    def of(cls, parts: tuple[Sequences, ...]) -> "Stream":
        """Of the parts, which all begin with the prompt."""
        first = parts[0][0]
        return cls(prompt=first.token_ids[: first.shared_prefix_tokens], parts=parts)


class Work:
    """The streams and micro-batches of a rank that are not computed yet."""

    def __init__(self, batch: TrainBatch):
        self.ran_out = False  # of memory, on this rank
        self._micro_batches = deque(batch.micro_batches)
        self._streams = deque(map(Stream.of, batch.streams))
        self._is_open = False  # on all ranks or none
        self._has_stream = False  # this rank, of those that are open
        self._parts: deque[Sequences] = deque()  # of it

    def agree(self, ranks: Ranks, *, may_stop: bool = False) -> Turn:
        """What all ranks do next.

        Args:
            ranks: all that do it.
            may_stop: nothing is lost by leaving the rest undone; the same on every rank.
        """
        if may_stop and stopping.requested():
            wish = Turn.STOP
        elif self.ran_out:
            wish = Turn.START_AGAIN
        elif self._is_open:
            wish = Turn.COMPUTE if self._parts else Turn.CLOSE
        elif self._streams:
            wish = Turn.OPEN
        else:
            wish = Turn.COMPUTE if self._micro_batches else Turn.NOTHING
        return Turn(int(ranks.largest(wish)))

    def open(self) -> Stream | None:
        """The stream whose prompt is to be opened; None where this rank has no more."""
        stream = self._streams.popleft() if self._streams else None
        self._is_open, self._has_stream = True, stream is not None
        self._parts = deque(stream.parts if stream else ())
        return stream

    def close(self) -> None:
        """All parts are through."""
        self._is_open = self._has_stream = False

    def next(self) -> Piece:
        """What this rank computes now."""
        if self._parts:
            return Piece(sequences=self._parts.popleft(), in_stream=True)
        if self._has_stream or not self._micro_batches:  # beside an open prompt is no room for more
            return Piece()
        return Piece(sequences=self._micro_batches.popleft())
