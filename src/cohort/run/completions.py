"""Completions of a step: `completions/step-N.parquet`, one row per trajectory (docs/metrics.md has the columns)."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cohort import fast_json
from cohort.config.data import SOURCE
from cohort.processes.this_process import gc_paused
from cohort.records import (
    FloatArray,
    Message,
    Prompt,
    ScoredGroup,
    TokenSequence,
    TrainSequence,
    Trajectory,
    join_calls,
)
from cohort.run.atomic import write_file_atomically

_ROW_GROUP_TOKENS = 1 << 20  # sampled tokens in a row group of completions, on average
_ARRAYS_IN_A_RUN = 16  # on average, at least: with fewer, chunks of a column cost more than copying it


def write_completions_file(
    file: Path, *, step: int, groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence] | None = None
) -> None:
    """Write completions as a Parquet file: one row each, with prompt, expected answer, tokens and rewards.

    With `sequences` it has advantages too.

    A file with trajectories of several turns, or broken ones, also has their messages, calls, sequences and loss masks.
    Files of many tokens have several row groups, so that one completion can be read without the others.
    """
    prepare_completions_file(file, step=step, groups=groups, sequences=sequences)()


@gc_paused()
def prepare_completions_file(
    file: Path, *, step: int, groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence] | None = None
) -> Callable[[], None]:
    """Collect what `write_completions_file` writes; return what writes it, in any thread and mostly in native code."""
    table = _completions_table(step, groups, sequences)
    rows = max(1, table.num_rows * _ROW_GROUP_TOKENS // max(num_sampled_tokens(groups), _ROW_GROUP_TOKENS))
    return partial(_write, file, table, rows)


def num_sampled_tokens(groups: Sequence[ScoredGroup]) -> int:
    """Number of tokens of all model calls."""
    return sum(len(call.token_ids) for g in groups for t in g.trajectories for call in t.calls)


def _write(file: Path, table: pa.Table, rows: int) -> None:
    with write_file_atomically(file) as unfinished:
        # collecting tokens and logprobs into a dictionary takes longer than compressing them, and hardly saves more
        dictionaries = [field.name for field in table.schema if not pa.types.is_list(field.type)]
        pq.write_table(
            table,
            unfinished,
            compression="zstd",
            row_group_size=rows,
            use_dictionary=dictionaries,
            use_byte_stream_split=["sampling_logprobs.list.element"],  # smaller, and as fast
        )


def _mean(parts: Sequence[FloatArray]) -> float:
    """Mean of all values; 0 without any."""
    values = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])
    return float(np.add.reduce(values) / len(values)) if len(values) else 0.0  # `mean` takes five times as long


def _lists(lengths: Sequence[int], arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> pa.ListArray:
    """A column of lists, whose values the arrays have together. `pa.array` would convert them element by element."""
    return _nested(lengths, pa.array(np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="same_kind")))


def _lists_of_calls(
    lengths: Sequence[int], arrays: Sequence[NDArray[Any]], dtype: type[np.generic]
) -> pa.ListArray | pa.ChunkedArray:
    """Like `_lists`, without copying pieces of larger arrays, such as those of a rank's completions."""
    is_one_each = [len(array) for array in arrays] == list(lengths)
    runs = _runs_in_memory(arrays, np.dtype(dtype)) if is_one_each else []
    if not runs or len(runs) * _ARRAYS_IN_A_RUN > len(arrays):
        return _lists(lengths, arrays, dtype)
    return pa.chunked_array([_nested(lengths[rows], pa.array(values)) for rows, values in runs])


def _runs_in_memory(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> list[tuple[slice, NDArray[Any]]]:
    """Find runs of arrays that are adjacent parts of one larger array.

    Returns:
        For each run, the rows of its arrays and the part of the larger array that they fill. Nothing if an array is not
        contiguous or has another dtype.
    """
    bases = [array.base if isinstance(array.base, np.ndarray) else array for array in arrays]
    if any(a.dtype != dtype or a.ndim != 1 or not a.flags.c_contiguous for a in (*arrays, *bases)):
        return []
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    starts = [0]
    for row in range(1, len(arrays)):
        end = addresses[row - 1] + arrays[row - 1].nbytes
        if bases[row] is not bases[row - 1] or addresses[row] != end:
            starts.append(row)
    runs = []
    for first, end in pairwise([*starts, len(arrays)]):
        offset = (addresses[first] - bases[first].__array_interface__["data"][0]) // dtype.itemsize
        length = sum(len(array) for array in arrays[first:end])
        runs.append((slice(first, end), bases[first][offset : offset + length]))
    return runs


def _nested(lengths: Sequence[int], values: pa.Array) -> pa.ListArray:
    """A column of lists with so many of the values each."""
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), values)


def prompt_text(content: str | Sequence[Message]) -> str:
    """Return a prompt as it is recorded: text, or messages as JSON."""
    return content if isinstance(content, str) else json.dumps(list(content))


def _completions_table(step: int, groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence] | None) -> pa.Table:
    numbers = [number for number, group in enumerate(groups) for _ in group.trajectories]
    prompts = [groups[number].prompt for number in numbers]
    completions = [trajectory for group in groups for trajectory in group.trajectories]
    sampled = [call for completion in completions for call in completion.trained_calls]
    lengths = [completion.num_sampled_tokens for completion in completions]
    columns: dict[str, Any] = {
        "step": pa.array([step] * len(completions), pa.int64()),
        "group": pa.array(numbers, pa.int64()),
        "prompt_id": pa.array([p.id for p in prompts], pa.int64()),
        "prompt": [prompt_text(p.content) for p in prompts],
        "prompt_is_chat": [not isinstance(p.content, str) for p in prompts],
        "answer": pa.array([groups[number].answer for number in numbers], pa.string()),
        "completion": pa.array([c.text for c in completions], pa.string()),
        "prompt_token_ids": _lists([len(p.token_ids) for p in prompts], [p.token_ids for p in prompts], np.int32),
        "completion_token_ids": _lists_of_calls(lengths, [call.token_ids for call in sampled], np.int32),
        "sampling_logprobs": _lists_of_calls(lengths, [call.sampling_logprobs for call in sampled], np.float32),
        "num_tokens": pa.array(lengths, pa.int64()),
        "end": [c.end for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
        "policy_version": pa.array([c.policy_version for c in completions], pa.int64()),
        "reward": pa.array([r for g in groups for r in g.rewards], pa.float64(), from_pandas=True),  # NaN is null
    }
    sources = [source if isinstance(source := p.columns.get(SOURCE), str) else None for p in prompts]
    if any(sources):
        columns["source"] = pa.array(sources, pa.string())
    for name in groups[0].reward_parts:
        values = [r for g in groups for r in g.reward_parts[name]]
        columns[f"rewards/{name}"] = pa.array(values, pa.float64(), from_pandas=True)
    # a reward that saw none of a group's completions has no details of them
    for name in dict.fromkeys(name for g in groups for name in g.reward_details):
        details = [d for g in groups for d in g.reward_details.get(name, (None,) * len(g.trajectories))]
        columns[f"details/{name}"] = pa.array(details, pa.string())
    built: list[list[TrainSequence]] = [[] for _ in completions]
    for s in sequences or ():
        built[s.trajectory].append(s)
    if sequences is not None:
        advantages = [[s.advantages for s in of_one] for of_one in built]
        columns["advantage"] = pa.array([_mean(of_tokens) for of_tokens in advantages], pa.float64())
    if not are_single_turn(groups):
        # broken trajectories have no sequences to train on
        joined = [of_one or join_calls(t.calls) for of_one, t in zip(built, completions, strict=True)]
        columns |= _turn_columns(completions, joined)
    return pa.table(columns)


_COUNTS = ("tool_calls", "tool_errors", "malformed_calls", "attempts")
_TIMES = ("model_s", "environment_s")


def _turn_columns(
    trajectories: Sequence[Trajectory], sequences: Sequence[Sequence[TokenSequence | TrainSequence]]
) -> dict[str, Any]:
    """Columns of trajectories with several turns, and of broken ones, from their calls and their joined sequences."""
    flat = [s for of_one in sequences for s in of_one]
    counts, lengths = [len(of_one) for of_one in sequences], [len(s.token_ids) for s in flat]
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    call_columns = {
        "context_tokens": pa.array([len(call.context_ids) for call in calls], pa.int64()),
        "token_ids": _lists([len(call.token_ids) for call in calls], [call.token_ids for call in calls], np.int32),
        "trained": pa.array([call.trained for call in calls], pa.bool_()),
        "finish_reason": pa.array([call.finish_reason for call in calls], pa.string()),
        "policy_version": pa.array([call.policy_version for call in calls], pa.int64()),
    }
    structs = pa.StructArray.from_arrays([*call_columns.values()], [*call_columns])
    columns: dict[str, Any] = {
        "error": pa.array([t.error for t in trajectories], pa.string()),
        "messages": pa.array([fast_json.encode(t.messages, default=str) for t in trajectories], pa.string()),
        "sequence_token_ids": _nested(counts, _lists(lengths, [s.token_ids for s in flat], np.int32)),
        "loss_mask": _nested(counts, _lists(lengths, [s.loss_mask for s in flat], np.bool_)),
        "calls": _nested([len(trajectory.calls) for trajectory in trajectories], structs),
    }
    if any(t.observation for t in trajectories):
        columns["observation"] = pa.array([t.observation for t in trajectories], pa.string())
    for names, kind in ((_COUNTS, pa.int64()), (_TIMES, pa.float64())):
        for name in names:
            values = [None if t.stats is None else getattr(t.stats, name) for t in trajectories]
            columns[name] = pa.array(values, kind)
    for name in sorted({name for t in trajectories for name in t.metrics}):
        columns[f"environment/{name}"] = pa.array([t.metrics.get(name) for t in trajectories], pa.float64())
    return columns


def are_single_turn(groups: Sequence[ScoredGroup]) -> bool:
    """Whether all trajectories are completions of their prompts; if not, the file has columns about turns."""
    return all(_is_single_turn(group.prompt, trajectory) for group in groups for trajectory in group.trajectories)


def _is_single_turn(prompt: Prompt, trajectory: Trajectory) -> bool:
    """Whether the trajectory is a completion: one call with exactly the prompt as context, by no environment."""
    if len(trajectory.calls) != 1 or trajectory.stats is not None or trajectory.is_broken:
        return False
    context_ids = trajectory.calls[0].context_ids
    return context_ids is prompt.token_ids or np.array_equal(context_ids, prompt.token_ids)
