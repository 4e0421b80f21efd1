"""Metrics of trajectories with turns."""

from collections.abc import Sequence
from typing import get_args

import numpy as np

from cohort.records import EndReason, IntArray, Trajectory, TurnStats, join_calls


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, tool calls, ends, masked tokens and times; empty for single completions.

    Broken trajectories count in the ends, the retries and the tool calls, not in the means.

    Args:
        trajectories: all trajectories of a step or an evaluation.
    """
    members = [(trajectory, trajectory.stats) for trajectory in trajectories if trajectory.stats is not None]
    if not members:
        return {}
    stats = [of_one for _, of_one in members]
    intact = [(trajectory, of_one) for trajectory, of_one in members if not trajectory.is_broken]
    metrics = {f"ends/{end}": _mean([t.end == end for t, _ in members]) for end in get_args(EndReason)}
    metrics["turns/retries"] = float(sum(s.attempts - 1 for s in stats))
    if intact:
        turns = [len(trajectory.trained_calls) for trajectory, _ in intact]
        metrics |= {
            "turns/mean": _mean(turns),
            "turns/max": float(max(turns)),
            "turns/model_calls": _mean([len(t.calls) for t, _ in intact]),
            "turns/masked_tokens": _mean([num_masked_tokens(t) for t, _ in intact]),
            "turns/model_s": _mean([s.model_s for _, s in intact]),
            "turns/environment_s": _mean([s.environment_s for _, s in intact]),
        }
    return metrics | _tool_metrics(stats) | _environment_metrics([trajectory for trajectory, _ in intact])


def num_masked_tokens(trajectory: Trajectory) -> int:
    """Count tokens of the trajectory's sequences that are neither trained nor part of its prompt, the first context."""
    return sum(
        int(np.count_nonzero(~sequence.loss_mask))
        - _num_shared(sequence.token_ids, trajectory.trained_calls[0].context_ids)
        for sequence in join_calls(trajectory.calls)
    )


def _num_shared(token_ids: IntArray, prompt: IntArray) -> int:
    """Number of leading tokens that both have."""
    length = min(len(token_ids), len(prompt))
    different = np.flatnonzero(token_ids[:length] != prompt[:length])
    return int(different[0]) if len(different) else length


def _tool_metrics(stats: Sequence[TurnStats]) -> dict[str, float]:
    calls, malformed = (sum(getattr(s, name) for s in stats) for name in ("tool_calls", "malformed_calls"))
    return {
        "tools/call_frequency": calls / len(stats),
        "tools/failure_frequency": sum(s.tool_errors for s in stats) / calls if calls else 0.0,
        "tools/malformed_ratio": malformed / (calls + malformed) if calls + malformed else 0.0,
    }


def _environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each metric over the trajectories that have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.metrics})
    return {
        f"environment/{name}": _mean([t.metrics[name] for t in trajectories if name in t.metrics]) for name in names
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
