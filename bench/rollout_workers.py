"""Many conversations of 8 turns with a tool at once over stub servers: in one event loop, and in rollout workers.

    python bench/rollout_workers.py [--conversations 8192] [--workers 1 2] [--servers 32] [--quick]

The stub servers are processes of their own, with vLLM's endpoint for tokens. Every reply has 256 tokens, the first of
them by its seed, and calls the tool, whose result has about 50 tokens. A reply takes 256 x 20 ms, give or take 20% by
its seed, and the tool 0.3 s. The "stub's own time" is what the slowest conversation then takes if nothing else takes
time. All conversations start at once, in groups of 16. Processor seconds are of this process (rank 0: event loop,
fleet, health checks) and of all workers together; seconds of wall clock only mean something where the cores are free.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import stub_server
from cohort.config import ModelConfig, config_from_dict
from cohort.demo.tasks import TOOLS
from cohort.models import load_tokenizer
from cohort.records import Prompt
from cohort.rollout import RolloutCollector, SamplingParams, StepKey
from cohort.rollout.engines.servers.channels import Channels
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import FleetLimits, RemoteServer, call_seed
from cohort.rollout.engines.servers.server_engine import ServerEngine
from cohort.rollout.engines.vllm.api import GenerateClient
from cohort.rollout.workers.load_rollout import collector_options, load_rollout
from cohort.rollout.workers.worker_main import allow_open_files
from cohort.trainer.parts import Parts
from harness import machine, markdown
from stub_server import FIRST_TOKEN, REPLY_TOKENS, latency_s

GENERATIONS, TURNS, PROMPT_TOKENS, TOOL_S = 16, 8, 200, 0.3
CORES = 16  # for which the table computes
TOOL = f'''
import asyncio

async def look_up(name: str) -> str:
    """Look up a person or a thing.

    Args:
        name: of the person or thing
    """
    await asyncio.sleep({{tool_s}})
    return "{"a few words about what was found, " * 4}" + name
'''
CALL = '<tool_call>{"name": "look_up", "arguments": {"name": "red kite"}}</tool_call>'


@contextmanager
def stub_servers(count: int, choice: bytes, speedup: float) -> Iterator[list[str]]:
    """Run the servers in two processes; yield their addresses."""
    with ExitStack() as stack, tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(choice)
        urls = []
        for share in (count // 2, count - count // 2):
            command = [sys.executable, stub_server.__file__, str(share), file.name, str(speedup)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            urls += [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
        yield urls


def make_choice(tokenizer: Any) -> bytes:
    """A completion for `stub_server`: without the bracket at its start, and with a name for its first token."""
    call = tokenizer(CALL, add_special_tokens=False)["input_ids"]
    words = np.random.default_rng(0).integers(20, 400, REPLY_TOKENS - len(call) - 2).tolist()
    token_ids = [FIRST_TOKEN, *words, *call, tokenizer.eos_token_id]
    content = [{"token_id": token_id, "logprob": -round(0.1 + n / 300, 6)} for n, token_id in enumerate(token_ids)]
    choice = {
        "token_ids": token_ids,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "weight_versions": [{"start": 0, "end": len(token_ids), "version": "0"}],
    }
    return json.dumps(choice).encode()[1:]


def measure(
    num_workers: int, conversations: int, urls: Sequence[str], folder: Path, tokenizer: Any, speedup: float
) -> dict[str, float]:
    """Seconds of wall clock and of processors."""
    config = config_from_dict(
        {
            "model": {"path": str(TOOLS.base_path)},
            "data": {"path": "none.jsonl"},
            "rewards": [{"use": "math"}],
            "rollout": {
                "tools": [f"{folder}/tool.py:look_up"],
                "max_turns": TURNS,
                "max_completion_tokens": REPLY_TOKENS,
                "max_trajectory_tokens": 100_000,
                "num_generations": GENERATIONS,
            },
        }
    )
    client = partial(
        GenerateClient,
        end_token_ids=frozenset({tokenizer.eos_token_id}),
        vocab_size=len(tokenizer),
        secret=None,
        timeout_s=600.0,
    )
    room = max(GENERATIONS, -(-conversations // len(urls)))
    limits = FleetLimits(max_num_seqs=room, start_timeout_s=60, request_timeout_s=600, max_server_failures=3)
    fleet = Fleet([RemoteServer(url) for url in urls], client, limits, server_name="stub server")
    engine = ServerEngine(fleet, channels=Channels(NoChannel, lambda channels, version: {}), notify=lambda text: None)
    engine.update_weights(policy_version=0)
    if num_workers > 1:
        options = engine.start_workers(partial(load_rollout, config, tokenizer), num_workers=num_workers)
    else:
        options = collector_options(config, Parts(config, tokenizer=tokenizer).environments)
    collector = RolloutCollector(engine, tokenizer, **options)
    sampling = SamplingParams.for_training(config.rollout)
    try:
        warm_up = [make_prompt(n, "hello") for n in range(num_workers)]
        collector.collect(warm_up, sampling, StepKey(purpose="eval", seed=0, step=0))
        processes = [psutil.Process(pid) for pid in engine.workers.pids] if engine.workers else []
        prompts = [make_prompt(n, "word " * PROMPT_TOKENS) for n in range(conversations // GENERATIONS)]
        key = StepKey(purpose="train", seed=0, step=0)
        own_s, workers_s, start = time.process_time(), processor_s(processes), time.perf_counter()
        groups = collector.collect(prompts, sampling, key)
        wall_s = time.perf_counter() - start
        own_s, workers_s = time.process_time() - own_s, processor_s(processes) - workers_s
    finally:
        collector.close()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert {(len(t.calls), t.end, t.stats.tool_calls) for t in trajectories} == {(TURNS, "max_turns", TURNS)}
    stub_s = max(own_time_s(prompt, key, sampling, speedup) for prompt in prompts)
    return {"wall": wall_s, "stub": stub_s, "rank 0": own_s, "workers": workers_s, "calls": len(trajectories) * TURNS}


def own_time_s(prompt: Prompt, key: StepKey, sampling: SamplingParams, speedup: float) -> float:
    """What the slowest conversation of a group takes if only the servers and the tool take time."""
    first = latency_s(call_seed(key.call(prompt, 0), sampling), speedup)
    calls = [[key.call(prompt, index, turn) for turn in range(1, TURNS)] for index in range(GENERATIONS)]
    later = [sum(latency_s(call_seed(call, sampling), speedup) for call in own) for own in calls]
    return first + max(later) + TURNS * TOOL_S / speedup


def processor_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time of processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def make_prompt(number: int, content: str) -> Prompt:
    messages = [{"role": "user", "content": content}]
    return Prompt(id=number, epoch=0, content=messages, token_ids=np.arange(20, 30), columns={"answer": "1"})


class NoChannel:
    """Weights need not be sent."""

    def __init__(self, url: str): ...

    def sleep(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8192)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--servers", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    speedup = 50 if args.quick else 1  # of servers and the tool
    if args.quick:
        args.conversations, args.servers = 64, 2
    allow_open_files()
    tokenizer = load_tokenizer(ModelConfig(path=str(TOOLS.base_path)))
    rows = []
    with tempfile.TemporaryDirectory() as folder, stub_servers(args.servers, make_choice(tokenizer), speedup) as urls:
        (Path(folder) / "tool.py").write_text(TOOL.replace("{tool_s}", str(TOOL_S / speedup)))
        for num_workers in args.workers:
            seconds = measure(num_workers, args.conversations, urls, Path(folder), tokenizer, speedup)
            rows.append([str(num_workers), *row(seconds)])
            print(seconds, flush=True)
    print(machine())
    print(f"{args.conversations:,} conversations of {TURNS} turns; ms are of a processor, per model call")
    columns = ["wall, s", "stub's own, s", "ratio", "rank 0, s", "workers, s", "rank 0, ms", "workers, ms"]
    print(markdown(["event loops", *columns, f"busiest process on {CORES} cores, s"], rows))


def row(seconds: dict[str, float]) -> list[str]:
    """A row of the table."""
    calls = seconds["calls"]
    alone = max(seconds["rank 0"], seconds["workers"] / (CORES - 1))
    return [
        *(f"{seconds[name]:.1f}" for name in ("wall", "stub")),
        f"{seconds['wall'] / seconds['stub']:.2f}",
        *(f"{seconds[name]:.1f}" for name in ("rank 0", "workers")),
        *(f"{1000 * seconds[name] / calls:.2f}" for name in ("rank 0", "workers")),
        f"{alone:.1f}",
    ]


if __name__ == "__main__":
    main()
