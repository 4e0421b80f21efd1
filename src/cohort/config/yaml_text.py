"""Read YAML safely: reject cycles, alias bombs and excessive nesting before constructing any value."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

_MAX_VALUES = 100_000
_MAX_DEPTH = 100


def compose(text: str) -> yaml.Node | None:
    """Parse a YAML document into nodes; None if it is empty.

    Raises:
        ValueError: invalid YAML, nested too deeply, a cycle, or more than 100,000 values counting every use of an
            anchor. The message has the position.
    """
    with _readable_errors():
        node = yaml.compose(text, Loader=_Loader)
    if node is not None:
        _count(node, {}, set())
    return node


def read_yaml(text: str) -> Any:
    """Read the value of a YAML document. Duplicate keys are an error (PyYAML would drop all but the last).

    Raises:
        ValueError: as `compose`, or a duplicate key, or a value that does not fit its tag.
    """
    node = compose(text)
    if node is None:
        return None
    with _readable_errors():
        return _Loader("").construct_document(node)


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Raise `ValueError` with the position and the problem in one line."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(where + ", ".join(filter(None, (error.problem, error.context)))) from error
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def _count(node: yaml.Node, counts: dict[int, int], around: set[int]) -> int:
    """Count the values of a node, including every use of an anchor. `around` holds the ids of its ancestors."""
    if id(node) in around:
        raise ValueError(f"line {node.start_mark.line + 1}: an anchor that contains itself")
    if id(node) not in counts:
        around.add(id(node))
        total = 1
        for child in _children(node):
            total += _count(child, counts, around)
            if total > _MAX_VALUES:
                raise ValueError(f"more than {_MAX_VALUES:,} values, counting every use of an anchor")
        around.discard(id(node))
        counts[id(node)] = total
    return counts[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


class _Loader(yaml.SafeLoader):
    """Limits the nesting depth, and reports duplicate keys and values that do not fit their tags."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node and its children."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a dict."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node."""
        try:
            return super().construct_object(node, deep)
        except (KeyError, ValueError, AttributeError, TypeError, OverflowError) as error:  # `!!bool maybe`
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:60]!r} is not a valid {kind}", problem_mark=node.start_mark
            ) from error
