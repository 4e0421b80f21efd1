"""The model of one trajectory, as environments and agents see it: chat and generate, with exact tokens and limits.

K context tokens and C sampled tokens of a call.
"""

import asyncio
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cohort.chat import ChatTemplate, Rendering, Reply, ResponseParser, are_equal
from cohort.errors import UserError
from cohort.records import EndReason, IntArray, Message, ModelCall, Prompt
from cohort.rollout.engines.base import CallKey, Generate, SamplingParams
from cohort.rollout.stop_strings import cut, cut_at_stop, truncate_at_stop

Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as the chat template takes them


NO_TEMPLATE = (
    "the tokenizer has no chat template, which chats need; put a chat_template.jinja into the model's folder, or call "
    "model.generate or /v1/completions, which take tokens and text as they are"
)


class TrajectoryEnded(Exception):  # noqa: N818
    """A limit has ended the trajectory. Every further model call raises it again."""

    def __init__(self, end: EndReason):
        super().__init__(f"the trajectory has ended: {end}")
        self.end = end


def limit_behind(error: BaseException) -> EndReason | None:
    """Return the limit that an exception reports: `TrajectoryEnded`, one raised from it, or a group of such ones."""
    if isinstance(error, TrajectoryEnded):
        return error.end
    if isinstance(error, BaseExceptionGroup):
        ends = [limit_behind(member) for member in error.exceptions]
        return ends[0] if all(ends) else None
    return None if error.__cause__ is None else limit_behind(error.__cause__)


class EnvironmentFailure(Exception):  # noqa: N818
    """The environment failed. The trajectory is repeated with a fresh one, then masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits of a trajectory."""

    max_turns: int  # model calls that are trained on
    max_prompt_tokens: int  # of the first context
    max_new_tokens: int  # after the first context, tool results included
    timeout_s: float  # while the event loop runs: a training step does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A chat call and the conversation up to and including its reply."""

    conversation: tuple[Message, ...]
    tools: Tools | None
    call: ModelCall

    def is_continued_by(self, messages: Sequence[Message], tools: Tools | None) -> bool:
        """Whether `messages` are this conversation and at least one more message, with the same tools."""
        length = len(self.conversation)
        return (
            len(messages) > length
            and (self.tools or None) == (tools or None)
            and all(map(_is_same, self.conversation, messages[:length]))
        )


class RolloutModel:
    """Samples from the policy for one trajectory and keeps every call.

    A chat that continues an earlier one starts with its exact tokens: what was sampled is never tokenized again. If the
    chat template rewrites the history, or the messages differ from the earlier ones, a new token sequence starts.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        template: ChatTemplate | None,
        parser: ResponseParser,
        tokenizer: Any,
        prompt: Prompt,
        sampling: SamplingParams,
        key: CallKey,
        limits: TurnLimits,
        keep_thoughts: bool = False,
    ):
        """Create the model of one trajectory.

        Args:
            generate: samples from the policy.
            template: renders messages; None if the tokenizer has no chat template.
            parser: parses replies.
            tokenizer: decodes tokens to find stop strings.
            prompt: prompt of the trajectory.
            sampling: sampling parameters of all calls.
            key: key of the first call.
            limits: limits of the trajectory.
            keep_thoughts: `rollout.keep_thoughts`.
        """
        self.prompt = prompt
        self.key = key
        self._template = template
        self.parser = parser
        self.tokenizer = tokenizer
        self.ended: EndReason | None = None  # the limit that was reached, if any
        self.engine_error: BaseException | None = None  # of the rollout engine, which user code may have caught
        self.transcript: list[Message] = []  # messages after the first context, for display and rewards
        self.step_rewards: list[float] = []  # of the environment, one per trained call
        self.model_s = 0.0  # seconds in which at least one call was waiting
        self.model_loop_s = 0.0  # the same by the event loop's clock, which stands still while a local engine samples
        self._generate = generate
        self._sampling = sampling
        self._limits = limits
        self._keep_thoughts = keep_thoughts
        self.num_rewritten = 0  # continued chats for which the chat template started a new token sequence
        self._calls: dict[int, ModelCall] = {}  # by turn
        self._turns: list[_Turn] = []
        self._rendering = Rendering()
        self._num_started = 0
        self._num_trained = 0
        self._first_context: int | None = None  # tokens of the first trained call's context
        self._num_messages = 0  # of the first trained chat
        self._all_answered = asyncio.Event()  # no call is waiting
        self._all_answered.set()
        self._tasks: set[asyncio.Task[Any]] = set()  # in which a call is waiting
        self._is_closed = False

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises UserError if the tokenizer has none."""
        if self._template is None:
            raise UserError(NO_TEMPLATE)
        return self._template

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """Finished calls in the order in which they were started, or that of `keep`."""
        return tuple(call for _, call in sorted(self._calls.items()))

    @property
    def turns_left(self) -> int:
        """Number of further calls that may be trained on."""
        return self._limits.max_turns - self._num_trained

    async def chat(
        self,
        messages: str | Sequence[Message],
        tools: Tools | None = None,
        train: bool = True,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> Reply:
        """Sample the next assistant message of a conversation.

        Args:
            messages: the conversation in the chat format; text is one user message.
            tools: JSON schemas of the tools that the model may call.
            train: whether to train on the sampled tokens. False for a simulated user or an opponent.
            max_tokens: limit of this call, if below `rollout.max_completion_tokens`.
            stop: strings that end the reply, besides `rollout.stop`. Their tokens are kept, but the text is cut before
                them.
            stop_token_ids: tokens that end the reply. They are kept.

        Raises:
            TrajectoryEnded: a limit of the trajectory is reached.
            EnvironmentFailure: the first context exceeds `rollout.max_prompt_tokens`.
            UserError: the chat template rejects the messages.
        """
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        earlier = self._continued_turn(messages, tools)
        # copies, as programs may change messages in place; those of the earlier turn are kept where equal
        kept = earlier.conversation if earlier else ()
        conversation = [
            *(old if are_equal(old, own) else copy.deepcopy(own) for old, own in zip(kept, messages, strict=False)),
            *copy.deepcopy(messages[len(kept) :]),
        ]
        tools = copy.deepcopy(tools)
        context_ids = self._context(earlier, conversation, tools)
        call = await self._call(
            context_ids, train=train, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids
        )
        reply = self.parser.parse(
            call.token_ids, context_ids=context_ids, tools=tools, finish_reason=call.finish_reason
        )
        reply = replace(reply, call=call)
        if stop:
            reply = replace(reply, content=truncate_at_stop(reply.content, stop))
        message = copy.deepcopy(reply.message)
        self._turns.append(_Turn(conversation=(*conversation, message), tools=tools, call=call))
        if train:
            if not self.transcript:
                self._num_messages = len(conversation)
            self.transcript = [*map(dict, conversation[self._num_messages :]), message]  # programs may change it
        return reply

    async def generate(
        self,
        token_ids: Sequence[int] | IntArray,
        train: bool = True,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> ModelCall:
        """Sample a continuation of `token_ids` [K]. Other arguments and errors are those of `chat`.

        Raises:
            ValueError: `token_ids` are empty, or not token ids of the tokenizer.
        """
        context_ids, num_tokens = np.asarray(token_ids), len(self.tokenizer)
        are_ids = context_ids.ndim == 1 and len(context_ids) and np.issubdtype(context_ids.dtype, np.integer)
        if not are_ids or not 0 <= context_ids.min() <= context_ids.max() < num_tokens:
            raise ValueError(
                f"token_ids must be one or more token ids from 0 to {num_tokens - 1}, got {token_ids!r:.200}"
            )
        return await self._call(
            context_ids.astype(np.int64), train=train, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids
        )

    def drop(self, call: ModelCall) -> None:
        """Forget a finished call that nobody has seen, and give its turn back."""
        self._calls = {turn: kept for turn, kept in self._calls.items() if kept is not call}
        self._turns = [turn for turn in self._turns if turn.call is not call]
        self._num_trained -= call.trained

    def keep(self, calls: Sequence[ModelCall]) -> None:
        """Keep only these of the finished calls, in this order."""
        self._calls = dict(enumerate(calls))

    def close(self) -> None:
        """End the trajectory: calls in flight, of tasks that the program left behind, are cancelled."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    def _continued_turn(self, messages: Sequence[Message], tools: Tools | None) -> _Turn | None:
        """Return the turn with the longest earlier conversation that these messages continue."""
        longest_first = sorted(self._turns, key=lambda turn: len(turn.conversation), reverse=True)
        return next((turn for turn in longest_first if turn.is_continued_by(messages, tools)), None)

    def _context(self, turn: _Turn | None, messages: Sequence[Message], tools: Tools | None) -> IntArray:
        """Return the context of the next call: the tokens of the turn that it continues and those of new messages."""
        if turn is not None:
            new = messages[len(turn.conversation) :]
            suffix = self.template.suffix(
                turn.conversation,
                new,
                tools,
                sampled_ids=turn.call.token_ids,
                finish_reason=turn.call.finish_reason,
                keep_history=self._keep_thoughts,
                rendering=self._rendering,
            )
            if suffix is not None:
                return np.concatenate([turn.call.context_ids, turn.call.token_ids, suffix])
            self.num_rewritten += 1
        return self.template.render(messages, tools)

    async def _call(
        self,
        context_ids: IntArray,
        *,
        train: bool,
        max_tokens: int | None,
        stop: Sequence[str],
        stop_token_ids: Sequence[int],
    ) -> ModelCall:
        if self._is_closed:
            raise RuntimeError("the model of a trajectory was called after its program had returned")
        try:
            room = self._room(context_ids, train=train)
        except TrajectoryEnded:
            await self._until_answered()
            raise
        limit = min(room, self._sampling.max_completion_tokens)
        limit = limit if max_tokens is None else max(1, min(limit, max_tokens))
        turn, self._num_started = self._num_started, self._num_started + 1
        self._num_trained += train
        stop = (*self._sampling.stop, *filter(None, stop))
        sampling = replace(self._sampling, max_completion_tokens=limit, stop=stop)
        with self._waiting():
            try:
                call = await self._generate(context_ids, sampling, replace(self.key, turn=turn))
            except asyncio.CancelledError:
                self._num_trained -= train  # nobody has seen the call
                raise
            except Exception as error:
                self.engine_error = error
                raise
        call = replace(cut_at_stop(_cut_at_token(call, stop_token_ids), stop, self.tokenizer), trained=train)
        self._calls[turn] = call
        return call

    async def _until_answered(self) -> None:
        """Wait for the calls in flight: they are part of the trajectory that a limit has ended."""
        await asyncio.sleep(0)  # a program that asks again and again must not block the event loop
        await self._all_answered.wait()

    def _room(self, context_ids: IntArray, *, train: bool) -> int:
        """Return how many tokens the next call may sample."""
        if self.ended is not None:
            raise TrajectoryEnded(self.ended)
        limits = self._limits
        if train and self._first_context is None:
            if len(context_ids) > limits.max_prompt_tokens:
                raise EnvironmentFailure(
                    f"the first context has {len(context_ids)} tokens, more than rollout.max_prompt_tokens: "
                    f"{limits.max_prompt_tokens}; use a shorter prompt, or raise it"
                )
            self._first_context = len(context_ids)
        if train and not self.turns_left:
            self._end("max_turns")
        # calls that are not trained on may come first, and have their own contexts
        first = self._first_context if train and self._first_context is not None else limits.max_prompt_tokens
        room = first + limits.max_new_tokens - len(context_ids)
        if room < 1:
            self._end("length")
        return room

    def _end(self, end: EndReason) -> None:
        self.ended = end
        raise TrajectoryEnded(end)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Measure the time in which calls wait; concurrent ones count once."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        if not self._tasks:
            self._waiting_since = time.monotonic(), loop.time()
        self._tasks.add(task)
        self._all_answered.clear()
        try:
            yield
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._all_answered.set()
                since, loop_since = self._waiting_since
                self.model_s += time.monotonic() - since
                self.model_loop_s += loop.time() - loop_since


def _cut_at_token(call: ModelCall, stop_token_ids: Sequence[int]) -> ModelCall:
    """Cut a call after the first of these tokens."""
    stops = np.flatnonzero(np.isin(call.token_ids, list(stop_token_ids)))
    return cut(call, int(stops[0]) + 1) if len(stops) else call


def _is_same(kept: Message, received: Message) -> bool:
    """Whether two messages are the same. Reasoning may be left out, since many clients drop it."""
    if are_equal(kept, received):
        return True
    if _identity(kept) != _identity(received):
        return False
    reasoning = received.get("reasoning_content")
    return reasoning is None or reasoning == kept.get("reasoning_content")


def _identity(message: Message) -> tuple[Any, ...]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return (
        message.get("role"),
        message.get("content") or "",
        [(call.get("name"), call.get("arguments")) for call in calls],
        message.get("tool_call_id"),
        message.get("name"),
    )
