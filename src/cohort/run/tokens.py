"""Per-token records of training: `tokens/step-N.parquet`, bounded in size."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cohort.records import BoolArray, FloatArray, ForwardOnlyOutputs, TrainSequence
from cohort.run.atomic import write_file_atomically

_ROWS_AT_A_TIME = 64  # rows of a row group, which is read as a whole
_REPEATING = ("advantages", "loss_weights", "loss_mask")


class TokenRecords:
    """The files `tokens/step-N.parquet` of a run, bounded in size."""

    def __init__(
        self, folder: Path, *, max_bytes: int, max_recent: int | None = None, max_step_tokens: float = math.inf
    ):
        """Find the files that exist.

        Args:
            folder: folder of the files; created with the first one.
            max_bytes: maximum size of all files. Beyond it, files are deleted so that evenly spread steps and the
                newest remain.
            max_recent: maximum number of steps; the oldest are deleted first. None: any number, evenly spread.
            max_step_tokens: maximum tokens of a step that are recorded.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_recent = max_recent
        self._max_step_tokens = max_step_tokens
        self._sizes = {  # step -> bytes
            int(file.stem.removeprefix("step-")): file.stat().st_size for file in folder.glob("step-[0-9]*.parquet")
        }

    def file(self, step: int) -> Path:
        """File of a step."""
        return self._folder / f"step-{step:06d}.parquet"

    def chosen(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Return a step's sequences to record: those of its first groups, at least of one."""
        num_tokens = 0
        for n, s in enumerate(sequences):
            num_tokens += len(s.token_ids)
            if num_tokens > self._max_step_tokens and s.group > sequences[0].group:
                return [chosen for chosen in sequences[:n] if chosen.group < s.group]
        return sequences

    def add(self, step: int) -> None:
        """Count a step's file, which has been written, and delete others if they take more room than there is."""
        self._sizes[step] = self.file(step).stat().st_size
        while self._sizes and (
            sum(self._sizes.values()) > self._max_bytes
            or (self._max_recent is not None and len(self._sizes) > self._max_recent)
        ):
            steps = sorted(self._sizes)
            self._delete(_most_crowded(steps) if self._max_recent is None else steps[0])

    def delete_after(self, steps_done: int) -> None:
        """Delete the files of steps after the first `steps_done`."""
        for step in [step for step in self._sizes if step > steps_done]:
            self._delete(step)

    def _delete(self, step: int) -> None:
        del self._sizes[step]
        self.file(step).unlink(missing_ok=True)


def prepare_tokens_file(
    file: Path,
    *,
    num_trajectories: int,
    sequences: Sequence[TrainSequence],
    outputs: ForwardOnlyOutputs,
    with_context: bool,
) -> Callable[[], None]:
    """Collect what training knew of each token: a row per trajectory, with one list per column.

    Args:
        file: Parquet file, written atomically.
        num_trajectories: rows of the file; those without a sequence here are null.
        sequences: sequences to record, with advantages and loss weights.
        outputs: [C] by sequence index; null for sequences that are missing, and outside the loss mask.
        with_context: whether a row has all tokens of its sequences, or only those that the policy sampled.

    Returns:
        What writes the file, in any thread. It raises `TrainingError` if the disk is full.
    """
    by_trajectory = sorted(sequences, key=lambda s: s.trajectory)  # stable
    lengths = np.zeros(num_trajectories, np.int64)
    np.add.at(
        lengths,
        [s.trajectory for s in sequences],
        [len(s.token_ids) if with_context else s.num_loss_tokens for s in sequences],
    )
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    broken = pa.array(np.isin(np.arange(num_trajectories), [s.trajectory for s in sequences], invert=True))

    def column(parts: Sequence[FloatArray | BoolArray], dtype: str = "float32") -> pa.Array:
        """Return one list per trajectory, from the values of each sequence; NaN is null."""
        tokens = np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype, casting="same_kind")
        return pa.ListArray.from_arrays(offsets, pa.array(tokens, from_pandas=True), mask=broken)

    def of_tokens(values: Callable[[TrainSequence], FloatArray], outside: float) -> pa.Array:
        """Return a column of values [C] of each sequence; with context, the tokens outside the mask have `outside`."""
        parts = [_expanded(s.loss_mask, values(s), outside) if with_context else values(s) for s in by_trajectory]
        return column(parts)

    def output(by_sequence: Mapping[int, FloatArray]) -> pa.Array:
        return of_tokens(lambda s: by_sequence.get(s.index, np.broadcast_to(np.nan, s.num_loss_tokens)), np.nan)

    columns = {"logprobs": output(outputs.logprobs), "entropies": output(outputs.entropies)}
    if outputs.reference_logprobs:
        columns["reference_logprobs"] = output(outputs.reference_logprobs)
    masks = [s.loss_mask if with_context else s.loss_mask[s.loss_mask] for s in by_trajectory]
    columns |= {
        "advantages": of_tokens(lambda s: s.advantages, 0.0),
        "loss_weights": of_tokens(lambda s: s.loss_weights, 0.0),
        "loss_mask": column(masks, "bool"),
    }
    return partial(_write, file, pa.table(columns))


def _expanded(loss_mask: BoolArray, values: FloatArray, outside: float) -> FloatArray:
    """Scatter values [C] of trained tokens to their positions in the sequence: [L]."""
    aligned = np.full(len(loss_mask), outside)
    aligned[loss_mask] = values
    return aligned


def _write(file: Path, table: pa.Table) -> None:
    with write_file_atomically(file) as unfinished:
        pq.write_table(
            table,
            unfinished,
            compression="zstd",
            row_group_size=_ROWS_AT_A_TIME,
            use_dictionary=False,  # of values that hardly repeat takes four times as long, and more room
            use_byte_stream_split=[f"{name}.list.element" for name in table.column_names if name not in _REPEATING],
        )


def _most_crowded(steps: Sequence[int]) -> int:
    """Return the step whose neighbors are closest to each other, the oldest of several; never the newest of two."""
    if len(steps) < 3:
        return steps[0]
    gaps = {step: after - before for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)}
    return min(gaps, key=gaps.__getitem__)
