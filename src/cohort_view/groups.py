"""A step's groups, a group's completions, and the differences between two of them."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cohort.health.explain import Explanation, GroupsSummary, explain_step, maximum_reward
from cohort_view.completions import (
    ParquetRows,
    StepIndex,
    TextBudget,
    calls,
    completions_name,
    has_equal_rewards,
    is_broken,
    known_rows,
    named_numbers,
    optional_text,
    parse_json,
    parse_messages,
    parse_prompt,
    reward_std,
    shared_prefix,
    step_index,
    steps_on_disk,
)
from cohort_view.records import (
    CompletionRow,
    FloatArray,
    Group,
    GroupCompletion,
    GroupRow,
    Step,
    StepFile,
    StepList,
    TextDiff,
)
from cohort_view.values import integer, number

Op = tuple[str, str, str]  # "equal", "replace", "delete" or "insert"; text of a; text of b
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_MAX_PAIRS = 300_000  # equal pairs of words that one comparison may try


def diff_words(a: str, b: str) -> list[Op]:
    """Return how `a` becomes `b`. Joining the texts of either side gives that side.

    Words that occur once in each text, in the same order, divide the texts into parts (patience diff). Parts that would
    take long to compare, because the same few words repeat many times, are one "replace".
    """
    words_a, words_b = _WORDS.findall(a), _WORDS.findall(b)
    ops: list[Op] = []
    budget = [_MAX_PAIRS]
    for part_a, part_b in _parts(words_a, words_b):
        for kind, text_a, text_b in _compare(part_a, part_b, budget):
            if ops and ops[-1][0] == kind:
                ops[-1] = (kind, ops[-1][1] + text_a, ops[-1][2] + text_b)
            else:
                ops.append((kind, text_a, text_b))
    return ops


def _parts(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Divide two texts at their common beginning and end and at words that both have once."""
    start = _num_equal(a, b)
    end = _num_equal(a[start:][::-1], b[start:][::-1])
    yield a[:start], b[:start]
    i, j = start, start
    for k, m in _anchors(a[start : len(a) - end], b[start : len(b) - end]):
        yield a[i : start + k], b[j : start + m]
        i, j = start + k, start + m
        yield a[i : i + 1], b[j : j + 1]
        i, j = i + 1, j + 1
    yield a[i : len(a) - end], b[j : len(b) - end]
    yield a[len(a) - end :], b[len(b) - end :]


def _num_equal(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the number of words at which two texts begin equally."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Return positions of words that both texts have once: the longest series in the order of both."""
    count_a, count_b = Counter(a), Counter(b)
    place_b = {word: j for j, word in enumerate(b) if count_b[word] == 1}
    pairs = [(i, place_b[word]) for i, word in enumerate(a) if count_a[word] == 1 and word in place_b]
    tails: list[int] = []  # smallest last position in b of an increasing series, by its length
    last: list[int] = []  # index of that pair
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect_left(tails, j)
        before.append(last[length - 1] if length else -1)
        if length == len(tails):
            tails.append(j)
            last.append(index)
        else:
            tails[length], last[length] = j, index
    chain: list[tuple[int, int]] = []
    index = last[-1] if last else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


def _compare(a: Sequence[str], b: Sequence[str], budget: list[int]) -> Iterator[Op]:
    """Compare two parts, taking what it costs off the budget."""
    if not a and not b:
        return
    if a == b:
        yield "equal", "".join(a), "".join(b)
        return
    count_a, count_b = Counter(a), Counter(b)
    cost = len(a) + len(b) + sum(n * count_b[word] for word, n in count_a.items())
    if not a or not b or cost > budget[0]:
        yield "insert" if not a else "delete" if not b else "replace", "".join(a), "".join(b)
        return
    budget[0] -= cost
    for kind, i, i_end, j, j_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        yield kind, "".join(a[i:i_end]), "".join(b[j:j_end])


STEPS_SHOWN = 200
MAX_GROUPS = 1000  # in one answer
SORTS = ("order", "spread", "length", "equal", "staleness", "reward")
_NEAR_ROWS = 64
_TOKEN_COLUMNS = ("prompt_token_ids", "completion_token_ids", "sampling_logprobs", "sequence_token_ids", "loss_mask")


class RunFiles(Protocol):
    """What these functions need of a `ViewedRun`."""

    @property
    def path(self) -> Path:
        """The run folder."""

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The run's configuration, if it can be read."""


def steps(run: RunFiles, around: int | None = None) -> StepList:
    """List the steps of which completions are kept: those nearest to `around`, by default the last."""
    by_step = steps_on_disk(run.path)
    numbers = np.array(list(by_step), dtype=np.int64)
    if not len(numbers):
        return StepList(steps=(), first=None, last=None)
    place = int(np.searchsorted(numbers, numbers[-1] if around is None else around))
    start = max(0, min(place - STEPS_SHOWN // 2, len(numbers) - STEPS_SHOWN))
    shown = [
        StepFile(step=step, kinds=by_step[step], rows=known_rows(run.path, by_step[step][0], step, run.config))
        for step in numbers[start : start + STEPS_SHOWN].tolist()
    ]
    return StepList(steps=shown, first=int(numbers[0]), last=int(numbers[-1]))


def step(
    run: RunFiles,
    step: int,
    kind: str = "step",
    sort: str = "order",
    descending: bool = True,
    offset: int = 0,
    limit: int = 50,
) -> Step:
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
    order = _order(index, step, kind, sort, descending)
    shown = order[max(0, offset) : max(0, offset) + max(0, min(limit, MAX_GROUPS))]
    metrics = _metrics(run, step, kind)
    return Step(
        step=step,
        kind=kind,
        metrics=metrics,
        explanation=_explain(run, metrics, index, step) if kind == "step" else None,
        num_groups=len(index.groups),
        groups=[_group_row(index, i, step, kind) for i in shown],
        reward_names=index.reward_names,
        environment_names=index.environment_names,
        problems=index.problems,
    )


def group(run: RunFiles, step: int, kind: str, index: int) -> Group:
    """Return a group's prompt and completions; `index` is its position in the file."""
    of_step = step_index(run.path, kind, step, run.config)
    problems = list(of_step.problems)
    if not 0 <= index < len(of_step.groups):
        if not problems:
            problems.append(f"{completions_name(kind, step)} has no group {index}: it has {len(of_step.groups)}.")
        return Group(step=step, kind=kind, index=index, prompt="", completions=(), problems=problems)
    rows = of_step.groups[index]
    file = ParquetRows(run.path, completions_name(kind, step))
    completions: list[GroupCompletion] = []
    prompt: Any = ""
    for row, values in row_values(file, rows, without=_TOKEN_COLUMNS):
        if row == rows.start:
            prompt = parse_prompt(optional_text(values.get("prompt"), cut=False), of_step.are_chats[index])
        first = completions[0].text if completions else None
        completions.append(group_completion(row, values, of_step, first=first))
    problems = list(dict.fromkeys([*problems, *file.problems]))
    return Group(step=step, kind=kind, index=index, prompt=prompt, completions=completions, problems=problems)


def diff(run: RunFiles, step: int, kind: str, a: int, b: int) -> TextDiff:
    """Compare the texts of two rows of a file, word by word."""
    file = ParquetRows(run.path, completions_name(kind, step))
    budget = TextBudget()
    near = abs(a - b) <= _NEAR_ROWS  # both in one pass
    ranges = [range(min(a, b), max(a, b) + 1)] if near else [range(row, row + 1) for row in (a, b)]
    read = {row: values for rows in ranges for row, values in row_values(file, rows, only=["completion"])}
    for row in (a, b):
        if row not in read and not file.problems:
            file.problems.append(f"{completions_name(kind, step)} has no row {row}: it has {file.num_rows}.")
    found = [budget.take(optional_text(read.get(row, {}).get("completion"), cut=False) or "") for row in (a, b)]
    ops = diff_words(found[0], found[1])
    return TextDiff(
        step=step, kind=kind, a=a, b=b, ops=ops, cut=budget.cut, problems=tuple(dict.fromkeys(file.problems))
    )


def group_completion(
    row: int, values: Mapping[str, Any], index: StepIndex, *, first: str | None = None
) -> GroupCompletion:
    """Return a row of a completions file.

    Args:
        row: number of the row in its file.
        values: columns of the row.
        index: the file.
        first: text of the group's first completion; None if this is the first.
    """
    budget = TextBudget()
    text = budget.take(optional_text(values.get("completion"), cut=False) or "")
    details = {n.removeprefix("details/"): optional_text(v) for n, v in values.items() if n.startswith("details/")}
    parsed_details = {name: parse_json(detail, budget) for name, detail in details.items()}
    messages = parse_messages(optional_text(values.get("messages"), cut=False), budget)
    return GroupCompletion(
        row=row,
        text=text,
        messages=messages,
        calls=calls(values.get("calls")),
        reward=number(values.get("reward")),
        rewards=named_numbers(values, "rewards/"),
        details=parsed_details,
        advantage=number(values.get("advantage")),
        length=integer(index.lengths[row]),
        end=optional_text(index.ends[row]),
        policy_version=integer(values.get("policy_version")),
        error=optional_text(values.get("error")),
        environment=named_numbers(values, "environment/"),
        model_s=number(values.get("model_s")),
        environment_s=number(values.get("environment_s")),
        tool_calls=integer(values.get("tool_calls")),
        same_prefix=len(text) if first is None else shared_prefix(first, text),
        cut=budget.cut,
    )


def row_values(
    file: ParquetRows, rows: range, *, only: Sequence[str] | None = None, without: Sequence[str] = ()
) -> list[tuple[int, dict[str, Any]]]:
    """Read rows as dictionaries of Python values, with their numbers."""
    columns = [name for name in (file.names if only is None else only) if name in file.names and name not in without]
    found: list[tuple[int, dict[str, Any]]] = []
    rows = range(max(0, rows.start), min(file.num_rows, rows.stop))
    for batch in file.batches(columns, rows):
        as_lists = {name: file.values(batch[name]) for name in columns}
        for i in range(len(next(iter(as_lists.values())))):
            found.append((rows.start + len(found), {name: values[i] for name, values in as_lists.items()}))
    return found


def _metrics(run: RunFiles, step: int, kind: str) -> dict[str, float]:
    """Return the row of metrics.jsonl of a step, or of the evaluation after it."""
    table = getattr(run, "metrics", None)
    if table is None:
        return {}
    row = (table.eval if kind == "eval" else table).row(step)
    return {name: float(value) for name, value in row.items()}


def _explain(run: RunFiles, metrics: Mapping[str, float], index: StepIndex, step: int) -> Explanation | None:
    groups = summarize(index) if index.num_rows else None
    table = getattr(run, "metrics", None)
    return explain_step(
        metrics,
        groups,
        step,
        run_id=getattr(run, "id", None),
        max_reward=None if table is None else maximum_reward(table, run.config),
        critic_warmup_steps=integer(run.config, "critic", "warmup_steps") or 0,
    )


def summarize(index: StepIndex) -> GroupsSummary:
    """Count what explanations of a step need of its groups."""
    broken = np.array([is_broken(end) for end in index.ends], dtype=bool)
    scored = ~np.isnan(index.rewards)
    has_advantages = not np.isnan(index.advantages).all()
    return GroupsSummary(
        num_groups=len(index.groups),
        num_equal=sum(has_equal_rewards(index.rewards[rows.start : rows.stop]) for rows in index.groups),
        num_rows=index.num_rows,
        num_scored=int(scored.sum()),
        num_broken=int(broken.sum()),
        num_clipped=sum(end == "length" for end in index.ends),
        num_zero_advantage=int((index.advantages == 0).sum()) if has_advantages else None,
        reward_min=number(float(index.rewards[scored].min())) if scored.any() else None,
        reward_max=number(float(index.rewards[scored].max())) if scored.any() else None,
    )


def _order(index: StepIndex, step: int, kind: str, sort: str, descending: bool) -> list[int]:
    """Return the groups' positions in the file, sorted."""
    in_file = list(range(len(index.groups)))
    if sort not in SORTS or sort == "order":
        return in_file
    keys = np.array([_sort_key(index, rows, step, kind, sort) for rows in index.groups], dtype=np.float64)
    without = np.isnan(keys)
    ranked = np.argsort(np.where(without, np.inf, -keys if descending else keys), kind="stable")
    return [int(i) for i in ranked]


def _sort_key(index: StepIndex, rows: range, step: int, kind: str, sort: str) -> float:
    rewards = index.rewards[rows.start : rows.stop]
    if sort == "spread":
        return reward_std(rewards) if not np.isnan(rewards).all() else np.nan
    if sort == "equal":
        return float(has_equal_rewards(rewards))
    if sort == "staleness":
        return _staleness(index, rows, step, kind)
    return _mean(rewards if sort == "reward" else index.intact_lengths(rows))


def _staleness(index: StepIndex, rows: range, step: int, kind: str) -> float:
    """Steps between the weights of a group's oldest token and those it trains; NaN for evaluations."""
    versions = index.policy_versions[rows.start : rows.stop]
    versions = versions[~np.isnan(versions)]
    return step - 1 - float(versions.min()) if kind != "eval" and len(versions) else np.nan


def _mean(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    with np.errstate(all="ignore"):  # infinite rewards
        return float(known.mean()) if len(known) else np.nan


def _group_row(index: StepIndex, i: int, step: int, kind: str) -> GroupRow:
    rows = index.groups[i]
    rewards, lengths = index.rewards[rows.start : rows.stop], index.intact_lengths(rows)
    ends = index.ends[rows.start : rows.stop]
    return GroupRow(
        index=i,
        prompt_id=index.prompt_ids[i],
        prompt=index.prompts[i],
        size=len(rows),
        reward_mean=number(_mean(rewards)),
        reward_std=None if np.isnan(rewards).all() else number(reward_std(rewards)),
        equal=has_equal_rewards(rewards),
        length_mean=number(_mean(lengths)),
        length_max=None if np.isnan(lengths).all() else integer(float(np.nanmax(lengths))),
        clipped=sum(end == "length" for end in ends),
        staleness=integer(_staleness(index, rows, step, kind)),
        broken=sum(map(is_broken, ends)),
        rows=[
            CompletionRow(
                row=row,
                reward=number(index.rewards[row]),
                advantage=number(index.advantages[row]),
                length=integer(index.lengths[row]),
                end=index.ends[row],
                text=index.previews[row],
            )
            for row in rows
        ],
    )
