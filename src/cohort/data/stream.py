"""Read rows as they are sampled, in an order that resumes exactly: streams of files, of the Hub and from Python.

B rows of a buffer.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cohort.config.objects import NamedObject
from cohort.data.cache import content_key
from cohort.data.files import find_stream, read_file_rows
from cohort.data.rows import Row
from cohort.errors import TrainingError, UserError, describe_error
from cohort.records import Prompt

# Buffers whose beginning a checkpoint knows, where prompts are read again that were taken and not yet trained on.
_KNOWN_BUFFERS = 16
_BATCH = 1000  # rows that are read at a time where no buffer is wanted
_CHANGED = (
    "data.path: the stream does not go on where the run was saved: its state leads to other rows. A stream that "
    "shuffles in a buffer of its own cannot be resumed exactly: leave that to data.buffer_size. If the data have "
    "changed, use a new run.dir"
)


class RowStream(Protocol):
    """Rows in a fixed order, as a `datasets.IterableDataset` has them."""

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows of an epoch, from the loaded state or from the beginning."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is of."""
        ...

    def state_dict(self) -> Any:
        """Return the position after the last row."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration begin at a position of its epoch; None: at the first row."""
        ...


class FileStream:
    """The rows of a file, which are parsed when they are read."""

    def __init__(self, file: Path, field: str) -> None:
        """Open nothing yet. `field` begins the messages of errors."""
        self._file, self._field = file, field
        self._first_row = self._next_row = 0

    def __iter__(self) -> Iterator[Row]:
        self._next_row = self._first_row
        for row in islice(read_file_rows(self._file, self._field), self._next_row, None):
            self._next_row += 1
            yield row

    def set_epoch(self, epoch: int) -> None:
        """See `RowStream`: every epoch has the same rows."""

    def state_dict(self) -> dict[str, int]:
        """See `RowStream`."""
        return {"row": self._next_row}

    def load_state_dict(self, state: Mapping[str, int] | None) -> None:
        """See `RowStream`."""
        self._first_row = state["row"] if state else 0


def open_stream(path: str, *, field: str, split: str, name: str | None) -> RowStream:
    """Open data whose rows are read as they are sampled: a file, a folder, a Hub id or an IterableDataset.

    Raises:
        UserError: there is no such data, or an object cannot resume.
    """
    where = f"{field}={path!r:.300}"
    if isinstance(path, NamedObject):
        if not all(hasattr(path.value, method) for method in ("state_dict", "load_state_dict", "set_epoch")):
            raise UserError(
                f"{where}: a stream is a datasets.IterableDataset, or has its methods state_dict, load_state_dict and "
                f"set_epoch, with which a run resumes; for other rows, leave out data.stream"
            )
        stream: RowStream = path.value
        return stream
    found = find_stream(path, field=field, split=split, name=name)
    return FileStream(found, where) if isinstance(found, Path) else found


def first_rows(stream: RowStream, count: int) -> list[Row]:
    """Return the first rows of a stream, which may have been read before.

    Raises:
        UserError: one of them is broken.
        TrainingError: the stream failed, or yields something that is no row.
    """
    stream.set_epoch(0)
    stream.load_state_dict(None)
    return _read(iter(stream), count, first=0)


def numbered_rows(stream: RowStream, numbers: Collection[int]) -> tuple[dict[int, Row], int]:
    """Return rows of the first epoch by number, counted from 0, and how many were read: none after the last of them.

    Raises:
        UserError: a row up to the last of them is broken.
        TrainingError: the stream failed, or yields something that is no row.
    """
    stream.set_epoch(0)
    stream.load_state_dict(None)
    found: dict[int, Row] = {}
    rows, num_read, num_wanted = iter(stream), 0, max(numbers) + 1
    while read := _read(rows, min(_BATCH, max(num_wanted - num_read, 0)), first=num_read):
        found |= {number: row for number, row in enumerate(read, num_read) if number in numbers}
        num_read += len(read)
    return found, num_read


def _read(rows: Iterator[Row], count: int, *, first: int) -> list[Row]:
    try:
        return [dict(row) for row in islice(rows, count)]
    except UserError:
        raise
    except Exception as error:  # of the network, or of a generator of the user's
        raise TrainingError(
            f"data.path: the stream failed after row {first}, in the rows of the next buffer: "
            f"{describe_error(error, 300)}"
        ) from error


class StreamedPrompts:
    """An endless stream of the prompts of a stream of rows: `PromptStream` for data whose rows are not known.

    B rows at a time are read and shuffled. The order depends on the rows, the seed, the epoch and B alone. The state is
    the stream's at the beginning of the buffer, and the position in the buffer, so that no row is saved. A prompt's id
    is its row's number in the epoch.
    """

    def __init__(
        self,
        rows: RowStream,
        render: Callable[[int, Mapping[str, Any]], Prompt | None],
        *,
        seed: int,
        shuffle: bool = True,
        buffer_size: int,
    ) -> None:
        """Start at the first row.

        Args:
            rows: read from its beginning.
            render: returns the prompt of a row, by its number; None if it is too long.
            seed: of the order.
            shuffle: whether rows are shuffled within a buffer.
            buffer_size: B.
        """
        self._rows, self._render = rows, render
        self._seed, self._shuffle, self._buffer_size = seed, shuffle, buffer_size
        self._known: list[dict[str, Any]] = []  # beginnings of the last buffers, this one included
        self._buffer: list[Row] = []
        self._order: list[int] = []
        self._position = 0
        self._num_overlong = 0
        self._iterator: Iterator[Row] = iter(())
        self._seek(_beginning(0))

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, continuing into the next epoch if needed."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self._position == len(self._buffer):
                self._next_buffer()
            index = self._order[self._position]
            self._position += 1
            beginning = self._known[-1]
            prompt = self._render(beginning["row"] + index, self._buffer[index])
            if prompt is None:
                self._num_overlong += 1
            else:
                taken.append(dataclasses.replace(prompt, epoch=beginning["epoch"]))
        return taken

    def record(self, outcomes: Iterable[tuple[int, int, int]]) -> dict[str, float]:
        """Forget results: a row is seldom seen twice. Count prompts that were too long."""
        return {"prompts/overlong": float(self._num_overlong)}

    def lookup(self, ids_and_epochs: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Return prompts taken before, by `Prompt.id` and `Prompt.epoch`: their rows are read again."""
        if not ids_and_epochs:
            return []
        here, position, known = self._known[-1], self._position, self._known[:-1]
        found: dict[tuple[int, int], Prompt] = {}
        for epoch in {epoch for _, epoch in ids_and_epochs}:
            wanted = {row for row, of_epoch in ids_and_epochs if of_epoch == epoch}
            beginning = _beginning(epoch)
            for buffer in (*known, here):
                if buffer["epoch"] == epoch and beginning["row"] <= buffer["row"] <= min(wanted):
                    beginning = buffer
            self._open(beginning)
            first = int(beginning["row"])
            for row, values in enumerate(islice(self._iterator, max(wanted) + 1 - first), start=first):
                if row in wanted and (prompt := self._render(row, values)) is not None:
                    found[row, epoch] = dataclasses.replace(prompt, epoch=epoch)
        self._known = known
        self._seek(here)
        self._position = position
        if not found.keys() >= set(ids_and_epochs):
            raise UserError(_CHANGED)
        return [found[visit] for visit in ids_and_epochs]

    def skip_epoch(self) -> None:
        """Continue with the next epoch, unless one has just begun."""
        beginning = self._known[-1]
        if beginning["row"] or self._position:
            self._seek(_beginning(beginning["epoch"] + 1))

    def epochs(self) -> float:
        """Return how many epochs are done. How far the current one is cannot be known."""
        return float(self._known[-1]["epoch"])

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON values, for `restore`."""
        return {
            "position": self._position,
            "buffers": list(self._known),
            "num_overlong": self._num_overlong,
            **self._identity(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`.

        Raises:
            UserError: the state belongs to another order, or the stream has other rows there than when it was saved.
        """
        here = self._identity()
        if changed := [key for key in here if state.get(key) != here[key]]:
            raise UserError(
                f"data.path: the saved position belongs to a different order of prompts: it was saved with "
                f"{changed[0]}={state.get(changed[0])!r}, but this run has {here[changed[0]]!r}; use the settings of "
                f"the saved run, or a new run.dir"
            )
        *self._known, last = state["buffers"]
        self._seek(last)
        if self._known[-1]["digest"] != last["digest"]:
            raise UserError(_CHANGED)
        self._position = int(state["position"])
        self._num_overlong = int(state["num_overlong"])

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "buffer_size": self._buffer_size}

    def _open(self, beginning: Mapping[str, Any]) -> None:
        """Let the iterator begin where a buffer does."""
        self._rows.set_epoch(beginning["epoch"])
        self._rows.load_state_dict(beginning["stream"])
        self._iterator = iter(self._rows)

    def _seek(self, beginning: Mapping[str, Any]) -> None:
        self._open(beginning)
        self._fill(beginning)

    def _next_buffer(self) -> None:
        """Read the next buffer of the epoch, or the first one of the next epoch."""
        last = self._known[-1]
        row = last["row"] + len(self._buffer)
        try:
            position = json.loads(json.dumps(self._rows.state_dict()))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.path: the stream's state_dict() must be plain JSON values, which a checkpoint keeps: {error}"
            ) from error
        self._fill({"epoch": last["epoch"], "row": row, "stream": position})
        if not self._buffer:
            self._known.pop()
            self._seek(_beginning(last["epoch"] + 1))

    def _fill(self, beginning: Mapping[str, Any]) -> None:
        """Read a buffer from the iterator."""
        self._buffer = _read(self._iterator, self._buffer_size, first=beginning["row"])
        if not self._buffer and beginning["row"] == 0:
            raise UserError("data.path: the stream has no rows; at least one prompt is needed")
        entropy = np.random.SeedSequence((self._seed, beginning["epoch"], beginning["row"]))
        keys = np.random.Philox(entropy).random_raw(len(self._buffer))  # as in `_epoch_order`
        self._order = np.argsort(keys, kind="stable").tolist() if self._shuffle else [*range(len(self._buffer))]
        self._position = 0
        digest = content_key(json.dumps(self._buffer, default=lambda value: type(value).__name__))
        self._known = [*self._known[1 - _KNOWN_BUFFERS :], {**beginning, "digest": digest}]


def _beginning(epoch: int) -> dict[str, Any]:
    """Return where an epoch begins."""
    return {"epoch": epoch, "row": 0, "stream": None}
