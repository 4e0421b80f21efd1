"""Chat messages to token ids and back: templates, suffixes for new messages, parsed replies, tool schemas."""

from cohort.chat.messages import append_observation, are_equal, prompt_messages
from cohort.chat.responses import Reply, ResponseParser, ToolCall
from cohort.chat.template import ChatTemplate, Rendering
from cohort.chat.tools import tool_schema

__all__ = [
    "ChatTemplate",
    "Rendering",
    "Reply",
    "ResponseParser",
    "ToolCall",
    "append_observation",
    "are_equal",
    "prompt_messages",
    "tool_schema",
]
