"""Texts of sampled tokens, and stop strings: texts that end a completion.

A completion ends with the first token with which its text, special tokens included, contains one of them. Engines end
it about there; `cut_at_stop` is what decides, so the result does not depend on the engine. C sampled tokens of a call.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cohort.records import IntArray, ModelCall

_MARGIN = 4  # tokens before the last ones that may begin inside a character


def cut_at_stop(call: ModelCall, stop: Sequence[str], tokenizer: Any) -> ModelCall:
    """Cut a call after the first token with which its text contains a stop string. The token is kept whole."""
    if not stop:
        return call
    ids = call.token_ids.tolist()
    if not _contains(tokenizer, ids, stop):
        return call
    lengths = range(1, len(ids) + 1)
    return cut(call, lengths[bisect_left(lengths, True, key=lambda n: _contains(tokenizer, ids[:n], stop))])


def cut(call: ModelCall, length: int) -> ModelCall:
    """Return the first tokens of a call, as one that has stopped there."""
    return replace(
        call,
        token_ids=call.token_ids[:length],
        sampling_logprobs=call.sampling_logprobs[:length],
        finish_reason="stop",
        text=None,
    )


def decode_text(tokenizer: Any, token_ids: IntArray) -> str:
    """Return the text of sampled tokens, without special tokens."""
    return str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


def text_of(call: ModelCall, tokenizer: Any) -> str:
    """Return the text of a call's sampled tokens, without special tokens."""
    return decode_text(tokenizer, call.token_ids) if call.text is None else call.text


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Truncate a text before its first stop string."""
    return text[: min((text.index(one) for one in stop if one and one in text), default=len(text))]


class StopWatch:
    """Notices stop strings in a completion that grows by one token at a time, at most a few tokens late."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        """Watch for these strings in the text that the tokenizer makes of the tokens."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        # a token has at least a byte, so that these have a string that the last token completes
        self._num_last = max(len(text.encode()) for text in stop) + _MARGIN

    def found_with(self, token_id: int) -> bool:
        """Append a token, and return whether the text now contains a stop string."""
        self._ids.append(token_id)
        return _contains(self._tokenizer, self._ids[-self._num_last :], self._stop) and _contains(
            self._tokenizer, self._ids, self._stop
        )


def _contains(tokenizer: Any, token_ids: Sequence[int], texts: Sequence[str]) -> bool:
    decoded = str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
    return any(text in decoded for text in texts)
