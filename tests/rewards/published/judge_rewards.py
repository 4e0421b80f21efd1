"""Judges over HTTP, with a client that answers by itself; called asynchronously."""

import asyncio
import random
from dataclasses import dataclass
from functools import partial


@dataclass
class Response:
    status_code: int
    payload: dict

    def json(self) -> dict:
        return self.payload


class Client:
    """What people use of httpx.AsyncClient, without a network."""

    def __init__(self, max_connections: int = 2):
        self.slots = asyncio.Semaphore(max_connections)
        self.rng = random.Random(0)

    async def post(self, url: str, json: dict, timeout: float = 10.0) -> Response:
        async with self.slots:
            await asyncio.sleep(self.rng.random() * 0.01)
            text = json["completion"]
            if not text.strip():
                return Response(422, {"error": "empty"})
            return Response(200, {"score": round(10 * min(1.0, len(set(text.split())) / 12), 1)})


client = Client()


async def ask(client: Client, text: str) -> float | None:
    response = await client.post("http://localhost:9/score", json={"completion": text})
    return response.json()["score"] / 10 if response.status_code == 200 else None


async def judge_reward(prompts, completions, **kwargs):
    """Asynchronous all the way, with a client that lives as long as the process."""
    return await asyncio.gather(*(ask(client, completion) for completion in completions))


class RubricReward:
    """An instance whose call is asynchronous."""

    def __init__(self, criteria: dict[str, float]):
        self.criteria = criteria
        self.__name__ = "rubric_reward"

    async def grade(self, text: str) -> float:
        parts = await asyncio.gather(*(self.check(name, text) for name in self.criteria))
        return sum(weight * part for weight, part in zip(self.criteria.values(), parts, strict=True))

    async def check(self, name: str, text: str) -> float:
        await asyncio.sleep(0)
        return {"ends": float(text.endswith(".")), "short": float(len(text) < 60), "said": float(bool(text))}[name]

    async def __call__(self, completions, scale=1.0, **kwargs):
        return [scale * await self.grade(completion) for completion in completions]


rubric_reward = RubricReward({"ends": 0.5, "short": 0.3, "said": 0.2})
half_rubric_reward = partial(rubric_reward, scale=0.5)
