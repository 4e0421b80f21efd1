"""Find a row's expected answer, recorded so that readers can spot wrong verdicts."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from cohort.config.rewards import CodeSettings
from cohort.errors import excerpt
from cohort.rewards.builtin import BuiltinReward

MAX_CHARACTERS = 4000
_NAMES = ("answer", "solution", "ground_truth", "expected")
_IF_TAKEN = ("target", "label")  # which are often something else: names of classes, or of sources


def expected_answer(
    row: Mapping[str, Any], functions: Sequence[Callable[..., Any]], named: Collection[str] = ()
) -> str | None:
    """Return the answer that rewards compare a row's completions with, as text; None if it is not known.

    It is in the `answer_column` of a built-in reward. Without one it is in the first column with a usual name that a
    function takes; if none takes one, in the first that the row has, or in verl's `reward_model.ground_truth`. Tests of
    code are no answer.

    Args:
        row: columns of the row.
        functions: the functions of the rewards that are for the row.
        named: names of the parameters of these functions.
    """
    settings = [f.settings for f in functions if isinstance(f, BuiltinReward)]
    compared = [s.answer_column for s in settings if hasattr(s, "answer_column")]
    values: Iterator[Any]  # read one after the other: columns of large data are on disk
    if compared:
        values = (row.get(column) for column in compared)
    else:
        tests = {s.tests_column for s in settings if isinstance(s, CodeSettings)}
        names = [name for name in (*_NAMES, *_IF_TAKEN) if name in named] or _NAMES
        values = (_nested(row) if name is None else row.get(name) for name in (*names, None) if name not in tests)
    return next((_as_text(value) for value in values if value is not None), None)


def _nested(row: Mapping[str, Any]) -> Any:
    of_verl = row.get("reward_model")
    return of_verl.get("ground_truth") if isinstance(of_verl, Mapping) else None


def _as_text(value: Any) -> str:
    """Return lists and mappings as JSON, other values as they are."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    except (TypeError, ValueError, RecursionError):  # JSON has no such keys, or no such nesting
        text = excerpt(value, MAX_CHARACTERS)
    text = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair, which JSON may hold
