"""Text of prompts and completions: as a conversation, in messages, and where it states its answer."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

MAX_CHARS = 100_000  # at the end of a completion, in which `choice` and `number` look: that takes a tenth of a second
_INNER = r"(?:[^{}]++|\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\})*+"
_MARKED = re.compile(
    rf"\\f?box(?:ed)?\s*\{{(?P<box>{_INNER})(?:\}}|$)"  # a completion that is cut may leave the box open
    r"|<answer>(?P<tags>(?:(?!<answer>).)*?)</answer>"
    r"|####(?P<line>[^\n]*)",
    re.DOTALL,
)
_BETWEEN = re.compile(r"[\s$.,;*&\\]*(?:(?:and|or|text\s*\{\s*(?:and|or)\s*\}|q?quad)[\s$*\\]*)?")


Kind = Literal["box", "tags", "line"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place where an answer is stated."""

    kind: Kind
    content: str
    start: int  # in the text


def find_marks(text: str) -> list[Mark]:
    """Return the marked answers in order. Different boxes side by side, as in "4 or 3", are one box without content."""
    marks: list[Mark] = []
    end = 0
    for match in _MARKED.finditer(text):
        kind: Kind
        kind, content = next((k, match[k]) for k in _KINDS if match[k] is not None)
        inner = find_marks(content) if kind != "line" else []
        is_inner = bool(inner) and inner[-1].kind == "box"
        mark = Mark("box", inner[-1].content, match.start()) if is_inner else Mark(kind, content, match.start())
        if marks and mark.kind == marks[-1].kind == "box" and _BETWEEN.fullmatch(text, end, match.start()):
            same = marks.pop().content.strip() == content.strip()
            mark = mark if same else Mark("box", "", match.start())
        marks.append(mark)
        end = match.end()
    return marks


Message = Mapping[str, Any]


def messages_of(prompt: Any, completion: Any) -> list[Message]:
    """Return prompt and completion, each text or messages, as messages of one conversation."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    answered = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    return [*asked, *answered]


def plain_text(messages: Sequence[Message]) -> str:
    """Return the contents of messages, with a blank line between them."""
    return "\n\n".join(_content(message) for message in messages)


def transcript(conversation: Any) -> str:
    """Return text as it is, the content of a single message, or `role: content` for each of several."""
    if isinstance(conversation, str):
        return conversation
    if len(conversation) == 1:
        return _content(conversation[0])
    return "\n\n".join(f"{message.get('role')}: {_content(message)}" for message in conversation)


def message_text(message: Message) -> str:
    """Return the text of a message; "" if there is none. Parts that are not text are left out."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content) if content else ""


def _content(message: Message) -> str:
    """Return the text of a message, and its tool calls as JSON."""
    text = message_text(message)
    calls = [json.dumps(call) for call in message.get("tool_calls") or ()]
    return "\n".join([text] * bool(text) + calls)


class TurnsText(str):
    """Text of all turns of a trajectory."""

    last: str  # text of its last assistant message

    def __new__(cls, text: str, last: str = "") -> "TurnsText":
        """Create the text of several turns."""
        self = super().__new__(cls, text)
        self.last = last
        return self


def completion_text(completion: Any) -> str:
    """Return the text of a completion: as it is, or of the last assistant message.

    Args:
        completion: argument of a reward function: a string, or messages such as
            `[{"role": "assistant", "content": text}]`. The last one may be a tool's.
    """
    return completion if isinstance(completion, str) else last_text(completion)


def answer_text(completion: Any) -> str:
    """Return the text that may hold the answer: of the last assistant message, also in a `TurnsText`."""
    return completion.last if isinstance(completion, TurnsText) else completion_text(completion)


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, all of it if there is none: what reasoning states is no answer."""
    return text.rpartition("</think>")[2]


def last_match(pattern: str | None, text: str) -> str | None:
    """Return the group of a pattern's last match; None if there is no match, the whole text without a pattern."""
    if pattern is None:
        return text
    return ([match[1] or "" for match in re.finditer(pattern, text)] or [None])[-1]


def last_text(messages: Sequence[Message]) -> str:
    """Return the text of the last assistant message; "" if there is none, or it has no text."""
    own = [message for message in messages if message.get("role", "assistant") == "assistant"]
    return message_text(own[-1]) if own else ""
