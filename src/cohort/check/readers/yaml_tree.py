"""Read YAML as dotted keys with line numbers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cohort.check.findings import Finding
from cohort.check.launch import Setting
from cohort.check.readers.files import find_text
from cohort.config.yaml_text import compose


@dataclass(frozen=True, slots=True)
class YamlTree:
    """A YAML mapping."""

    values: dict[str, Setting] = field(default_factory=dict)  # dotted keys; lists and empty mappings are values
    top: dict[str, Setting] = field(default_factory=dict)  # top-level keys; a nested mapping is one value
    findings: list[Finding] = field(default_factory=list)  # keys that are there twice


def read_yaml_tree(text: str, name: str) -> YamlTree | None:
    """Read the mapping of a YAML document; `name` is its file's. None if it holds something else.

    Raises:
        ValueError: as `compose`, or `<<` merges something other than a mapping.
    """
    node = compose(text)
    if not isinstance(node, yaml.MappingNode):
        return None
    tree, loader = YamlTree(), yaml.SafeLoader("")

    def value_of(node: yaml.Node) -> Any:
        try:
            return loader.construct_object(node, deep=True)
        except (yaml.YAMLError, LookupError, ValueError, AttributeError, TypeError, ArithmeticError):
            # a tag of its own, a date that does not exist, `!!bool maybe`
            return text[node.start_mark.index : node.end_mark.index]

    def read(node: yaml.MappingNode, prefix: str) -> None:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            own = node.start_mark.index <= key_node.start_mark.index < node.end_mark.index  # and not merged
            if own and key in keys:
                told = f"{prefix}{key} is there twice; the value on line {line} counts and the earlier one is dropped"
                tree.findings.append(Finding("CHK005", prefix + key, told))
            keys |= {key} if own else set()
        loader.flatten_mapping(node)  # `<<: *anchor`
        for key_node, value_node in node.value:
            key, where = f"{prefix}{key_node.value}", f"{name}:{key_node.start_mark.line + 1}"
            if not prefix:
                tree.top[key] = Setting(value_of(value_node), where)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                read(value_node, f"{key}.")
            else:
                tree.values[key] = Setting(value_of(value_node), where)

    try:
        read(node, "")
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return tree


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
