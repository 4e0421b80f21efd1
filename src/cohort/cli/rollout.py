"""`cohort rollout`: sample a few trajectories without training, and show every turn."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cohort.cli.command import Debug, Overrides
from cohort.config import load_config
from cohort.errors import TrainingError
from cohort.processes.this_process import print_loading_notice
from cohort.records import join_calls

if TYPE_CHECKING:
    from rich.console import Console

    from cohort.records import ScoredGroup
    from cohort.trainer.without_training import SampledRows

_MAX_LINES = 12  # of a segment
_STYLES = {"title": "bold", "trained": "green", "masked": "dim", "call": "cyan"}


def rollout(
    config: Annotated[Path, typer.Argument(help="YAML file of a run; docs/config.md lists every key.")],
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows of the data, in the order of training.")] = 4,
    generations: Annotated[int, typer.Option(min=1, help="Trajectories per row.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Print long prompts and results in full.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the trajectories as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Sample a few trajectories without training: every turn, tool call, masked token and reward.

    Nothing is written to run.dir. Exit code 1: no trajectory could be completed.
    """
    settings = load_config(config, overrides or ())
    print_loading_notice()
    from rich.console import Console

    from cohort.display import ProgressBar
    from cohort.trainer.without_training import sample_rows

    errors = Console(stderr=True, highlight=False, markup=False)
    with ProgressBar("sampling") as progress, redirect_stdout(sys.stderr):  # what tools print is no part of the result
        sampled = sample_rows(
            settings,
            rows=rows,
            generations=generations,
            notify=lambda text: errors.print(text, soft_wrap=True),
            on_data_progress=progress.data_progress,
        )
    if json_:
        typer.echo(json.dumps(as_json(sampled), default=str))
    else:
        with suppress(AttributeError):  # a replaced stdout
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # models may write anything
        show(sampled, Console(highlight=False, markup=False), max_lines=None if full else _MAX_LINES)
    trajectories = [trajectory for group in sampled.groups for trajectory in group.trajectories]
    if all(trajectory.is_broken for trajectory in trajectories):
        raise TrainingError("rollout: every trajectory failed; the errors are above")


def show(sampled: "SampledRows", console: "Console", *, max_lines: int | None) -> None:
    """Print trajectories and a summary.

    Args:
        sampled: trajectories with their rewards.
        console: console to print to.
        max_lines: lines of a prompt, a reply or a result; None: all.
    """
    from cohort.display.trajectory import MASKED, TRAINED, end_line, reward_line, trajectory_lines

    console.print(f"{TRAINED} trained   {MASKED} masked: seen by the model, not trained", style="dim")
    for group in sampled.groups:
        for index, trajectory in enumerate(group.trajectories):
            number = f", trajectory {index + 1}" if len(group.trajectories) > 1 else ""
            console.rule(f"row {group.prompt.id + 1}{number}", align="left", style="bold")
            for style, text in trajectory_lines(trajectory, sampled.decode, width=console.width, max_lines=max_lines):
                console.print(text, style=_STYLES[style], soft_wrap=True)
            if trajectory.error is not None:
                console.print(trajectory.error, style="red", soft_wrap=True)
            console.print(end_line(trajectory), style="bold", soft_wrap=True)
            console.print(reward_line(group, index, sampled.weights), style="bold", soft_wrap=True)
    console.rule(style="bold")
    for line in _summary(sampled.groups):
        console.print(line, soft_wrap=True)


def _summary(groups: "list[ScoredGroup]") -> Iterator[str]:
    """Averages of all trajectories."""
    from cohort.metrics.rollouts import rollout_metrics

    m = rollout_metrics(groups)
    ends = [trajectory.end for group in groups for trajectory in group.trajectories]
    reward = "no reward" if math.isnan(m["reward"]) else f"mean reward {m['reward']:.3g}"
    ended = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
    yield f"{len(ends)} {'trajectory' if len(ends) == 1 else 'trajectories'}: {reward}; ended: {ended}"
    if "turns/mean" in m:
        yield (
            f"means: {m['turns/mean']:.1f} turns, {m['tools/call_frequency']:.1f} tool calls, "
            f"{m['completions/mean_length']:.1f} trained tokens, "
            f"{m['turns/masked_tokens']:.1f} masked after the prompt; "
            f"{m['turns/model_s']:.2f} s in the model, {m['turns/environment_s']:.2f} s elsewhere"
        )


def as_json(sampled: "SampledRows") -> list[dict[str, Any]]:
    """Return the trajectories as JSON values."""
    return [
        {
            "row": group.prompt.id,
            "index": index,
            "prompt": group.prompt.content,
            "messages": list(trajectory.messages),
            "end": trajectory.end,
            "error": trajectory.error,
            "reward": _finite(group.rewards[index]),
            "rewards": {name: _finite(part[index]) for name, part in group.reward_parts.items()},
            "step_rewards": list(trajectory.step_rewards),
            "metrics": dict(trajectory.metrics),
            "stats": None if trajectory.stats is None else asdict(trajectory.stats),
            "calls": [
                {
                    "context_tokens": len(call.context_ids),
                    "token_ids": call.token_ids.tolist(),
                    "text": sampled.decode(call.token_ids.tolist()),
                    "trained": call.trained,
                    "finish_reason": call.finish_reason,
                }
                for call in trajectory.calls
            ],
            "sequences": [
                {"token_ids": s.token_ids.tolist(), "loss_mask": s.loss_mask.astype(int).tolist()}
                for s in join_calls(trajectory.calls)
            ],
        }
        for group in sampled.groups
        for index, trajectory in enumerate(group.trajectories)
    ]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
