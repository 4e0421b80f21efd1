"""Where a run stands, and what it asks of its machine: time per phase, memory against the plan."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from weakref import WeakKeyDictionary

import numpy as np

from cohort.health.facts import facts_of
from cohort.health.findings import Finding
from cohort.health.metrics_table import MetricsTable
from cohort.health.rules import judge
from cohort.run.files import resume_hint
from cohort_view.evaluations import evaluations
from cohort_view.records import (
    FloatArray,
    IntArray,
    Machine,
    Measured,
    MemoryPart,
    MemoryPeaks,
    MemorySummary,
    Now,
    PlannedPhase,
    Progress,
    RunEntry,
    RunList,
    RunMessage,
)
from cohort_view.run import ViewedRun
from cohort_view.series import SIGNAL, WallTime, downsample, marks, messages
from cohort_view.values import integer, mapping, number, text

_POINTS = 800
_WITHIN_OTHERS = ("communication", "move")  # parts of other phases
_MEASURED = {  # the metric memory/{}_peak_bytes that covers a phase of the plan
    "sampling": "rollout",
    "logprobs": "train",
    "backward": "train",
    "optimizer": "optim",
}


def machine(run: ViewedRun) -> Machine:
    """Return what a run asks of its machine, by step."""
    table = run.metrics
    rows = downsample(table.column("step_time"), _POINTS)
    phases = [name[len("time/") : -len("_s")] for name in table.names if name.startswith("time/")]
    phases = [phase for phase in phases if phase not in _WITHIN_OTHERS]
    return Machine(
        phases=phases,
        x=table.steps[rows],
        seconds={phase: table.column(f"time/{phase}_s")[rows] for phase in phases},
        totals=_totals(run, phases),
        num_steps=len(table.steps),
        memory=_memory_peaks(run),
        marks=marks(run, "step"),
        problems=run.problems,
    )


def _totals(run: ViewedRun, phases: Sequence[str]) -> dict[str, float]:
    """Return where the run's seconds went; what no metric or event covers is `other`."""
    table = run.metrics
    totals = {phase: float(np.nansum(table.column(f"time/{phase}_s"))) for phase in phases}
    totals["evaluation"] = float(np.nansum(table.eval.column("eval/time_s")))
    saves = [number(event.values, "seconds") for event in run.events if event.event == "checkpoint"]
    totals["checkpoint"] = sum(seconds for seconds in saves if seconds is not None)
    return totals | {"other": max(0.0, (_elapsed_s(run) or 0.0) - sum(totals.values()))}


def memory_summary(run: ViewedRun) -> MemorySummary:
    """Return the peak so far and what the plan predicts for it."""
    peaks = run.metrics.column("memory/peak_bytes")
    phases = {phase.phase: phase for phase in planned_phases(run)}
    peak = phases.get(text(run.plan, "memory", "peak_phase") or "")
    return MemorySummary(
        peak_bytes=float(np.nanmax(peaks)) if np.isfinite(peaks).any() else None,
        predicted_bytes=None if peak is None else float(peak.total),
        capacity_bytes=number(run.plan, "hardware", "gpu_memory_bytes"),
        parts=() if peak is None else peak.parts,
    )


def planned_phases(run: ViewedRun) -> list[PlannedPhase]:
    """Return the plan's memory by phase, as far as `memory/peak_bytes` measures it.

    On a GPU that is what PyTorch allocates, without the memory of the framework itself and of vLLM during training.
    """
    on_gpu = run.plan is not None and mapping(run.plan, "hardware").get("on_gpu")
    left_out = ("framework", "rollout server's base") if on_gpu else ()
    found = []
    for name, phase in mapping(run.plan, "memory", "phases").items():
        sizes = {str(part): number(size) for part, size in mapping(phase, "parts").items() if part not in left_out}
        parts = [MemoryPart(name=part, bytes=int(size)) for part, size in sizes.items() if size]
        parts.sort(key=lambda part: -part.bytes)
        total = sum(part.bytes for part in parts)
        found.append(PlannedPhase(phase=str(name), measured=_MEASURED.get(str(name)), parts=parts, total=total))
    return found


def _memory_peaks(run: ViewedRun) -> MemoryPeaks:
    columns = {name: _finite(run.metrics.column(f"memory/{name}_peak_bytes")) for name in ("rollout", "train", "optim")}
    return MemoryPeaks(
        peaks={name: float(values.max()) for name, values in columns.items() if len(values)},
        plan=planned_phases(run),
        capacity_bytes=number(run.plan, "hardware", "gpu_memory_bytes"),
    )


_RECENT = 20  # steps and evaluations whose median time predicts the rest
_MAX_WARNINGS = 100
_SPARK_POINTS = 120
_NUMBERS = ("reward", "completions/mean_length", "entropy")
# The rules take a while for long runs, and their findings are asked for more often than metrics change.
_JUDGED: WeakKeyDictionary[ViewedRun, tuple[MetricsTable, object, list[Finding]]] = WeakKeyDictionary()


def now(run: ViewedRun) -> Now:
    """Return where a run stands."""
    table, state = run.metrics, run.state
    live = run.status if state in ("starting", "running") else None
    per_step, end = _seconds_per_step(run), _end(run)
    return Now(
        id=run.id,
        state=state,
        stopped=None if end is None or end.is_warning else end.sentence,
        step=_step(run),
        steps=_steps(run),
        phase=None if live is None else live.phase,
        phase_since=None if live is None else live.phase_since,
        progress=None if live is None or live.done is None else Progress(done=live.done, total=live.total),
        seconds_left=None if state != "running" else _seconds_left(run, per_step),
        seconds_per_step=per_step,
        elapsed_s=_elapsed_s(run),
        numbers={name: _measured(table.steps, table.column(name)) for name in _NUMBERS}
        | {"eval/accuracy": _measured(*_accuracies(run))},
        tokens_per_second=table.last("tokens_per_second"),
        memory=memory_summary(run),
        banners=_findings(run),
        warnings=_warnings(run),
        problems=run.problems,
    )


def _warnings(run: ViewedRun) -> list[RunMessage]:
    """Return the last warnings, equal ones once."""
    found: dict[str, RunMessage] = {}
    for message in messages(run):
        if message.level != "note":
            earlier = found.pop(message.text, None)
            found[message.text] = replace(message, num=1 if earlier is None else earlier.num + 1)
    return list(found.values())[-_MAX_WARNINGS:]


def runs(runs: Sequence[ViewedRun], root: Path | None = None) -> RunList:
    """Return the list of runs."""
    return RunList(root=None if root is None else str(root), runs=[run_entry(run) for run in runs])


def run_entry(run: ViewedRun) -> RunEntry:
    """Return a run's line in the list of runs, from what was read of the run so far."""
    starts = [event.timestamp for event in run.events if event.event == "start"]
    accuracy = run.last_metrics.eval.last("eval/accuracy")
    model = text(run.config, "model", "path")
    return RunEntry(
        id=run.id,
        name=run.name,
        path=str(run.path),
        state=run.state,
        step=_step(run),
        steps=_steps(run),
        started=starts[0] if starts else None if run.status is None else run.status.started,
        updated=run.updated,
        reward=run.last_metrics.last("reward"),
        accuracy=number(run.summary, "accuracy_after") if accuracy is None else accuracy,
        model=None if model is None else PurePath(model).name or model,
        algorithm=text(run.config, "algorithm", "name"),
        banner=next(iter(_findings(run)), None),
        gone=run.gone,
        has_all_metrics=run.has_all_metrics,
    )


def _step(run: ViewedRun) -> int | None:
    """Steps done."""
    if len(run.last_metrics.steps):
        return int(run.last_metrics.steps[-1])
    return 0 if len(run.last_metrics.eval.steps) or run.status is not None else None


def _steps(run: ViewedRun) -> int | None:
    """Steps in all."""
    said = (
        None if run.status is None else run.status.steps,
        integer(run.config, "train", "steps"),
        integer(run.plan, "layout", "num_steps"),
        integer(run.summary, "steps"),
    )
    return next((steps for steps in said if steps is not None), None)


def _end(run: ViewedRun) -> Finding | None:
    """Say why a run that did not finish ended, and what to do; None for a version that recorded no events.

    That it died is a problem, that a user stopped it is not.
    """
    ends = [event for event in run.events if event.event in ("start", "stop", "end")]
    if run.state != "stopped" or not ends or ends[-1].event == "end":
        return None
    step, reason, is_death = _step(run) or 0, str(ends[-1].values.get("reason") or "no reason given"), True
    if ends[-1].event != "stop":
        text = f"Died after step {step} without saying why: its process was killed, or the machine went down"
    elif is_death := not SIGNAL.fullmatch(reason):
        text = f"Died after step {step}: {reason.removeprefix('UserError: ').rstrip('.')}"
    else:
        text = f"Stopped after step {step} by {reason}"
    hint = resume_hint(run.path)
    return Finding(
        rule="died" if is_death else "stopped",
        level="bad" if is_death else "info",
        text=text,
        advice=f"{hint[:1].upper()}{hint[1:]}",
        step=step,
        evidence=(),
    )


def _seconds_per_step(run: ViewedRun) -> float | None:
    """Median wall time of the recent steps, without evaluations; None before the first."""
    table = run.metrics
    recent = _finite(table.column("step_time")[-_RECENT:])
    times, steps = table.timestamps[-_RECENT - 1 :], table.steps[-_RECENT - 1 :]
    if len(times) > 1 and np.isfinite(times).all():
        took, eval_times = np.diff(times), table.eval.column("eval/time_s")
        for step, seconds in zip(table.eval.steps, eval_times, strict=True):
            took[steps[:-1] == step] -= seconds if np.isfinite(seconds) else 0.0
        starts = np.array([event.timestamp for event in run.events if event.event == "start"])
        is_restart = ((starts[:, None] > times[:-1]) & (starts[:, None] <= times[1:])).any(axis=0)
        recent = took[~is_restart] if not is_restart.all() else recent
    return float(np.median(recent)) if len(recent) else None


def _seconds_left(run: ViewedRun, per_step: float | None) -> float | None:
    """Predict the rest of the run, evaluations included."""
    step, steps = _step(run), _steps(run)
    if per_step is None or step is None or steps is None or step >= steps:
        return None
    eval_times = _finite(run.metrics.eval.column("eval/time_s"))[-_RECENT:]
    every = integer(run.config, "eval", "every") or steps
    evaluations = steps // every - step // every + (steps % every > 0)  # after the last step, too
    since_last = time.time() - run.metrics.timestamps[-1] if np.isfinite(run.metrics.timestamps[-1:]).any() else 0.0
    left = (steps - step - 1) * per_step + max(0.0, per_step - since_last)
    return float(left + evaluations * (np.median(eval_times) if len(eval_times) else 0.0))


def _elapsed_s(run: ViewedRun) -> float | None:
    """Seconds that the run took, up to now or to its end, without pauses between an end and a restart."""
    is_running = run.state in ("starting", "running")
    if not is_running and (seconds := number(run.summary, "seconds")) is not None:
        return seconds
    table, times = run.metrics, WallTime(run)
    starts = [event.timestamp for event in run.events if event.event == "start" and np.isfinite(event.timestamp)]
    if times.start is None or not times.is_measured:
        return max((float(t[-1]) for t in (times.train, times.eval) if len(t)), default=None)
    starts = starts or [times.start]
    seen = np.concatenate([table.timestamps, table.eval.timestamps, [event.timestamp for event in run.events]])
    seen = np.append(_finite(seen), [time.time()] if is_running else [])
    bounds = [-np.inf, *starts[1:], np.inf]
    total = 0.0
    for start, low, high in zip(starts, bounds, bounds[1:], strict=False):
        within = seen[(seen >= max(start, low)) & (seen < high)]
        total += float(within.max(initial=start)) - start
    return total


def _findings(run: ViewedRun) -> list[Finding]:
    """Return how the run goes, most important first: that it died, then what the rules find."""
    found, end = _judged(run), _end(run)
    if end is None or not end.is_warning:
        return found
    return [end, *(finding for finding in found if finding.is_warning)]


def _judged(run: ViewedRun) -> list[Finding]:
    """Return what the run recorded, or what the rules find in the metrics of one that recorded nothing."""
    if run.findings is not None:
        return run.findings if len(run.last_metrics.steps) else []  # a run that starts over has no metrics yet
    if not run.has_all_metrics:
        return []
    table, config = run.metrics, run.config
    known = _JUDGED.get(run)
    if known is None or known[0] is not table or known[1] is not config:
        known = _JUDGED[run] = (table, config, judge(table, facts_of(config)))
    return known[2]


def _accuracies(run: ViewedRun) -> tuple[IntArray, FloatArray]:
    """[E] steps with evaluations and [E] their accuracies; from the completions if the metrics have none."""
    table = run.metrics.eval
    steps, values = table.steps, table.column("eval/accuracy")
    if not np.isfinite(values).any():
        known = [(point.step, point.accuracy) for point in evaluations(run).points if point.accuracy is not None]
        steps = np.array([step for step, _ in known], dtype=np.int64)
        values = np.array([accuracy for _, accuracy in known], dtype=np.float64)
    return steps[np.isfinite(values)], values[np.isfinite(values)]


def _measured(steps: IntArray, values: FloatArray) -> Measured:
    known = np.flatnonzero(np.isfinite(values))
    first, last = (known[0], known[-1]) if len(known) else (None, None)
    return Measured(
        first=None if first is None else float(values[first]),
        first_step=None if first is None else int(steps[first]),
        last=None if last is None else float(values[last]),
        last_step=None if last is None else int(steps[last]),
        spark=_spark(values),
    )


def _spark(values: FloatArray) -> FloatArray:
    """[at most 120] means of buckets."""
    values = _finite(values)
    if len(values) <= _SPARK_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, _SPARK_POINTS)])


def _finite(values: FloatArray) -> FloatArray:
    return values[np.isfinite(values)]
