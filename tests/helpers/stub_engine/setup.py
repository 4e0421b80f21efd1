"""The engine: how one of its servers is started, asked for completions, and given the weights."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

import numpy as np
import torch
from torch import Tensor

from cohort.models import Policy
from cohort.plan.defaults import server_memory_utilization
from cohort.records import ModelCall
from cohort.rollout.engines.servers.channels import Channel, Channels
from cohort.rollout.engines.servers.cuda_ipc import IpcHandle
from cohort.rollout.engines.servers.handles import Client, GenerateRequest, ServerError
from cohort.rollout.engines.servers.setup import ServersSetup
from cohort.rollout.engines.setup import TrainingProcesses

from .server import StubServer, serving

_TIMEOUT_S = 600.0


def post(url: str, path: str, *, timeout_s: float = _TIMEOUT_S, **body: Any) -> Any:
    try:
        with urlopen(Request(f"{url}/{path}", json.dumps(body).encode()), timeout=timeout_s) as answer:
            return json.load(answer)
    except OSError as error:
        raise ServerError(f"{url}/{path}: {error}") from error


class StubClient:
    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def healthy(self, url: str) -> bool:
        try:
            return await self.max_model_len(url) > 0
        except ServerError:
            return False

    async def max_model_len(self, url: str) -> int:
        return (await asyncio.to_thread(post, url, "limits"))["max_model_len"]

    async def generate(self, url: str, request: GenerateRequest, *, allows: Callable[[int], bool]) -> list[ModelCall]:
        answer = await asyncio.to_thread(
            post,
            url,
            "generate",
            timeout_s=self.timeout_s,
            seeds=[request.seed + i for i in range(request.num_completions)],
            max_tokens=request.sampling.max_completion_tokens,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
        )
        if not allows(answer["version"]):
            raise ServerError(f"{url} has sampled with weights {answer['version']}")
        return [
            ModelCall(
                context_ids=request.token_ids,
                token_ids=np.asarray(token_ids),
                sampling_logprobs=np.full(len(token_ids), answer["logprob"]),
                finish_reason="length",
                policy_version=answer["version"],
            )
            for token_ids in answer["token_ids"]
        ]


class StubChannel:
    def __init__(self, url: str):
        self.url = url

    def sleep(self) -> None:
        post(self.url, "sleep")

    def close(self) -> None: ...


def publish(
    processes: TrainingProcesses, dtype: torch.dtype, channels: Sequence[StubChannel], version: int
) -> dict[StubChannel, ServerError]:
    failed = {}

    def send(weights: Iterator[tuple[str, Tensor]], handles: Mapping[str, IpcHandle]) -> None:
        dtypes = {name: str(tensor.dtype) for name, tensor in weights}
        for channel in channels:
            try:
                post(channel.url, "publish", version=version, dtypes=dtypes)
            except ServerError as error:
                failed[channel] = error

    processes.send_weights(send, dtype)
    return failed


class StubHandle:
    """A server in a thread of this process."""

    url = ""
    server: StubServer

    def __init__(self, **settings: Any):
        self.settings = settings
        self.running = ExitStack()

    def start(self) -> None:
        self.server = self.running.enter_context(serving(**self.settings))
        self.url = self.server.url

    def poll(self) -> str | None:
        return None

    def log(self) -> str:
        return ""

    def stop(self) -> None:
        self.running.close()


class StubSetup(ServersSetup):
    def make_server(self, gpus: str, log_file: Path) -> StubHandle:
        return StubHandle(
            vocab_size=len(self.inputs.tokenizer),
            max_model_len=self.max_model_len,
            gpu_memory_utilization=server_memory_utilization(self.rollout, shared=self.shares_gpus),
        )

    def make_client(self, policy: Policy) -> Callable[[], Client]:
        return partial(StubClient, self.rollout.request_timeout_s)

    def make_channels(
        self, processes: TrainingProcesses, *, folder: Path, notify: Callable[[str], None]
    ) -> Channels[Channel]:
        return Channels(StubChannel, partial(publish, processes, self.dtype))
