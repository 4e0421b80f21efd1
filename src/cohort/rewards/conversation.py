"""Prompt and completion as a conversation, for models that judge them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
