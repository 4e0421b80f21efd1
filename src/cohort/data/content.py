"""Check what rows hold as prompts: text, or a list of chat messages."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cohort.errors import UserError, excerpt
from cohort.records import Message

Content = str | Sequence[Message]
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")


class Place:
    """Where a value is, for messages. Of most rows, nobody asks."""

    __slots__ = ("_describe",)

    def __init__(self, describe: Callable[[], str]):
        self._describe = describe

    def __str__(self) -> str:
        return self._describe()


def read_content(value: Any, where: object) -> Content:
    """Validate a prompt: text or a list of messages."""
    if isinstance(value, str):
        _check_text(value, where)
        if _is_messages_as_text(value):
            raise UserError(
                f"{where}: holds chat messages as text; store them as a list of messages, in JSON lines or "
                "Parquet (CSV holds text prompts only)"
            )
        return value
    if isinstance(value, list | tuple):
        return _read_messages(value, where)
    raise UserError(
        f"{where}: a prompt is text or a list of chat messages, not {'missing' if value is None else excerpt(value)}"
    )


def _read_messages(values: Sequence[Any], where: object) -> list[Message]:
    if not values:
        raise UserError(f"{where}: the list of chat messages is empty")
    messages: list[Message] = []
    for number, value in enumerate(values, start=1):
        at = Place(lambda n=number: f"{where}, message {n}")  # type: ignore[misc]
        if not isinstance(value, Mapping):
            raise UserError(f'{at}: a message is {{"role": ..., "content": ...}}, not {excerpt(value)}')
        message = {key: entry for key, entry in value.items() if entry is not None}
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise UserError(f'{at}: has no "role" such as "user". Its keys: {", ".join(map(str, message)) or "none"}')
        content = message.get("content")
        if isinstance(content, str):
            _check_text(content, at, may_be_empty=message["role"] != "user")
        elif content is not None or "tool_calls" not in message:
            raise UserError(f'{at}: its "content" must be text, not {excerpt(content)}')
        messages.append(message)
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the last message is the assistant's, so the prompt already holds an answer; end it with the "
            "message to answer, and move the answer to a column of its own"
        )
    return messages


def _check_text(text: str, where: object, *, may_be_empty: bool = False) -> None:
    if not text.strip() and not may_be_empty:
        raise UserError(f"{where}: the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which tokenizers reject
        raise UserError(f"{where}: character {error.start + 1} of the text is not valid Unicode") from error


def _is_messages_as_text(text: str) -> bool:
    """Whether the text is a list of messages printed as JSON or Python, as in CSV files."""
    if not _MESSAGES_AS_TEXT.match(text):
        return False
    for parse in (json.loads, ast.literal_eval):
        try:
            values = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return all(isinstance(value, dict) and {"role", "content"} <= value.keys() for value in values)
    return False
