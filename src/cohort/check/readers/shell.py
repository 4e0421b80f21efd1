"""Shell scripts read as text: words, variables assigned in the file, defaults. Nothing is run.

What only a running shell knows (a variable from outside, `$(command)`, what a branch assigns) is named as missing, and
the rest of the word is kept.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from cohort.check.readers.shell_words import Word, end_of_balanced, end_of_quoted, expand
from cohort.check.readers.slurm import read_job

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_OPENS = {"if", "for", "while", "until", "case", "select"}
_CLOSES = {"fi", "done", "esac"}
_GOES_ON = {"then", "else", "do", "!", "{", "}", "time", "elif"}
_PREFIXES = {"export", "declare", "local", "readonly", "typeset"}
_LAUNCHERS = {"sudo", "env", "nohup", "exec", "command"}

_MOST_NESTED = 4  # functions that call functions, shells in shells
_FUNCTION = re.compile(
    r"[ \t]*(?:function[ \t]+([A-Za-z_][\w-]*)(?:[ \t]*\(\))?|([A-Za-z_][\w-]*)[ \t]*\(\))[ \t\n\x00]*\{(?=[\s\x00])"
)
_MOST_EXPANDED = 1_000_000  # characters of all expanded words together


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
    job = read_job(text)
    scanner = _Scanner(text.replace("\x00", " ").replace("\r\n", "\n").replace("\\\n", "\x00"))
    scanner.variables = {name: [Word(value)] for name, value in job.variables().items()}
    return tuple(scanner.commands())


@dataclass(slots=True)
class _Function:
    """A function of the script."""

    body: str
    line: int
    called: bool = False


def _script_of_shell(command: Command) -> Word | None:
    """What `bash -c` runs, wherever it stands in the command: behind srun, ssh or docker too."""
    names = [word.text.rsplit("/", 1)[-1] for word in command.words]
    for place, (name, option) in enumerate(pairwise(names)):
        if name in ("bash", "sh", "zsh") and re.fullmatch("-[a-z]*c", option) and place + 2 < len(names):
            return command.words[place + 2]
    return None


class _Scanner:
    """Reads a script from left to right. A continued line is one NUL, so that line numbers can be counted."""

    def __init__(self, text: str, *, line: int = 1, nested: int = 0) -> None:
        self.text, self.at, self.line = text, 0, line
        self.nested = nested  # calls of functions and shells in shells around this text
        self.functions: dict[str, _Function] = {}
        self.variables: dict[str, list[Word]] = {}
        self.exported: dict[str, Word] = {}
        self.depth = 0  # of if, for, while, case
        self.after_test = False  # whether && or || ended the last command
        self.expanded = 0  # characters so far

    def commands(self) -> list[Command]:
        """All commands. A function's are those of each of its calls; of one that is not called, those of its body."""
        found: list[Command] = []
        while self.at < len(self.text):
            if self._reads_function():
                continue
            line, conditional = self.line, self.after_test
            raw = self._raw_command()
            self.depth += conditional
            command = self._command(raw, line) if raw else None
            self.depth -= conditional
            if command:
                found += self._inside(command)
        if self.nested == 0:
            for function in [f for f in self.functions.values() if not f.called]:
                found += self._nested(_Scanner(function.body, line=function.line, nested=1))
        return found

    def _reads_function(self) -> bool:
        """Take a definition in, where one stands here."""
        match = _FUNCTION.match(self.text, self.at)
        if not match:
            return False
        self._skip_to(match.end() - 1)
        start, line = self.at + 1, self.line
        self._skip_to(end_of_balanced(self.text, self.at, "{", "}"))
        self.functions[match[1] or match[2]] = _Function(self.text[start : self.at - 1], line)
        return True

    def _inside(self, command: Command) -> list[Command]:
        """The commands of a function that this one calls, or of `bash -c '...'`; otherwise itself."""
        if self.nested >= _MOST_NESTED:
            return [command]
        name = command.words[0].text
        if name in self.functions:
            function = self.functions[name]
            function.called = True
            inner = _Scanner(function.body, line=function.line, nested=self.nested + 1)
            arguments = command.words[1:]
            own = {str(place): [word] for place, word in enumerate(arguments, start=1)}
            return [
                Command(found.env, found.words, command.line)
                for found in self._nested(inner, own | {"@": list(arguments), "*": list(arguments)})
            ]
        script = _script_of_shell(command)
        if script is None:
            return [command]
        inner = _Scanner(script.text, line=command.line, nested=self.nested + 1)
        inner.exported = dict(command.env)
        inner.variables = {name: [word] for name, word in command.env.items()}
        unread = (Word("", script.missing),) if script.missing else ()  # whatever else would stand there
        return [Command(found.env, (*found.words, *unread), found.line) for found in inner.commands()]

    def _nested(self, inner: "_Scanner", own: Mapping[str, list[Word]] | None = None) -> list[Command]:
        """The commands of a text that shares this one's variables, with arguments of its own."""
        inner.variables = {**self.variables, **(own or {})}
        inner.exported, inner.functions, inner.depth = self.exported, self.functions, self.depth
        inner.expanded = self.expanded
        found = inner.commands()
        self.expanded = inner.expanded
        self.variables |= {name: words for name, words in inner.variables.items() if name not in (own or {})}
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
                    self._skip_to(end_of_balanced(self.text, self.at, "(", ")"))
                    continue
                break
            if character == "\\":
                self._step()
                if self.at < len(self.text):
                    self._step()
            elif character in "'\"`":
                self._skip_to(end_of_quoted(self.text, self.at))
            elif self.text.startswith(("$(", "${"), self.at):
                pair = "()" if self.text[self.at + 1] == "(" else "{}"
                self._skip_to(end_of_balanced(self.text, self.at + 1, *pair))
            else:
                self._step()
        if self.at == start:  # a character that starts nothing
            self._step()
        return self.text[start : self.at]

    def _skip_to(self, end: int) -> None:
        self.line += sum(self.text.count(character, self.at, end) for character in "\n\x00")
        self.at = end

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
            added = expand(part, self.variables, split=split)
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
