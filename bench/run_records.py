"""What a step of the demo pays for the run's records: events and status, and `run.record_tokens`.

    python bench/run_records.py [--steps 50] [--task words] [--quick]

Seconds inside the functions that write them, as shares of the run from its first step to its last. The status is
written by a thread of its own, whose CPU time counts.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import cohort
from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import find_task
from cohort.display import Display, RunLog, StepReport
from cohort.run.folder import RunFolder
from cohort.trainer import loop
from harness import machine, markdown

EVENTS = [name for name in vars(Display) if not name.startswith("_") and name in vars(RunLog)]


class Steps(Display):
    """When the first and the last step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def step(self, report: StepReport) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--task", default="words")
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        seconds, total = measure(Path(folder) / "run", args.task, steps=3 if args.quick else args.steps)
    rows = [[name, f"{1e3 * spent:.1f}", f"{spent / total:.2%}"] for name, spent in seconds.items()]
    print(markdown(["records", "milliseconds", f"share of {total:.1f} s"], rows))


def measure(run: Path, task: str, *, steps: int) -> tuple[dict[str, float], float]:
    """Seconds by kind of record, and of the steps after the first."""
    seconds: Counter[str] = Counter()
    config = demo_config(run, task=find_task(task), seed=0)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    write_data(run, config, task=find_task(task), seed=0)
    shown = Steps()
    with ExitStack() as stack:
        patched = [
            *((RunLog, name, "events, in the training loop") for name in EVENTS),
            (RunLog, "_write_status", "status, in its thread"),
            (loop, "with_first_pass", "tokens: collecting"),
            (RunFolder, "write_tokens", "tokens: writing"),
        ]
        for owner, name, kind in patched:
            clock = time.thread_time if name == "_write_status" else time.perf_counter
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), seconds, kind, clock)))
        cohort.train(config, display=shown)
    return dict(seconds), shown.times[-1] - shown.times[0]


def timed(
    function: Callable[..., Any], seconds: Counter[str], kind: str, clock: Callable[[], float]
) -> Callable[..., Any]:
    """The function, with its time added to `seconds`."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        start = clock()
        try:
            return function(*arguments, **keywords)
        finally:
            seconds[kind] += clock() - start

    return call


if __name__ == "__main__":
    main()
