"""Read YAML as dotted keys with line numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cohort.check.findings import Finding
from cohort.check.launch import Setting
from cohort.check.readers.files import find_text
from cohort.config.yaml_text import compose

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class YamlTree:
    """A flattened YAML mapping."""

    values: dict[str, Setting]  # dotted keys; lists and empty mappings are values
    twice: tuple[tuple[str, int], ...]  # keys that are there twice, with the line of the second one

    def nested_once(self) -> dict[str, Setting]:
        """The values by top-level key. A nested mapping (`model_init_kwargs`) is one value."""
        flat: dict[str, Setting] = {}
        for key, said in self.values.items():
            top, _, rest = key.partition(".")
            if not rest:
                flat[top] = said
                continue
            if top not in flat or not isinstance(flat[top].value, dict):
                flat[top] = Setting({}, said.where)
            flat[top].value[rest] = said.value
        return flat

    def duplicates(self) -> tuple[Finding, ...]:
        """Findings for duplicate keys, of which YAML readers keep the last one."""
        message = "{0} is there twice; the value on line {1} counts and the earlier one is dropped"
        return tuple(Finding("CHK005", key, message.format(key, line)) for key, line in self.twice)


def read_yaml_tree(text: str, name: str) -> YamlTree | None:
    """Read the mapping of a YAML document; `name` is its file's. None if it holds something else.

    Raises:
        ValueError: as `compose`.
    """
    node = compose(text)
    if not isinstance(node, yaml.MappingNode):
        return None
    reader = _Reader(name)
    reader.mapping(node, "")
    return YamlTree(reader.values, tuple(reader.twice))


def find_yaml(name: str, folder: Path) -> YamlTree:
    """Read a YAML or JSON file that another file names.

    Raises:
        ValueError: it cannot be found or read, or holds no mapping.
    """
    path, text = find_text(name, folder)
    tree = read_yaml_tree(text, path.name)
    if tree is None:
        raise ValueError(f"{path}: holds no mapping")
    return tree


class _Reader:
    """Collects the values of a document."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, Setting] = {}
        self.twice: list[tuple[str, int]] = []
        self._loader = yaml.SafeLoader("")

    def mapping(self, node: yaml.MappingNode, prefix: str) -> None:
        """Add the values of a mapping."""
        own: set[str] = set()
        merged = [value for key, value in node.value if key.tag == _MERGE]
        self._merge(merged, prefix)  # first, as keys that stand there themselves win
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                continue
            key = prefix + (str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?")
            if key in own:
                self.twice.append((key, line))
            own.add(key)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                self.mapping(value_node, f"{key}.")
            else:
                self.values[key] = Setting(self._value(value_node), f"{self.name}:{line}")

    def _merge(self, nodes: list[yaml.Node], prefix: str) -> None:
        """Merge `<<: *anchor` or `<<: [*anchor, *another]`, of which the first one wins."""
        for node in reversed(nodes):
            if isinstance(node, yaml.SequenceNode):
                self._merge(node.value, prefix)
            elif isinstance(node, yaml.MappingNode):
                self.mapping(node, prefix)

    def _value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {str(key.value): self._value(value) for key, value in node.value}
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, LookupError, ValueError, AttributeError, TypeError, ArithmeticError):
            # a tag of its own, a date that does not exist, `!!bool maybe`
            return str(node.value)
