"""Parse shell scripts into commands, expanding the variables that the script assigns. Nothing is run."""

import ast
import math
import re
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product, takewhile

import tree_sitter
import tree_sitter_bash

from cohort_check.readers.python_values import UNREADABLE, compute

_BASH = tree_sitter.Language(tree_sitter_bash.language())
_MOST_EXPANDED = 1_000_000  # characters of all variables where they are used
_MOST_REASONS = 4  # why a word is not known
_MOST_VARIANTS = 16  # of a script, by the ways through its branches
_EXPORTED = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES")  # that decide something
_BRANCHES = {"elif_clause", "else_clause", "case_item", "do_group"}
_PLACEHOLDER = re.compile(r"(?<=[ =])(<[A-Za-z][\w-]*>)(?=\s|$)")
# tree-sitter-bash can crash on characters from here on, which no script has
_UNASSIGNED = re.compile("[\U00030000-\U0010ffff]")
_BLANK = re.compile(r"(?<!\\)\\[ \t](?:#|(?=[ \t]*$|[ \t]+#))", re.MULTILINE)  # a backslash that continues no line
_ENDS_HERE = "a backslash before a blank is an argument of its own, and the command ends on this line"
_DIRNAME = r"\$\(dirname (?:-- )?\"?\$(?:0|BASH_SOURCE|\{(?:0|BASH_SOURCE(?:\[0\])?)\})\"?\)"
_OWN_FOLDER = re.compile(rf'{_DIRNAME}|\$\(cd (?:-- )?"?{_DIRNAME}((?:/\.\.)*)/?"?(?: &?>[^&]*)? && pwd(?: -P)?\)')
_WHERE_IS = re.compile(r"\$\((?:which|command -v) +([\w.-]+)\)")
_UNQUOTED_LINE = re.compile(r"^[^\"'\n]*$", re.MULTILINE)
_PARAMETER = re.compile(r"\$\{([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(:?[-=?+]|:\d+\}$|\}$)")


Known = tuple[tuple[str, str], ...]  # variables and their values


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, as far as it can be expanded."""

    text: str
    where: str = field(default="", compare=False)  # NAME:LINE
    missing: tuple[str, ...] = ()  # why a part of it is not known
    choices: tuple[str, ...] = field(default=(), compare=False)  # values of which a branch decides; "": none

    @property
    def name(self) -> str:
        """Without folders: `launch.sh` of `scripts/launch.sh`."""
        return self.text.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command."""

    words: tuple[Word, ...]
    env: Mapping[str, Word] = field(default_factory=dict)  # of `_EXPORTED` and what stands before the command

    @property
    def where(self) -> str:
        """Of its first word."""
        return self.words[0].where

    def has(self, *names: str) -> bool:
        """Whether the command contains these words in sequence."""
        own = [word.name for word in self.words]
        return any(tuple(own[i : i + len(names)]) == names for i in range(len(own)))


Arms = tuple[tuple[int, int], ...]  # by where a branch starts: which of its arms is taken


def parse_shell(text: str, name: str, *, known: Known = (), arms: Arms = ()) -> tuple[Command, ...]:
    """Parse the commands of a script, in order. `name` is its file's; the variables `known` are set when it starts.

    Raises:
        ValueError: its variables expand to more than any script holds.
        RecursionError: it is nested too deeply.
    """
    return tuple(_walked(text, name, known, arms).commands)


def exported(text: str, name: str) -> Known:
    """The variables that a script hands to those that it starts, as far as their values are known."""
    walker = _walked(text, name, (), ())
    given = {key: _joined(walker.variables.get(key, [])) for key in walker.exported}
    return tuple((key, word.text) for key, word in given.items() if not word.missing)


def variants(text: str, name: str, variables: Iterable[str], *, known: Known = ()) -> Iterator[Arms]:
    """Yield each way through the branches that decide these variables; none if there are too many."""
    decided = _walked(text, name, known, ()).decided
    places = dict(sorted(place for variable in variables for place in decided.get(variable, {}).items()))
    if places and math.prod(places.values()) <= _MOST_VARIANTS:
        yield from (tuple(zip(places, taken, strict=True)) for taken in product(*map(range, places.values())))


@lru_cache(maxsize=8)
def _walked(text: str, name: str, known: Known, arms: Arms) -> "_Walker":
    walker = _Walker(name, {"HOME": "~", "PWD": ".", **dict(known)}, dict(arms))
    walker.walk(_tree(text))
    return walker


def _tree(text: str) -> tree_sitter.Node:
    """Parse a script. A placeholder such as `<your-model>` is a word, not a redirection."""
    plain = _UNASSIGNED.sub("\ufffd", text.replace("\r\n", "\n"))
    plain = _UNQUOTED_LINE.sub(lambda line: _BLANK.sub("'\ue000'", _PLACEHOLDER.sub(r"'\1'", line[0])), plain)
    return tree_sitter.Parser(_BASH).parse(plain.encode(errors="replace")).root_node


def _text(node: tree_sitter.Node) -> str:
    return (node.text or b"").decode(errors="replace")


class _Walker:
    """Walk a script once, from its first line to its last."""

    def __init__(self, name: str, variables: Mapping[str, str], arms: Mapping[int, int]) -> None:
        self.name, self.arms = name, arms
        # by variable: where branches start that decide its value, and how many arms they have
        self.decided: dict[str, dict[int, int]] = defaultdict(dict)
        self.commands: list[Command] = []
        # one word each, or those of an array, which have their own places
        self.variables: ChainMap[str, list[Word]] = ChainMap({key: [Word(text)] for key, text in variables.items()})
        self.exported: set[str] = set()
        self._expanded = 0

    def walk(self, node: tree_sitter.Node) -> None:
        """Read a statement.

        A branch's assignments hold inside it, and after it if they agree. Functions are read where they are defined.
        """
        if node.type == "command":
            self._command(node)
        elif node.type == "variable_assignment":
            self._assign(node, self.variables)
        elif node.type == "declaration_command":
            names = [child for child in node.named_children if child.type == "variable_assignment"]
            exported = [self._assign(child, self.variables) for child in names]
            if _text(node).startswith(("export", "declare -x", "typeset -x")):
                self.exported |= {*exported, *(_text(child) for child in node.named_children)}
        elif node.type in ("if_statement", "case_statement", "for_statement", "while_statement", "list"):
            self._branches(node)
        elif not node.type.startswith(("heredoc", "test_command")):
            for child in node.named_children:
                self.walk(child)

    def _branches(self, node: tree_sitter.Node) -> None:
        arms = [child for child in node.named_children if child.type in _BRANCHES]
        rest = [child for child in node.named_children if child.type not in _BRANCHES]
        variable = node.child_by_field_name("variable")
        if variable:  # of a loop
            name = _text(variable)
            self.variables[name] = [Word("", missing=(f"${name} is set by a loop",))]
            given = [child for child in node.children if child.type in ("in", "ERROR")]  # ERROR: `in` and no word
            if given and not any(self._argument(child) for child in rest if child not in (variable, *given)):
                return  # over nothing
        elif node.type == "list" and rest:  # A && B
            self.walk(rest.pop(0))
        before, ends = self.variables, []
        ways = ([rest] if node.type in ("if_statement", "list") else []) + [[arm] for arm in arms]
        if not any(arm.type == "else_clause" or _text(arm).lstrip("(").startswith("*)") for arm in arms):
            ways.insert(0, [])
        if (taken := self.arms.get(node.start_byte)) is not None:
            ways = [ways[taken]]
        for way in ways:
            self.variables = before.new_child()
            for child in way:
                for part in child.named_children if child.type in _BRANCHES else [child]:
                    self.walk(part)
            ends.append(self.variables)
        self.variables = before
        for name in dict.fromkeys(name for end in ends for name in end.maps[0]):
            values = [end[name] for end in ends if name in end]
            before[name] = merged = _merged(name, values)
            if len(values) < len(ends) and len(merged) == 1 and not merged[0].where:  # not set in one of them
                before[name] = [replace(merged[0], choices=("", *_choices(merged[0])))]
            if any(word.missing or word.choices for word in before[name]):
                self.decided[name][node.start_byte] = len(ends)

    def _command(self, node: tree_sitter.Node) -> None:
        exported = [key for key in _EXPORTED if key in self.exported and key in self.variables]
        env = {key: self.variables[key] for key in exported}
        words: list[Word] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child, env)
            elif not child.type.endswith("redirect"):
                inner = child.named_children[0] if child.type == "command_name" and child.named_children else child
                words += self._argument(inner)
        if not words:
            return
        known = {key: replace(value[0], where=self._where(node)) for key, value in env.items() if value}
        self.commands.append(Command(tuple(words), known))
        unread = [replace(words[-1], text="")] if words[-1].missing else []
        if words[0].text == "eval" or any(re.fullmatch(r"-l?c", word.text) for word in words):  # bash -c '...'
            for found in parse_shell(words[-1].text, self.name):
                moved = [replace(word, where=words[0].where) for word in found.words]
                self.commands.append(Command((*moved, *unread), {**known, **found.env}))

    def _assign(self, node: tree_sitter.Node, variables: MutableMapping[str, list[Word]]) -> str:
        """Assign `NAME=value`, `NAME+=value` or `NAME=(...)`, and return the name."""
        target, given = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = _text(target).partition("[")[0] if target else ""
        if target is None or target.type == "subscript":  # A[2]=x
            value = [Word("", missing=(f"${name} is assigned in parts",))]
        elif given is not None and given.type == "array":
            value = [word for child in given.named_children for word in self._argument(child)]
        else:
            value = [_joined(self._pieces(given, quoted=True) if given else [])]
        if any(child.type == "+=" for child in node.children):
            old = self.variables.get(name, [])
            is_array = len(old) != 1 or (given is not None and given.type == "array")
            value = [*old, *value] if is_array else [_joined([*old, *value])]
        variables[name] = value
        return name

    def _where(self, node: tree_sitter.Node) -> str:
        return self.name if self.name.startswith("--") else f"{self.name}:{node.start_point[0] + 1}"

    def _argument(self, node: tree_sitter.Node) -> list[Word]:
        """Expand one argument. An array or an unquoted variable can be no word or several."""
        words = self._pieces(node, quoted=False) if node.type != "comment" else []
        return [word if word.where else replace(word, where=self._where(node)) for word in words]

    def _pieces(self, node: tree_sitter.Node, *, quoted: bool) -> list[Word]:
        """Expand a node into words. Unquoted variables are split at whitespace."""
        text = _text(node)
        if node.type in ("simple_expansion", "expansion"):
            blanks, text = text[: len(text) - len(text.lstrip())], text.lstrip()  # the grammar has them in the node
            words = self._parameter(node, text)
            self._expanded += sum(len(word.text) + 1 for word in words)
            if self._expanded > _MOST_EXPANDED:
                raise ValueError(f"{self._where(node)}: variables expand to more than {_MOST_EXPANDED:,} characters")
            if quoted:
                return _concatenated([[Word(blanks)], words]) if blanks else words
            pieces = [(word, word.text.split() or [""] * bool(word.missing)) for word in words]
            return [replace(word, text=part) for word, parts in pieces for part in parts]
        if node.type in ("string", "translated_string", "concatenation"):
            inside = quoted or node.type != "concatenation"
            parts: list[list[Word]] = []
            source, at = node.text or b"", 0
            for child in node.children:
                before = source[at : child.start_byte - node.start_byte]
                at = child.end_byte - node.start_byte
                own = b"" if child.is_named else (child.text or b"").rstrip(b'"$}')  # blanks before a quotation mark
                parts.append(_literal(before + own, quoted=inside))
                parts.append(self._pieces(child, quoted=inside) if child.is_named else [])
            words = _concatenated(parts)
            vanishes = node.type == "concatenation" or any("@" in _text(child) for child in node.named_children)
            return words or ([] if vanishes else [Word("")])
        # in a default, the grammar takes $((...)) for a command
        if node.type == "arithmetic_expansion" or (text.startswith("$((") and text.endswith("))")):
            return [self._arithmetic(text)]
        if node.type == "command_substitution" and (folder := _OWN_FOLDER.fullmatch(text)):
            return [Word(f".{folder[1] or ''}")]  # relative to the script, as files that it names are
        if program := _WHERE_IS.fullmatch(text):
            return [Word(program[1])]
        if node.type in ("command_substitution", "process_substitution"):
            return [Word("", missing=(f"{text:.80} is the output of a command, and nothing is run",))]
        if node.type in ("raw_string", "ansi_c_string"):
            return [Word("", missing=(_ENDS_HERE,)) if text == "'\ue000'" else Word(text.lstrip("$")[1:-1])]
        return _literal(node.text or b"", quoted=quoted and node.type == "string_content") or [Word("")]

    def _parameter(self, node: tree_sitter.Node, text: str) -> list[Word]:
        """Expand `$NAME`, `${NAME}`, `${NAME[@]}`, `${NAME:-default}` and `${NAME:+word}`."""
        match = _PARAMETER.match(text if text.startswith("${") else f"${{{text[1:]}}}")
        if match is None:
            return [Word("", missing=(f"{text:.80} is not worked out",))]
        name, operator = match[1], match[3]
        value = self.variables.get(name)
        if operator.endswith("+") and (not value or not any(word.missing for word in value)):
            return self._default(node, operator) if value and (value != [Word("")] or operator == "+") else []
        if value is not None and not (operator.startswith(":") and value == [Word("")]):
            if operator.startswith(":-") and len(value) == 1 and "" in value[0].choices:
                default = self._default(node, operator)[0].text  # stands in the place of nothing
                return [_chosen(name, (choice or default for choice in value[0].choices))]
            return value
        if operator.endswith("="):  # : "${NAME:=default}"
            self.variables[name] = self._default(node, operator)
        if operator.endswith(("-", "=")):
            return self._default(node, operator)
        shown = "$@" if name in "@*" else f"${name}"
        return [Word(shown if name in "@*" else "", missing=(f"{shown} is set outside of this file",))]

    def _default(self, node: tree_sitter.Node, operator: str) -> list[Word]:
        at = next((i for i, child in enumerate(node.children) if child.type == operator), len(node.children))
        default = [child for child in node.children[at + 1 :] if child.is_named]
        return _concatenated([self._pieces(child, quoted=True) for child in default]) or [Word("")]

    def _arithmetic(self, text: str) -> Word:
        """Evaluate integer arithmetic such as `$((a * b))`."""

        def value(node: ast.expr) -> int:
            if not isinstance(node, ast.Name):
                return int(ast.literal_eval(node))
            (word,) = self.variables[node.id]
            return int("".join((word.text, *word.missing)))

        plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", r"\1", text[3:-2].replace("/", "//"))
        try:
            return Word(str(int(compute(ast.parse(plain.strip(), mode="eval").body, value))))
        except UNREADABLE:
            used = [word for name in re.findall(r"[A-Za-z_]\w*", text) for word in self.variables.get(name, [])]
            return Word("", missing=_joined(used).missing or (f"{text:.80} is not worked out",))


def _literal(text: bytes, *, quoted: bool) -> list[Word]:
    """Remove backslash escapes from plain text; no word if it is empty."""
    escaped = r"\\(\n|[\"$`\\])" if quoted else r"\\(.|\n)"
    plain = re.sub(escaped, lambda match: match[1].strip("\n"), text.decode(errors="replace"), flags=re.DOTALL)
    return [Word(plain)] if text else []


def _concatenated(parts: Iterable[Sequence[Word]]) -> list[Word]:
    """Join adjacent parts: the last word of one continues as the first word of the next."""
    groups: list[list[Word]] = []
    for part in filter(None, parts):
        if groups:
            groups[-1].append(part[0])
            groups += [[word] for word in part[1:]]
        else:
            groups = [[word] for word in part]
    return [_joined(group, next((word.where for word in group if word.where), "")) for group in groups]


def _joined(words: Sequence[Word], where: str = "") -> Word:
    """Join words into one."""
    missing = dict.fromkeys(reason for word in words for reason in word.missing)
    return Word("".join(word.text for word in words), where, tuple(missing)[:_MOST_REASONS])


def _merged(name: str, values: Sequence[list[Word]]) -> list[Word]:
    """Merge a variable's values after branches. Array words that only some branches add are unknown."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(len(value) == 1 and not value[0].where for value in values):
        return [_chosen(name, (choice for value in values for choice in _choices(value[0])))]
    pairs = zip(*values, strict=False)
    same = sum(1 for _ in takewhile(lambda words: all(word == words[0] for word in words), pairs))
    added = {word: None for value in values for word in value[same:]}
    told = f"only a branch adds it to ${name}"
    return [*values[0][:same], *(replace(word, missing=(told, *word.missing)) for word in added)]


def _choices(word: Word) -> tuple[str, ...]:
    return word.choices or (word.text or "".join(word.missing).partition(" is ")[0],)


def _chosen(name: str, values: Iterable[str]) -> Word:
    """The value of a variable that has several after branches, or the only one."""
    choices = tuple(dict.fromkeys(values))
    if len(choices) == 1 and not choices[0].startswith("$"):
        return Word(choices[0])
    told = " or ".join(choice or "nothing" for choice in choices)
    return Word("", missing=(f"${name} is {told:.80}, which a branch decides",), choices=choices)
