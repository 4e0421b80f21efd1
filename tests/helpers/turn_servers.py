"""Servers with vLLM's endpoint for tokens that reply by a script, and collectors over them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cohort.records import Prompt, RolloutGroup
from cohort.rollout import RolloutCollector, SamplingParams, StepKey
from cohort.rollout.engines.servers.channels import Channels
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import FleetLimits, RemoteServer
from cohort.rollout.engines.servers.server_engine import ServerEngine
from cohort.rollout.engines.vllm.api import GenerateClient
from cohort.rollout.workers.load_rollout import collector_options, load_rollout
from cohort.rollout.workers.nodes import Place
from cohort.trainer.parts import Parts
from playing import turns_config, turns_tokenizer
from waiting import PATIENCE_S

LIMITS = FleetLimits(
    max_num_seqs=64, start_timeout_s=PATIENCE_S, request_timeout_s=PATIENCE_S, max_server_failures=3, first_pause_s=0.05
)
KEY = StepKey(purpose="train", seed=5, step=2)


def replying(script: Callable[[str, int], str]) -> Callable[[Any], Any]:
    """The answer to a request: for each of its completions the script's reply to the context's text and the seed."""
    tokenizer = turns_tokenizer()

    def answer(body: Any) -> Any:
        context, sampling = tokenizer.decode(body["token_ids"]), body["sampling_params"]
        texts = [script(context, sampling["seed"] + index) for index in range(sampling["n"])]
        return {"choices": [_choice(index, text, sampling["max_tokens"]) for index, text in enumerate(texts)]}

    def _choice(index: int, text: str, most: int) -> Any:
        token_ids = tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"][:most]
        ended = token_ids[-1] == tokenizer.eos_token_id
        logprobs = np.random.default_rng(len(text)).uniform(-3, 0, len(token_ids))
        return {
            "index": index,
            "token_ids": token_ids,
            "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(token_ids, logprobs, strict=True)]},
            "finish_reason": "stop" if ended else "length",
            "weight_versions": [{"start": 0, "end": len(token_ids), "version": "3"}],
        }

    return answer


class NoChannel:
    """Weights need not be sent."""

    def __init__(self, url: str):
        pass

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def collecting(
    folder: Path,
    urls: Sequence[str],
    *,
    num_workers: int,
    elsewhere: Sequence[Place] = (),
    notes: list[str] | None = None,
    **rollout: Any,
) -> Iterator[tuple[RolloutCollector, ServerEngine]]:
    """A collector over servers with the keys of `rollout`: in this process, or in so many workers, some elsewhere."""
    config, tokenizer = turns_config(folder, **rollout), turns_tokenizer()
    client = partial(
        GenerateClient,
        end_token_ids=frozenset({tokenizer.eos_token_id}),
        vocab_size=len(tokenizer),
        secret=None,
        timeout_s=PATIENCE_S,
    )
    fleet = Fleet([RemoteServer(url) for url in urls], client, LIMITS, server_name="server")
    channels = Channels(NoChannel, lambda channels, version: {})
    engine = ServerEngine(fleet, channels=channels, notify=(notes if notes is not None else []).append)
    engine.update_weights(policy_version=3)
    if num_workers > 1 or elsewhere:
        load = partial(load_rollout, config, tokenizer)
        options = engine.start_workers(load, num_workers=num_workers, elsewhere=elsewhere)
    else:
        options = collector_options(config, Parts(config, tokenizer=tokenizer).environments)
    collector = RolloutCollector(engine, tokenizer, **options)
    try:
        yield collector, engine
    finally:
        collector.close()


def collect(collector: RolloutCollector, rows: Sequence[dict[str, Any]], *, generations: int = 3) -> list[RolloutGroup]:
    """One group per row, whose column `prompt` is the prompt."""
    return collector.collect(prompts_of(rows), sampling(generations), KEY)


def sampling(generations: int = 3) -> SamplingParams:
    """Of the tests' trajectories."""
    return SamplingParams(num_generations=generations, max_completion_tokens=200, temperature=1.0)


def prompts_of(rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Prompts of rows."""
    tokenizer = turns_tokenizer()
    return [
        Prompt(
            id=number,
            epoch=0,
            content=row["prompt"],
            token_ids=np.array(tokenizer(str(row["prompt"]), add_special_tokens=False)["input_ids"]),
            columns={name: value for name, value in row.items() if name != "prompt"},
        )
        for number, row in enumerate(rows)
    ]
