"""The `code` reward: runs the completion's code against the row's tests in the sandbox."""

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cohort.errors import UserError, excerpt
from cohort.rewards.code_tests import ProgramTests, Tests, read_tests
from cohort.rewards.code_verdict import CodeVerdict, job_request, judge
from cohort.rewards.completion_text import answer_text
from cohort.rewards.function import column_values
from cohort.sandbox import Job, Sandbox
from cohort.sandbox.process import Limits

# Possessive, so that a last fence without a line break is not tried again and again.
_FENCE = re.compile(r"^```[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON_TAGS = ("python", "python3", "py")


class CodeReward:
    """Share of the row's tests that the completion's code passes; None if the sandbox could not judge it.

    The code is the last fenced block in the language after the last `</think>`; without such a block, the last one
    without a language; else the whole text. Forms of tests: see `code_tests`. Code that crashes, hangs or exceeds a
    limit fails. Not judged, and counted by `last_counts`: completions for which the sandbox does not start, that the
    deadline leaves no time for, or whose tests cannot be read or fail before the code runs.

    Arguments (in `rewards[i].args`):
        tests_column: dataset column with the tests. Default "tests".
        entry_point_column: column with the name of the function under test, read if there is one. Default
            "entry_point".
        setup_column: column with statements to run before the code, such as imports, read if there is one. Default
            "test_setup_code".
        setup: statements to run before the code of every row. Default none.
        score: "all" (1.0 if every test passes, else 0.0) or "fraction". Default "all".
        language: "python", or {name: {compile: command, run: command}} for stdin tests; the source is `main.name`.
        case_s: seconds for each run of a program. Default 10.
        max_tests: run only the first N tests. Default None: all.
    """

    __name__ = "code"

    def __init__(self, sandbox: Sandbox, *, budget_s: float = 240.0) -> None:
        """Create the reward.

        Args:
            sandbox: runs the code.
            budget_s: seconds for all completions of a call; the rest is not judged.
        """
        self.sandbox = sandbox
        self.last_counts: dict[str, int] = {}  # completions of the last call by what is noteworthy about them
        self.last_details: list[str | None] = []  # of the last call: results of each test, as JSON
        self.on_progress: Callable[[int, int], None] = lambda done, total: None  # see `ReportsProgress`
        self._budget_s = budget_s
        self._has_read = False  # whether tests of some row could be read

    def required_columns(
        self,
        *,
        tests_column: str = "tests",
        entry_point_column: str = "entry_point",
        setup_column: str = "test_setup_code",
        setup: str = "",
        score: str = "all",
        language: str | Mapping[str, Any] = "python",
        case_s: float = 10.0,
        max_tests: int | None = None,
    ) -> Sequence[str]:
        """See `ChecksArguments`."""
        if score not in ("all", "fraction"):
            raise ValueError(f"score: {score!r} must be all or fraction")
        if isinstance(case_s, bool) or not isinstance(case_s, int | float) or not 0 < case_s < float("inf"):
            raise ValueError(f"case_s: {case_s!r} must be a number of seconds above 0")
        if max_tests is not None and (type(max_tests) is not int or max_tests < 1):
            raise ValueError(f"max_tests: {max_tests!r} must be a whole number of at least 1")
        _language(language)
        _check_setup(setup, language)
        return (tests_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        tests_column: str = "tests",
        entry_point_column: str = "entry_point",
        setup_column: str = "test_setup_code",
        setup: str = "",
        score: str = "all",
        language: str | Mapping[str, Any] = "python",
        case_s: float = 10.0,
        max_tests: int | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: no row's tests can be read, nor could any before.
        """
        name, commands = _language(language)
        missing = [None] * len(completions)
        optional = (column_values(columns, column, missing) for column in (entry_point_column, setup_column))
        values = column_values(columns, tests_column)
        rows = list(zip(values, *optional, strict=True))
        tests = [_tests(*row, setup=setup, max_tests=max_tests) for row in rows]
        self._check_readable(tests, values, tests_column)
        options = {
            **commands,
            "case_s": case_s,
            "max_output": self.sandbox.limits.max_output_bytes,
            "stop_early": score == "all",
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
                raise UserError(f"args.language: {name} needs stdin tests, but {tests_column!r} tests Python functions")
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
            [job for *_, job in jobs.values()], budget_s=self._budget_s, on_progress=self.on_progress
        )
        for (key, (of_row, token, _)), outcome in zip(jobs.items(), outcomes, strict=True):
            verdicts[key] = CodeVerdict(None, ("out of time",)) if outcome is None else judge(of_row, outcome, token)
        rewards = self._rewards([None if key is None else verdicts[key] for key in keys], score)
        if unreadable := sum(isinstance(of_row, str) for of_row in tests):
            self.last_counts["unreadable_tests"] = unreadable
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

    def _rewards(self, verdicts: Sequence[CodeVerdict | None], score: str) -> list[float | None]:
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
                rewards.append(share if score == "fraction" else float(share == 1))
        self.last_counts = {kind: number for kind, number in counts.items() if number}
        self.last_details = [None if verdict is None else _details(verdict) for verdict in verdicts]
        return rewards


def extract_code(text: str, language: str = "python") -> str:
    """Return the last fenced block in the language after `</think>`, else the last without one, else the whole text."""
    text = text.rpartition("</think>")[2]
    tags = _PYTHON_TAGS if language == "python" else (language,)
    blocks = _FENCE.findall(text)
    bodies = [body for tag, body in blocks if tag.lower() in tags] or [body for tag, body in blocks if not tag]
    return bodies[-1] if bodies else text


def _language(language: str | Mapping[str, Any]) -> tuple[str, dict[str, str | None]]:
    """Return a language's name, and the source file and commands that build and run it.

    Raises:
        ValueError: it is not written as the docs say.
    """
    if language == "python":
        return "python", {"file": None, "compile": None, "run": None}
    rule = 'must be python, or {name: {"compile": command, "run": command}}, where compile is optional'
    if not isinstance(language, Mapping) or len(language) != 1:
        raise ValueError(f"language: {excerpt(language)} {rule}")
    [(name, commands)] = language.items()
    is_right = isinstance(commands, Mapping) and set(commands) <= {"compile", "run"} and "run" in commands
    if not (is_right and re.fullmatch(r"[\w+#-]+", name) and all(isinstance(c, str) and c for c in commands.values())):
        raise ValueError(f"language: {excerpt(language)} {rule}")
    return name, {"file": f"main.{name}", "compile": commands.get("compile"), "run": commands["run"]}


def _check_setup(setup: str, language: Any) -> None:
    """Raise `ValueError` if `setup` is not Python, or the tests are of another language."""
    if setup and language != "python":
        raise ValueError("setup: is for language: python; remove it")
    try:
        compile(setup, "setup", "exec")
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"setup: {excerpt(setup)} is not Python ({error})") from error


def _tests(value: Any, entry_point: Any, setup_of_row: Any, *, setup: str, max_tests: int | None) -> Tests | str | None:
    """Read a row's tests; None if it has none, a message if they cannot be read."""
    if value is None:
        return None
    try:
        before = "\n".join(filter(None, [setup, setup_of_row]))
        return read_tests(value, entry_point=entry_point, setup=before).first(max_tests)
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
