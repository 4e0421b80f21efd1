"""The `choice` reward: 1.0 if the completion picks the right letter of a multiple-choice question."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cohort.errors import UserError
from cohort.rewards.arguments import check_number
from cohort.rewards.choice_text import ChoiceReader
from cohort.rewards.describe import answer_text, excerpt
from cohort.rewards.function import column_values
from cohort.rewards.patterns import compile_pattern

_LETTERS = "ABCDEFGHIJ"


class ChoiceReward:
    """1.0 for the right letter, 0.0 for another or none; None if the row has no answer.

    The letter is in the last box, answer tags or sentence such as "the answer is B", "I choose B" or "B is correct",
    behind the last `</think>`; without any of these, it is the text itself, its beginning ("B) 4 cm") or its last line.
    "A or B" picks none.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the letter, such as `B`, `(b)` or `B.`, or the number of the choice (1, or
            1.0). Default "answer".
        letters: the choices. Default "ABCDEFGHIJ".
        first_number: number of the first choice, for columns with numbers; 0 in MMLU. Default None: letters only.
        pattern: regular expression with one group, the letter; the last match counts. Default None: as above.
    """

    def required_columns(
        self,
        *,
        answer_column: str = "answer",
        letters: str = _LETTERS,
        first_number: int | None = None,
        pattern: str | None = None,
    ) -> Sequence[str]:
        """See `ChecksArguments`."""
        if not isinstance(letters, str) or not re.fullmatch("[A-Z]+", letters) or len(set(letters)) < len(letters):
            raise ValueError(f"letters must be different capital letters, such as ABCD, got {letters!r}")
        if first_number is not None:
            check_number("first_number", first_number, minimum=0, whole=True)
        if pattern is not None:
            compile_pattern(pattern, num_groups=1)
        return (answer_column,)

    def check_row(
        self,
        row: Mapping[str, Any],
        *,
        answer_column: str = "answer",
        letters: str = _LETTERS,
        first_number: int | None = None,
        pattern: str | None = None,
    ) -> None:
        """See `ChecksRows`."""
        if row.get(answer_column) is not None:
            _gold_letter(row[answer_column], letters, first_number, answer_column)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        letters: str = _LETTERS,
        first_number: int | None = None,
        pattern: str | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a value of the answer column is not a choice.
        """
        regex = None if pattern is None else compile_pattern(pattern, num_groups=1)
        reader = ChoiceReader(letters)
        rewards: list[float | None] = []
        for completion, gold in zip(completions, column_values(columns, answer_column), strict=True):
            if gold is None:
                rewards.append(None)
                continue
            text = answer_text(completion).rpartition("</think>")[2]
            if regex is None:
                picked = reader.read(text)
            else:
                picked = str(([match[1] or "" for match in regex.finditer(text)] or [""])[-1]).strip().upper()
            rewards.append(float(picked == _gold_letter(gold, letters, first_number, answer_column)))
        return rewards


def _gold_letter(gold: Any, letters: str, first_number: int | None, column: str) -> str:
    text = str(gold).strip()
    match = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", text)
    if match and match[1].upper() in letters:
        return match[1].upper()
    if first_number is not None and re.fullmatch(r"\d{1,3}(\.0)?", text):
        index = int(float(text)) - first_number
        if 0 <= index < len(letters):
            return letters[index]
    hint = "" if first_number is not None else "; for numbers set args.first_number"
    raise UserError(f"the column {column!r} holds {excerpt(gold)}, which is none of the choices {letters}{hint}")
