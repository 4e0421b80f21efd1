"""The engine: calls that wait are sent to the first server, one after the other."""

import json
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from cohort.records import IntArray, ModelCall
from cohort.rollout.base import CallKey, Sampled, SamplingParams
from cohort.rollout.calls import CallQueue
from cohort.trainer.engines import StartedEngine
from waiting import PATIENCE_S


def post(url: str, body: dict[str, Any]) -> Any:
    with urlopen(Request(url, json.dumps(body).encode()), timeout=PATIENCE_S) as answer:
        return json.load(answer)


class StubEngine:
    def __init__(self, url: str):
        self.url = url
        self.calls = CallQueue()

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        return await self.calls.put(token_ids, sampling, key)

    def advance(self) -> bool:
        calls = self.calls.take()
        for call in calls:
            seed = hash((call.key.step, call.key.prompt_id, call.key.epoch, call.key.index)) % 2**32
            body = {"seed": seed, "max_tokens": call.sampling.max_completion_tokens}
            answer = post(f"{self.url}/generate", body)
            sampled = Sampled(
                token_ids=np.asarray(answer["token_ids"]),
                sampling_logprobs=np.asarray(answer["logprobs"]),
                finish_reason="length",
            )
            call.answer(sampled, policy_version=answer["version"])
        return bool(calls)

    def release_gpus(self) -> None: ...

    def load_weights(self, *, policy_version: int) -> None:
        post(f"{self.url}/publish", {"version": policy_version})

    def close(self) -> None: ...


class StubSetup:
    shares_gpus = False

    def __init__(self, config: Any, inputs: Any):
        self.url = config.rollout.urls[0]

    def start(self, config: Any, inputs: Any, workers: Any, *, folder: Any, note: Any) -> StartedEngine:
        engine = StubEngine(self.url)
        engine.load_weights(policy_version=workers.local.engine.updates_done)
        note(f"sampling with {self.url}")
        return StartedEngine(engine=engine)
