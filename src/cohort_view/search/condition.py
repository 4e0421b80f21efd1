"""The columns of the completions files, as conditions of a search name them."""

import keyword
from collections.abc import Collection, Iterable
from dataclasses import replace

import pyarrow as pa
import pyarrow.dataset as ds

from cohort.config.condition import TYPES, Column, Condition, parse_condition

_FIXED = (
    Column("text", "text", "text that the policy sampled"),
    Column("prompt", "text", "the prompt; chat messages as JSON", is_json=True),
    Column("answer", "text", "the expected answer"),
    Column("source", "text", "the source of the prompt's row"),
    Column("reward", "number", "weighted sum of the rewards; None if not scored"),
    Column("advantage", "number", "mean over the sampled tokens"),
    Column("length", "number", "tokens that the policy sampled, over all turns"),
    Column("end", "text", "answer, max_turns, length, timeout or environment_error"),
    Column("finish_reason", "text", "stop or length, of the last turn"),
    Column("step", "number", "training step"),
    Column("kind", "text", "step, replaced, dropped or eval: the kind of file"),
    Column("group", "number", "index of the group within the file"),
    Column("prompt_id", "number", "row of the prompt in the dataset"),
    Column("policy_version", "number", "optimizer steps done when the oldest token was sampled"),
    Column("error", "text", "message of a broken trajectory"),
    Column("messages", "text", "the conversation after the prompt, as JSON", is_json=True),
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
    Column("details/", "text", "how a reward scored, as JSON", is_json=True),
)
_IN_ALL_FILES = frozenset({"text", "length", "end", "step", "kind"})  # under another name, or by the file's name


class Columns:
    """The columns of a run.

    Attributes:
        by_name: the columns by their names in the files.
        schema: what files are read as; a column that a file lacks is null.
    """

    def __init__(self, files: Iterable[Collection[str]]):
        """Collect the columns of some files, each given by the names of its columns."""
        self._in_files = frozenset[str]().union(*files)
        families = [
            replace(family, name=name)
            for name in sorted(self._in_files)
            for family in _FAMILIES
            if name.startswith(family.name)
        ]
        self.by_name = {column.name: column for column in (*_FIXED, *families)}
        types = {name: TYPES[column.type] for name, column in self.by_name.items()}
        others = {"completion": pa.string(), "num_tokens": pa.float64(), "prompt_is_chat": pa.bool_()}
        self.schema = pa.schema(types | others)

    def listed(self) -> list[Column]:
        """Return the columns that files have, named as in a condition."""
        in_files = [name for name in self.by_name if name in _IN_ALL_FILES or name in self._in_files]
        return [replace(self.by_name[name], name=_spelled(name)) for name in in_files]

    def find(self, name: str) -> Column | None:
        """Return a column by its name in a condition; None if there is none."""
        return self.by_name.get("text" if name == "completion" else name)

    def names(self) -> Iterable[str]:
        """Return the names of all columns, as a condition spells them."""
        return map(_spelled, self.by_name)

    def expression(self, name: str) -> ds.Expression:
        """Return a column as an expression over `schema`."""
        return ds.field({"text": "completion", "length": "num_tokens"}.get(name, name))


def _spelled(name: str) -> str:
    """Return how a condition names a column of the files: `rewards/math` or `rewards['any name']`."""
    if all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split("/")):
        return name
    family, _, rest = name.partition("/")
    return f"{family}[{rest!r}]"


def parse(text: str, where: str, columns: Columns) -> Condition:
    """Parse a search: what the completion's text contains, in any case, and a condition. Both may be empty.

    Raises:
        ConditionError: the condition has no meaning, or the search is too large.
    """
    return parse_condition(where, columns, text=text, text_column="text")
