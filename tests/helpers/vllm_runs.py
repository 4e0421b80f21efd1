"""Engines over fake servers, for the tests of what servers do to them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from cohort.records import Prompt, RolloutGroup
from cohort.rollout import RolloutCollector, SamplingParams, StepKey
from cohort.rollout.engines.servers.channels import Channels
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import FleetLimits, ServerError, ServerHandle, call_seed
from cohort.rollout.engines.servers.secret import Secret, request_headers
from cohort.rollout.engines.servers.server_engine import ServerEngine
from cohort.rollout.engines.vllm.api import GenerateClient
from cohort.rollout.engines.vllm.server import root_cause
from fake_vllm import END, SECRET, VOCAB_SIZE, logprob_of, sampled
from tiny import make_tokenizer
from waiting import PATIENCE_S

SAMPLING = SamplingParams(num_generations=3, max_completion_tokens=8, temperature=1.0)
KEY = StepKey(purpose="train", seed=0, step=5)
LIMITS = FleetLimits(
    max_num_seqs=6,
    start_timeout_s=PATIENCE_S,
    request_timeout_s=PATIENCE_S,
    max_server_failures=3,
    health_every_s=0.05,
    health_timeout_s=PATIENCE_S,
    first_pause_s=0.02,
)
# For servers that hang
IMPATIENT = replace(LIMITS, request_timeout_s=2.0, health_timeout_s=2.0, max_server_failures=1000)
TOKENIZER = make_tokenizer()


def prompts(count: int, *, num_tokens: int = 5) -> list[Prompt]:
    return [
        Prompt(id=i, epoch=1, content="", token_ids=np.arange(num_tokens) + i, columns={"answer": i})
        for i in range(count)
    ]


class Channel:
    """Weights are a version, and nothing else."""

    def __init__(self, url: str):
        self.url = url
        self.is_open = True

    def post(self, path: str, body: Any) -> None:
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), request_headers(Secret(SECRET)))
        try:
            with urlopen(request, timeout=PATIENCE_S):
                pass
        except OSError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error

    def sleep(self) -> None:
        self.post("/sleep", {})

    def close(self) -> None:
        self.is_open = False


class Published(list[tuple[str, int]]):
    """Publishes, and remembers to whom and what."""

    def __call__(self, channels: Sequence[Channel], version: int) -> dict[Channel, ServerError]:
        failures = {}
        for channel in channels:
            self.append((channel.url, version))
            try:
                channel.post("/finish_weight_update", {"weight_version": str(version)})
            except ServerError as error:
                failures[channel] = error
        return failures


class Run:
    """An engine under test, and what it has said and done."""

    def __init__(self, handles: Sequence[ServerHandle], limits: FleetLimits, sleeps: bool, mutual: bool):
        self.notes: list[str] = []
        self.published = Published()
        client = lambda: make_client(limits.request_timeout_s, mutual=mutual)  # noqa: E731
        self.fleet = Fleet(
            handles, client, limits, server_name="vLLM server", find_cause=root_cause, failures_pause_starts=sleeps
        )
        self.engine = ServerEngine(
            self.fleet,
            channels=Channels(Channel, self.published),
            notify=self.notes.append,
            sleeps=sleeps,
        )
        self.collector = RolloutCollector(self.engine, TOKENIZER)

    def generate(self, count: int = 4, sampling: SamplingParams = SAMPLING, **options: Any) -> list[RolloutGroup]:
        return self.collector.collect(prompts(count, **options), sampling, KEY)


def make_client(timeout_s: float, *, mutual: bool = False) -> GenerateClient:
    secret = Secret(SECRET, mutual=mutual)
    return GenerateClient(end_token_ids=frozenset({END}), vocab_size=VOCAB_SIZE, secret=secret, timeout_s=timeout_s)


@contextmanager
def run_with(
    *handles: ServerHandle,
    limits: FleetLimits = LIMITS,
    sleeps: bool = False,
    version: int = 7,
    mutual: bool = False,
) -> Iterator[Run]:
    run = Run(handles, limits, sleeps, mutual)
    try:
        run.engine.update_weights(policy_version=version)
        yield run
    finally:
        run.collector.close()


def assert_right(groups: Sequence[RolloutGroup], sampling: SamplingParams = SAMPLING, *, version: int = 7) -> None:
    """Each prompt has its n completions, in order, with the tokens that its seeds give."""
    for group in groups:
        seeds = [call_seed(KEY.call(group.prompt, i), sampling) for i in range(sampling.num_generations)]
        token_ids = group.prompt.token_ids.tolist()
        expected = [sampled(token_ids, seed, sampling.max_completion_tokens) for seed in seeds]
        assert [c.sampled_token_ids.tolist() for c in group.trajectories] == expected
        for completion, tokens in zip(group.trajectories, expected, strict=True):
            assert completion.sampling_logprobs.tolist() == [logprob_of(t) for t in tokens]
            assert completion.finish_reason == ("stop" if tokens[-1] == END else "length")
            assert completion.policy_version == version
            assert completion.text == TOKENIZER.decode(tokens, skip_special_tokens=True)
