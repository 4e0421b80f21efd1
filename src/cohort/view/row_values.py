"""Values of a completions file's row as the page shows them: bounded, and valid JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cohort.view.completions import as_text
from cohort.view.files import number

TEXT_CHARS = 200_000  # longest text that is sent to the page
_MESSAGES_CHARS = 1_000_000  # of all texts of a conversation
_MAX_JSON_CHARS = 16_000_000
_MAX_DEPTH = 40
_MAX_ITEMS = 10_000  # of one list
_MAX_KEY_CHARS = 200


class TextBudget:
    """Cuts texts so that all of them together stay bounded."""

    def __init__(self, chars: int = _MESSAGES_CHARS):
        self._left = chars
        self.cut = False

    def take(self, text: str) -> str:
        """Return the text, or as much of it as is left."""
        kept = text[: max(0, min(TEXT_CHARS, self._left))]
        self._left -= len(kept)
        self.cut = self.cut or len(kept) < len(text)
        return without_surrogates(kept)


def without_surrogates(text: str) -> str:
    """Replace half surrogate pairs, which JSON may hold and UTF-8 may not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def parse_json(text: str | None, budget: TextBudget) -> Any:
    """Return a JSON text's value with bounded texts. The text itself if it is not JSON."""
    if text is None:
        return None
    if len(text) > _MAX_JSON_CHARS:
        return budget.take(text)
    try:
        return _bounded(json.loads(text), budget, _MAX_DEPTH)
    except (ValueError, RecursionError):
        return budget.take(text)


def _bounded(value: Any, budget: TextBudget, depth: int) -> Any:
    if isinstance(value, str):
        return budget.take(value)
    if depth == 0 and isinstance(value, list | dict):
        return budget.take(repr(value)[:TEXT_CHARS])
    if isinstance(value, list | dict):
        budget.cut = budget.cut or len(value) > _MAX_ITEMS
    if isinstance(value, list):
        return [_bounded(v, budget, depth - 1) for v in value[:_MAX_ITEMS]]
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return {without_surrogates(key)[:_MAX_KEY_CHARS]: _bounded(v, budget, depth - 1) for key, v in items}
    return value


def parse_prompt(text: str | None) -> Any:
    """Return a prompt: a text, or chat messages as a list."""
    if text is not None and text.lstrip()[:1] == "[":
        messages = parse_json(text, TextBudget())
        if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
            return messages
    return TextBudget().take(text or "")


def prompt_text(text: str | None, limit: int) -> str:
    """Return the beginning of a prompt: of the last user message if it is a conversation."""
    prompt = parse_prompt(text)
    if isinstance(prompt, str):
        return prompt[:limit]
    of_user = [m.get("content") for m in prompt if m.get("role") == "user"] or [prompt[-1].get("content")]
    return _content_text(of_user[-1])[:limit]


def _content_text(content: Any) -> str:
    """Return a message's text; contents may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def shared_prefix(a: str, b: str) -> int:
    """Return the number of characters at which two texts begin equally."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def calls(value: Any) -> list[dict[str, Any]] | None:
    """Return the model calls of a row, with the number of tokens in place of their ids."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    found = [dict(call) for call in value if isinstance(call, Mapping)]
    without_ids = [{key: v for key, v in call.items() if key != "token_ids"} for call in found]
    counts = [len(call.get("token_ids") or ()) for call in found]
    return [{**call, "tokens": count} for call, count in zip(without_ids, counts, strict=True)]


def named_numbers(row: Mapping[str, Any], prefix: str) -> dict[str, float | None]:
    """Return the numbers of columns whose names begin with a prefix, such as `rewards/`."""
    return {name.removeprefix(prefix): number(v) for name, v in row.items() if name.startswith(prefix)}


def optional_text(value: Any, *, cut: bool = True) -> str | None:
    """Return a value of a row as text, by default of bounded length."""
    text = as_text(value, limit=TEXT_CHARS if cut else None)
    return None if text is None else without_surrogates(text)
