"""YAML to dotted keys with line numbers, for files of strangers: cycles and bombs are told, not followed."""

from dataclasses import dataclass
from typing import Any

import yaml

from cohort.check.launch import Said
from cohort.config.yaml_text import MAX_VALUES, compose


@dataclass(frozen=True, slots=True)
class YamlTree:
    """A YAML mapping, flat."""

    values: dict[str, Said]  # dotted keys; lists and empty mappings are values
    top: tuple[str, ...]  # the keys of the first level
    twice: tuple[tuple[str, int], ...]  # keys that are there twice, with the line of the second one


def read_yaml_tree(text: str) -> YamlTree | None:
    """The mapping that the text holds; None where it holds something else.

    Raises:
        ValueError: not valid YAML, or it refers to itself, or has too many values.
    """
    node = compose(text)
    if not isinstance(node, yaml.MappingNode):
        return None
    reader = _Reader()
    reader.mapping(node, "", ())
    return YamlTree(
        reader.values, tuple(dict.fromkeys(key.split(".")[0] for key in reader.values)), tuple(reader.twice)
    )


class _Reader:
    """Walks the nodes of a document once."""

    def __init__(self) -> None:
        self.values: dict[str, Said] = {}
        self.twice: list[tuple[str, int]] = []
        self._seen = 0
        self._loader = yaml.SafeLoader("")

    def mapping(self, node: yaml.MappingNode, prefix: str, path: tuple[int, ...]) -> None:
        """Adds what a mapping holds."""
        path = self._enter(node, path)
        own: set[str] = set()
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._merge(value_node, prefix, path)
                continue
            key = prefix + (str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?")
            if key in own:
                self.twice.append((key, line))
            own.add(key)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                self.mapping(value_node, f"{key}.", path)
            else:
                self.values[key] = Said(self._value(value_node, path), f"line {line}")

    def _merge(self, node: yaml.Node, prefix: str, path: tuple[int, ...]) -> None:
        """`<<: *anchor`: keys that are there already win."""
        several = isinstance(node, yaml.SequenceNode)
        path = self._enter(node, path) if several else path
        for part in node.value if several else [node]:
            if isinstance(part, yaml.MappingNode):
                mine = dict(self.values)
                self.mapping(part, prefix, path)
                self.values.update(mine)

    def _value(self, node: yaml.Node, path: tuple[int, ...]) -> Any:
        path = self._enter(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, path) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {str(key.value): self._value(value, path) for key, value in node.value}
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, LookupError, ValueError, AttributeError, TypeError, ArithmeticError):
            # a tag of its own, a date that does not exist, `!!bool maybe`
            return str(node.value)

    def _enter(self, node: yaml.Node, path: tuple[int, ...]) -> tuple[int, ...]:
        if id(node) in path:
            raise ValueError(f"line {node.start_mark.line + 1}: an anchor that contains itself")
        self._seen += 1
        if self._seen > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values, counting every use of an anchor")
        return (*path, id(node))
