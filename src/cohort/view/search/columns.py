"""The columns that a search may use: their names, types and meaning."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

ColumnType = Literal["number", "text"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the completions files, as a search names it."""

    name: str
    type: ColumnType
    description: str


_FIXED = (
    Column("text", "text", "text that the policy sampled"),
    Column("prompt", "text", "the prompt; chat messages as JSON"),
    Column("reward", "number", "weighted sum of the rewards; null if not scored"),
    Column("advantage", "number", "mean over the sampled tokens"),
    Column("length", "number", "tokens that the policy sampled, over all turns"),
    Column("end", "text", "answer, max_turns, length, timeout or environment_error"),
    Column("finish_reason", "text", "stop or length, of the last turn"),
    Column("step", "number", "training step"),
    Column("kind", "text", "step, replaced, dropped or eval: the kind of file"),
    Column("prompt_id", "number", "row of the prompt in the dataset"),
    Column("policy_version", "number", "optimizer steps done when the oldest token was sampled"),
    Column("error", "text", "message of a broken trajectory"),
    Column("messages", "text", "the conversation after the prompt, as JSON"),
    Column("tool_calls", "number", "tool calls"),
    Column("tool_errors", "number", "tool calls that failed"),
    Column("malformed_calls", "number", "tool calls that could not be parsed"),
    Column("attempts", "number", "1 plus the number of times that the environment was replaced"),
    Column("model_s", "number", "seconds in which a model call was waiting"),
    Column("environment_s", "number", "seconds of everything else"),
)
_FAMILIES = (
    Column("rewards/", "number", "one reward, unweighted"),
    Column("environment/", "number", "a metric of the environment or agent"),
    Column("details/", "text", "how a reward scored, as JSON"),
)
_NOT_AS_NAMED = frozenset({"text", "length", "end", "kind"})  # of columns of another name, or of the file's name


class Columns:
    """The known columns of a run.

    Without names, any column of a family (`rewards/...`, `environment/...`, `details/...`) is known.
    """

    def __init__(self, in_files: Iterable[str] | None = None):
        """Collect the columns.

        Args:
            in_files: column names in the run's Parquet files, or None if there are none yet.
        """
        self._in_files = None if in_files is None else frozenset(in_files)
        self._columns: Mapping[str, Column] = {column.name: column for column in _FIXED} | {
            name: Column(name, family.type, family.description)
            for name in sorted(self._in_files or ())
            if (family := _family(name)) is not None
        }

    def __iter__(self) -> Iterator[Column]:
        """Iterate over the known columns: the fixed ones first."""
        return iter(self._columns.values())

    def find(self, name: str) -> Column | None:
        """Return the column of this name, or None. `rewards.x` is short for `rewards/x`, and `completion` is `text`."""
        if name == "completion":
            name = "text"
        family, dot, rest = name.partition(".")
        for spelling in (name, f"{family}/{rest}" if dot else name):
            if spelling in self._columns:
                return self._columns[spelling]
            if self._in_files is None and (column := _family(spelling)) is not None:
                return Column(spelling, column.type, column.description)
        return None

    def in_files(self) -> list[Column]:
        """Return the known columns that files have, all if that is not known."""
        return [c for c in self if self._in_files is None or c.name in _NOT_AS_NAMED or c.name in self._in_files]

    def names(self) -> list[str]:
        """Names of the known columns."""
        return list(self._columns)


def _family(name: str) -> Column | None:
    return next((f for f in _FAMILIES if name.startswith(f.name) and len(name) > len(f.name)), None)
