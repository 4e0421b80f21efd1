"""Expected lengths of completions, as given or as in a column of reference answers."""

import json
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from cohort.errors import UserError

_CHARACTERS_PER_TOKEN = 4  # assumed: English text; fewer for formulas and code


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Expected tokens after the prompt, for predicted times."""

    mean: int
    longest: int | None = None  # None: as for an exponential distribution
    source: str = "--length"  # in words

    def cut_at(self, limit: int) -> "Lengths":
        """The lengths of completions that are cut at `limit` tokens."""
        return replace(self, mean=min(self.mean, limit), longest=self.longest and min(self.longest, limit))


def parse_lengths(text: str) -> Lengths:
    """Parse `--length`: the mean, or mean:longest.

    Raises:
        UserError: neither, or a longest below the mean.
    """
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UserError(
            f"--length: {text!r} is not a number of tokens such as 800, mean:longest such as 800:4000, or with a "
            f"configuration file a column of its data"
        )
    return Lengths(mean=int(match[1]), longest=int(match[2]) if match[2] else None)


def answer_lengths(path: str | None, column: str) -> Lengths:
    """Mean and 99th percentile of the lengths in a column of reference answers, in tokens of about four characters.

    Args:
        path: `data.path`, a JSONL or Parquet file.
        column: the column.

    Raises:
        UserError: the file or the column cannot be read, or has no text.
    """
    file = Path(path or "")
    if file.suffix not in (".jsonl", ".parquet") or not file.is_file():
        raise UserError(
            f"--length: {column!r} as a column needs data.path to be a .jsonl or .parquet file of this machine, and it "
            f"is {path!r}; use a number of tokens such as 800, or 800:4000"
        )
    try:
        names, values = _read_column(file, column)
    except (OSError, ValueError) as error:
        raise UserError(f"--length: {path!r} cannot be read: {error}") from error
    tokens = sorted(len(value) / _CHARACTERS_PER_TOKEN for value in values if isinstance(value, str) and value)
    if not tokens:
        raise UserError(
            f"--length: {path!r} has no text in {column!r}; its columns are {', '.join(names)}. Use one with reference "
            f"solutions, or a number of tokens such as 800"
        )
    mean = max(1, round(statistics.fmean(tokens)))
    longest = max(mean, round(tokens[int(0.99 * (len(tokens) - 1))]))
    return Lengths(
        mean=mean, longest=longest, source=f"{column!r} of the data, {_CHARACTERS_PER_TOKEN} characters each"
    )


def _read_column(file: Path, column: str) -> tuple[list[str], list[object]]:
    """Return the names of all columns, and the values of one."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        names = pq.read_schema(file).names
        return names, pq.read_table(file, columns=[column])[column].to_pylist() if column in names else []
    with file.open(encoding="utf-8") as lines:
        rows = [row for row in (json.loads(line) for line in lines if line.strip()) if isinstance(row, dict)]
    return list(dict.fromkeys(name for row in rows for name in row)), [row.get(column) for row in rows]
