"""Score recorded completions again, for `cohort reward`."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cohort.config import Config
from cohort.data import OnProgress, no_progress, numbered_rows, read_content, read_rows
from cohort.errors import UserError, excerpt
from cohort.records import BROKEN, FloatArray, ModelCall, Prompt, RolloutGroup, ScoredGroup, Trajectory
from cohort.rewards import RewardRunner
from cohort.rewards.completion_text import completion_text
from cohort.run.completions import prompt_text
from cohort.trainer.inputs import build_reward_functions
from cohort.trainer.open_run import OpenRun, open_run

# Columns of a completions file that are not of the dataset.
_RECORDED = frozenset(
    {
        *("step", "prompt_id", "prompt", "completion", "prompt_token_ids", "completion_token_ids", "sampling_logprobs"),
        *("finish_reason", "policy_version", "reward", "advantage", "end", "sequence_token_ids", "loss_mask"),
        *("error", "messages", "calls", "tool_calls", "tool_errors", "malformed_calls", "attempts"),
        *("observation", "model_s", "environment_s"),
    }
)
_RECORDED_OF_RUNS = _RECORDED | {"answer", "group", "num_tokens", "prompt_is_chat"}
_RECORDED_BY_NAME = ("rewards/", "details/", "environment/")
Row = Mapping[str, Any]
_TOLERANCE = 1e-9  # between values that count as equal
_TEXT_WIDTH = 100  # characters of a completion among the examples


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardValues:
    """Statistics of a reward, or of the weighted sum, over the completions that it scored."""

    name: str
    scored: int
    mean: float | None  # this and the following: None if it scored none
    std: float | None
    min: float | None
    max: float | None
    equal_groups: int  # groups whose scored completions have equal values
    seconds: float | None  # None for the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Completions for which a reward differs from the recorded one, or from another reward."""

    reward: str
    other: str  # "recorded", or another reward
    differing: int
    compared: int
    examples: tuple[Mapping[str, Any], ...]  # row, both values and the completion's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Recorded completions, scored again."""

    completions: int
    prompts: int
    notes: tuple[str, ...]
    rewards: tuple[RewardValues, ...]  # the sum last
    disagreements: tuple[Disagreement, ...]

    def as_text(self) -> str:
        """Format a table of the rewards, and the disagreements."""
        head = [f"{self.completions} completions of {self.prompts} prompts", *self.notes]
        return "\n".join([*head, "", *self._table(), "", *self._disagreements()])

    def _table(self) -> list[str]:
        lines: list[tuple[str, ...]] = [("reward", "scored", "mean", "std", "min", "max", "equal groups", "seconds")]
        for of_one in self.rewards:
            numbers = (of_one.mean, of_one.std, of_one.min, of_one.max)
            shown = ["-" if number is None else f"{number:.4g}" for number in numbers]
            seconds = "-" if of_one.seconds is None else f"{of_one.seconds:.2f}"
            lines.append((of_one.name, str(of_one.scored), *shown, f"{of_one.equal_groups}/{self.prompts}", seconds))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]

    def _disagreements(self) -> Iterator[str]:
        for found in self.disagreements:
            between = f"{found.reward} and {found.other}"
            yield f"{between} differ for {found.differing} of {found.compared} completions"
            for example in found.examples:
                one, other = (_shown(example[name]) for name in (found.reward, found.other))
                text = excerpt(example["completion"], _TEXT_WIDTH)
                yield f"  row {example['row']}: {found.reward} {one}, {found.other} {other}: {text}"


def rescore(
    settings: Config,
    completions: Path,
    *,
    only: Sequence[str] = (),
    examples: int = 1,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_data_progress: OnProgress = no_progress,
) -> Rescored:
    """Score completions, and find where rewards disagree.

    Args:
        settings: configuration with the rewards, and the dataset with the columns that they need.
        completions: file of completions.
        only: names of the rewards to compute; empty: all. Gates before them are computed too.
        examples: number of completions to show for each disagreement.
        on_progress: called with a reward's name, its verdicts that are done, and all of them.
        on_data_progress: called while data take long.

    Raises:
        UserError: the file or the dataset cannot be read, or they do not belong together; or a reward fails.
    """
    recorded = read_rows(str(completions), field="--completions", on_progress=on_data_progress)
    rows = [row for row in recorded if row.get("end") not in BROKEN]
    if not rows or "completion" not in rows[0]:
        raise UserError(f"--completions: {str(completions)!r} has no column 'completion'")
    _check_rows(rows)
    with open_run(settings, on_data_progress=on_data_progress) as run:
        groups, order = _groups(settings, rows, _dataset(run, completions, rows))
        runner, chosen = _runner(run, groups, only)
        runner.on_progress = on_progress
        scored = runner.score(groups, require_scores=False)
    parts = {name: np.empty(len(rows)) for name in chosen}
    for name, values in parts.items():
        values[order] = np.concatenate([group.reward_parts[name] for group in scored])
    return Rescored(
        completions=len(rows),
        prompts=len(groups),
        notes=tuple(run.parts.sandbox.notes),
        rewards=tuple(_values(scored, parts, runner.seconds)),
        disagreements=tuple(_disagreements(rows, parts, examples)),
    )


def _check_rows(rows: Sequence[Row]) -> None:
    """Check the columns of completions that this command reads.

    Raises:
        UserError: a row has another value than it may have.
    """
    for number, row in enumerate(rows):
        recorded = ((key, value) for key, value in row.items() if key.startswith("rewards/"))
        columns = [(key, row.get(key)) for key in ("completion", *(key for key in _OPTIONAL if key in row))]
        for key, value in (*columns, *recorded):
            rule, is_valid = _RULES.get(key, _NUMBER)
            if (value is not None or key == "completion") and not is_valid(value):
                raise UserError(f"--completions: row {number}: {key}: {excerpt(value)} must be {rule}")
        prompt = row.get("prompt")
        if row.get("prompt_is_chat") and isinstance(prompt, str) and not _is_messages_as_json(prompt):
            raise UserError(f"--completions: row {number}: prompt: {excerpt(prompt)} must be messages as JSON")


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _is_text_or_messages(value: Any) -> bool:
    return isinstance(value, str) or _is_messages(value)


def _is_messages_as_json(value: Any) -> bool:
    try:
        return _is_messages(json.loads(value))
    except (TypeError, ValueError):
        return False


_NUMBER = ("a number", lambda value: isinstance(value, int | float))
_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "completion": ("text or messages", _is_text_or_messages),
    "prompt": ("text or messages", _is_text_or_messages),
    "prompt_is_chat": ("true or false", lambda value: isinstance(value, bool)),
    "prompt_id": ("a whole number", lambda value: isinstance(value, int)),
    "messages": ("messages as JSON", _is_messages_as_json),
    "completion_token_ids": (
        "a list of token ids",
        lambda value: isinstance(value, list) and all(isinstance(token, int) for token in value),
    ),
}
_OPTIONAL = [key for key in _RULES if key != "completion"]


def _dataset(run: OpenRun, completions: Path, rows: Sequence[Row]) -> Mapping[int, Row]:
    """Return the rows of the dataset by number; none if the file has the dataset's columns itself."""
    if "prompt_id" not in rows[0]:
        return {}
    settings = run.config
    is_eval = completions.name.startswith("eval-") and settings.eval is not None
    if is_eval and settings.eval is not None:
        is_given, field = settings.eval.is_given, settings.eval.field
    else:
        is_given, field = settings.data.is_given, settings.data.field
    if not is_given:  # an environment brought the rows
        return {}
    ids = dict.fromkeys(row["prompt_id"] for row in rows)
    if is_eval or run.parts.stream is None:
        dataset = run.parts.eval_rows if is_eval else run.parts.rows
        known, num_rows = {i: dataset[i] for i in ids if i in range(len(dataset))}, len(dataset)
    else:
        known, num_rows = numbered_rows(run.parts.stream, ids)
    missing = next((i for i in ids if i not in known), None)
    if missing is not None:
        raise UserError(
            f"--completions: prompt_id {missing} is not a row of the dataset, which has {num_rows} rows; use the "
            f"configuration of the run that wrote the file"
        )
    column = settings.eval.prompt if is_eval and settings.eval is not None else None
    for number, row in enumerate(rows):
        prompt = known[row["prompt_id"]].get(column or settings.data.prompt)
        if prompt is not None and row.get("prompt") not in (None, prompt_text(read_content(prompt, field))):
            raise UserError(
                f"--completions: row {number} has the prompt {excerpt(row['prompt'])}, but row {row['prompt_id']} of "
                f"{field} has {excerpt(prompt)}: the dataset has changed, or is in another order; use the one that the "
                f"run had"
            )
    return known


def _groups(settings: Config, rows: Sequence[Row], dataset: Mapping[int, Row]) -> tuple[list[RolloutGroup], list[int]]:
    """Group rows of the same step, group and prompt. Without `prompt_id`, rows of a prompt have equal columns too.

    Returns:
        The groups, and the numbers of their rows in the order of the groups.
    """
    members: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        if "prompt_id" in row:
            key: tuple[Any, ...] = (row.get("step"), row.get("group"), row["prompt_id"])
        else:
            key = (None, json.dumps([row.get("prompt"), _own_columns(row)], sort_keys=True, default=str))
        members.setdefault(key, []).append(i)
    groups = []
    for number, of_group in enumerate(members.values()):
        first = rows[of_group[0]]
        data = _own_columns(first)
        data |= dataset.get(first.get("prompt_id", -1), {})
        prompt = Prompt(
            id=first.get("prompt_id", number),
            epoch=0,
            content=_content(first),
            token_ids=np.zeros(0, np.int64),
            columns={key: value for key, value in data.items() if key != settings.data.prompt},
        )
        groups.append(RolloutGroup(prompt=prompt, trajectories=tuple(_trajectory(rows[i]) for i in of_group)))
    return groups, list(itertools.chain.from_iterable(members.values()))


def _own_columns(row: Row) -> dict[str, Any]:
    """Return the columns that a run does not record: those of the dataset."""
    recorded = _RECORDED_OF_RUNS if "prompt_id" in row else _RECORDED
    return {key: value for key, value in row.items() if key not in recorded and not key.startswith(_RECORDED_BY_NAME)}


def _content(row: Row) -> Any:
    """Return the prompt of a row: text, or messages, which may be written as JSON."""
    prompt = row.get("prompt", "")
    return json.loads(prompt) if row.get("prompt_is_chat") and isinstance(prompt, str) else prompt


def _trajectory(row: Row) -> Trajectory:
    ids = np.asarray(row.get("completion_token_ids") or [], dtype=np.int64)
    call = ModelCall(
        context_ids=np.zeros(0, np.int64),
        token_ids=ids,
        sampling_logprobs=np.zeros(len(ids)),
        finish_reason="length" if row.get("finish_reason") == "length" else "stop",
        policy_version=0,
    )
    trajectory = Trajectory.single_turn(call, text=completion_text(row["completion"]))
    turns = row.get("messages")  # JSON, of several turns
    if not isinstance(turns, str):
        return trajectory
    return replace(trajectory, messages=tuple(json.loads(turns)), observation=row.get("observation") or "")


def _runner(run: OpenRun, groups: Sequence[RolloutGroup], only: Sequence[str]) -> tuple[RewardRunner, list[str]]:
    """Return the rewards to compute, and the names of those to show: gates before them may be more."""
    prompt = run.config.data.prompt
    columns = sorted({column for group in groups for column in group.prompt.columns} | {prompt})
    functions = build_reward_functions(run.config, run.parts, columns, only=only, ask_servers_first=False)
    shown = [f.name for f in functions if not only or f.name in only]
    weighted = [f if f.name in shown else replace(f, weight=0.0) for f in functions]
    return RewardRunner(weighted, columns=columns, prompt_column=prompt), shown


def _values(
    scored: Sequence[ScoredGroup], parts: Mapping[str, FloatArray], seconds: Mapping[str, float]
) -> Iterator[RewardValues]:
    """Return the statistics of each reward, and of their sum."""
    sums = np.concatenate([group.rewards for group in scored])
    for name, values in {**parts, "sum": sums}.items():
        known = values[~np.isnan(values)]
        of_groups = [group.rewards if name == "sum" else group.reward_parts[name] for group in scored]
        equal = sum(bool(np.nanmax(v) - np.nanmin(v) < _TOLERANCE) for v in of_groups if not np.isnan(v).all())
        mean, std, low, high = (float(f(known)) if len(known) else None for f in (np.mean, np.std, np.min, np.max))
        yield RewardValues(
            name=name,
            scored=len(known),
            mean=mean,
            std=std,
            min=low,
            max=high,
            equal_groups=equal,
            seconds=seconds.get(name),
        )


def _disagreements(rows: Sequence[Row], parts: Mapping[str, FloatArray], examples: int) -> Iterator[Disagreement]:
    """Compare each reward with the recorded one of its name, and each pair of rewards with each other."""
    pairs: list[tuple[str, FloatArray, str, FloatArray]] = []
    for name, values in parts.items():
        recorded = [row.get(f"rewards/{name}", ...) for row in rows]
        if ... not in recorded:
            pairs.append((name, values, "recorded", np.array([np.nan if r is None else r for r in recorded], float)))
    pairs += [(a, parts[a], b, parts[b]) for a, b in itertools.combinations(parts, 2)]
    for name, values, other, others in pairs:
        same = np.isclose(values, others, rtol=0, atol=_TOLERANCE, equal_nan=other == "recorded")
        # a reward that did not score a completion does not contradict another one
        compared = ~(np.isnan(values) | np.isnan(others)) if other != "recorded" else np.ones(len(rows), bool)
        differing = np.flatnonzero(~same & compared)
        yield Disagreement(
            reward=name,
            other=other,
            differing=len(differing),
            compared=int(compared.sum()),
            examples=tuple(
                {
                    "row": int(i),
                    name: _number(values[i]),
                    other: _number(others[i]),
                    "completion": completion_text(rows[i]["completion"]),
                }
                for i in differing[:examples]
            ),
        )


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _shown(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"
