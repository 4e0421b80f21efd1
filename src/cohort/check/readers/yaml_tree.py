"""YAML to dotted keys with line numbers, for files of strangers: cycles and bombs are told, not followed."""

from dataclasses import dataclass
from typing import Any

import yaml

from cohort.check.findings import Finding
from cohort.check.launch import Said
from cohort.config.yaml_text import MAX_VALUES, compose

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class YamlTree:
    """A YAML mapping, flat."""

    values: dict[str, Said]  # dotted keys; lists and empty mappings are values
    top: tuple[str, ...]  # the keys of the first level
    twice: tuple[tuple[str, int], ...]  # keys that are there twice, with the line of the second one

    def nested_once(self) -> dict[str, Said]:
        """The values with one level of keys: what is nested (`model_init_kwargs`) stays one value."""
        flat: dict[str, Said] = {}
        for key, said in self.values.items():
            top, _, rest = key.partition(".")
            if not rest:
                flat[top] = said
                continue
            if top not in flat or not isinstance(flat[top].value, dict):
                flat[top] = Said({}, said.where)
            flat[top].value[rest] = said.value
        return flat

    def duplicates(self) -> tuple[Finding, ...]:
        """Keys that are there twice: YAML readers keep the last one."""
        told = "{0} is there twice; the value on line {1} counts and the earlier one is dropped"
        return tuple(Finding("CHK005", key, told.format(key, line)) for key, line in self.twice)


def read_yaml_tree(text: str, name: str) -> YamlTree | None:
    """The mapping that the text of the file with this name holds; None where it holds something else.

    Raises:
        ValueError: not valid YAML, or it refers to itself, or has too many values.
    """
    node = compose(text)
    if not isinstance(node, yaml.MappingNode):
        return None
    reader = _Reader(name)
    reader.mapping(node, "", ())
    return YamlTree(
        reader.values, tuple(dict.fromkeys(key.split(".")[0] for key in reader.values)), tuple(reader.twice)
    )


class _Reader:
    """Walks the nodes of a document once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, Said] = {}
        self.twice: list[tuple[str, int]] = []
        self._seen = 0
        self._loader = yaml.SafeLoader("")

    def mapping(self, node: yaml.MappingNode, prefix: str, path: tuple[int, ...]) -> None:
        """Adds what a mapping holds."""
        path = self._enter(node, path)
        own: set[str] = set()
        merged = [value for key, value in node.value if key.tag == _MERGE]
        self._merge(merged, prefix, path)  # first, as keys that stand there themselves win
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                continue
            key = prefix + (str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?")
            if key in own:
                self.twice.append((key, line))
            own.add(key)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                self.mapping(value_node, f"{key}.", path)
            else:
                self.values[key] = Said(self._value(value_node, path), f"{self.name}:{line}")

    def _merge(self, nodes: list[yaml.Node], prefix: str, path: tuple[int, ...]) -> None:
        """`<<: *anchor`, and `<<: [*anchor, *another]`, of which the first one wins."""
        for node in reversed(nodes):
            if isinstance(node, yaml.SequenceNode):
                self._merge(node.value, prefix, self._enter(node, path))
            elif isinstance(node, yaml.MappingNode):
                self.mapping(node, prefix, path)

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
