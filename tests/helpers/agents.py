"""Agents of the tests: an engine that replies by a script, and what it takes to run an agent in front of it."""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from cohort.chat import ChatTemplate, ResponseParser
from cohort.records import IntArray, ModelCall, Prompt, Trajectory
from cohort.rollout import CallKey, RolloutCollector, SamplingParams, StepKey
from cohort.rollout.endpoint.agent import AgentProgram
from cohort.rollout.engines.base import CallQueue
from cohort.rollout.environments.model import TurnLimits
from cohort.rollout.environments.trajectory import TrajectoryRunner
from playing import turns_tokenizer
from waiting import PATIENCE_S

TOKENIZER = turns_tokenizer()
END = TOKENIZER.eos_token_id
LIMITS = TurnLimits(max_turns=4, max_prompt_tokens=2000, max_new_tokens=2000, timeout_s=PATIENCE_S)
SAMPLING = SamplingParams(num_generations=1, max_completion_tokens=200, temperature=1.0)
CALL = '<tool_call>{"name": "look_up",  "arguments": {"word": "cat"}}</tool_call>'  # not as the template has it
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]
MESSAGES = [{"role": "user", "content": "What is a cat?"}]


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def decode(token_ids: IntArray) -> str:
    return str(TOKENIZER.decode(token_ids.tolist()))


class ReplyingEngine:
    """Replies by a function of the turn, one character after another if `slowly`, or waits for ever."""

    def __init__(self, reply: Callable[[CallKey], str | None]):
        self._reply = reply
        self._calls = CallQueue()
        self._waiting: list[Any] = []  # calls without a reply
        self.asked = threading.Event()  # a call is there

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        self.asked.set()
        return await self._calls.put(token_ids, sampling, key)

    def advance(self) -> bool:
        calls = self._calls.take()
        for call in calls:
            text = self._reply(call.key)
            if text is None:
                self._waiting.append(call)
                continue
            token_ids = np.array([*encode(text), END][: call.sampling.max_completion_tokens])
            call.answer(
                ModelCall(
                    context_ids=call.token_ids,
                    token_ids=token_ids,
                    sampling_logprobs=-0.01 * token_ids,
                    finish_reason="stop" if token_ids[-1] == END else "length",
                    policy_version=0,
                )
            )
        return bool(calls)

    def release_gpus(self) -> None:
        pass

    def update_weights(self, *, policy_version: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(kw_only=True)
class Played:
    """What agents did."""

    trajectories: list[Trajectory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def trajectory(self) -> Trajectory:
        (only,) = self.trajectories
        return only


def play(
    solve: Callable[..., Any],
    *replies: str | None,
    num_rows: int = 1,
    limits: TurnLimits = LIMITS,
    retries: int = 0,
    engine: Any = None,
    batches_requests: bool = False,
) -> Played:
    """Run an agent for some rows at a time; the model replies by the turn, the last for ever."""
    played = Played()
    engine = engine or ReplyingEngine(lambda key: replies[min(key.turn, len(replies) - 1)])
    program = AgentProgram(solve, name="solve", batches_requests=batches_requests)
    program.notify = played.notes.append
    runner = TrajectoryRunner(
        program,
        template=ChatTemplate(TOKENIZER),
        parser=ResponseParser(TOKENIZER),
        limits=limits,
        prompt_column="question",
        retries=retries,
    )
    prompts = [
        Prompt(id=number, epoch=0, content="hi", token_ids=np.array([5]), columns={"number": number, "answer": "4"})
        for number in range(num_rows)
    ]
    collector = RolloutCollector(engine, TOKENIZER, rollout_function=runner, close_environments=runner.close)
    with closing(collector):
        groups = collector.collect(prompts, SAMPLING, StepKey(purpose="train", seed=0, step=0))
        played.counts = program.counts()
    played.trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return played


def post(base_url: str, key: str, body: Any, path: str = "chat/completions", **options: Any) -> httpx2.Response:
    """Send a request as a client does that is not OpenAI's."""
    return httpx2.post(
        f"{base_url}/{path}",
        headers={"Authorization": f"Bearer {key}"},
        content=body if isinstance(body, bytes) else json.dumps(body),
        timeout=PATIENCE_S,
        trust_env=False,
        **options,
    )


def ask(base_url: str, key: str, messages: Any = MESSAGES, **fields: Any) -> dict[str, Any]:
    """Return the answer to a chat request."""
    response = post(base_url, key, {"model": "any", "messages": messages, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
