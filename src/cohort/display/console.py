"""Console progress: one line per step and, on a terminal, live progress bars."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from cohort.display.trajectory import conversation_lines, end_line
from cohort.plan import RunSchedule
from cohort.records import ScoredGroup
from cohort.run.log import Display, StepReport

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def render_curve(xs: Sequence[float], ys: Sequence[float], *, height: int = 8) -> str:
    """Plot fractions as one column of block characters per point, with a y axis and the first and last x.

    Args:
        xs: Positions; the first and last are shown.
        ys: values from 0 to 1.
        height: height of the plot in lines.
    """
    width = 3  # characters per point
    lines = []
    for level in reversed(range(height)):
        filled = [min(max(y * height - level, 0.0), 1.0) for y in ys]  # fraction of this line, by point
        cells = "".join(_EIGHTHS[round(8 * f)] * (width - 1) + " " for f in filled)
        lines.append(f"{(level + 1) / height:6.0%} ┤{cells}".rstrip())
    axis = len(xs) * width
    lines.append(f"{0:6.0%} └{'─' * axis}")
    first, last = f"{xs[0]:g}", f"{xs[-1]:g}"
    lines.append(f"{'step':>6}  {first}{last.rjust(max(1, axis - len(first)))}")
    return "\n".join(lines)


class SafeStdout:
    """Standard output that never raises: `| head`, a full disk or a closed terminal must not end a run."""

    def write(self, text: str) -> int:
        """Write, or discard after an error."""
        with _discarding_after_errors():
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or discard after an error."""
        with _discarding_after_errors():
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


@contextmanager
def _discarding_after_errors() -> Iterator[None]:
    """After an error, redirect stdout to /dev/null: the interpreter flushes it at exit, and would fail again."""
    lost = (OSError, ValueError, AttributeError)  # ValueError: closed; AttributeError: None, closed from the start
    try:
        yield
    except lost:
        with suppress(*lost), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


_LONG_S = 2.0  # what takes longer gets a progress bar


class ConsoleDisplay(Display):
    """Prints one line per step and, every N steps, a group's best and worst completion."""

    def __init__(self, *, show_completions_every: int = 0, console: Console | None = None):
        """Create a display.

        Args:
            show_completions_every: show completions every N steps; 0: never.
            console: console to print to; standard output by default.
        """
        self.console = console or Console(file=cast(IO[str], SafeStdout()), highlight=False)
        self._show_every = show_completions_every
        self._start_time = time.monotonic()
        self._start_step = 0
        self._num_steps = 0
        self._eval_sampling = "greedy"
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._steps: TaskID | None = None
        self._eval = _Bar(self._progress, "evaluating", after_s=0.0)
        self._bars = _Bars(self._progress)

    def started(self, schedule: RunSchedule, *, steps_done: int) -> None:
        """Print the number of steps and their size."""
        self._start_time, self._start_step, self._num_steps = time.monotonic(), steps_done, schedule.num_steps
        updates = f", {schedule.updates_per_rollout} updates" if schedule.updates_per_rollout > 1 else ""
        self._eval_sampling = f"temperature {schedule.eval_temperature:g}" if schedule.eval_temperature else "greedy"
        data = "no data, only an environment"
        if schedule.has_data:
            data = f"{schedule.num_prompts} prompts, {schedule.steps_per_epoch:.4g} steps per epoch"
        steps = "1 step" if schedule.num_steps == 1 else f"{schedule.num_steps} steps"
        step = f"{schedule.prompts_per_step} prompts × {schedule.num_generations} generations"
        self._print(f"{steps} of {step} = {schedule.completions_per_step} completions{updates}; {data}")
        if steps_done:
            self._print(f"resuming after step {steps_done}")
        self._progress.start()
        self._steps = self._progress.add_task("training", total=schedule.num_steps, completed=steps_done, left="")

    def notify(self, text: str) -> None:
        """Print a line."""
        self._print(escape(text))

    def step(self, report: StepReport) -> None:
        """Print the step's metrics and time left and, every N steps, completions."""
        m = report.metrics
        left, number = self._time_left(report.steps_done), f"{report.steps_done:>{len(str(self._num_steps))}}"
        self._print(
            f"step {number}/{self._num_steps}  sampled reward {m['reward']:6.3f}"
            f"{_turns(m)}  length {m['completions/mean_length']:5.1f}  ended {1 - m['completions/clipped_ratio']:4.0%}"
            f"  {m['tokens_per_second']:,.0f} tokens/s  {left} left"
        )
        if self._steps is not None:
            self._progress.update(self._steps, completed=report.steps_done, left=f"{left} left")
        if self._show_every and report.steps_done % self._show_every == 0:
            self._show_completions(report.groups)

    def data_progress(self, name: str, done: float, total: float) -> None:
        """Update the progress bar of data that take long and remove it when done."""
        self._bars.update(name, done, total)

    def eval_progress(self, done: int, total: int) -> None:
        """Update the evaluation's progress bar and remove it when done."""
        self._eval.update(done, total)

    def reward_progress(self, name: str, done: int, total: int) -> None:
        """Update the progress bar of a reward that takes long and remove it when done."""
        self._bars.update(f"judging: {name}", done, total)

    def save_progress(self, done: int, total: int) -> None:
        """Update the progress bar of a long save and remove it when done."""
        self._bars.update("saving (MB)", done / 1e6, total / 1e6)

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """Print the evaluation's main metrics."""
        names = [n for n in metrics if n.startswith(("eval/pass@", "eval/mean@")) and not n.endswith("@1")]
        more = "".join(f"  {name.removeprefix('eval/')} {metrics[name]:.1%}" for name in names)
        of_eval = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        self._print(
            f"[bold]eval accuracy {metrics['eval/accuracy']:.1%} after step {steps_done}[/bold]{more}  "
            f"reward {metrics['eval/reward']:.3f}{_turns(of_eval)}  "
            f"length {metrics['eval/completions/mean_length']:.1f}  ({len(groups)} held-out prompts, "
            f"{self._eval_sampling})"
        )

    def close(self) -> None:
        """Remove the progress bars."""
        self._progress.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)  # let the terminal wrap; log files get whole lines

    def _time_left(self, steps_done: int) -> str:
        per_step = (time.monotonic() - self._start_time) / (steps_done - self._start_step)
        seconds = round(per_step * (self._num_steps - steps_done))
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds % 60:02}s"

    def _show_completions(self, groups: Sequence[ScoredGroup]) -> None:
        """Print the best and worst completion of the group with the widest rewards."""
        scored = [g for g in groups if not np.isnan(g.rewards).all()]
        group = max(scored, key=lambda g: float(np.nanmax(g.rewards) - np.nanmin(g.rewards)))
        content = group.prompt.content if isinstance(group.prompt.content, str) else group.prompt.content[-1]["content"]
        if content:  # an environment may write the prompt
            self._print(f"  [dim]prompt[/dim] {escape(on_one_line(str(content)))}")
        for place in dict.fromkeys((int(np.nanargmax(group.rewards)), int(np.nanargmin(group.rewards)))):
            reward, trajectory = group.rewards[place], group.trajectories[place]
            if len(trajectory.messages) < 2:
                self._print(f"  [dim]reward {reward:5.2f}[/dim] {escape(on_one_line(trajectory.text))}")
                continue
            self._print(f"  [dim]reward {reward:5.2f}[/dim] {escape(end_line(trajectory))}")
            for line in conversation_lines(trajectory.messages):
                self._print(f"    {escape(on_one_line(line))}")


class _Bar:
    """A bar of work that is done again and again, shown when it takes long."""

    def __init__(self, progress: Progress, description: str, *, after_s: float = _LONG_S) -> None:
        self._progress = progress
        self._description = description
        self._after_s = after_s
        self._task: TaskID | None = None
        self._start: float | None = None

    def update(self, done: float, total: float) -> None:
        """Report that `done` of `total` are finished, and remove the bar when all are."""
        now = time.monotonic()
        self._start = self._start or now
        if self._task is None and done < total and now - self._start >= self._after_s:
            self._progress.start()  # nothing else may be shown yet
            self._task = self._progress.add_task(self._description, total=total, left="")
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)
        if done == total:
            if self._task is not None:
                self._progress.remove_task(self._task)
                if not self._progress.tasks:
                    self._progress.stop()
            self._task = self._start = None


class _Bars:
    """Bars by description."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._of: dict[str, _Bar] = {}

    def update(self, description: str, done: float, total: float) -> None:
        """See `_Bar.update`."""
        self._of.setdefault(description, _Bar(self._progress, escape(description))).update(done, total)


def _turns(metrics: Mapping[str, float]) -> str:
    """Turns and tool calls per trajectory, if there are any."""
    if "turns/mean" not in metrics:
        return ""
    calls = metrics["tools/call_frequency"]
    return f"  turns {metrics['turns/mean']:.1f}" + (f"  tool calls {calls:.1f}" if calls else "")


def on_one_line(text: str, limit: int = 240) -> str:
    """Show text on one line with visible line breaks, cut at `limit` characters."""
    flat = text.strip().replace("\n", " ⏎ ")
    return flat if len(flat) <= limit else f"{flat[:limit]}…"


class ProgressBar:
    """Progress bar of a command on standard error; silent without a terminal."""

    def __init__(self, description: str) -> None:
        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(description, total=None)
        self._bars = _Bars(self._progress)

    def update(self, done: int, total: int) -> None:
        """Report that `done` of `total` items are finished."""
        self._progress.update(self._task, completed=done, total=total)

    def data_progress(self, name: str, done: float, total: float) -> None:
        """Update another bar, of data that take long, and remove it when done."""
        self._bars.update(name, done, total)

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
