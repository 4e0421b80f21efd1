"""Questions of a run: how often each prompt was answered right over its training steps or evaluations.

A completion is right if the reward `eval.success_reward` (by default the first) is at least `eval.success_threshold`.
Unscored completions are wrong, broken ones do not count. A question is right at a time if at least half of its
completions are. It was never right if none of its completions ever was, and rarely right if at no time half of them.
Q questions, M groups of all files, G of one.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cohort.records import BROKEN, FloatArray, IntArray
from cohort_view.completions import (
    PROMPT_CHARS,
    FileCache,
    ParquetRows,
    group_bounds,
    numbers,
    prompt_and_answer,
    prompt_text,
)
from cohort_view.evaluations import accuracy_point
from cohort_view.run import ViewedRun, completions_name, steps_on_disk
from cohort_view.values import number, text

STATES = ("never", "rarely", "lost", "now", "always", "unscored")  # of questions, in the order in which they are listed
SORTS = ("order", "changes", "seen", "share")
COLUMNS_SHOWN = 60
TIMES_SHOWN = 100
_ENDING_CHARS = 80
_ENDING_READ_CHARS = 400  # before white space is folded
_PROBLEMS_SHOWN = 5
_THREADS = 4  # reading waits for the disk, and pyarrow lets other threads run

Groups = NDArray[np.void]
_Row = Mapping[str, Any]  # what is shown of a completion
_GROUP = np.dtype(
    {
        "names": ["file", "prompt", "group", "row", "best", "num", "scored", "right", "reward"],
        "formats": ["i4", "i8", "i4", "i4", "i4", "i4", "i4", "i4", "f8"],
    }
)


@dataclass(frozen=True, slots=True)
class _File:
    """What a completions file says of its questions."""

    groups: Groups  # [G]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _History:
    """All files of a kind."""

    steps: IntArray  # [files]
    groups: Groups  # [M] sorted by question, then by step
    ids: IntArray  # [Q] ascending
    starts: IntArray  # [Q + 1] the groups of each question
    states: IntArray  # [Q] index of STATES
    changes: IntArray  # [Q] how often it turned right or wrong
    last: FloatArray  # [Q] share of right completions when it was last counted
    points: Sequence[Mapping[str, Any]]  # of evaluations
    problems: Sequence[str]


_FILES: FileCache[_File] = FileCache(20_000)
_HISTORIES: FileCache[_History] = FileCache(8)
_ROWS: FileCache[dict[int, _Row]] = FileCache(2000)


def questions(
    run: ViewedRun, kind: str, show: str = "", sort: str = "order", offset: int = 0, limit: int = 100
) -> dict[str, Any]:
    """List questions.

    Args:
        run: the run.
        kind: `step` for training prompts, `eval` for held-out ones.
        show: one of `STATES`, or "" for all.
        sort: `order` by state and then as in the data, `changes` and `seen` the most first, `share` the lowest first.
        offset: questions to leave out.
        limit: most questions.
    """
    history = _history(run, kind)
    seen = np.diff(history.starts)
    keys = {
        "order": history.states,
        "changes": -history.changes,
        "seen": -seen,
        "share": np.nan_to_num(history.last, nan=np.inf),
    }
    order = np.argsort(keys[sort], kind="stable")
    if show:
        order = order[history.states[order] == STATES.index(show)]
    shown = order[offset : offset + limit]
    # each column stands for the steps after the one before it
    ends = np.unique(np.linspace(0, len(history.steps), COLUMNS_SHOWN + 1).astype(int)[1:] - 1)
    ends = ends[ends >= 0]
    last_groups = history.groups[history.starts[shown + 1] - 1]
    problems = list(history.problems)
    of_rows = _rows(run, kind, history.steps, last_groups["file"], last_groups["row"], problems)
    return {
        "kind": kind,
        "points": _points(run, history) if kind == "eval" else [],
        "steps": history.steps[ends],
        "questions": [
            {
                "prompt_id": int(history.ids[q]),
                "prompt": of_row["prompt"],
                "state": STATES[history.states[q]],
                "seen": int(seen[q]),
                "right": _shares(history.groups[history.starts[q] : history.starts[q + 1]], ends),
                "last_step": int(history.steps[group["file"]]),
                "last_share": number(float(history.last[q])),
                "last_answer": of_row["completion"]["end_of_text"],
            }
            for q, group, of_row in zip(shown.tolist(), last_groups, of_rows, strict=True)
        ],
        "num_questions": dict(zip(STATES, np.bincount(history.states, minlength=len(STATES)).tolist(), strict=True)),
        "total": len(order),
        "problems": problems,
    }


def question(run: ViewedRun, kind: str, prompt_id: int) -> dict[str, Any]:
    """Return all times that a question was asked, newest first, each with its best completion."""
    history = _history(run, kind)
    q = int(np.searchsorted(history.ids, prompt_id))
    known = q < len(history.ids) and history.ids[q] == prompt_id
    times = history.groups[history.starts[q] : history.starts[q + 1]] if known else history.groups[:0]
    newest = times[::-1][:TIMES_SHOWN]
    problems = list(history.problems)
    of_rows = _rows(run, kind, history.steps, newest["file"], newest["best"], problems)
    first: dict[str, Any] = {}
    if known:
        file = ParquetRows(run.path, completions_name(kind, int(history.steps[newest[0]["file"]])))
        row = int(newest[0]["best"])
        columns = file.read(("prompt", "prompt_is_chat", "answer"), range(row, row + 1))
        first = {name: column[0].as_py() for name, column in columns.items()}
    else:
        problems.append(f"No completions of question {prompt_id}.")
    return {
        "prompt_id": prompt_id,
        **prompt_and_answer(first),
        "num_times": len(times),
        "times": [
            {
                "step": int(history.steps[time["file"]]),
                "kind": kind,
                "group": int(time["group"]),
                "num": int(time["num"]),
                "num_right": int(time["right"]),
                "reward_mean": number(float(time["reward"])),
                "best": {"row": int(time["best"]), **of_row["completion"]},
            }
            for time, of_row in zip(newest, of_rows, strict=True)
        ],
        "problems": problems,
    }


def _points(run: ViewedRun, history: _History) -> list[Mapping[str, Any]]:
    """Return the evaluations; those without completions have the accuracy of the metrics, and no interval."""
    table, known = run.metrics.eval, {point["step"] for point in history.points}
    rest: dict[str, Any] = {"low": None, "high": None, "num_questions": None, "pass_at": {}}
    others = [
        {"step": int(step), "accuracy": float(accuracy), **rest}
        for step, accuracy in zip(table.steps, table.column("eval/accuracy"), strict=True)
        if np.isfinite(accuracy) and step not in known
    ]
    return sorted([*history.points, *others], key=lambda point: point["step"])


def _history(run: ViewedRun, kind: str) -> _History:
    """Return all files of a kind. Files are replaced by renaming, so the folder tells whether there is a new one."""
    rule = text(run.config, "eval", "success_reward"), number(run.config, "eval", "success_threshold")
    return _HISTORIES.get(run.path / "completions", lambda: _read_history(run, kind, *rule), key=(kind, *rule))


def _read_history(run: ViewedRun, kind: str, reward: str | None, threshold: float | None) -> _History:
    steps = [step for step, kinds in steps_on_disk(run.path).items() if kind in kinds]

    def read(step: int) -> _File:
        name = completions_name(kind, step)
        wanted = 1.0 if threshold is None else threshold
        return _FILES.get(run.path / name, lambda: _read(run, name, reward, wanted), key=(reward, wanted))

    with ThreadPoolExecutor(_THREADS) as threads:
        files = dict(zip(steps, threads.map(read, steps), strict=True))
    problems = [file.problem for file in files.values() if file.problem is not None]
    if (num_more := len(problems) - _PROBLEMS_SHOWN) > 0:
        problems[_PROBLEMS_SHOWN:] = [f"{num_more:,} more files cannot be read."]
    files = {step: file for step, file in files.items() if len(file.groups)}
    of_files = [file.groups for file in files.values()]
    groups = np.concatenate(of_files) if of_files else np.zeros(0, _GROUP)
    groups["file"] = np.repeat(np.arange(len(files)), [len(of_file) for of_file in of_files])
    points = []
    if kind == "eval":
        points = [accuracy_point(step, file.groups["right"], file.groups["num"]) for step, file in files.items()]
    return _History(
        steps=np.array(list(files), dtype=np.int64), points=points, problems=problems, **_by_question(groups)
    )


def _read(run: ViewedRun, name: str, reward: str | None, threshold: float) -> _File:
    """Count what is right in a file. Reads narrow columns only."""
    file = ParquetRows(run.path, name)
    with file.noting_problems():
        columns = [n for n in file.names if n.startswith("rewards/") and reward in (None, n.removeprefix("rewards/"))]
        if file.num_rows and not columns:
            raise ValueError(f"it has no column 'rewards/{reward or ''}'")
        found = file.read(["prompt_id", "group", "reward", "end", *columns[:1]])
        if not found:
            return _File(np.zeros(0, _GROUP), next(iter(file.problems), None))
        is_broken = np.array([end in BROKEN for end in found["end"].to_pylist()], dtype=bool)
        prompts, group_numbers, rewards, judged = (
            numbers(found[column], file.num_rows) for column in ("prompt_id", "group", "reward", columns[0])
        )
        bounds = group_bounds(group_numbers)
        starts = bounds[:-1]
        of_group = np.repeat(np.arange(len(starts)), np.diff(bounds))
        best_first = np.lexsort((np.arange(file.num_rows), -np.nan_to_num(rewards, nan=-np.inf), of_group))
        groups = np.zeros(len(starts), _GROUP)
        groups["prompt"], groups["group"] = prompts[starts], np.arange(len(starts))
        groups["row"], groups["best"] = starts, best_first[starts]
        for field, of_row in (
            ("num", ~is_broken),
            ("scored", ~is_broken & ~np.isnan(judged)),
            ("right", ~is_broken & (judged >= threshold)),
        ):
            groups[field] = np.bincount(of_group, of_row, len(starts))
        is_scored = ~np.isnan(rewards)
        sums, counts = (np.bincount(of_group, values, len(starts)) for values in (np.nan_to_num(rewards), is_scored))
        with np.errstate(invalid="ignore"):
            groups["reward"] = sums / counts
        return _File(groups)
    return _File(np.zeros(0, _GROUP), file.problems[0])


def _by_question(groups: Groups) -> dict[str, Any]:
    """Sort groups by question, and say what each question is."""
    groups = groups[np.argsort(groups["prompt"], kind="stable")]
    ids, starts = np.unique(groups["prompt"], return_index=True)
    starts = np.append(starts, len(groups))
    of_group = np.repeat(np.arange(len(ids)), np.diff(starts))
    counted = groups["num"] > 0
    is_right = 2 * groups["right"] >= groups["num"]
    # of the times that count, one after the other
    right, question = is_right[counted], of_group[counted]
    turned = (right[1:] != right[:-1]) & (question[1:] == question[:-1])
    times, times_right = (np.bincount(question, w, len(ids)) for w in (np.ones(len(right)), right))
    is_last = np.append(question[1:] != question[:-1], True)[: len(question)]
    last = np.full(len(ids), np.nan)
    last[question[is_last]] = (groups["right"] / np.maximum(groups["num"], 1))[counted][is_last]
    states = np.select(
        [
            np.bincount(of_group, groups["scored"], len(ids)) == 0,
            np.bincount(of_group, groups["right"], len(ids)) == 0,
            times_right == 0,
            last < 0.5,
            times_right < times,
        ],
        [STATES.index(state) for state in ("unscored", "never", "rarely", "lost", "now")],
        STATES.index("always"),
    )
    changes = np.bincount(question[1:], turned, len(ids)) if len(question) > 1 else np.zeros(len(ids))
    return {"groups": groups, "ids": ids, "starts": starts, "states": states, "changes": changes, "last": last}


def _shares(groups: Groups, ends: IntArray) -> list[float | None]:
    """Return the share of right completions of a question's groups in each column of files; None if there are none."""
    column = np.searchsorted(ends, groups["file"])
    right, num = (np.bincount(column, groups[name], len(ends)).tolist() for name in ("right", "num"))
    return [r / n if n else None for r, n in zip(right, num, strict=True)]


def _rows(
    run: ViewedRun, kind: str, steps: IntArray, files: IntArray, rows: IntArray, problems: list[str]
) -> list[_Row]:
    """Return rows of files, each file read once."""
    wanted = list(zip(files.tolist(), rows.tolist(), strict=True))
    known: dict[int, dict[int, _Row]] = {}
    for file in dict.fromkeys(file for file, _ in wanted):
        name = completions_name(kind, int(steps[file]))
        of_file = known[file] = _ROWS.get(run.path / name, dict)
        if missing := [row for f, row in wanted if f == file and row not in of_file]:
            of_file.update(zip(missing, _read_rows(run, name, missing, problems), strict=True))
    return [known[file][row] for file, row in wanted]


_SHOWN = ("prompt", "prompt_is_chat", "completion", "end")


def _read_rows(run: ViewedRun, name: str, rows: Sequence[int], problems: list[str]) -> list[_Row]:
    file = ParquetRows(run.path, name)
    of_rows: list[dict[str, Any]] = [{} for _ in rows]
    with file.noting_problems():
        if found := file.read(_SHOWN, range(min(rows), max(rows) + 1)):
            table = pa.table(found).take([row - min(rows) for row in rows])
            ends = pc.utf8_slice_codeunits(table["completion"], -_ENDING_READ_CHARS)
            of_rows = table.drop_columns("completion").append_column("completion", ends).to_pylist()
    problems += [problem for problem in file.problems if problem not in problems]
    return [
        {
            "prompt": prompt_text(values.get("prompt"), values.get("prompt_is_chat") is True, PROMPT_CHARS),
            "completion": {
                "end_of_text": " ".join((values.get("completion") or "").split())[-_ENDING_CHARS:],
                "end": values.get("end"),
            },
        }
        for values in of_rows
    ]
