"""What ranks do together in the tests of rewards that score each group by itself."""

import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from builtin_rewards import configured
from cohort.errors import UserError
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import Prompt, RolloutGroup
from cohort.rewards import RewardRunner, TrainerProgress, build_rewards
from cohort.rewards.load_rewards import load_per_group
from cohort.rewards.per_group import GroupScorer
from cohort.trainer.worker import RewardRanks, Worker
from rank_workers import commanded
from samples import answer

FUNCTIONS = '''
import psutil

def kill_workers(completions, level):
    """Kill the processes that grade answers on the rank that scores group 1."""
    for child in psutil.Process().children(recursive=True) if level[0] == 1 else ():
        if child.status() != "zombie" and "cohort.rewards.math_worker" in child.cmdline():
            child.kill()
    return [1] * len(completions)

def longest(prompts, completions, level, log_metric, log_extra, trainer_state, share=1.0, **columns):
    """Compare the completions of one group."""
    assert len(set(prompts)) == 1 and sorted(columns) == ["answer", "completion_ids"]
    lengths = [len(c) for c in completions]
    log_metric("share", max(lengths) / sum(lengths))
    log_extra("seen", [f"{len(completions)} at {trainer_state.global_step}"] * len(completions))
    if level[0] == 13:
        raise RuntimeError("unlucky")
    return [None if level[0] == 3 else share * (n == max(lengths)) for n in lengths]

async def spread(completions, answer):
    return [len({*completions}) / 10 for _ in answer]
'''


class Scoring:
    """A worker with nothing but its rewards."""

    def __init__(self, ranks: Ranks, scorer: GroupScorer):
        self.ranks = ranks
        self.scorer = scorer

    score_groups = Worker.score_groups


def groups(num_groups: int, *, unlucky: bool = False) -> list[RolloutGroup]:
    """Groups of three answers with LaTeX."""
    made = []
    for n in range(num_groups):
        columns = {"answer": f"\\frac{{{n}}}{{7}}", "level": 13 if unlucky and n == num_groups - 1 else n}
        prompt = Prompt(id=n, epoch=0, content=f"What is {n}/7?", token_ids=np.arange(3), columns=columns)
        texts = [f"It is $\\boxed{{\\frac{{{n + wrong}}}{{7}}}}$" + "." * (n % 2) * wrong for wrong in (0, 1, 0)]
        made.append(RolloutGroup(prompt=prompt, trajectories=tuple(answer(prompt, [4, 1], text=t) for t in texts)))
    return made


def scores(ranks: Ranks, folder: str, num_groups: str) -> dict[str, Any]:
    """What a step's rewards are, twice, and how a function fails."""
    file = Path(folder) / "functions.py"
    own = {"per_group": True}
    configs = configured(
        {"use": f"{file}:kill_workers", "weight": 0, **own},
        {"use": "format", "pattern": "It.*", "gate": True},
        {"use": "math"},
        {"use": f"{file}:longest", "args": {"share": 0.5}, **own},
        {"use": f"{file}:spread", "where": {"level": [0, 1, 2, 4]}, **own},
        {"use": "overlong", "buffer_tokens": 2},
    )
    load = partial(load_per_group, configs, max_completion_tokens=2, num_workers=1)
    workers: WorkerGroup[Any] = WorkerGroup(Scoring(ranks, GroupScorer(load)), ranks)

    def command() -> dict[str, Any]:
        functions = build_rewards(configs, columns=["answer", "level", "prompt"], max_completion_tokens=2)
        runner = RewardRunner(functions, columns=["answer", "level"], prompt_column="prompt")
        runner.trainer_progress = lambda: TrainerProgress(global_step=5)
        if ranks.world_size > 1:
            workers.local.scorer, runner.on_ranks = runner.scorer, RewardRanks(workers)
        steps = []
        for _ in range(2):
            scored = runner.score(groups(int(num_groups)))
            parts = {name: [p for g in scored for p in g.reward_parts[name].tolist()] for name in runner.weights}
            details = {name: [d for g in scored for d in g.reward_details[name]] for name in scored[0].reward_details}
            rewards = [r for g in scored for r in g.rewards.tolist()]
            logged = runner.take_logged({})
            steps.append(repr((rewards, parts, details, runner.counts(), logged)))
        try:
            runner.score(groups(int(num_groups), unlucky=True))
        except UserError as error:
            return {
                "steps": steps,
                "error": str(error),
                "cause": str(error.__cause__),
                "ranks": runner.describe_ranks(),
            }
        raise AssertionError("a function has failed")

    return commanded(workers, command)


def scores_of_one_process(folder: str, num_groups: int) -> dict[str, Any]:
    return scores(SINGLE_PROCESS, folder, str(num_groups))


NAMESAKES = """
class Told:
    def __init__(self, text):
        self.__name__, self.text = "told", text

    def __call__(self, completions):
        self.last_details = [self.text] * len(completions)
        return [1.0] * len(completions)

a, b = Told("a"), Told("b")
"""


def namesakes(ranks: Ranks, folder: str) -> dict[str, Any]:
    """What two rewards of one name tell of each completion."""
    file = Path(folder) / "namesakes.py"
    configs = configured(*({"use": f"{file}:{name}", "per_group": True} for name in "ab"))
    scorer = GroupScorer(partial(load_per_group, configs, max_completion_tokens=2, num_workers=1))
    workers: WorkerGroup[Any] = WorkerGroup(Scoring(ranks, scorer), ranks)

    def command() -> dict[str, Any]:
        functions = build_rewards(configs, columns=["answer", "level", "prompt"], max_completion_tokens=2)
        runner = RewardRunner(functions, columns=["answer", "level"], prompt_column="prompt")
        workers.local.scorer, runner.on_ranks = runner.scorer, RewardRanks(workers)
        return {"details": [dict(group.reward_details) for group in runner.score(groups(2))]}

    return commanded(workers, command)


def slow_rank(ranks: Ranks) -> dict[str, Any]:
    """Whether rank 0 waits for one that scores longer than the deadline of other collectives."""
    deadline_s = 1 if ranks.is_rank0 else 60
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    waiting = replace(ranks, command_group=group, command_timeout_s=60)
    start = time.monotonic()
    time.sleep(0 if ranks.is_rank0 else 2)
    waiting.wait_for_all()
    return {"seconds": time.monotonic() - start}


JOBS = {"scores": scores, "namesakes": namesakes, "slow rank": slow_rank}
