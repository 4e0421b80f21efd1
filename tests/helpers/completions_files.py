"""Completions files of a few literal rows, for the page's readers."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cohort_view.run import ViewedRun, completions_name
from cohort_view.values import to_json

_TYPES = {
    "completion_token_ids": pa.list_(pa.int32()),
    "prompt_token_ids": pa.list_(pa.int32()),
    "sampling_logprobs": pa.list_(pa.float32()),
    "sequence_token_ids": pa.list_(pa.list_(pa.int32())),
    "loss_mask": pa.list_(pa.list_(pa.bool_())),
    "reward": pa.float64(),
    "advantage": pa.float64(),
}


class Answer(dict[str, Any]):
    """An object of JSON whose fields are attributes too."""

    __getattr__ = dict.__getitem__


def answering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what the page gets of its answer: JSON."""
    return lambda *args, **kwargs: json.loads(to_json(function(*args, **kwargs)), object_hook=Answer)


class RunFolder(ViewedRun):
    """A run folder with nothing but what a test writes into it, and with a configuration."""

    def __init__(self, path: Path, config: Mapping[str, Any] | None = None):
        super().__init__(path, "run")
        self.config = config


def a_row(prompt_id: int, reward: float | None = 0.0, *, length: int = 2, **columns: Any) -> dict[str, Any]:
    """A row of a completions file: a completion of `length` tokens 10, 11, ... Neighbors of one prompt are a group."""
    token_ids = columns.get("completion_token_ids", list(range(10, 10 + length)))
    return {
        "step": 5,
        "group": prompt_id,
        "prompt_id": prompt_id,
        "prompt": f"Question {prompt_id}?",
        "prompt_is_chat": False,
        "answer": f"right {prompt_id}",
        "completion": f"answer to {prompt_id}",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": token_ids,
        "sampling_logprobs": [-0.5] * length,
        "num_tokens": len(token_ids),
        "end": {"stop": "answer", "length": "length"}[columns.get("finish_reason", "stop")],
        "finish_reason": "stop",
        "policy_version": 4,
        "reward": reward,
        "rewards/right": reward,
        "advantage": 0.0,
        **columns,
    }


def write_rows(
    run_path: Path, rows: Sequence[Mapping[str, Any]], *, kind: str = "step", step: int = 5, **options: Any
) -> Path:
    """Write a completions file; columns are those of the first row."""
    columns = {name: pa.array([row[name] for row in rows], _TYPES.get(name)) for name in rows[0]}
    return write_columns(run_path, columns, kind=kind, step=step, **options)


def write_columns(
    run_path: Path, columns: Mapping[str, Any], *, kind: str = "step", step: int = 5, **options: Any
) -> Path:
    """Write a completions file of these columns."""
    path = run_path / completions_name(kind, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **{"compression": "zstd", **options})
    return path
