"""The words of a shell script: where quotes and brackets end, and what variables stand for, as far as the file goes."""

import ast
import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARGUMENT = re.compile(r"\d+")
_LONGEST = 10_000  # characters of an expanded word


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, expanded as far as the file goes."""

    text: str
    missing: tuple[str, ...] = ()  # what could not be resolved, such as ("$MODEL",)


def why_unread(missing: Iterable[str]) -> str:
    """What `Word.missing` names, in a sentence."""
    told: dict[str, list[str]] = {}
    for name in missing:
        if name.startswith("`") or (name.startswith("$(") and not name.startswith("$((")):
            reason = "is the output of a command, and nothing is run"
        elif name.startswith("$") and not name.startswith("$(("):
            reason = "is not assigned in the file"
        else:
            reason = "could not be worked out"
        told.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} {reason}" for reason, names in told.items())


def end_of_quoted(text: str, at: int) -> int:
    """Where what begins with the quote at `at` ends."""
    quote, at = text[at], at + 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text.startswith("$(", at):  # which may hold quotes of its own
            at = end_of_balanced(text, at + 1, "(", ")")
        elif text[at] == "\\" and quote != "'":
            at += 2
        else:
            at += 1
    return min(at + 1, len(text))


def end_of_balanced(text: str, at: int, opening: str, closing: str) -> int:
    """Where what begins with the bracket at `at` ends."""
    depth = 0
    while at < len(text):
        character = text[at]
        if character in "'\"":
            at = end_of_quoted(text, at)
            continue
        if character == "#" and text[at - 1] in " \t\n\x00":
            while at < len(text) and text[at] not in "\n\x00":
                at += 1
            continue
        depth += (character == opening) - (character == closing)
        at += 1
        if depth == 0:
            return at
    return at


def expand(raw: str, variables: Mapping[str, list[Word]], *, split: bool = True) -> list[Word]:
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
        end = end_of_balanced(raw, at + 1, *("()" if raw[at + 1] == "(" else "{}"))
        inner = raw[at + 2 : end - 1]
        if inner.startswith("(") and inner.endswith(")"):
            return [_arithmetic(raw[at:end], variables)], end
        if raw[at + 1] == "(":
            return [Word("", (raw[at:end],))], end
        return _parameter(inner, variables), end
    match = _NAME.match(raw, at + 1)
    if match:
        return _value(match[0], variables), match.end()
    special = raw[at + 1 : at + 2]
    if special in ("@", "*"):  # the script's own arguments: none when nobody gives any
        return variables.get(special, []), at + 2
    if special.isdigit():
        return _value(special, variables), at + 2
    if special in ("?", "$", "#", "!"):
        return [Word("", (f"${special}",))], at + 2
    return [Word("$")], at + 1


def _parameter(inner: str, variables: Mapping[str, list[Word]]) -> list[Word]:
    """`${inner}`: a name, an array, or a name with a default."""
    match = _NAME.match(inner) or _ARGUMENT.match(inner)
    if not match:
        later = re.fullmatch(r"[@*]:(\d+)", inner)
        if later:  # from one of them on
            return variables.get("@", [])[max(0, int(later[1]) - 1) :]
        return variables.get(inner[:1], []) if inner[:1] in ("@", "*") else [Word("", (f"${{{inner}}}",))]
    name, rest = match[0], inner[match.end() :]
    if rest in ("", "[@]", "[*]"):
        return _value(name, variables)
    default = re.match(r":?[-=]", rest)
    if default:
        known = variables.get(name)
        empty = known is not None and len(known) == 1 and not known[0].text and not known[0].missing
        if known is not None and not (empty and rest.startswith(":")):
            return known
        return expand(rest[default.end() :], variables, split=False) or [Word("")]
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
