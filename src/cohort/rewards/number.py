"""The `number` reward: 1.0 if the completion's number is within a tolerance of the answer column."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from cohort.errors import UserError
from cohort.rewards.arguments import check_number
from cohort.rewards.describe import answer_text, excerpt
from cohort.rewards.function import column_values
from cohort.rewards.patterns import compile_pattern

# A fraction, or a decimal with thousands separators and an exponent. The bounds keep exact arithmetic cheap. A minus
# behind a word is a dash: 5-7.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+−](?:\\?[$€£¥])?)?"
    r"(?:\d{1,3}(?:,\d{3}){1,30}(?!\d)(?:\.\d{1,100})?|\d{1,100}(?:\.\d{0,100})?|\.\d{1,100})(?:[eE][-+]?\d{1,3})?"
    r"(?:/[1-9]\d{0,99})?"
)
_BOXED = r"\\boxed\{((?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+)\}"
_BOX = re.compile(_BOXED)
_MARKED = re.compile(rf"{_BOXED}|####([^\n]*)|<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\{(\d{1,100})\}\{([1-9]\d{0,99})\}")
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox)\{([^{}]*)\}(\^\{?\d\}?)?")  # with a unit's exponent
_SPACING = re.compile(r"\^\{?\\circ\}?|\\(?:[,;:! $%]|approx|quad|left|right)")
_UNREADABLE = re.compile(r"\\[A-Za-z]|[{}^]")  # of LaTeX: what does it to the number?


class NumberReward:
    """1.0 if |number - gold| <= max(abs_tol, rel_tol * |gold|), else 0.0; None if the row has no answer.

    The number is the last one in the last box, answer tags or line after `####`, else the last one in the text, behind
    the last `</think>`. `1,234.5`, `1e-3`, `3/4` and LaTeX fractions are numbers; currency signs, percent signs and
    units are ignored. A box or an answer in other LaTeX, such as `10^{5}`, has no number. Comparison is exact, without
    rounding.

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
            UserError: a value of the answer column has no number.
        """
        regex = None if pattern is None else compile_pattern(pattern, num_groups=1)
        relative, absolute = Fraction(str(rel_tol)), Fraction(str(abs_tol))  # 0.1 is a tenth
        rewards: list[float | None] = []
        for completion, answer in zip(completions, column_values(columns, answer_column), strict=True):
            if answer is None:
                rewards.append(None)
                continue
            gold = None if isinstance(answer, bool) else read_number(str(answer))
            if gold is None:
                raise UserError(f"the column {answer_column!r} holds {excerpt(answer)}, which has no number")
            text = answer_text(completion).rpartition("</think>")[2]
            if regex is not None:
                text = str(([match[1] or "" for match in regex.finditer(text)] or [""])[-1])
            number = read_number(text)
            rewards.append(float(number is not None and abs(number - gold) <= max(absolute, relative * abs(gold))))
        return rewards


def read_number(text: str) -> Fraction | None:
    """Return the last number in a text, or in the last box, answer tags or line after `####`; None if there is none."""
    text = _FRACTION.sub(r"\1/\2", text)
    marked = [next(group for group in match.groups() if group is not None) for match in _MARKED.finditer(text)]
    if marked:
        text = marked[-1]
        if _BOX.search(text):  # in answer tags
            return read_number(text)
        text = _TEXT.sub(lambda match: match[1] if re.search(r"\d", match[1]) else " ", text.replace("{,}", ","))
        if _UNREADABLE.search(_SPACING.sub(" ", text)):
            return None
    found = _NUMBER.findall(text)
    if not found:
        return None
    numerator, _, denominator = re.sub(r"[,\\$€£¥]", "", found[-1]).replace("−", "-").partition("/")
    return Fraction(numerator) / int(denominator or 1)
