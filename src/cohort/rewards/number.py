"""The `number` reward: 1.0 if the completion's number is within a tolerance of the answer column."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from cohort.errors import UserError
from cohort.rewards.arguments import check_number
from cohort.rewards.describe import answer_text, excerpt
from cohort.rewards.function import column_values
from cohort.rewards.number_text import plain_number, read_number
from cohort.rewards.patterns import compile_pattern

_RULE = (
    r"a number is written like 42, -1,234.5, 1e-3, 3/4, 3 1/2, 10^5 or \frac{3}{4}, alone, with a unit, or after ####; "
    "use {use: math} for formulas, {use: exact} for other texts, or set args.answer_column to a column with numbers"
)


class NumberReward:
    """1.0 if |number - gold| <= max(abs_tol, rel_tol * |gold|), else 0.0; None if the row has no answer.

    The number is that of the last box, answer tags or line after `####`, else the last one of the text, behind the last
    `</think>`. docs/rewards.md says what is a number; "4 or 3", "5-3" and "(5, 3)" are none. Comparison is exact,
    without rounding.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the number, or with text such as GSM8K's `... #### 42`. Default "answer".
        rel_tol: tolerance relative to the gold answer. Default 1e-6.
        abs_tol: absolute tolerance. Default 0.
        pattern: regular expression with one group, in whose last match the number is. Default None: as above.
    """

    def required_columns(
        self, *, answer_column: str = "answer", rel_tol: float = 1e-6, abs_tol: float = 0.0, pattern: str | None = None
    ) -> Sequence[str]:
        """See `ChecksArguments`."""
        check_number("rel_tol", rel_tol, minimum=0)
        check_number("abs_tol", abs_tol, minimum=0)
        if pattern is not None:
            compile_pattern(pattern, num_groups=1)
        return (answer_column,)

    def check_row(self, row: Mapping[str, Any], *, answer_column: str = "answer", **args: Any) -> None:
        """See `ChecksRows`."""
        if row.get(answer_column) is not None:
            _gold(row[answer_column], answer_column)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        rel_tol: float = 1e-6,
        abs_tol: float = 0.0,
        pattern: str | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a value of the answer column is not plainly a number.
        """
        regex = None if pattern is None else compile_pattern(pattern, num_groups=1)
        relative, absolute = Fraction(str(rel_tol)), Fraction(str(abs_tol))  # 0.1 is a tenth
        rewards: list[float | None] = []
        for completion, answer in zip(completions, column_values(columns, answer_column), strict=True):
            if answer is None:
                rewards.append(None)
                continue
            gold = _gold(answer, answer_column)
            text = answer_text(completion).rpartition("</think>")[2]
            if regex is not None:
                text = str(([match[1] or "" for match in regex.finditer(text)] or [""])[-1])
            number = read_number(text)
            rewards.append(float(number is not None and abs(number - gold) <= max(absolute, relative * abs(gold))))
        return rewards


def _gold(answer: Any, answer_column: str) -> Fraction:
    """Return the number that a gold answer is.

    Raises:
        UserError: it is not plainly a number.
    """
    gold = None if isinstance(answer, bool) else plain_number(str(answer))
    if gold is None:
        raise UserError(f"the column {answer_column!r} holds {excerpt(answer)}, which is not plainly a number: {_RULE}")
    return gold
