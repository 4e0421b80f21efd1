"""Tool calls of the newest steps: how often each tool was called, and with which errors."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort_view.completions import (
    FileCache,
    ParquetRows,
    TextBudget,
    numbers,
    parse_json,
    texts,
)
from cohort_view.run import ViewedRun, completions_name, steps_on_disk

FILES_READ = 50
_ERROR = "Error: "  # the beginning of the answer to a call that failed, as `ToolExecutor` writes it
_ERROR_CHARS = 200
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_DIGITS = re.compile(r"\d+")

Call = tuple[str, str | None]  # the tool and the error, None for a call that worked


@dataclass(frozen=True, slots=True)
class _File:
    """Calls of a file, and the group and row of the first of each kind."""

    calls: Counter[Call]
    examples: Mapping[Call, tuple[int, int]]
    malformed: int
    problems: Sequence[str]


_FILES: FileCache[_File] = FileCache(1000)


def tools(run: ViewedRun) -> dict[str, Any]:
    """Return the tools that were called in the newest steps, those that failed most often first."""
    steps = [step for step, kinds in steps_on_disk(run.path).items() if "step" in kinds][-FILES_READ:]
    files = {step: _file(run, step) for step in steps}
    total = sum((file.calls for file in files.values()), Counter[Call]())
    found = []
    for call, num in sorted(total.items(), key=lambda item: (item[0][1] is None, -item[1], item[0][0])):
        having = [step for step, file in files.items() if call in file.calls]
        group, row = files[having[-1]].examples[call]
        example = {"step": having[-1], "kind": "step", "group": group, "row": row}
        found.append(
            {"name": call[0], "error": call[1], "calls": num, "steps": [having[0], having[-1]], "example": example}
        )
    return {
        "tools": found,
        "malformed": sum(file.malformed for file in files.values()),
        "steps": [steps[0], steps[-1]] if steps else None,
        "problems": [problem for file in files.values() for problem in file.problems],
    }


def _file(run: ViewedRun, step: int) -> _File:
    name = completions_name("step", step)
    return _FILES.get(run.path / name, lambda: _read(ParquetRows(run.path, name)))


def _read(file: ParquetRows) -> _File:
    counted: Counter[Call] = Counter()
    examples: dict[Call, tuple[int, int]] = {}
    num_malformed = 0
    with file.noting_problems():
        columns, n = file.read(("group", "messages", "tool_errors", "malformed_calls")), file.num_rows
        groups, errors, malformed = (numbers(columns.get(c), n) for c in ("group", "tool_errors", "malformed_calls"))
        num_malformed = int(malformed[malformed > 0].sum())
        for row, messages in enumerate(texts(columns.get("messages"), n)):
            for call in _calls(messages, has_errors=bool(errors[row] > 0)):
                counted[call] += 1
                examples.setdefault(call, (int(groups[row]), row))
    return _File(counted, examples, num_malformed, tuple(file.problems))


def is_error(message: Mapping[str, Any], *, has_errors: bool) -> bool:
    """Whether a tool's answer says that its call failed; `has_errors`: whether some call of the conversation did."""
    return has_errors and str(message.get("content")).startswith(_ERROR)


def _calls(messages: str | None, *, has_errors: bool) -> Iterator[Call]:
    """Yield the calls of a conversation."""
    found = parse_json(messages, TextBudget()) if messages else None
    names: dict[Any, str] = {}
    for message in found if isinstance(found, list) else ():
        if not isinstance(message, Mapping):
            continue
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                names[str(call.get("id"))] = str(call["function"].get("name"))
        if message.get("role") == "tool":
            name = message.get("name") or names.get(str(message.get("tool_call_id"))) or "?"
            yield str(name), _folded(str(message.get("content"))) if is_error(message, has_errors=has_errors) else None


def _folded(content: str) -> str:
    """Return the first line of an error without what differs between equal ones: quoted texts and digits."""
    first_line = content.removeprefix(_ERROR).partition("\n")[0]
    return _DIGITS.sub("#", _QUOTED.sub("'…'", first_line))[:_ERROR_CHARS]
