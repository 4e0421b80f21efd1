"""Held-out accuracy over a run: confidence intervals, pass@k, and questions that flipped.

Q questions, n completions of each, c of them successes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from cohort_view.completions import (
    PROMPT_CHARS,
    FileCache,
    ParquetRows,
    completions_name,
    is_broken,
    names_below,
    numbers,
    prompt_text,
    steps_on_disk,
    texts,
)
from cohort_view.groups import RunFiles
from cohort_view.records import AccuracyPoint, BoolArray, EvalQuestion, Evaluations, Flips, IntArray
from cohort_view.values import number, text

QUESTIONS_SHOWN = 200  # of each kind
_Z = 1.959963984540054  # 95%
_CACHE_FILES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFile:
    """Successes of one evaluation, by question."""

    prompt_ids: IntArray  # [Q] ascending
    num: IntArray  # [Q] completions, broken ones excluded
    num_right: IntArray  # [Q]
    accuracy: float | None  # share of completions that succeed
    interval: tuple[float | None, float | None]
    pass_at: Mapping[str, float]
    problems: Sequence[str]

    def right(self) -> BoolArray:
        """[Q] questions of which at least half of the completions succeed."""
        return (self.num > 0) & (2 * self.num_right >= self.num)


_EVALUATIONS: FileCache[EvaluationFile] = FileCache(_CACHE_FILES)
_PROMPTS: FileCache[dict[int, str]] = FileCache(8)


def evaluations(run: RunFiles) -> Evaluations:
    """Return the accuracy of each evaluation and what changed between them.

    A completion succeeds if the reward `eval.success_reward` (by default the first) is at least
    `eval.success_threshold`. Unscored ones fail, broken ones do not count. Files are read once per version.
    """
    wanted, threshold = _success_rule(run.config)
    steps = [step for step, kinds in steps_on_disk(run.path).items() if "eval" in kinds]
    files: dict[int, EvaluationFile] = {}
    problems: list[str] = []
    for step in steps:
        file = _evaluation(run.path, step, wanted, threshold)
        problems += file.problems
        if len(file.prompt_ids):
            files[step] = file
    points = {step: _point(step, file) for step, file in files.items()}
    points |= _points_without_files(run, points)
    return Evaluations(
        points=[points[step] for step in sorted(points)],
        flips=[_flips(a, files[a], b, files[b]) for a, b in zip(list(files), list(files)[1:], strict=False)],
        **_questions(run.path, sorted(points), files),
        problems=tuple(dict.fromkeys(problems)),
    )


def wilson_interval(share: float, num: float) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a share of `num` independent trials (Wilson 1927)."""
    if num <= 0:
        return 0.0, 1.0
    spread = _Z * sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    center, scale = share + _Z**2 / (2 * num), 1 + _Z**2 / num
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def effective_trials(num_right: IntArray, num: IntArray) -> float:
    """Return how many independent completions tell as much about the accuracy as these, which share questions.

    The variance of the accuracy p is taken over questions (a ratio estimator with questions as clusters), and the
    number is p (1 - p) / variance. With one completion per question it is the number of questions. It is at least 1, at
    most the number of completions, and the number of questions if all or no completions succeed.
    """
    counted = num > 0
    right, total = num_right[counted].astype(np.float64), num[counted].astype(np.float64)
    if not len(total):
        return 0.0
    share = right.sum() / total.sum()
    if share in (0.0, 1.0):
        return float(len(total))
    variance = ((right - share * total) ** 2).sum() / total.sum() ** 2
    return float(np.clip(share * (1 - share) / variance, 1, total.sum())) if variance > 0 else float(total.sum())


def pass_at_k(num_right: IntArray, num: IntArray) -> dict[str, float]:
    """Return pass@k for powers of two and the most completions of a question, by k.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374), averaged over the questions
    with at least k completions.
    """
    most = int(num.max(initial=0))
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return {str(k): _pass_at(k, num_right[num >= k], num[num >= k]) for k in ([*powers, most] if most else [])}


def _pass_at(k: int, num_right: IntArray, num: IntArray) -> float:
    pairs, counts = np.unique(np.stack([num_right, num]), axis=1, return_counts=True)
    each = [1 - comb(n - c, k) / comb(n, k) for c, n in pairs.T.tolist()]
    return float(np.average(each, weights=counts))


def _success_rule(config: Mapping[str, Any] | None) -> tuple[str | None, float]:
    """Return `eval.success_reward` and `eval.success_threshold`."""
    threshold = number(config, "eval", "success_threshold")
    return text(config, "eval", "success_reward"), 1.0 if threshold is None else threshold


def _evaluation(run_path: Path, step: int, wanted: str | None, threshold: float) -> EvaluationFile:
    name = completions_name("eval", step)
    return _EVALUATIONS.get(run_path / name, lambda: _read(run_path, name, wanted, threshold), key=(wanted, threshold))


def _read(run_path: Path, name: str, wanted: str | None, threshold: float) -> EvaluationFile:
    """Count the successes of an evaluation's file."""
    file = ParquetRows(run_path, name)
    names = names_below(file.names, "rewards/")
    reward = wanted or next(iter(names), None)
    column = f"rewards/{reward}" if reward in names else "reward"
    if file.num_rows and reward not in names:
        missing = "rewards" if reward is None else f"column 'rewards/{reward}'"
        file.problems.append(f"{name} has no {missing}: success is judged by the weighted sum of rewards.")
    n = file.num_rows
    found = file.read(("prompt_id", column, "end"))
    ids = numbers(found.get("prompt_id"), n)
    values = np.nan_to_num(numbers(found.get(column), n), nan=-np.inf)
    intact = ~np.array([is_broken(end) for end in texts(found.get("end"), n)], dtype=bool)
    unreadable = column in found and found[column].null_count == n > 0
    if n and (np.isnan(ids).any() or column not in found or unreadable):
        file.problems.append(f"{name} has no prompt_id or reward in some rows and is left out.")
        ids, values, intact = ids[:0], values[:0], intact[:0]
    questions, of_row = np.unique(ids.astype(np.int64), return_inverse=True)
    num = np.bincount(of_row[intact], minlength=len(questions))
    num_right = np.bincount(of_row[intact & (values >= threshold)], minlength=len(questions))
    accuracy = int(num_right.sum()) / int(num.sum()) if num.any() else None
    return EvaluationFile(
        prompt_ids=questions,
        num=num,
        num_right=num_right,
        accuracy=accuracy,
        interval=(None, None) if accuracy is None else wilson_interval(accuracy, effective_trials(num_right, num)),
        pass_at=pass_at_k(num_right, num),
        problems=tuple(dict.fromkeys(file.problems)),
    )


def _point(step: int, file: EvaluationFile) -> AccuracyPoint:
    return AccuracyPoint(
        step=step,
        accuracy=file.accuracy,
        low=file.interval[0],
        high=file.interval[1],
        num=int(file.num.sum()),
        num_questions=int((file.num > 0).sum()),
        pass_at=file.pass_at,
    )


def _points_without_files(run: RunFiles, known: Mapping[int, AccuracyPoint]) -> dict[int, AccuracyPoint]:
    """Return the evaluations of which only metrics.jsonl is left: their accuracy, without an interval."""
    metrics = getattr(run, "metrics", None)
    if metrics is None:
        return {}
    table = metrics.eval
    of_steps = zip(table.steps.tolist(), table.column("eval/accuracy").tolist(), strict=True)
    return {
        step: AccuracyPoint(
            step=step, accuracy=number(value), low=None, high=None, num=None, num_questions=None, pass_at={}
        )
        for step, value in of_steps
        if step not in known and number(value) is not None
    }


def _flips(start: int, before: EvaluationFile, stop: int, after: EvaluationFile) -> Flips:
    """Compare the questions that both evaluations answered."""
    _, i, j = np.intersect1d(before.prompt_ids, after.prompt_ids, assume_unique=True, return_indices=True)
    counted = (before.num[i] > 0) & (after.num[j] > 0)
    was, now = before.right()[i], after.right()[j]
    num_gained, num_lost = int((counted & ~was & now).sum()), int((counted & was & ~now).sum())
    return Flips(from_=start, to=stop, num_gained=num_gained, num_lost=num_lost)


def _questions(run_path: Path, steps: Sequence[int], files: Mapping[int, EvaluationFile]) -> dict[str, Any]:
    """Return questions with what they were at each evaluation, and how many there are of each kind.

    Of each kind the ones that changed most often are listed; those that were never right come first.
    """
    if not files:
        return {"questions": [], "num_questions": {}}
    ids = np.unique(np.concatenate([file.prompt_ids for file in files.values()]))
    states = np.full((len(ids), len(steps)), -1, dtype=np.int8)  # 1: right, 0: wrong, -1: not known
    for i, step in enumerate(steps):
        if (file := files.get(step)) is not None:
            state = np.where(file.num > 0, file.right().astype(np.int8), np.int8(-1))
            states[np.searchsorted(ids, file.prompt_ids), i] = state
    num_flips = np.zeros(len(ids), dtype=np.int64)
    last = np.full(len(ids), -1, dtype=np.int8)
    for column in states.T:
        num_flips += (column >= 0) & (last >= 0) & (column != last)
        last = np.where(column >= 0, column, last)
    was_right, was_wrong = ((states == state).any(axis=1) for state in (1, 0))
    of_kind = {
        "never": ~was_right,
        "lost": was_right & (last == 0),
        "gained": was_wrong & (last == 1),
        "always": was_right & ~was_wrong,
    }
    order = np.argsort(-num_flips, kind="stable")
    shown = [(kind, q) for kind, has in of_kind.items() for q in order[has[order]][:QUESTIONS_SHOWN].tolist()]
    prompts = _prompts(run_path, list(files)[-1])
    as_json = {1: True, 0: False, -1: None}
    questions = [
        EvalQuestion(
            prompt_id=int(ids[q]),
            prompt=prompts.get(int(ids[q]), ""),
            kind=kind,
            right=[as_json[state] for state in states[q].tolist()],
        )
        for kind, q in shown
    ]
    return {"questions": questions, "num_questions": {kind: int(has.sum()) for kind, has in of_kind.items()}}


def _prompts(run_path: Path, step: int) -> dict[int, str]:
    """Read the beginnings of an evaluation's prompts, by id."""
    name = completions_name("eval", step)
    return _PROMPTS.get(run_path / name, lambda: _read_prompts(run_path, name))


def _read_prompts(run_path: Path, name: str) -> dict[int, str]:
    file = ParquetRows(run_path, name)
    found = file.read_upgraded(("prompt_id", "prompt", "prompt_is_chat"))
    ids, are_chats = (numbers(found.get(column), file.num_rows) for column in ("prompt_id", "prompt_is_chat"))
    rows = np.unique(ids, return_index=True)[1]
    prompts = texts(found.get("prompt"), file.num_rows)
    return {int(ids[row]): prompt_text(prompts[row], bool(are_chats[row] == 1), PROMPT_CHARS) for row in rows.tolist()}
