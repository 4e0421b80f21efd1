"""Trajectories of several turns that proceed independently, against the same engine in lock step.

    python bench/turns.py [--trajectories 64] [--threads 1] [--repeats 3] [--quick]

Trajectory number i has 1 to 6 model calls of 32 tokens. A tool call follows each but the last: 0.1 s, and 2 s for one
in ten, drawn at random. In lock step, as in TRL, all calls of a turn are sampled together, and then all tools of the
turn run at once: every turn waits for its slowest tool.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from contextlib import closing

import numpy as np
import torch

from cohort.chat import ChatTemplate, ResponseParser
from cohort.config import ModelConfig
from cohort.demo.tasks import WORDS
from cohort.models import LoadRequest, load_policy, load_tokenizer
from cohort.records import Prompt
from cohort.rollout import LocalEngine, RolloutCollector, Sampler, SamplingParams, StepKey
from cohort.rollout.environments.model import RolloutModel, TurnLimits
from cohort.rollout.environments.programs import UserProgram
from cohort.rollout.environments.trajectory import TrajectoryRunner
from harness import machine, markdown

MAX_TURNS, CALL_TOKENS, RESULT_TOKENS, PROMPT_TOKENS = 6, 32, 4, 30
TOOL_S, SLOW_TOOL_S, SLOW_EVERY = 0.1, 2.0, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    speedup = 10 if args.quick else 1  # of tools
    if args.quick:
        args.trajectories, args.repeats = 12, 1
    torch.set_num_threads(args.threads)
    seconds: dict[str, list[float]] = {"independent": [], "in lock step": []}
    tokens: dict[str, set[bytes]] = {name: set() for name in seconds}
    for _ in range(args.repeats):
        for name, times in seconds.items():
            elapsed, sampled = roll_out(args.trajectories, lock_step=name == "in lock step", tool_speedup=speedup)
            times.append(elapsed)
            tokens[name].add(sampled)
    print(machine())
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [[name, f"{median:.1f}"] for name, median in medians.items()]
    print(markdown(["trajectories", f"seconds for {args.trajectories}"], rows))
    same = len(set.union(*tokens.values())) == 1
    print(f"lock step takes {medians['in lock step'] / medians['independent']:.2f} times as long")
    print(f"sampled tokens are {'the same' if same else 'DIFFERENT'}")


class TurnBarrier:
    """Holds trajectories until all that are still running have come to the end of the turn."""

    def __init__(self, num_running: int):
        self._num_running = num_running
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait for the others."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._release()
        await future

    def leave(self) -> None:
        """Stop taking part."""
        self._num_running -= 1
        self._release()

    def _release(self) -> None:
        if len(self._waiting) == self._num_running:
            for future in self._waiting:
                future.set_result(None)
            self._waiting = []


class Turns:
    """A program of model calls and tools; with a barrier, in lock step with the other trajectories."""

    def __init__(self, *, tool_speedup: float):
        self.barrier: TurnBarrier | None = None
        self._tool_speedup = tool_speedup

    async def run(self, row: Mapping[str, int], model: RolloutModel) -> float:
        """Play one row."""
        token_ids = model.prompt.token_ids
        last = row["number"] % MAX_TURNS
        for turn in range(last + 1):
            if turn > 0:
                is_slow = np.random.default_rng((row["number"], turn)).integers(SLOW_EVERY) == 0
                await asyncio.sleep((SLOW_TOOL_S if is_slow else TOOL_S) / self._tool_speedup)
                token_ids = np.concatenate([token_ids, np.full(RESULT_TOKENS, 5)])
                await self._others()
            call = await model.generate(token_ids)
            token_ids = np.concatenate([token_ids, call.token_ids])
            if turn < last:
                await self._others()
        if self.barrier is not None:
            self.barrier.leave()
        return 0.0

    async def _others(self) -> None:
        if self.barrier is not None:
            await self.barrier.wait()


def roll_out(count: int, *, lock_step: bool, tool_speedup: float) -> tuple[float, bytes]:
    """Roll out `count` trajectories of the demo's base model. Return the seconds and all sampled tokens."""
    model = ModelConfig(path=str(WORDS.base_path))
    tokenizer = load_tokenizer(model)
    policy = load_policy(LoadRequest(model, device=torch.device("cpu"), tokenizer=tokenizer, trainable=False))
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(id=i, epoch=0, content="", token_ids=rng.integers(5, 400, PROMPT_TOKENS), columns={"number": i})
        for i in range(count)
    ]
    turns = Turns(tool_speedup=tool_speedup)
    runner = TrajectoryRunner(
        UserProgram(turns.run, name="turns"),
        template=ChatTemplate(tokenizer),
        parser=ResponseParser(tokenizer),
        limits=TurnLimits(max_turns=MAX_TURNS, max_prompt_tokens=512, max_new_tokens=512, timeout_s=600.0),
        prompt_column="prompt",
        retries=0,
    )
    sampler = Sampler(policy, end_token_ids=frozenset(), max_num_seqs=count)  # every call has all its tokens
    sampling = SamplingParams(num_generations=1, max_completion_tokens=CALL_TOKENS, temperature=1.0)
    key = StepKey(purpose="train", seed=0, step=1)
    with closing(RolloutCollector(LocalEngine(sampler.sample), tokenizer, rollout_function=runner)) as collector:
        collector.collect(prompts[:1], sampling, key)  # warms up
        turns.barrier = TurnBarrier(count) if lock_step else None
        start = time.perf_counter()
        groups = collector.collect(prompts, sampling, key)
        seconds = time.perf_counter() - start
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [len(trajectory.calls) for trajectory in trajectories] == [1 + i % MAX_TURNS for i in range(count)]
    return seconds, np.concatenate([trajectory.sampled_token_ids for trajectory in trajectories]).tobytes()


if __name__ == "__main__":
    main()
