"""Read YAML with bounded work: cycles, alias bombs and endless nesting are refused before any value is made."""

from typing import Any

import yaml

MAX_VALUES = 100_000
_MAX_DEPTH = 100


def compose(text: str) -> yaml.Node | None:
    """Parse a YAML document into nodes; None where there is none.

    Raises:
        ValueError: it is not valid YAML, or nested too deeply. The message says where.
    """
    try:
        return yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        raise ValueError(_told(error)) from error
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def _told(error: yaml.MarkedYAMLError) -> str:
    """Where it is, and what is wrong."""
    mark = error.problem_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + ", ".join(filter(None, (error.problem, error.context)))


def read_yaml(text: str) -> Any:
    """Read the value of a YAML document. A mapping that has a key twice is refused, of which YAML would drop the first.

    Raises:
        ValueError: it is not valid YAML, refers to itself, has more than 100,000 values counting every use of an
            anchor, or has a key twice or a value that does not fit its tag.
    """
    node = compose(text)
    if node is None:
        return None
    _count(node, {}, set())
    return _construct(node)


def _count(node: yaml.Node, counts: dict[int, int], around: set[int]) -> int:
    """The values of a node, where each use of an anchor counts; `around`: the nodes that it is in."""
    if id(node) in around:
        raise ValueError(f"line {node.start_mark.line + 1}: an anchor that contains itself")
    if id(node) not in counts:
        around.add(id(node))
        total = 1
        for child in _children(node):
            total += _count(child, counts, around)
            if total > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES:,} values, counting every use of an anchor")
        around.discard(id(node))
        counts[id(node)] = total
    return counts[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _construct(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ValueError(_told(error)) from error


class _Composer(yaml.SafeLoader):
    """Stops where collections are nested deeper than any configuration's."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node and what is in it."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Loader(yaml.SafeLoader):
    """Tells duplicate keys and values that do not fit their tags."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping as a dict."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node."""
        try:
            return super().construct_object(node, deep)
        except (KeyError, ValueError, AttributeError, TypeError, OverflowError) as error:  # `!!bool maybe`
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:60]!r} is no {kind}", problem_mark=node.start_mark
            ) from error
