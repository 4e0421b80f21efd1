"""What lists of groups need of a completions file: a few numbers per row, and where each group is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cohort.records import BROKEN
from cohort.view.completions import FileCache, ParquetRows, completions_name, list_lengths, numbers, texts
from cohort.view.files import integer
from cohort.view.records import FloatArray
from cohort.view.row_values import prompt_text

PREVIEW_CHARS = 160
PROMPT_CHARS = 400
_EQUAL = 1e-8  # as in cohort.metrics
_CACHE_ROWS = 100_000  # of all files; about 300 bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """A completions file. N rows, P groups; NaN and None where the file has no value."""

    num_rows: int
    groups: Sequence[range]  # [P] rows of each group
    prompt_ids: Sequence[Any]  # [P]
    prompts: Sequence[str]  # [P] beginnings
    rewards: FloatArray  # [N]
    advantages: FloatArray  # [N]
    lengths: FloatArray  # [N] tokens sampled
    policy_versions: FloatArray  # [N]
    ends: Sequence[str | None]  # [N]
    previews: Sequence[str]  # [N] beginnings of the completions
    reward_names: Sequence[str]
    environment_names: Sequence[str]
    problems: Sequence[str]

    def intact_lengths(self, rows: range) -> FloatArray:
        """Return the lengths of the completions that infrastructure did not break, as in metrics of lengths."""
        return np.array([self.lengths[row] for row in rows if not is_broken(self.ends[row])], dtype=np.float64)

    def group_of(self, row: int) -> int | None:
        """Return the index of the group that has a row."""
        return next((i for i, rows in enumerate(self.groups) if row in rows), None)


_INDEXES: FileCache[StepIndex] = FileCache(_CACHE_ROWS, lambda index: index.num_rows + 1)


def step_index(run_path: Path, kind: str, step: int, config: Mapping[str, Any] | None) -> StepIndex:
    """Read what lists of groups need of a completions file, once per version of the file."""
    name = completions_name(kind, step)
    size = group_size(config, kind)
    index = _INDEXES.get(run_path / name, lambda: _read(run_path, name, size), key=size)
    if not index.num_rows and not (run_path / name).exists():
        return replace(index, problems=(why_missing(kind, step, config),))
    return index


def why_missing(kind: str, step: int, config: Mapping[str, Any] | None) -> str:
    """Say why a step has no completions file of a kind."""
    if kind == "eval":
        return f"No completions of an evaluation after step {step}."
    every = integer(config, "run", "completions_every")
    if every is not None and (every == 0 or step % every):
        which = "none are kept" if every == 0 else f"only those of every {every} steps are kept"
        return f"No completions of step {step}: {which} (run.completions_every: {every})."
    if kind != "step":
        return f"No groups of step {step} were {kind}."
    return f"No completions of step {step}: the step is not done, or the file was deleted."


def known_rows(run_path: Path, kind: str, step: int, config: Mapping[str, Any] | None) -> int | None:
    """Return the number of rows of a file that was read before."""
    found = _INDEXES.peek(run_path / completions_name(kind, step), key=group_size(config, kind))
    return None if found is None else found.num_rows


def group_size(config: Mapping[str, Any] | None, kind: str) -> int | None:
    """Return the number of completions sampled per prompt, if the configuration is known."""
    section, key = ("eval", "num_samples") if kind == "eval" else ("rollout", "num_generations")
    size = integer(config, section, key)
    return size if size is not None and size > 0 else None


def split_groups(prompt_ids: Sequence[Any], size: int | None) -> list[range]:
    """Split rows into groups: consecutive rows of the same prompt.

    Prompts of two epochs can meet in one file. Rows of one prompt in excess of `size` are therefore another group.

    Args:
        prompt_ids: one per row.
        size: completions per group; None: as many as most prompts have.
    """
    bounds = [i for i in range(1, len(prompt_ids)) if prompt_ids[i] != prompt_ids[i - 1]]
    starts, stops = [0, *bounds], [*bounds, len(prompt_ids)]
    runs = [range(a, b) for a, b in zip(starts, stops, strict=True) if a < b]
    if size is None and runs:
        size = Counter(map(len, runs)).most_common(1)[0][0]
    return [run[i : i + (size or 1)] for run in runs for i in range(0, len(run), size or 1)]


def reward_std(rewards_G: FloatArray) -> float:
    """Unbiased standard deviation of the scored rewards, 0 for fewer than two: as in the metric `reward_std`."""
    scored = rewards_G[~np.isnan(rewards_G)]
    with np.errstate(all="ignore"):  # infinite rewards
        return float(np.std(scored, ddof=1)) if len(scored) > 1 else 0.0


def has_equal_rewards(rewards_G: FloatArray) -> bool:
    """Whether all scored rewards of a group are equal up to rounding: as in the metric `frac_reward_zero_std`."""
    return reward_std(rewards_G) < _EQUAL


def is_broken(end: str | None) -> bool:
    """Whether infrastructure ended a trajectory."""
    return end in BROKEN


def ends_of_rows(ends: Sequence[str | None], finish_reasons: Sequence[str | None]) -> list[str | None]:
    """Return how each trajectory ended; a single turn has only a finish reason."""
    single_turn = {"stop": "answer", "length": "length"}
    return [end or single_turn.get(reason or "") for end, reason in zip(ends, finish_reasons, strict=True)]


def names_below(names: Sequence[str], prefix: str) -> list[str]:
    """Return what follows a prefix in names of columns, such as `rewards/`."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _read(run_path: Path, name: str, size: int | None) -> StepIndex:
    file = ParquetRows(run_path, name)
    n = file.num_rows
    small = file.read(("prompt_id", "prompt", "reward", "advantage", "policy_version", "finish_reason", "end"))
    rewards = numbers(small.get("reward"), n)
    ids = small["prompt_id"].to_pylist() if "prompt_id" in small else [None] * n
    groups = split_groups(ids, size)
    if n and "prompt_id" not in small:
        file.problems.append(f"{name} has no column 'prompt_id': its rows cannot be told apart by prompt.")
    lengths = "completion_token_ids" if "completion_token_ids" in file.names else "sampling_logprobs"
    return StepIndex(
        num_rows=n,
        groups=groups,
        prompt_ids=[ids[rows.start] for rows in groups],
        prompts=[prompt_text(_one_text(small.get("prompt"), rows.start), PROMPT_CHARS) for rows in groups],
        rewards=rewards,
        advantages=numbers(small.get("advantage"), n),
        lengths=_lengths(file, lengths),
        policy_versions=numbers(small.get("policy_version"), n),
        ends=ends_of_rows(texts(small.get("end"), n), texts(small.get("finish_reason"), n)),
        previews=_previews(file),
        reward_names=names_below(file.names, "rewards/"),
        environment_names=names_below(file.names, "environment/"),
        problems=tuple(dict.fromkeys(file.problems)),
    )


def _one_text(column: pa.ChunkedArray | None, row: int) -> str | None:
    return None if column is None else texts(column.slice(row, 1), 1)[0]


def _lengths(file: ParquetRows, name: str) -> FloatArray:
    if name not in file.names:
        return np.full(file.num_rows, np.nan)
    batches = file.batches([name], range(file.num_rows))
    return np.concatenate([np.zeros(0), *(list_lengths(batch[name], len(batch[name])) for batch in batches)])


def _previews(file: ParquetRows) -> list[str]:
    name = "completion"
    if name not in file.names:
        return [""] * file.num_rows
    batches = file.batches([name], range(file.num_rows))
    found = [text for batch in batches for text in texts(batch[name], len(batch[name]), limit=PREVIEW_CHARS)]
    return [text or "" for text in found]
