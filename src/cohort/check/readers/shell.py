"""Shell scripts read as text: words, variables assigned in the file, defaults. Nothing is run.

What only a running shell knows (a variable from outside, `$(command)`, what a branch assigns) is named as missing, and
the rest of the word is kept.
"""

import ast
import operator
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_OPENS = {"if", "for", "while", "until", "case", "select"}
_CLOSES = {"fi", "done", "esac"}
_GOES_ON = {"then", "else", "do", "!", "{", "}", "time", "elif"}
_PREFIXES = {"export", "declare", "local", "readonly", "typeset"}
_LAUNCHERS = {"sudo", "env", "nohup", "exec", "command"}


_LONGEST = 10_000  # characters of an expanded word
_MOST_EXPANDED = 1_000_000  # characters of all expanded words together


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, expanded as far as the file goes."""

    text: str
    missing: tuple[str, ...] = ()  # what could not be resolved, such as ("$MODEL",)


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command."""

    env: Mapping[str, Word]  # what was exported before it, and what stands before it
    words: tuple[Word, ...]
    line: int


@lru_cache(maxsize=8)
def parse_shell(text: str) -> tuple[Command, ...]:
    """The commands of a script in order.

    Raises:
        ValueError: its variables expand to more than any script holds.
    """
    scanner = _Scanner(text.replace("\x00", " ").replace("\r\n", "\n").replace("\\\n", "\x00"))
    return tuple(scanner.commands())


class _Scanner:
    """Reads a script from left to right. A continued line is one NUL, so that line numbers can be counted."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.variables: dict[str, list[Word]] = {}
        self.exported: dict[str, Word] = {}
        self.depth = 0  # of if, for, while, case
        self.after_test = False  # whether && or || ended the last command
        self.expanded = 0  # characters so far

    def commands(self) -> list[Command]:
        """All commands."""
        found: list[Command] = []
        while self.at < len(self.text):
            line, conditional = self.line, self.after_test
            raw = self._raw_command()
            self.depth += conditional
            command = self._command(raw, line) if raw else None
            self.depth -= conditional
            if command:
                found.append(command)
        return found

    def _raw_command(self) -> list[str]:
        """The unexpanded words up to the end of the command."""
        words: list[str] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\x00":
                self._step()
            elif character == "#":
                self._skip_to_line_end()
            elif self.text.startswith("<<", self.at) and not self.text.startswith("<<<", self.at):
                self._skip_here_document()
                return words
            elif character in "\n;&|()":
                self.after_test = self.text.startswith(("&&", "||"), self.at)
                self.at += self.after_test  # of two characters, the first
                self._step()
                return words
            elif character in "<>":
                self._skip_redirection()
            else:
                word = self._raw_word()
                if not (word.isdigit() and self.text[self.at : self.at + 1] in ("<", ">")):  # 2>&1 is no word
                    words.append(word)
        return words

    def _step(self) -> None:
        if self.text[self.at] in "\n\x00":
            self.line += 1
        self.at += 1

    def _skip_to_line_end(self) -> None:
        # A continued comment line ends at the backslash for the shell: a comment has no continuation.
        while self.at < len(self.text) and self.text[self.at] not in "\n\x00":
            self.at += 1

    def _skip_redirection(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in "<>&":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in "\n;|\x00":
            self._raw_word()

    def _skip_here_document(self) -> None:
        match = re.compile(r"<<-?[ \t]*(['\"]?)([A-Za-z0-9_]+)\1[^\n]*\n?").match(self.text, self.at)
        if not match:
            self.at += 2
            return
        end = re.compile(rf"^[ \t]*{re.escape(match[2])}[ \t]*$", re.MULTILINE).search(self.text, match.end())
        stop = end.end() if end else len(self.text)
        self.line += len(re.findall("[\n\x00]", self.text[self.at : stop]))
        self.at = stop

    def _raw_word(self) -> str:
        """The next word with its quotes and dollars."""
        start = self.at
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\n;&|<>()\x00":
                if character == "(" and self.text[self.at - 1] == "=" and self.at > start:
                    self._skip_balanced("(", ")")
                    continue
                break
            if character == "\\":
                self._step()
                if self.at < len(self.text):
                    self._step()
            elif character in "'\"`":
                self._skip_quoted(character)
            elif self.text.startswith("$(", self.at):
                self.at += 1
                self._skip_balanced("(", ")")
            elif self.text.startswith("${", self.at):
                self.at += 1
                self._skip_balanced("{", "}")
            else:
                self._step()
        if self.at == start:  # a character that starts nothing
            self._step()
        return self.text[start : self.at]

    def _skip_quoted(self, quote: str) -> None:
        self._step()
        while self.at < len(self.text) and self.text[self.at] != quote:
            if quote == '"' and self.text.startswith("$(", self.at):  # which may hold quotes of its own
                self.at += 1
                self._skip_balanced("(", ")")
                continue
            if self.text[self.at] == "\\" and quote != "'" and self.at + 1 < len(self.text):
                self._step()
            self._step()
        if self.at < len(self.text):
            self._step()

    def _skip_balanced(self, opening: str, closing: str) -> None:
        depth = 0
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "'\"":
                self._skip_quoted(character)
                continue
            if character == "#" and self.text[self.at - 1] in " \t\n\x00":
                self._skip_to_line_end()
                continue
            depth += (character == opening) - (character == closing)
            self._step()
            if depth == 0:
                return

    def _command(self, raw: list[str], line: int) -> Command | None:
        """The command with its variables expanded; None for a mere assignment or a word of the language."""
        while raw and raw[0] in _OPENS | _CLOSES | _GOES_ON:
            word = raw.pop(0)
            self.depth += (word in _OPENS) - (word in _CLOSES)
            if word in ("for", "select") and raw:
                self.variables[raw[0]] = [Word("", (f"${raw[0]}",))]
                return None
            if word in ("case", "{", "}"):
                return None
        exports = bool(raw) and raw[0] in _PREFIXES
        if exports:
            exports = raw.pop(0) in ("export", "declare", "typeset")
            raw = [word for word in raw if not word.startswith("-")]
        while len(raw) > 1 and raw[0] in _LAUNCHERS:
            raw.pop(0)
        assignments: dict[str, list[Word]] = {}
        while raw and (match := _ASSIGNMENT.match(raw[0])):
            value = raw.pop(0)[match.end() :]
            words, old = self._assigned(value), self.variables.get(match[1], [])
            if match[2] and value.startswith("("):
                words = [*old, *words]
            elif match[2] and old:  # text is added to text
                words = [*old[:-1], Word(old[-1].text + words[0].text, (*old[-1].missing, *words[0].missing))]
            assignments[match[1]] = words
        if exports or not raw:
            for name, words in assignments.items():
                self._assign(name, words)
            for name in [*assignments, *raw] if exports else ():
                if len(self.variables.get(name, [])) == 1:
                    self.exported[name] = self.variables[name][0]
            return None
        prefix = {name: words[0] for name, words in assignments.items() if len(words) == 1}
        expanded = self._expand_all(raw)
        return Command({**self.exported, **prefix}, tuple(expanded), line) if expanded else None

    def _assigned(self, value: str) -> list[Word]:
        if value.startswith("("):
            inner, parts = _Scanner(value[1:-1]), []
            while inner.at < len(inner.text):  # lines of an array are no commands of their own
                parts += inner._raw_command()
            return self._expand_all(parts)
        return self._expand_all([value], split=False) or [Word("")]

    def _expand_all(self, parts: list[str], *, split: bool = True) -> list[Word]:
        words: list[Word] = []
        for part in parts:
            added = _expand(part, self.variables, split=split)
            self.expanded += sum(len(word.text) + 1 for word in added)
            if self.expanded > _MOST_EXPANDED:
                raise ValueError(f"line {self.line}: variables expand to more than {_MOST_EXPANDED:,} characters")
            words += added
        return words

    def _assign(self, name: str, words: list[Word]) -> None:
        if self.depth and name in self.variables and self.variables[name] != words:
            words = [Word("", (f"${name} (assigned in a branch)",))]
        self.variables[name] = words
        if name in self.exported and len(words) == 1:
            self.exported[name] = words[0]


def _expand(raw: str, variables: Mapping[str, list[Word]], *, split: bool = True) -> list[Word]:
    """One raw word as words: an unquoted variable splits at its blanks, and may be nothing."""
    done: list[Word] = []
    text, exists, at = "", False, 0
    size = 0  # of what variables stood for
    vanished = False  # "$@" without arguments is no word, though it is quoted
    missing: list[str] = []
    quote = ""

    def end_word() -> None:
        nonlocal text, missing, exists, vanished
        if exists and (text or missing or not vanished):
            done.append(Word(text, tuple(dict.fromkeys(missing))))
        text, missing, exists, vanished = "", [], False, False

    while at < len(raw):
        character = raw[at]
        if character == "\x00":
            at += 1
        elif character == "\\" and quote != "'":
            if quote and raw[at + 1 : at + 2] not in ("$", "`", '"', "\\"):
                text += "\\"  # inside double quotes a backslash before anything else stays
            text, exists, at = text + raw[at + 1 : at + 2], True, at + 2
        elif character in "'\"" and quote in ("", character):
            quote, exists, at = "" if quote else character, True, at + 1
        elif character in "$`" and quote != "'":
            words, at = _expansion(raw, at, variables)
            vanished = vanished or not words
            if not quote and split:
                words = [Word(part, word.missing) for word in words for part in word.text.split() or [""]]
                words = [word for word in words if word.text or word.missing]
            size += sum(len(word.text) + 1 for word in words)
            if size > _LONGEST:
                return [Word("", (f"a value of more than {_LONGEST:,} characters",))]
            for i, word in enumerate(words):
                if i:
                    end_word()
                text, exists = text + word.text, True
                missing.extend(word.missing)
        else:
            text, exists, at = text + character, True, at + 1
    end_word()
    return done


def _expansion(raw: str, at: int, variables: Mapping[str, list[Word]]) -> tuple[list[Word], int]:
    """What stands at a dollar or a back-quote, and where it ends."""
    if raw[at] == "`":
        end = raw.find("`", at + 1)
        end = len(raw) if end < 0 else end + 1
        return [Word("", (raw[at:end],))], end
    if raw.startswith(("$(", "${"), at):
        scanner = _Scanner(raw)
        scanner.at = at + 1
        scanner._skip_balanced(*("()" if raw[at + 1] == "(" else "{}"))
        inner = raw[at + 2 : scanner.at - 1]
        if inner.startswith("(") and inner.endswith(")"):
            return [_arithmetic(raw[at : scanner.at], variables)], scanner.at
        if raw[at + 1] == "(":
            return [Word("", (raw[at : scanner.at],))], scanner.at
        return _parameter(inner, variables), scanner.at
    match = _NAME.match(raw, at + 1)
    if match:
        return _value(match[0], variables), match.end()
    special = raw[at + 1 : at + 2]
    if special in ("@", "*"):  # the script's own arguments: none when nobody gives any
        return [], at + 2
    if special.isdigit() or special in ("?", "$", "#", "!"):
        return [Word("", (f"${special}",))], at + 2
    return [Word("$")], at + 1


def _parameter(inner: str, variables: Mapping[str, list[Word]]) -> list[Word]:
    """`${inner}`: a name, an array, or a name with a default."""
    match = _NAME.match(inner)
    if not match:
        return [] if inner[:1] in ("@", "*") else [Word("", (f"${{{inner}}}",))]
    name, rest = match[0], inner[match.end() :]
    if rest in ("", "[@]", "[*]"):
        return _value(name, variables)
    default = re.match(r":?[-=]", rest)
    if default:
        known = variables.get(name)
        empty = known is not None and len(known) == 1 and not known[0].text and not known[0].missing
        if known is not None and not (empty and rest.startswith(":")):
            return known
        return _expand(rest[default.end() :], variables, split=False) or [Word("")]
    return [Word("", (f"${{{inner}}}",))]


def _value(name: str, variables: Mapping[str, list[Word]]) -> list[Word]:
    return variables[name] if name in variables else [Word("", (f"${name}",))]


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _arithmetic(raw: str, variables: Mapping[str, list[Word]]) -> Word:
    """`$((a * b))` of whole numbers."""
    unknown = Word("", (raw,))

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            words = variables.get(node.id, [])
            if len(words) != 1 or words[0].missing:
                raise ValueError(node.id)
            return int(words[0].text)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            if max(abs(left), abs(right)) > 10**12:
                raise ValueError("too large")
            return int(_OPERATORS[type(node.op)](left, right))
        raise ValueError("not plain arithmetic")

    try:
        text = re.sub(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", r"\1", raw[3:-2]).strip().replace("\x00", " ")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return Word(str(value(ast.parse(text, mode="eval").body)))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return unknown
