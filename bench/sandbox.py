"""Verdicts per second of the reward `code`, with every backend that works here.

    python bench/sandbox.py [--verdicts 400] [--concurrent N] [--quick]

Each verdict is one completion with three function calls, judged in a fresh process. `one alone` is the wall time of one
verdict. Run it on an otherwise idle machine; the target is 60 per second on 2 cores.
"""

import argparse
import os
import time

from cohort.config.hardware import SandboxConfig
from cohort.config.rewards import CodeSettings
from cohort.errors import UserError
from cohort.rewards.builtin import RewardContext
from cohort.rewards.code import CodeReward
from cohort.sandbox import SharedSandbox
from cohort.sandbox.pool import default_concurrency

TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(10, 5) == 15"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verdicts", type=int, default=400)
    parser.add_argument("--concurrent", type=int, default=default_concurrency())
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    num_verdicts = 10 if args.quick else args.verdicts
    print("| backend | CPUs | verdicts | per second | one alone |")
    print("|---|--:|--:|--:|--:|")
    for backend in ("sandlock", "bubblewrap", "container"):
        try:
            sandbox = SharedSandbox(SandboxConfig(backend=backend, max_concurrent=args.concurrent))
            sandbox.open()
        except UserError as error:
            print(f"| {backend} | | | {str(error).partition('(')[2].partition('). Install')[0]} | |")
            continue
        alone = measure(sandbox, 1)
        seconds = measure(sandbox, num_verdicts)
        print(
            f"| {backend} | {len(os.sched_getaffinity(0))} | {num_verdicts} | {num_verdicts / seconds:.1f} "
            f"| {alone * 1000:.0f} ms |"
        )


def measure(sandbox: SharedSandbox, num_verdicts: int) -> float:
    """Seconds for completions that all differ, since equal ones are judged once."""
    completions = [f"```python\ndef add(a, b):\n    return a + b  # {i}\n```" for i in range(num_verdicts)]
    start = time.perf_counter()
    reward = CodeReward(CodeSettings(), RewardContext(max_completion_tokens=100, sandbox=sandbox))
    rewards = reward(completions, columns={"tests": [TESTS] * num_verdicts})
    seconds = time.perf_counter() - start
    assert rewards == [1.0] * num_verdicts
    return seconds


if __name__ == "__main__":
    main()
