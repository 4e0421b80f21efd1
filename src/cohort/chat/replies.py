"""Split the text of a reply into answers, thoughts and tool calls, going through it once."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from cohort.chat.calls import READERS, Cursor, Malformed, RawCall, calls_of_json, read_pythonic
from cohort.chat.formats import Format
from cohort.chat.messages import any_of

MAX_REGIONS = 200  # thoughts and tool calls of a turn


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply."""

    kind: Literal["text", "thought", "call", "malformed", "cut", "beyond"]  # beyond: more than `MAX_REGIONS`
    text: str  # exactly as the model wrote it
    calls: Sequence[RawCall] = ()
    reason: str = ""  # why a call is malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """What stands around thoughts."""

    open: str = "<think>"
    close: str = "</think>"
    are_separate: bool = True  # False: the chat template knows no thoughts, so they stay part of the answer


def read_reply(
    text: str, form: Format | None, thoughts: Thoughts, *, inside: bool = False, is_cut: bool = False
) -> Iterator[Piece]:
    """Yield the parts of a reply in their order.

    Args:
        text: the reply without its end-of-turn token.
        form: how calls are written; None: there are none.
        thoughts: how thoughts are written.
        inside: whether the prompt has opened a thought.
        is_cut: whether a limit ended the reply.
    """
    if form is not None and form.syntax == "harmony":
        return _read_harmony(text, is_cut=is_cut)
    return _Reader(text=text, form=form, thoughts=thoughts, is_cut=is_cut).read(inside)


# How calls start in families that write them without tags.
_LLAMA_OBJECT = r'\{\s*+"(?:name|type|parameters|arguments|function)"\s*+:'
_LLAMA_NAME = re.compile(r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:')
_PYTHON_LIST = r"\[\s*+[A-Za-z_][\w.]*+\s*+\("
_JSON_LIST = r'\[\s*+\{\s*+"(?:name|arguments)"\s*+:'


def _untagged_calls(form: Format) -> list[str]:
    if form.syntax == "llama":
        return [_LLAMA_OBJECT, _PYTHON_LIST] if form.shape == "either" else [_LLAMA_OBJECT]
    return [_JSON_LIST] if form.syntax == "bare" else []


@cache
def _markers(form: Format | None, thoughts: Thoughts) -> re.Pattern[str]:
    """Match what starts a call or a thought, and the marks that are no part of answers."""
    patterns = [f"(?P<think>{re.escape(thoughts.open)})"]
    marks = {thoughts.close} if thoughts.are_separate else set()
    if form is not None:
        starts = [any_of(form.call_starts).pattern] if form.call_starts else []
        starts += _untagged_calls(form)
        patterns.append(f"(?P<call>{'|'.join(starts)})")
        marks |= form.own_texts - set(form.call_starts)
    if marks:
        patterns.append(f"(?P<mark>{any_of(marks).pattern})")
    return re.compile("|".join(patterns))


@dataclass(slots=True, kw_only=True)
class _Reader:
    text: str
    form: Format | None
    thoughts: Thoughts
    is_cut: bool
    pos: int = 0
    has_text: bool = False  # an answer has begun
    in_section: bool = False

    def read(self, inside: bool) -> Iterator[Piece]:
        markers = _markers(self.form, self.thoughts)
        num_regions = 0
        if inside or self._has_end_alone(markers):
            yield self._thought()
            num_regions += 1
        while self.pos < len(self.text):
            match = markers.search(self.text, self.pos)
            begin = match.start() if match else len(self.text)
            if begin > self.pos:
                yield self._text(begin)
            if match is None:
                break
            if match.lastgroup == "mark":
                self.pos = match.end()
                self.in_section = False
                continue
            if num_regions == MAX_REGIONS:
                yield Piece("beyond", self.text[self.pos :])
                return
            num_regions += 1
            yield self._thought() if match.lastgroup == "think" else self._call()
        if self.in_section and self.is_cut:
            yield Piece("cut", "")

    def _has_end_alone(self, markers: re.Pattern[str]) -> bool:
        """Whether the first marker ends a thought, whose start then is missing."""
        end = self.text.find(self.thoughts.close) if self.thoughts.are_separate else -1
        if end < 0:
            return False
        first = next((m for m in markers.finditer(self.text, 0, end + 1) if m.lastgroup != "mark"), None)
        return first is None

    def _text(self, end: int) -> Piece:
        text, self.pos = self.text[self.pos : end], end
        self.has_text = self.has_text or bool(text.strip())
        return Piece("text", text)

    def _thought(self) -> Piece:
        begin, (opening, close) = self.pos, (self.thoughts.open, self.thoughts.close)
        end = self.text.find(close, begin)
        self.pos = len(self.text) if end < 0 else end + len(close)
        if not self.thoughts.are_separate:
            return Piece("text", self.text[begin : self.pos])
        thought = self.text[begin : end if end >= 0 else len(self.text)]
        return Piece("thought", thought.lstrip().removeprefix(opening))

    def _call(self) -> Piece:
        """Read the calls that start here. One that is malformed ends after the next text that ends calls."""
        assert self.form is not None
        begin = self.pos
        cursor = Cursor(self.text, begin, begin, self.is_cut)
        try:
            calls = self._read(cursor)
        except (Malformed, ValueError, RecursionError) as error:
            reason = str(error) if not isinstance(error, RecursionError) else "it is nested too deeply"
            ended = self.is_cut and isinstance(error, Malformed) and error.at_end
            self.pos = end = len(self.text) if ended else self._end_of_malformed(max(cursor.pos, begin + 1))
            if end < len(self.text):
                self.in_section = False
            is_cut = ended or (self.is_cut and end == len(self.text) and not self._is_closed(begin))
            return Piece("cut" if is_cut else "malformed", self.text[begin:end], reason=reason)
        if calls is None:  # JSON that is no call is an answer
            self.pos = begin
            return self._text(cursor.pos)
        self.pos = cursor.pos
        return Piece("call", self.text[begin : self.pos], calls=calls)

    def _read(self, cursor: Cursor) -> list[RawCall] | None:
        form = self.form
        assert form is not None
        cursor.skip()
        is_tagged = cursor.text.startswith(form.opens, cursor.pos) if form.opens else False
        if form.syntax in ("llama", "bare") and not is_tagged:
            return self._read_untagged(cursor)
        if form.syntax == "llama":
            cursor.take(*form.opens)
            cursor.skip()
            if form.shape == "either" and cursor.text.startswith("[", cursor.pos):
                return read_pythonic(cursor, form)
            return self._calls_of_llama(cursor, cursor.json())
        if form.section is not None:
            if cursor.take(form.section[0]):
                self.in_section = True
                cursor.skip()
            calls = READERS[form.syntax](cursor, form)
            after = cursor.pos
            cursor.skip()
            if cursor.take(form.section[1]):
                self.in_section = False
            elif not cursor.text.startswith(form.opens, cursor.pos):
                cursor.pos = after
            return calls
        return READERS[form.syntax](cursor, form)

    def _read_untagged(self, cursor: Cursor) -> list[RawCall] | None:
        """Read a call that only looks like one: None if it is an answer. After text, only a whole one is a call."""
        form = self.form
        assert form is not None
        begin = cursor.pos
        is_object = form.syntax == "llama" and self.text[begin] == "{"
        try:
            if not is_object:
                return read_pythonic(cursor, form) if form.syntax == "llama" else READERS["bare"](cursor, form)
            value = cursor.json()
        except ValueError:
            looks_like_call = not is_object or _LLAMA_NAME.match(self.text, begin) is not None
            if looks_like_call and (self.is_cut or not self.has_text):
                raise
            cursor.pos = len(self.text)
            return None
        if not isinstance(value, dict) or "name" not in value or not value.keys() & {"parameters", "arguments"}:
            return None
        return self._calls_of_llama(cursor, value)

    def _calls_of_llama(self, cursor: Cursor, value: object) -> list[RawCall]:
        assert self.form is not None
        calls = calls_of_json(value, self.form)
        separator = re.compile(r"\s*+;\s*+(?=\{)").match(self.text, cursor.pos)
        if separator is not None:
            cursor.pos = separator.end()
        return calls

    def _end_of_malformed(self, begin: int) -> int:
        """Return where a malformed call ends: after what ends calls, before the next call, or at the end of the text.

        What ends the calls of a turn counts too.
        """
        form = self.form
        assert form is not None
        if not form.close:  # nothing marks the end of a call
            following = any_of(form.opens).search(self.text, begin) if form.opens else None
            return following.start() if following else len(self.text)
        ends = any_of((form.close, form.section[1]) if form.section else (form.close,))
        match = ends.search(self.text, begin)
        if match is None:
            return len(self.text)
        if form.section is None or match.group() == form.section[1]:
            return match.end()
        rest = Cursor(self.text, match.end(), begin)
        rest.skip()
        return rest.pos if rest.take(form.section[1]) else match.end()

    def _is_closed(self, begin: int) -> bool:
        """Whether the text ends with what ends calls."""
        form = self.form
        assert form is not None
        last = self.text[begin:].rstrip()
        return any(bool(close) and last.endswith(close) for close in (form.close, (form.section or ("", ""))[1]))


_HARMONY_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>")
_RECIPIENT = re.compile(r"to=([^\s<]{1,200}+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*+([a-z]{0,20}+)")
_HARMONY_CALL = re.compile(r"<\|start\|>|<\|channel\|>|to=")


def _read_harmony(text: str, *, is_cut: bool) -> Iterator[Piece]:
    """Yield the messages of a gpt-oss turn.

    https://developers.openai.com/cookbook/articles/openai-harmony describes them: a header, `<|message|>`, a body, and
    `<|end|>`, `<|call|>` or `<|return|>`.
    """
    pos, num_regions = 0, 0
    while pos < len(text):
        begin = pos
        start = text.find("<|message|>", pos)
        if start < 0:
            yield from _harmony_rest(text[pos:], is_cut)
            return
        header = text[pos:start]
        body_begin = start + len("<|message|>")
        end = _HARMONY_END.search(text, body_begin)
        body_end, pos = (end.start(), end.end()) if end is not None else (len(text), len(text))
        if end is not None and end.group() == "<|start|>":
            pos = end.start()
        body = text[body_begin:body_end]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        is_thought = channel is not None and channel.group(1) == "analysis"
        if recipient is None and not is_thought:
            yield Piece("text", body)
            continue
        if num_regions == MAX_REGIONS:
            yield Piece("beyond", text[begin:])
            return
        num_regions += 1
        if recipient is None:
            yield Piece("thought", body)
        elif end is None and is_cut:
            yield Piece("cut", text[begin:])
        else:
            yield _harmony_call(text, begin, body_begin, body_end, pos, recipient.group(1))


def _harmony_call(text: str, begin: int, body_begin: int, body_end: int, end: int, recipient: str) -> Piece:
    source = text[begin:end]
    try:
        if not recipient.startswith("functions.") or recipient == "functions.":
            raise Malformed(f"functions are called as to=functions.NAME, not to={recipient}")
        cursor = Cursor(text[:body_end], body_begin, begin)
        arguments = cursor.json()
        cursor.skip()
        if cursor.pos < body_end:
            cursor.fail("text follows the arguments")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise Malformed(f"the arguments are an object with one value per parameter, not {kind}")
    except ValueError as error:
        return Piece("malformed", source, reason=str(error))
    return Piece("call", source, calls=[RawCall(recipient.removeprefix("functions."), arguments)])


def _harmony_rest(text: str, is_cut: bool) -> Iterator[Piece]:
    """Yield what follows the last message: a call without a body is malformed, everything else is text."""
    recipient = _RECIPIENT.search(text)
    if recipient is None or (_HARMONY_CALL.match(text.lstrip()) is None):
        yield Piece("text", text)
    elif is_cut:
        yield Piece("cut", text)
    else:
        yield Piece("malformed", text, reason="'<|message|>' and the arguments are missing")
