"""Answer the requests of one trajectory with its model, in its event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cohort.errors import UserError
from cohort.records import IntArray, ModelCall
from cohort.rollout.endpoint.openai_answers import Body, chat_answer, text_answer, token_answer
from cohort.rollout.endpoint.openai_requests import AnyRequest, ChatRequest, RequestError, TextRequest, TokenRequest
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel, TrajectoryEnded
from cohort.rollout.stop_strings import truncate_at_stop

T = TypeVar("T")


class Session:
    """One trajectory behind the endpoint, until its agent has returned."""

    def __init__(
        self,
        model: RolloutModel,
        *,
        warn: Callable[[str], None],
        batcher: "Batcher",
        on_limit: Callable[[], None] = lambda: None,
    ):
        """Create the session in the event loop of the trajectory.

        Args:
            model: samples from the policy for this trajectory.
            warn: called with the name of a field that has no effect.
            batcher: holds requests of all trajectories.
            on_limit: called before a request is refused because a limit has ended the trajectory.
        """
        self.loop = asyncio.get_running_loop()
        self.answered: list[ModelCall] = []  # in the order of the answers
        self.num_tool_calls = 0
        self.num_malformed_calls = 0
        self._model = model
        self._warn = warn
        self._batcher = batcher
        self._on_limit = on_limit
        self._requests: set[asyncio.Task[Any]] = set()
        self._engine_failed: asyncio.Future[None] = self.loop.create_future()
        self._has_ended = False
        self._has_checked_tools = False
        self._texts: list[tuple[str, IntArray]] = []  # text completions with their prompts, and their tokens

    async def until_failure(self, agent: Awaitable[T]) -> T:
        """Return what `agent` returns. Raises the rollout engine's error if it fails meanwhile."""
        task = asyncio.ensure_future(agent)
        try:
            waiting: list[asyncio.Future[Any]] = [task, self._engine_failed]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._engine_failed.result()
            return await task
        finally:
            task.cancel()

    async def answer(self, request: AnyRequest, *, is_abandoned: Callable[[], bool]) -> Body | None:
        """Return the answer to a request. Raises RequestError.

        Args:
            request: what the agent asks for.
            is_abandoned: whether the client has hung up. Nobody learns of its call then, and the answer is None.
        """
        if self._has_ended:
            raise ended()
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            for name in request.ignored:
                self._warn(name)
            await self._batcher.wait()
            call, body = await self._answer(request)
            if self._has_ended:
                raise ended()
            if is_abandoned():
                self._model.drop(call)
                return None
            self.answered.append(call)
            return body
        except TrajectoryEnded as error:
            self._on_limit()
            raise RequestError(
                f"{error}; rollout.max_turns and rollout.max_trajectory_tokens are its limits", code="trajectory_ended"
            ) from error
        except EnvironmentFailure as error:
            raise RequestError(str(error), code="context_length_exceeded") from error
        except Exception as error:
            failed = self._model.engine_error
            if failed is not None:
                if not self._engine_failed.done():
                    self._engine_failed.set_exception(failed)
                raise RequestError("the rollout engine failed; the run ends", status=500) from error
            if isinstance(error, UserError):  # the chat template rejects the messages or the tools
                raise RequestError(str(error)) from error
            raise
        finally:
            self._requests.discard(task)

    def end(self) -> None:
        """Answer no more requests: the agent has returned. From any thread."""
        self._has_ended = True

    def close(self) -> None:
        """Cancel the requests in progress. Their calls are not recorded."""
        self.end()
        for task in self._requests:
            task.cancel()
        if self._engine_failed.done():
            self._engine_failed.exception()  # retrieve it, or asyncio logs a warning

    async def _answer(self, request: AnyRequest) -> tuple[ModelCall, Body]:
        tokenizer = self._model.tokenizer
        options: dict[str, Any] = {
            "train": request.train,
            "max_tokens": request.limit,
            "stop": request.stop,
            "stop_token_ids": request.stop_token_ids,
        }
        if isinstance(request, ChatRequest):
            messages, tools = [message.canonical() for message in request.messages], request.usable_tools
            self._check_tools(tools)
            reply = await self._model.chat(messages, tools, **options)
            assert reply.call is not None
            self.num_tool_calls += len(reply.tool_calls)
            self.num_malformed_calls += len(reply.errors)
            return reply.call, chat_answer(reply, reply.call, request, tokenizer)
        prompt = request.prompt if isinstance(request, TextRequest) else request.token_ids
        token_ids = self._tokenize(prompt) if isinstance(prompt, str) else np.asarray(prompt, dtype=np.int64)
        if token_ids.max() >= len(tokenizer):
            raise RequestError(f"token id {token_ids.max()} is outside of the vocabulary of {len(tokenizer)} tokens")
        call = await self._model.generate(token_ids, **options)
        if isinstance(request, TokenRequest):
            return call, token_answer(call, request)
        text = truncate_at_stop(tokenizer.decode(call.token_ids.tolist(), skip_special_tokens=True), request.stop)
        if isinstance(prompt, str):
            self._keep_text(prompt, text, call)
        return call, text_answer(text, call, request, tokenizer)

    def _check_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        if tools and not self._has_checked_tools:
            self._model.template.check_tools(tools)
            self._model.parser.check_tools()
            self._has_checked_tools = True

    def _tokenize(self, prompt: str) -> IntArray:
        """Tokenize a prompt, except for the part that an earlier call has sampled."""
        tokenizer = self._model.tokenizer
        continued = [kept for kept in self._texts if prompt.startswith(kept[0])]
        if not continued:
            token_ids: IntArray = np.asarray(tokenizer(prompt)["input_ids"], dtype=np.int64)
            if not len(token_ids):
                raise RequestError("prompt has no tokens", param="prompt")
            return token_ids
        text, token_ids = max(continued, key=lambda kept: len(kept[0]))
        new = tokenizer(prompt[len(text) :], add_special_tokens=False)["input_ids"]
        return np.concatenate([token_ids, np.asarray(new, dtype=np.int64)])

    def _keep_text(self, prompt: str, text: str, call: ModelCall) -> None:
        """Keep the tokens of a completion's text: all, or without the end-of-turn token or stop string."""
        decode = self._model.tokenizer.decode
        for length in range(len(call.token_ids), -1, -1):
            kept = decode(call.token_ids[:length].tolist())
            if kept == text:
                self._texts.append((prompt + text, np.concatenate([call.context_ids, call.token_ids[:length]])))
            if len(kept) <= len(text):
                return


class Batcher:
    """Holds requests until no other has come for a moment, for engines that sample all waiting calls in one batch.

    Without it, the first of many agents that get their answers at the same time would have a batch to itself.
    """

    def __init__(self, *, quiet_s: float, max_s: float):
        """Create a batcher.

        Args:
            quiet_s: requests continue when no other has come for this time; 0: at once.
            max_s: maximum time that a request is held.
        """
        self._quiet_s = quiet_s
        self._max_s = max_s
        self._batch: asyncio.Future[None] | None = None  # done when the held requests may continue
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Wait until the request may continue."""
        if not self._quiet_s:
            return
        loop = asyncio.get_running_loop()
        if self._batch is None:
            self._batch, self._deadline = loop.create_future(), loop.time() + self._max_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(loop.time() + self._quiet_s, self._deadline), self._release, self._batch)
        await asyncio.shield(self._batch)  # one that is cancelled does not cancel the others

    def _release(self, batch: "asyncio.Future[None]") -> None:
        self._batch = self._timer = None
        batch.set_result(None)


def ended() -> RequestError:
    """Return the error of requests after the trajectory."""
    return RequestError(
        "this key is not valid: it is unknown, or the function to which it was given has returned",
        status=401,
        code="invalid_api_key",
    )
