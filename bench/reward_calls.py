"""What calling a reward function costs a step: one that does nothing, in the main thread and in a child, and `math`.

    python bench/reward_calls.py [--quick] [--only-math]

Scores 16 groups of 16 completions of 1,000 characters with 4 columns, again and again. `math` grades 512 different
answers in LaTeX.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cohort.config import RewardConfig
from cohort.records import ModelCall, Prompt, RolloutGroup, Trajectory
from cohort.rewards import RewardRunner, build_rewards
from harness import machine, markdown

NOTHING = """
import asyncio

def plain(completions):
    return [0.0] * len(completions)

def with_all(completions, **kwargs):
    return [0.0] * len(completions)

async def later(completions):
    return [0.0] * len(completions)
"""
COLUMNS = ("answer", "level", "source", "number")


def group(number: int) -> RolloutGroup:
    """A group of 16 completions of 300 tokens."""
    columns = {name: f"{name} of row {number}" for name in COLUMNS}
    tokens = np.arange(300)
    prompt = Prompt(id=number, epoch=0, content="What is 6 * 7?", token_ids=tokens[:20], columns=columns)
    call = ModelCall(
        context_ids=prompt.token_ids,
        token_ids=tokens,
        sampling_logprobs=np.zeros(300),
        finish_reason="stop",
        policy_version=0,
    )
    text = "x" * 1000
    message = {"role": "assistant", "content": text}
    return RolloutGroup(
        prompt=prompt,
        trajectories=tuple(Trajectory(calls=(call,), messages=(message,), text=text, end="answer") for _ in range(16)),
    )


def latex_answers(count: int) -> tuple[list[str], list[str]]:
    """Return different answers and their gold answers; every other one is right."""
    forms = (
        r"\frac{%d}{7}",
        r"%d\sqrt{3}",
        "x^2 + %dx + 1",
        "(%d, 5]",
        r"\frac{%d\pi}{4}",
        "(1, %d)",
        "2^{%d}",
        "y = %dx",
    )
    golds = [forms[i % len(forms)] % (3 + 2 * (i // len(forms))) for i in range(count)]
    texts = [f"So it is $\\boxed{{{golds[i - i % 2]}}}$." for i in range(count)]
    return texts, golds


def milliseconds(call: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each call but the first, which imports and starts what it needs."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1000)
    return taken[1:]


def of_math(num_answers: int, times: int) -> list[list[str]]:
    """The row of `math`."""
    (reward,) = build_rewards([RewardConfig(use="math")], columns=["answer"], max_completion_tokens=300)
    texts, golds = latex_answers(num_answers)
    taken = milliseconds(lambda: reward.function(texts, {"answer": golds}), times)
    return [["math", "children", f"{statistics.median(taken):.0f}", f"{max(taken):.0f}"]]


def of_nothing(times: int) -> list[list[str]]:
    """The rows of functions that do nothing."""
    rows = []
    groups = [group(number) for number in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nothing.py"
        file.write_text(NOTHING)
        for name in ("plain", "with_all", "later"):
            for isolate in (False, True):
                config = RewardConfig(use=f"{file}:{name}", isolate=isolate)
                functions = build_rewards([config], columns=COLUMNS, max_completion_tokens=300)
                runner = RewardRunner(functions, columns=COLUMNS)
                taken = milliseconds(lambda runner=runner: runner.score(groups), times)  # type: ignore[misc]
                place = "child" if isolate else "event loop" if name == "later" else "main thread"
                rows.append(
                    [name, place, f"{statistics.median(taken):.2f}", f"{statistics.quantiles(taken, n=20)[-1]:.2f}"]
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: to see that it runs")
    parser.add_argument("--only-math", action="store_true", help="leave out functions that do nothing")
    arguments = parser.parse_args()
    times = 20 if arguments.quick else 200
    print(machine(), flush=True)
    rows = [] if arguments.only_math else of_nothing(times)
    rows += of_math(64, 1) if arguments.quick else of_math(512, 3)
    print(markdown(["function", "where", "median ms", "95th percentile ms (math: slowest)"], rows))


if __name__ == "__main__":
    main()
