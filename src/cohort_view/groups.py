"""A step's groups, and a group's completions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cohort.health.explain import Explanation, GroupsSummary, explain_step, maximum_reward
from cohort.records import FloatArray
from cohort_view.completions import (
    ParquetRows,
    StepIndex,
    TextBudget,
    has_equal_rewards,
    is_broken,
    named_numbers,
    parse_json,
    parse_messages,
    prompt_and_answer,
    reward_std,
    step_index,
)
from cohort_view.run import ViewedRun, completions_name
from cohort_view.tools import is_error
from cohort_view.values import integer, number

MAX_GROUPS = 1000  # in one answer
SORTS = {  # the field of a group that each sorts by
    "order": "index",
    "spread": "reward_std",
    "length": "length_mean",
    "equal": "equal",
    "staleness": "staleness",
    "reward": "reward_mean",
}
_UNUSED = ("prompt_token_ids", "completion_token_ids", "sampling_logprobs", "sequence_token_ids", "loss_mask", "calls")


def step(
    run: ViewedRun,
    step: int,
    kind: str = "step",
    sort: str = "order",
    descending: bool = True,
    offset: int = 0,
    limit: int = 50,
) -> dict[str, Any]:
    """List the groups of a step.

    Args:
        run: run folder.
        step: number of completed steps, as in the file's name.
        kind: `step`, `replaced`, `dropped` or `eval`.
        sort: one of `SORTS`. Groups without a value come last; `order` is the order of the file, always ascending.
        descending: largest first; for `equal`, equal groups first.
        offset: sorted groups to leave out.
        limit: most groups to return.
    """
    index = step_index(run.path, kind, step, run.config)
    field, sign = SORTS[sort], -1 if descending and sort != "order" else 1
    rows = [_group_row(index, i, step, kind) for i in range(len(index.groups))]
    rows.sort(key=lambda row: (row[field] is None, sign * (row[field] or 0), row["index"]))
    table = run.metrics.eval if kind == "eval" else run.metrics
    metrics = {name: float(value) for name, value in table.row(step).items()}
    return {
        "step": step,
        "kind": kind,
        "metrics": metrics,
        "explanation": _explain(run, metrics, index, step) if kind == "step" else None,
        "num_groups": len(index.groups),
        "groups": rows[offset : offset + limit],
        "problems": index.problems,
    }


def group(run: ViewedRun, step: int, kind: str, index: int) -> dict[str, Any]:
    """Return a group's prompt and completions; `index` is its position in the file."""
    of_step = step_index(run.path, kind, step, run.config)
    file = ParquetRows(run.path, completions_name(kind, step))
    rows = of_step.groups[index] if index < len(of_step.groups) else range(0)
    columns = file.read([name for name in file.names if name not in _UNUSED], rows)
    of_columns = {name: column.to_pylist() for name, column in columns.items()}
    of_rows = [dict(zip(of_columns, values, strict=True)) for values in zip(*of_columns.values(), strict=True)]
    problems = list(dict.fromkeys([*of_step.problems, *(file.problems if rows else ())]))
    if not rows and not problems:
        problems.append(f"{file.name} has no group {index}: it has {len(of_step.groups)}.")
    first = of_rows[0] if of_rows else {}
    return {
        "step": step,
        "kind": kind,
        "index": index,
        "prompt_id": first.get("prompt_id"),
        **prompt_and_answer(first),
        "completions": [_completion(row, values) for row, values in zip(rows, of_rows, strict=False)],
        "problems": problems,
    }


def _completion(row: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a completions file, from its columns."""
    budget = TextBudget()
    text = budget.take(values.get("completion") or "")
    details = {n.removeprefix("details/"): v for n, v in values.items() if n.startswith("details/")}
    messages = parse_messages(values.get("messages"), budget)
    has_errors = (number(values, "tool_errors") or 0) > 0
    for message in messages or ():
        if message.get("role") == "tool":
            message["is_error"] = is_error(message, has_errors=has_errors)
    return {
        "row": row,
        "text": text,
        "messages": messages,
        "reward": number(values, "reward"),
        "rewards": named_numbers(values, "rewards/"),
        "details": {name: parse_json(detail, budget) for name, detail in details.items()},
        "advantage": number(values, "advantage"),
        "length": integer(values, "num_tokens"),
        "end": values.get("end"),
        "error": None if values.get("error") is None else budget.take(values["error"]),
        "environment": named_numbers(values, "environment/"),
        "model_s": number(values, "model_s"),
        "environment_s": number(values, "environment_s"),
        "cut": budget.cut,
    }


def _explain(run: ViewedRun, metrics: Mapping[str, float], index: StepIndex, step: int) -> Explanation | None:
    return explain_step(
        metrics,
        summarize(index) if index.num_rows else None,
        step,
        max_reward=maximum_reward(run.metrics, run.config),
        critic_warmup_steps=integer(run.config, "critic", "warmup_steps") or 0,
    )


def summarize(index: StepIndex) -> GroupsSummary:
    """Count what explanations of a step need of its groups."""
    scored = ~np.isnan(index.rewards)
    return GroupsSummary(
        num_groups=len(index.groups),
        num_equal=sum(has_equal_rewards(index.rewards[rows.start : rows.stop]) for rows in index.groups),
        num_rows=index.num_rows,
        num_scored=int(scored.sum()),
        num_broken=sum(map(is_broken, index.ends)),
        reward_min=number(float(index.rewards[scored].min())) if scored.any() else None,
        reward_max=number(float(index.rewards[scored].max())) if scored.any() else None,
    )


def _staleness(index: StepIndex, rows: range, step: int, kind: str) -> float:
    """Steps between the weights of a group's oldest token and those it trains; NaN for evaluations."""
    versions = index.policy_versions[rows.start : rows.stop]
    versions = versions[~np.isnan(versions)]
    return step - 1 - float(versions.min()) if kind != "eval" and len(versions) else np.nan


def _mean(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    with np.errstate(all="ignore"):  # infinite rewards
        return float(known.mean()) if len(known) else np.nan


def _group_row(index: StepIndex, i: int, step: int, kind: str) -> dict[str, Any]:
    rows = index.groups[i]
    rewards = index.rewards[rows.start : rows.stop]
    ends = index.ends[rows.start : rows.stop]
    return {
        "index": i,
        "prompt_id": index.prompt_ids[i],
        "prompt": index.prompts[i],
        "size": len(rows),
        "reward_mean": number(_mean(rewards)),
        "reward_std": None if np.isnan(rewards).all() else number(reward_std(rewards)),
        "equal": has_equal_rewards(rewards),
        "length_mean": number(_mean(index.intact_lengths(rows))),
        "clipped": sum(end == "length" for end in ends),
        "staleness": integer(_staleness(index, rows, step, kind)),
        "broken": sum(map(is_broken, ends)),
        "rows": [{"row": row, "reward": number(float(index.rewards[row])), "end": index.ends[row]} for row in rows],
    }
