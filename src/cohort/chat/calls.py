"""Parse one tool call: a small parser for each syntax of `cohort.chat.formats`.

A parser starts where a call starts, reads forward once, and raises `Malformed` unless the call is whole.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from cohort.chat.formats import Format

_SPACE = re.compile(r"\s*+")
_NAME = re.compile(r"[^\s<>{}()\[\]\"':,]{1,200}")
_MAX_DEPTH = 100  # of lists and objects in calls that are not JSON
_TOO_DEEP = "it is nested too deeply"


class Malformed(ValueError):  # noqa: N818
    """Why a text is not a whole call."""

    def __init__(self, reason: str, *, at_end: bool = False):
        super().__init__(reason)
        self.at_end = at_end  # the text ended too early, and may have gone on to a whole call


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as it was written."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. One of two equal keys would be dropped."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Malformed(f"{twice!r} is given twice")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


@dataclass(slots=True)
class Cursor:
    """A place in the text of a reply."""

    text: str
    pos: int
    start: int  # of the call
    is_cut: bool = False  # a limit ended the text, so what is missing at its end may have followed

    def fail(self, reason: str, *, at_end: bool = False) -> NoReturn:
        """Raise `Malformed` with the place, counted from the start of the call."""
        raise Malformed(f"{reason} (at character {self.pos - self.start})", at_end=at_end)

    def skip(self) -> None:
        """Go past white space."""
        self.pos = _SPACE.match(self.text, self.pos).end()  # type: ignore[union-attr]

    def take(self, *texts: str) -> str | None:
        """Go past the first of the texts that is here; None if none is."""
        for text in texts:
            if text and self.text.startswith(text, self.pos):
                self.pos += len(text)
                return text
        return None

    def expect(self, *texts: str) -> None:
        """Go past one of the texts."""
        if self.take(*texts) is None:
            self.fail(f"{texts[0]!r} is missing")

    def until(self, text: str) -> str:
        """Go past the next `text`; return what is before it."""
        end = self.text.find(text, self.pos)
        if end < 0:
            self.fail(f"{text!r} is missing", at_end=True)
        before = self.text[self.pos : end]
        self.pos = end + len(text)
        return before

    def close(self, text: str) -> None:
        """Go past what ends a call, which may be missing at the end of a turn that the model ended."""
        self.skip()
        if text and self.take(text) is None and (self.is_cut or self.pos < len(self.text)):
            self.fail(f"{text!r} is missing")

    def name(self, text: str) -> str:
        """Check a name."""
        if _NAME.fullmatch(text) is None:
            self.fail(f"{text:.60} is not a name" if text else "the name is missing")
        return text

    def json(self) -> Any:
        """Read a JSON value."""
        self.skip()
        try:
            value, self.pos = _DECODER.raw_decode(self.text, self.pos)
        except RecursionError:
            raise Malformed(_TOO_DEEP) from None
        except Malformed:
            raise
        except json.JSONDecodeError as error:
            # the shortest part of JSON that is none by itself, \uXXXX, has six characters
            at_end = error.msg.startswith("Unterminated") or error.pos + 6 > len(self.text)
            raise Malformed(f"{error.msg} (at character {error.pos - self.start})", at_end=at_end) from None
        except ValueError as error:  # an integer with more digits than Python reads
            self.fail(str(error).partition(";")[0])
        return value


def json_of(text: str) -> Any:
    """Return the JSON value that is all of a text inside a call."""
    inner = Cursor(text, 0, 0)
    try:
        value = inner.json()
    except Malformed as error:
        raise Malformed(str(error)) from None  # the text is whole, so nothing is cut off
    inner.skip()
    if inner.pos < len(text):
        inner.fail("text follows the JSON value")
    return value


def arguments_of(value: Any) -> dict[str, Any]:
    """Return the arguments of a call: an object, or the JSON text of one."""
    if isinstance(value, str):
        value = json_of(value) if value.strip() else {}
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise Malformed(f"the arguments are an object with one value per parameter, not {type(value).__name__}")
    return value


def calls_of_json(value: Any, form: Format) -> list[RawCall]:
    """Return the calls that a JSON value describes."""
    if form.shape == "object" or (form.shape == "either" and isinstance(value, dict)):
        return [_call_of_json(value, form)]
    if not isinstance(value, list) or not value:
        raise Malformed("tool calls are a list of one or more objects")
    return [_call_of_json(item, form) for item in value]


def _call_of_json(value: Any, form: Format) -> RawCall:
    if not form.keys:  # {"f": {"a": 1}}
        if not isinstance(value, dict) or len(value) != 1:
            raise Malformed("a tool call is an object with the function's name as its only key")
        return RawCall(*next((name, arguments_of(arguments)) for name, arguments in value.items()))
    names, arguments, ids = (form.keys[key] for key in ("name", "arguments", "id"))
    rule = f'a tool call is an object with a "{names[0]}" and "{arguments[0]}"'
    name = next((value[key] for key in names if key in value), None) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise Malformed(rule)
    unknown = [key for key in value if key not in {*names, *arguments, *ids, "type"}]
    if unknown:
        raise Malformed(f"{rule}, without {unknown[0]!r}")
    given = [value[key] for key in arguments if key in value]
    if len(given) > 1:
        raise Malformed(f"{rule}; it gives its arguments twice")
    call_id = next((value[key] for key in ids if isinstance(value.get(key), str)), None)
    return RawCall(name, arguments_of(given[0] if given else None), call_id)


def read_json(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read JSON between two texts."""
    cursor.expect(*form.opens)
    calls = calls_of_json(cursor.json(), form)  # before the end, at which a malformed call ends too
    cursor.close(form.close)
    return calls


def read_mistral(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read `[TOOL_CALLS]` with a list of calls, or with a name and its arguments, and maybe an id between them."""
    cursor.expect(*form.opens)
    cursor.skip()
    if cursor.text.startswith("[", cursor.pos) and not cursor.text.startswith("[ARGS]", cursor.pos):
        value = cursor.json()
        if not isinstance(value, list) or not value:
            raise Malformed("tool calls are a list of one or more objects")
        return [_call_of_json(item, form) for item in value]
    if cursor.text.startswith("{", cursor.pos):  # one call, as vLLM reads it
        return [_call_of_json(cursor.json(), form)]
    name = _NAME.match(cursor.text, cursor.pos)
    if name is None:
        cursor.fail("the name is missing")
    cursor.pos = name.end()
    cursor.skip()
    call_id = None
    if cursor.take("[CALL_ID]"):
        cursor.skip()
        found = _NAME.match(cursor.text, cursor.pos)
        if found is None:
            cursor.fail("the id is missing")
        call_id, cursor.pos = found.group(), found.end()
        cursor.skip()
    cursor.take("[ARGS]")
    cursor.skip()
    if not cursor.text.startswith("{", cursor.pos):
        cursor.fail("the arguments are missing, which are an object")
    return [RawCall(name.group(), arguments_of(cursor.json()), call_id)]


def read_bare(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read a list of calls in JSON that is the whole answer, or stands in a code block or tags."""
    opening = cursor.take(*form.opens) or ""
    if opening.endswith("["):
        cursor.pos -= 1
    value = cursor.json()
    cursor.skip()
    if opening == "<tool_call>":
        cursor.close("</tool_call>")
    elif opening.startswith("```"):
        cursor.close("```")
    elif not opening and cursor.pos < len(cursor.text):
        cursor.fail("the list of calls ends the answer, but text follows")
    if not isinstance(value, list) or not value:
        raise Malformed("tool calls are a list of one or more objects")
    return [_call_of_json(item, form) for item in value]


def read_pythonic(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read `[f(a=1), g(b="x")]`. Without texts around it, it ends the answer."""
    cursor.take(*form.opens)
    cursor.skip()
    calls = _python_calls(cursor)
    if form.close:
        cursor.close(form.close)
        return calls
    cursor.skip()
    cursor.take(*form.marks)
    cursor.skip()
    if cursor.pos < len(cursor.text):
        cursor.fail("the list of calls ends the answer, but text follows")
    return calls


def read_lines(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read calls `f(a=1)` on lines of their own."""
    cursor.expect(*form.opens)
    begin = cursor.pos
    lines = cursor.until(form.close).strip()
    end, cursor.pos = cursor.pos, begin  # where a malformed call is looked at for its end
    depth = max(lines.count(bracket) for bracket in "([{")
    if depth > 10 * _MAX_DEPTH:  # which Python's parser might not survive
        raise Malformed(_TOO_DEEP)
    body = _parse_python(lines, "exec").body  # type: ignore[attr-defined]
    if not body or not all(isinstance(statement, ast.Expr) for statement in body):
        cursor.fail("calls are lines such as f(a=1)")
    calls = _python_calls_of([statement.value for statement in body])
    cursor.pos = end
    return calls


def _parse_python(text: str, mode: Literal["eval", "exec"]) -> ast.AST:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            return ast.parse(text, mode=mode)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Malformed(getattr(error, "msg", None) or str(error) or _TOO_DEEP) from None


_PYTHON_PARTS = re.compile(r""""(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|[\[\](){}"']""", re.DOTALL)


def _python_calls(cursor: Cursor) -> list[RawCall]:
    if not cursor.text.startswith("[", cursor.pos):
        cursor.fail("calls are a list, such as [f(a=1)]")
    depth, begin = 0, cursor.pos
    for part in _PYTHON_PARTS.finditer(cursor.text, begin):
        if part.group() in "([{":
            depth += 1
        elif part.group() in ")]}":
            depth -= 1
        elif part.group() in "\"'":
            cursor.fail("a string has no end", at_end=True)
        if depth > _MAX_DEPTH:
            raise Malformed(_TOO_DEEP)
        if not depth:
            cursor.pos = part.end()
            break
    else:
        cursor.fail("']' is missing", at_end=True)
    body = _parse_python(cursor.text[begin : cursor.pos], "eval").body  # type: ignore[attr-defined]
    if not isinstance(body, ast.List) or not body.elts:
        raise Malformed("calls are a list of one or more, such as [f(a=1)]")
    return _python_calls_of(body.elts)


def _python_calls_of(nodes: Sequence[ast.expr]) -> list[RawCall]:
    try:
        return [_python_call(node) for node in nodes]
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None


def _python_call(node: ast.expr) -> RawCall:
    if not isinstance(node, ast.Call):
        raise Malformed("calls are a list, such as [f(a=1)]")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Malformed("arguments have names, such as f(a=1)")
    pairs = [(str(keyword.arg), _python_value(keyword.value)) for keyword in node.keywords]
    return RawCall(ast.unparse(node.func), _unique(pairs))


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=("true" | "false" | "null") as name):
            return json.loads(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=number)) if type(number) in (int, float):
            return -number  # type: ignore[operator]
        case ast.List() | ast.Tuple():
            return [_python_value(item) for item in node.elts]
        case ast.Dict():
            keys = [_python_value(key) if key is not None else None for key in node.keys]
            if not all(isinstance(key, str) for key in keys):
                raise Malformed("keys of objects are texts")
            return _unique([(str(key), _python_value(value)) for key, value in zip(keys, node.values, strict=True)])
    raise Malformed(f"{ast.unparse(node):.60} is not a value; values are texts, numbers, lists and objects")


def read_xml(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read a call with one tag for each parameter."""
    tags = form.tags
    assert tags is not None
    cursor.expect(*form.opens)
    name = cursor.name(_unquoted(cursor.until(tags.name_end)))
    pairs: list[tuple[str, Any]] = []
    while True:
        cursor.skip()
        ends_section = form.section is not None and cursor.text.startswith(form.section[1], cursor.pos)
        if cursor.take(form.close) or ends_section:  # which ends the call too, as in vLLM
            return [RawCall(name, _unique(pairs))]
        if not cursor.take(tags.parameter):
            cursor.fail(f"{tags.parameter!r} or {form.close!r} is missing")
        pairs.append(_xml_parameter(cursor, form))


def _xml_parameter(cursor: Cursor, form: Format) -> tuple[str, Any]:
    tags = form.tags
    assert tags is not None
    key, quote, attribute = _unquoted(cursor.until(tags.parameter_name_end)).partition(
        '"'
    )  # DeepSeek's have string="true"
    key = cursor.name(key.strip())
    begin = cursor.pos
    value = cursor.until(tags.parameter_close)
    following = value.find(tags.parameter)  # another parameter may end it, as in vLLM
    if following >= 0:
        value, cursor.pos = value[:following], begin + following
    if form.close in value:
        cursor.pos = begin
        cursor.fail(f"the parameter {key!r} has no {tags.parameter_close!r}")
    if tags.trims_newlines:
        value = value.removeprefix("\n").removesuffix("\n")
    if 'string="false"' not in quote + attribute:
        return key, value
    return key, json_of(value)


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def read_glm(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read a name, and pairs of `<arg_key>` and `<arg_value>`."""
    cursor.expect(*form.opens)
    begin = cursor.pos
    end = re.compile(f"<arg_key>|{re.escape(form.close)}").search(cursor.text, begin)
    if end is None:
        cursor.fail(f"{form.close!r} is missing")
    name = cursor.name(cursor.text[begin : end.start()].strip())
    cursor.pos = end.start()
    pairs: list[tuple[str, Any]] = []
    while True:
        cursor.skip()
        if cursor.text.startswith(form.close, cursor.pos):
            calls = [RawCall(name, _unique(pairs))]
            cursor.expect(form.close)
            return calls
        cursor.expect("<arg_key>")
        key = cursor.name(cursor.until("</arg_key>").strip())
        cursor.skip()
        cursor.expect("<arg_value>")
        begin = cursor.pos
        value = cursor.until("</arg_value>")
        if "<arg_key>" in value or form.opens[0] in value:  # of a later argument or call
            cursor.pos = begin
            cursor.fail(f"the argument {key!r} has no '</arg_value>'")
        pairs.append((key, value))


def read_deepseek(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read `f<sep>{...}` of V3.1, or the kind, the name and a code block of V3 and R1."""
    cursor.expect(*form.opens)
    name = cursor.until("<｜tool▁sep｜>").strip()
    cursor.skip()
    has_block = name == "function" and not cursor.text.startswith("{", cursor.pos)
    if has_block:
        name = cursor.until("\n").strip()
        cursor.skip()
        cursor.expect("```json")
    name = cursor.name(name)
    cursor.skip()
    if not cursor.text.startswith("{", cursor.pos):
        cursor.fail("the arguments are missing, which are an object")
    arguments = cursor.json()
    if has_block:
        cursor.skip()
        cursor.expect("```")
    cursor.close(form.close)
    return [RawCall(name, arguments_of(arguments))]


_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:<>]{1,200}):\d{1,9}")


def read_kimi(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read `functions.f:0<|tool_call_argument_begin|>{...}`. The id belongs to the call."""
    cursor.expect(*form.opens)
    call_id = cursor.until("<|tool_call_argument_begin|>").strip()
    match = _KIMI_ID.fullmatch(call_id)
    if match is None:
        cursor.fail("a call begins with its id, such as functions.f:0")
    arguments = arguments_of(cursor.json())
    cursor.close(form.close)
    return [RawCall(match.group(1), arguments, call_id)]


_GEMMA_WORD = re.compile(r"[^,{}\[\]<>:]*+")


def read_gemma(cursor: Cursor, form: Format) -> list[RawCall]:
    """Read `call:f{a:1,b:<|"|>text<|"|>}`."""
    cursor.expect(*form.opens)
    cursor.skip()
    cursor.expect("call:")
    name = cursor.name(cursor.until("{").strip())
    cursor.pos -= 1
    arguments = _gemma_value(cursor, form.quote, 0)
    cursor.close(form.close)
    return [RawCall(name, arguments)]


def _gemma_value(cursor: Cursor, quote: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise Malformed(_TOO_DEEP)
    cursor.skip()
    if cursor.take(quote):
        return cursor.until(quote)
    if cursor.take("["):
        return _gemma_items(cursor, "]", lambda: _gemma_value(cursor, quote, depth + 1))
    if cursor.take("{"):
        return _unique(_gemma_items(cursor, "}", lambda: _gemma_pair(cursor, quote, depth + 1)))
    match = _GEMMA_WORD.match(cursor.text, cursor.pos)
    assert match is not None, "it matches nothing as well"
    word = match.group().strip()
    if not word:
        cursor.fail("a value is missing")
    cursor.pos = match.end()
    try:
        return json.loads(word)
    except ValueError:
        return word


def _gemma_pair(cursor: Cursor, quote: str, depth: int) -> tuple[str, Any]:
    cursor.skip()
    if cursor.take(quote):
        key = cursor.until(quote)
        cursor.skip()
    else:
        match = _GEMMA_WORD.match(cursor.text, cursor.pos)
        assert match is not None, "it matches nothing as well"
        cursor.pos, key = match.end(), match.group().strip()
    cursor.expect(":")
    return key, _gemma_value(cursor, quote, depth)


def _gemma_items(cursor: Cursor, close: str, item: Callable[[], Any]) -> list[Any]:
    items: list[Any] = []
    cursor.skip()
    if cursor.take(close):
        return items
    while True:
        items.append(item())
        cursor.skip()
        if cursor.take(close):
            return items
        cursor.expect(",")


READERS: Mapping[str, Callable[[Cursor, Format], list[RawCall]]] = {
    "json": read_json,
    "mistral": read_mistral,
    "bare": read_bare,
    "pythonic": read_pythonic,
    "lines": read_lines,
    "xml": read_xml,
    "glm": read_glm,
    "deepseek": read_deepseek,
    "kimi": read_kimi,
    "gemma": read_gemma,
}


def cast_arguments(call: RawCall, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the arguments with texts turned into the types that the tool's schema declares, where they fit."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    schema: Mapping[str, Any] = next((f for f in functions if f.get("name") == call.name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    return {
        key: _cast(value, _types(properties.get(key))) if isinstance(value, str) else value
        for key, value in call.arguments.items()
    }


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else [t for t in declared or () if isinstance(t, str)]
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types += _types(choice)
    return [*types, "null"] if schema.get("nullable") else types


_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _cast(text: str, types: Sequence[str]) -> Any:
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return None
    if "string" in types:
        return text
    if "boolean" in types and word.lower() in _BOOLEANS:
        return _BOOLEANS[word.lower()]
    try:
        value = json.loads(word, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float):
        if not math.isfinite(value):
            return text
        value = int(value) if value.is_integer() and "integer" in types else value
    if isinstance(value, bool):
        return text
    return value if any(isinstance(value, _KINDS.get(kind, ())) for kind in types) else text
