"""Trajectories as text: token by token with the loss mask, or as a short conversation."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cohort.records import IntArray, Message, ModelCall, ScoredGroup, Trajectory, starts_with

TRAINED, MASKED = "▌", "·"  # marks of lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of a trajectory that are either all trained or all masked."""

    title: str
    token_ids: IntArray
    trained: bool
    tool_calls: tuple[str, ...] = ()  # what the sampled tokens call, such as 'look(key="a")'


def segments(trajectory: Trajectory) -> Iterator[Segment]:
    """Split the model calls of a trajectory into what the model saw and what it sampled, in order of the calls.

    Context that an earlier call has is not repeated, unless the history was rewritten.
    """
    turns = _Turns(trajectory)
    earlier: dict[bool, IntArray] = {}  # tokens of the last call, trained or not
    for number, call in enumerate(trajectory.calls, start=1):
        known = earlier.get(call.trained, np.zeros(0, np.int64))
        continues = starts_with(call.context_ids, known)
        new = call.context_ids[len(known) :] if continues else call.context_ids
        if len(new):
            yield Segment(title=turns.context_title(call, len(new), continues), token_ids=new, trained=False)
        yield turns.sampled(call, number)
        earlier[call.trained] = np.concatenate([call.context_ids, call.token_ids])


class _Turns:
    """Titles of a trajectory's segments, from its messages if these are one conversation."""

    def __init__(self, trajectory: Trajectory):
        replies = [n for n, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
        self._is_conversation = len(replies) == len(trajectory.trained_calls)
        self._messages = trajectory.messages
        self._replies = replies
        self._num_trained = 0  # calls so far
        self._num_others = 0

    def context_title(self, call: ModelCall, num_tokens: int, continues: bool) -> str:
        """Title of a call's new context."""
        is_first = (self._num_trained if call.trained else self._num_others) == 0
        if not call.trained:
            return f"context of a call that is not trained{' (continued)' * (not is_first)}, {_tokens(num_tokens)}"
        if is_first:
            return f"prompt, {_tokens(num_tokens)}"
        if not continues:
            return f"history was rewritten: a new sequence starts, {_tokens(num_tokens)} masked"
        return f"{', '.join(self._names_before_reply()) or 'context'}, {_tokens(num_tokens)} masked"

    def sampled(self, call: ModelCall, number: int) -> Segment:
        """Segment of what a call sampled."""
        ended = "cut by the length limit" if call.finish_reason == "length" else "stop"
        if not call.trained:
            self._num_others += 1
            title = f"model call {number}, {_tokens(len(call.token_ids))} not trained, {ended}"
            return Segment(title=title, token_ids=call.token_ids, trained=False)
        calls: tuple[str, ...] = ()
        if self._is_conversation:
            calls = tuple(map(format_call, self._messages[self._replies[self._num_trained]].get("tool_calls") or ()))
        self._num_trained += 1
        title = f"turn {self._num_trained}, {_tokens(len(call.token_ids))} trained, {ended}"
        return Segment(title=title, token_ids=call.token_ids, trained=True, tool_calls=calls)

    def _names_before_reply(self) -> list[str]:
        """Roles of the messages between the last reply and the next, with names of tools."""
        if not self._is_conversation:
            return []
        between = self._messages[self._replies[self._num_trained - 1] + 1 : self._replies[self._num_trained]]
        return [" ".join(filter(None, (message["role"], message.get("name")))) for message in between]


def trajectory_lines(
    trajectory: Trajectory,
    decode: Callable[[list[int]], str],
    *,
    width: int,
    max_lines: int | None,
) -> Iterator[tuple[str, str]]:
    """Show all tokens of a trajectory, and which of them are trained.

    Args:
        trajectory: the trajectory.
        decode: token ids to text, with special tokens.
        width: of a line in characters.
        max_lines: lines of a segment; the middle of longer ones is left out. None: no limit.

    Yields:
        Style ("title", "trained", "masked" or "call") and text of a line.
    """
    for segment in segments(trajectory):
        yield "title", segment.title
        mark, style = (TRAINED, "trained") if segment.trained else (MASKED, "masked")
        wrapped = _wrapped(decode(segment.token_ids.tolist()), max(20, width - len(f"  {mark} ")))
        yield from ((style, f"  {mark} {line}") for line in _without_middle(wrapped, max_lines))
        yield from (("call", f"  → {call}") for call in segment.tool_calls)
    last = max((n for n, message in enumerate(trajectory.messages) if message.get("role") == "assistant"), default=-1)
    if unseen := trajectory.messages[last + 1 :]:
        yield "title", "after the last turn, not seen by the model"
        lines = _wrapped("\n".join(conversation_lines(unseen)), max(20, width - 2))
        yield from (("masked", f"  {line}") for line in _without_middle(lines, max_lines))


def end_line(trajectory: Trajectory) -> str:
    """Say how a trajectory ended, with counts and times."""
    num_trained = trajectory.num_sampled_tokens
    trained = _count(num_trained, "trained token")
    parts = [f"end: {trajectory.end}", f"{_count(len(trajectory.trained_calls), 'turn')}, {trained}"]
    stats = trajectory.stats
    if stats is not None:
        retries = stats.attempts - 1
        counts = {
            _count(stats.tool_calls, "tool call"): stats.tool_calls,
            f"{stats.tool_errors} failed": stats.tool_errors,
            f"{stats.malformed_calls} malformed": stats.malformed_calls,
            f"{retries} retr{'y' if retries == 1 else 'ies'}": retries,
        }
        parts += [", ".join(text for text, number in counts.items() if number)] * any(counts.values())
        parts.append(f"{stats.model_s:.2f} s in the model, {stats.environment_s:.2f} s elsewhere")
    return "; ".join(parts)


def reward_line(group: ScoredGroup, index: int, weights: Mapping[str, float]) -> str:
    """Show the reward of a trajectory, its parts with their weights, and metrics of the environment."""
    reward, trajectory = group.rewards[index], group.trajectories[index]
    parts = [
        f"{name} {_number(part[index])}" + ("" if weights.get(name, 1.0) == 1.0 else f" (weight {weights[name]:g})")
        for name, part in group.reward_parts.items()
    ]
    line = f"reward: {_number(reward)}" + (f" = {', '.join(parts)}" if parts and not np.isnan(reward) else "")
    if trajectory.step_rewards:
        line += f"; by turn: {', '.join(map(_number, trajectory.step_rewards))}"
    if trajectory.metrics:
        line += "; metrics: " + ", ".join(f"{name} {value:.4g}" for name, value in trajectory.metrics.items())
    return line


def conversation_lines(messages: Sequence[Message]) -> list[str]:
    """Show messages, one per line: role, text and tool calls."""
    lines = []
    for message in messages:
        text = str(message.get("content") or message.get("reasoning_content") or "")
        calls = [f"→ {format_call(call)}" for call in message.get("tool_calls") or ()]
        who = " ".join(filter(None, (message.get("role"), message.get("name"))))
        lines.append(f"{who}: {' '.join(filter(None, (text.strip(), *calls)))}")
    return lines


def format_call(call: Mapping[str, Any]) -> str:
    """Show a tool call of a message, such as 'look(key="a")'."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return f"{function.get('name')}({arguments or ''})"
    shown = (f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in arguments.items())
    return f"{function.get('name')}({', '.join(shown)})"


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken at spaces. Nothing is left out; control characters are escaped."""
    escapes = {ord(c): repr(c)[1:-1] for c in set(text) if not c.isprintable()}
    lines = [line.translate(escapes) for line in text.split("\n")]
    lines = lines[:-1] if len(lines) > 1 and not lines[-1] else lines
    # textwrap takes time quadratic in the length of a word
    part = re.compile(rf".{{1,{width}}}(?:(?<=[^ ])(?= )|(?<= )(?=[^ ])|$)|.{{1,{width}}}")
    return [piece for line in lines for piece in (part.findall(line) if len(line) > width else [line])]


def _without_middle(lines: list[str], max_lines: int | None) -> list[str]:
    if max_lines is None or len(lines) <= max_lines:
        return lines
    tail = max_lines // 2
    return [*lines[: max_lines - tail - 1], f"[{len(lines) - max_lines + 1} more lines]", *lines[-tail:]]


def _number(value: float) -> str:
    return "not scored" if np.isnan(value) else f"{value:.3g}"


def _tokens(number: int) -> str:
    return _count(number, "token")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
