"""Score recorded completions again, for `cohort reward`."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cohort.config import Config
from cohort.data import read_rows
from cohort.errors import UserError, suggest
from cohort.records import BROKEN, FloatArray, ModelCall, Prompt, RolloutGroup, ScoredGroup, Trajectory
from cohort.rewards import RewardRunner, build_rewards
from cohort.rewards.describe import completion_text, excerpt
from cohort.sandbox import SharedSandbox

# Columns of a completions file that are not of the dataset.
_RECORDED = frozenset(
    {
        *("step", "prompt_id", "prompt", "completion", "prompt_token_ids", "completion_token_ids", "sampling_logprobs"),
        *("finish_reason", "policy_version", "reward", "advantage", "end", "sequence_token_ids", "loss_mask"),
        *("error", "messages", "calls", "tool_calls", "tool_errors", "malformed_calls", "attempts"),
        *("model_s", "environment_s"),
    }
)
_RECORDED_BY_NAME = ("rewards/", "details/", "environment/")
Row = Mapping[str, Any]
_TOLERANCE = 1e-9  # between values that count as equal
_TEXT_WIDTH = 100  # characters of a completion among the examples


def rescore(
    settings: Config,
    completions: Path,
    *,
    only: Sequence[str] = (),
    examples: int = 1,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> str:
    """Score completions and return a table of the rewards, and where they disagree.

    Args:
        settings: configuration with the rewards, and the dataset with the columns that they need.
        completions: file of completions.
        only: names of the rewards to compute; empty: all.
        examples: number of completions to show for each disagreement.
        on_progress: called with a reward's name, its verdicts that are done, and all of them.

    Raises:
        UserError: the file or the dataset cannot be read, or they do not belong together; or a reward fails.
    """
    rows = [row for row in read_rows(str(completions), field="--completions") if row.get("end") not in BROKEN]
    if not rows or "completion" not in rows[0]:
        raise UserError(f"--completions: {str(completions)!r} has no column 'completion'")
    groups, order = _groups(settings, rows, _dataset(settings, completions, rows))
    sandbox = SharedSandbox(settings.sandbox)
    runner = _runner(settings, groups, only, sandbox)
    runner.on_progress = on_progress
    scored = runner.score(groups, require_scores=False)
    parts = {f.name: np.empty(len(rows)) for f in runner.functions}
    for name, values in parts.items():
        values[order] = np.concatenate([group.reward_parts[name] for group in scored])
    head = [f"{len(rows)} completions of {len(groups)} prompts", *sandbox.notes]
    lines = [*head, "", *_table(scored, parts, runner.seconds), ""]
    return "\n".join(lines + _disagreements(rows, parts, examples))


def _dataset(settings: Config, completions: Path, rows: Sequence[Row]) -> Mapping[int, Row]:
    """Return the rows of the dataset by number; none if the file has the dataset's columns itself."""
    if "prompt_id" not in rows[0]:
        return {}
    is_eval = completions.name.startswith("eval-") and settings.eval is not None
    section, field = (settings.eval, "eval.path") if is_eval else (settings.data, "data.path")
    if section is None or section.path is None:  # an environment brought the rows
        return {}
    known = dict(enumerate(read_rows(section.path, field=field, split=section.split, name=section.name)))
    missing = next((row["prompt_id"] for row in rows if row["prompt_id"] not in known), None)
    if missing is not None:
        raise UserError(
            f"--completions: prompt_id {missing} is not a row of the dataset, which has {len(known)} rows; use the "
            f"configuration of the run that wrote the file"
        )
    return known


def _groups(settings: Config, rows: Sequence[Row], dataset: Mapping[int, Row]) -> tuple[list[RolloutGroup], list[int]]:
    """Group rows of the same step and prompt. Without `prompt_id`, rows of a prompt have equal columns too.

    Returns:
        The groups, and the numbers of their rows in the order of the groups.
    """
    members: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        if "prompt_id" in row:
            key = (row.get("step"), row["prompt_id"])
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
            content=_content(first.get("prompt", "")),
            token_ids=np.zeros(0, np.int64),
            columns={key: value for key, value in data.items() if key != settings.data.prompt},
        )
        groups.append(RolloutGroup(prompt=prompt, trajectories=tuple(_trajectory(rows[i]) for i in of_group)))
    return groups, list(itertools.chain.from_iterable(members.values()))


def _own_columns(row: Row) -> dict[str, Any]:
    """Return the columns that a run does not record: those of the dataset."""
    return {key: value for key, value in row.items() if key not in _RECORDED and not key.startswith(_RECORDED_BY_NAME)}


def _content(prompt: Any) -> Any:
    """Return text, or messages that are written as JSON."""
    if isinstance(prompt, str) and prompt.startswith("[{"):
        try:
            return json.loads(prompt)
        except ValueError:
            return prompt
    return prompt


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
    return replace(trajectory, messages=tuple(json.loads(turns))) if isinstance(turns, str) else trajectory


def _runner(
    settings: Config, groups: Sequence[RolloutGroup], only: Sequence[str], sandbox: SharedSandbox
) -> RewardRunner:
    columns = sorted({column for group in groups for column in group.prompt.columns} | {settings.data.prompt})
    functions = build_rewards(
        settings.rewards,
        columns=columns,
        max_completion_tokens=settings.rollout.max_trained_tokens,
        sandbox=sandbox,
        device=settings.hardware.device,
        run_folder=Path(settings.run.dir),
    )
    runner = RewardRunner(functions, columns=columns, prompt_column=settings.data.prompt)
    names = [f.name for f in runner.functions]
    for name in only:
        if name not in names:
            raise UserError(f"--only: there is no reward {name!r}{suggest(name, names, 'Rewards')}")
    chosen = [f for f in runner.functions if not only or f.name in only]
    return RewardRunner(chosen, columns=columns, prompt_column=settings.data.prompt)


def _table(scored: Sequence[ScoredGroup], parts: Mapping[str, FloatArray], seconds: Mapping[str, float]) -> list[str]:
    """Format one line per reward, and one for their sum."""
    lines: list[tuple[str, ...]] = [("reward", "scored", "mean", "std", "min", "max", "equal groups", "seconds")]
    sums = np.concatenate([group.rewards for group in scored])
    for name, values in {**parts, "sum": sums}.items():
        known = values[~np.isnan(values)]
        of_groups = [group.rewards if name == "sum" else group.reward_parts[name] for group in scored]
        equal = sum(bool(np.nanmax(v) - np.nanmin(v) < _TOLERANCE) for v in of_groups if not np.isnan(v).all())
        numbers = [f"{f(known):.4g}" if len(known) else "-" for f in (np.mean, np.std, np.min, np.max)]
        time = f"{seconds[name]:.2f}" if name in seconds else "-"
        lines.append((name, str(len(known)), *numbers, f"{equal}/{len(scored)}", time))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]


def _disagreements(rows: Sequence[Row], parts: Mapping[str, FloatArray], examples: int) -> list[str]:
    """Compare each reward with the recorded one of its name, and each pair of rewards with each other."""
    pairs: list[tuple[str, FloatArray, str, FloatArray]] = []
    for name, values in parts.items():
        recorded = [row.get(f"rewards/{name}", ...) for row in rows]
        if ... not in recorded:
            pairs.append((name, values, "recorded", np.array([np.nan if r is None else r for r in recorded], float)))
    pairs += [(a, parts[a], b, parts[b]) for a, b in itertools.combinations(parts, 2)]
    lines = []
    for name, values, other, others in pairs:
        same = np.isclose(values, others, rtol=0, atol=_TOLERANCE, equal_nan=other == "recorded")
        # a reward that did not score a completion does not contradict another one
        compared = ~(np.isnan(values) | np.isnan(others)) if other != "recorded" else np.ones(len(rows), bool)
        differing = np.flatnonzero(~same & compared)
        lines.append(f"{name} and {other} differ for {len(differing)} of {int(compared.sum())} completions")
        for i in differing[:examples]:
            text = excerpt(completion_text(rows[i]["completion"]), _TEXT_WIDTH)
            lines.append(f"  row {i}: {name} {values[i]:.4g}, {other} {others[i]:.4g}: {text}")
    return lines
