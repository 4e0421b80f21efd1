"""The `code` reward: runs the completion's code against the row's tests in the sandbox."""

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cohort.config.rewards import CodeSettings
from cohort.errors import UserError, excerpt
from cohort.rewards.builtin import BuiltinReward, Columns, RewardContext
from cohort.rewards.code.row_tests import ProgramTests, Tests, first, read_tests
from cohort.rewards.code.verdict import CodeVerdict, job_request, judge
from cohort.rewards.completion_text import after_thinking, answer_text
from cohort.sandbox import Job
from cohort.sandbox.process import Limits

# Possessive, so that a last fence without a line break is not tried again and again.
_FENCE = re.compile(r"^```[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON_TAGS = ("python", "python3", "py")


class CodeReward(BuiltinReward[CodeSettings]):
    """Share of the row's tests that the completion's code passes; None if the sandbox could not judge it.

    The code is the last fenced block in the language after the last `</think>`; without such a block, the last one
    without a language; else the whole text. Forms of tests: see `row_tests`. Code that crashes, hangs or exceeds a
    limit fails. Not judged, and counted by `last_counts`: completions for which the sandbox does not start, that the
    deadline leaves no time for, or whose tests cannot be read or fail before the code runs. `last_details` are the
    results of each test, as JSON.
    """

    def __init__(self, settings: CodeSettings, context: RewardContext) -> None:
        """Create the reward, and open the sandbox."""
        super().__init__(settings, context)
        self.sandbox = context.sandbox.open()
        self.on_progress: Callable[[int, int], None] = lambda done, total: None  # see `ReportsProgress`
        self._has_read = False  # whether tests of some row could be read

    def required_columns(self) -> Sequence[str]:
        """See `BuiltinReward`."""
        return (self.settings.tests_column,)

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: no row's tests can be read, nor could any before.
        """
        s = self.settings
        name, commands = _language(s.language)
        missing = [None] * len(completions)
        optional = (columns.get(column, missing) for column in (s.entry_point_column, s.setup_column))
        values = columns[s.tests_column]
        rows = list(zip(values, *optional, strict=True))
        tests = [_tests(*row, setup=s.setup, max_tests=s.max_tests) for row in rows]
        self._check_readable(tests, values, s.tests_column)
        options = {
            **commands,
            "case_s": s.case_s,
            "max_output": self.sandbox.limits.max_output_bytes,
            "stop_early": s.score == "all",
        }
        jobs: dict[str, tuple[Tests, str, Job]] = {}  # completions of a group repeat: judge each once
        verdicts: dict[str, CodeVerdict] = {}
        keys: list[str | None] = []
        for completion, row, of_row in zip(completions, rows, tests, strict=True):
            if of_row is None:
                keys.append(None)
                continue
            if isinstance(of_row, str):
                keys.append(of_row)
                verdicts[of_row] = CodeVerdict(None, (f"the tests cannot be read: {of_row}",))
                continue
            if commands["run"] is not None and not isinstance(of_row, ProgramTests):
                raise UserError(
                    f"args.language: {name} needs stdin tests, but {s.tests_column!r} tests Python functions"
                )
            code = extract_code(answer_text(completion), name)
            key = json.dumps([code, row], default=str)
            keys.append(key)
            if (problem := _too_large(of_row, self.sandbox.limits)) is not None:
                verdicts[key] = CodeVerdict(None, (problem,))
            elif key not in jobs:
                token = secrets.token_hex(16)
                request = job_request(of_row, code, token, options=options)
                jobs[key] = (of_row, token, Job(request=request, toolchain=commands["run"] is not None))
        outcomes = self.sandbox.run_all(
            [job for *_, job in jobs.values()], budget_s=self.context.budget_s, on_progress=self.on_progress
        )
        for (key, (of_row, token, _)), outcome in zip(jobs.items(), outcomes, strict=True):
            verdicts[key] = CodeVerdict(None, ("out of time",)) if outcome is None else judge(of_row, outcome, token)
        rewards = self._rewards([None if key is None else verdicts[key] for key in keys])
        if unreadable := sum(isinstance(of_row, str) for of_row in tests):
            self.last_counts = {**self.last_counts, "unreadable_tests": unreadable}
        return rewards

    def _check_readable(self, tests: Sequence[Tests | str | None], values: Sequence[Any], column: str) -> None:
        """Refuse tests none of which can be read, unless others could be: then it is not the column that is wrong."""
        self._has_read = self._has_read or any(not isinstance(of_row, str | None) for of_row in tests)
        for of_row, value in zip(tests, values, strict=True):
            if isinstance(of_row, str) and not self._has_read:
                raise UserError(
                    f"the column {column!r} holds {excerpt(value)}, which cannot be read as tests: {of_row}; set "
                    "args.tests_column to the column with the tests"
                )

    def _rewards(self, verdicts: Sequence[CodeVerdict | None]) -> list[float | None]:
        counts: Counter[str] = Counter()
        rewards: list[float | None] = []
        for verdict in verdicts:
            if verdict is None:
                counts["no_tests"] += 1
                rewards.append(None)
            elif verdict.passed is None:
                counts["not_judged"] += 1
                rewards.append(None)
            else:
                counts["shared_interpreter"] += verdict.shares_interpreter
                share = sum(verdict.passed) / len(verdict.passed)
                rewards.append(share if self.settings.score == "fraction" else float(share == 1))
        self.last_counts = {kind: number for kind, number in counts.items() if number}
        self.last_details = [None if verdict is None else _details(verdict) for verdict in verdicts]
        return rewards


def extract_code(text: str, language: str = "python") -> str:
    """Return the last fenced block in the language after `</think>`, else the last without one, else the whole text."""
    text = after_thinking(text)
    tags = _PYTHON_TAGS if language == "python" else (language,)
    blocks = _FENCE.findall(text)
    bodies = [body for tag, body in blocks if tag.lower() in tags] or [body for tag, body in blocks if not tag]
    return bodies[-1] if bodies else text


def _language(language: str | Mapping[str, Mapping[str, str]]) -> tuple[str, dict[str, str | None]]:
    """Return a language's name, and the source file and commands that build and run it."""
    if isinstance(language, str):
        return language, {"file": None, "compile": None, "run": None}
    [(name, commands)] = language.items()
    return name, {"file": f"main.{name}", "compile": commands.get("compile"), "run": commands["run"]}


def _tests(value: Any, entry_point: Any, setup_of_row: Any, *, setup: str, max_tests: int | None) -> Tests | str | None:
    """Read a row's tests; None if it has none, a message if they cannot be read."""
    if value is None:
        return None
    try:
        before = "\n".join(filter(None, [setup, setup_of_row]))
        return first(read_tests(value, entry_point=entry_point, setup=before), max_tests)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__


def _too_large(tests: Tests, limits: Limits) -> str | None:
    """Return why no program can pass tests of this size, or None."""
    if not isinstance(tests, ProgramTests):
        return None
    given = max(len(case.input.encode(errors="replace")) for case in tests.cases)
    if given > limits.max_file_bytes:
        return f"an input of {given:,} bytes is above sandbox.max_file_size ({limits.max_file_bytes:,})"
    expected = sum(len(case.expected.encode(errors="replace")) for case in tests.cases)
    if expected >= limits.max_output_bytes:
        return f"expected outputs of {expected:,} bytes reach sandbox.max_output ({limits.max_output_bytes:,})"
    return None


def _details(verdict: CodeVerdict) -> str:
    """Return the results as JSON, for the completions file."""
    if verdict.passed is None:
        return json.dumps({"not_judged": verdict.notes[0]})
    results = [note or "passed" for note in verdict.notes]
    return json.dumps({"tests": results} | ({"shared_interpreter": True} if verdict.shares_interpreter else {}))
