"""Where a run stands: how it goes, its time by phase, its memory against the plan, its logs."""

import errno
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from cohort.health.findings import Finding
from cohort.records import FloatArray
from cohort.run.files import resume_hint
from cohort.run.provenance import hide_in_text
from cohort_view.run import ViewedRun
from cohort_view.series import SIGNAL, WallTime, messages
from cohort_view.values import get, integer, mapping, number, regular_file, text

_WITHIN_OTHERS = ("communication", "move")  # parts of other phases


def seconds_by_phase(run: ViewedRun) -> dict[str, float]:
    """Return where the run's seconds went; what no metric or event covers is `other`."""
    table = run.metrics
    names = {name: name[len("time/") : -len("_s")] for name in table.names if name.startswith("time/")}
    found = {
        phase: float(np.nansum(table.column(name))) for name, phase in names.items() if phase not in _WITHIN_OTHERS
    }
    found["evaluation"] = float(np.nansum(table.eval.column("eval/time_s")))
    saves = [number(event.values, "seconds") for event in run.events if event.event == "checkpoint"]
    found["checkpoint"] = sum(seconds for seconds in saves if seconds is not None)
    return found | {"other": max(0.0, (_elapsed_s(run) or 0.0) - sum(found.values()))}


def memory(run: ViewedRun) -> dict[str, Any]:
    """Return the peak of memory so far per process, what the plan predicts for it, and how they compare.

    On a GPU the peak is what PyTorch allocates, without the memory of the framework itself and of vLLM during training.
    """
    peaks = _finite(run.metrics.column("memory/peak_bytes"))
    peak = float(peaks.max()) if len(peaks) else None
    on_gpu = get(run.plan, "hardware", "on_gpu") is True
    left_out = ("framework", "rollout server's base") if on_gpu else ()
    parts = mapping(run.plan, "memory", "phases", text(run.plan, "memory", "peak_phase") or "", "parts")
    sizes = [number(size) for part, size in parts.items() if part not in left_out]
    predicted = sum(size for size in sizes if size is not None) or None
    verdict = None
    if peak is not None and predicted is not None:
        share = round(100 * (peak / predicted - 1))
        verdict = "as planned" if share == 0 else f"{abs(share)}% {'above' if share > 0 else 'below'} the plan"
        if not on_gpu:
            verdict += "; on CPU the peak is that of the whole process"
    capacity = number(run.plan, "hardware", "gpu_memory_bytes")
    return {"peak_bytes": peak, "predicted_bytes": predicted, "capacity_bytes": capacity, "verdict": verdict}


_RECENT = 20  # steps and evaluations whose median time predicts the rest
_MAX_WARNINGS = 100


def now(run: ViewedRun) -> dict[str, Any]:
    """Return where a run stands."""
    table, state = run.metrics, run.state
    live = run.status if state in ("starting", "running") else None
    done, per_step, end = number(live, "done"), _seconds_per_step(run), _end(run)
    warnings = _warnings(run)
    return {
        "id": run.id,
        "state": state,
        "stopped": None if end is None or end.is_warning else end.sentence,
        "step": _step(run),
        "steps": _steps(run),
        "phase": text(live, "phase"),
        "phase_since": number(live, "phase_since"),
        "progress": None if done is None else {"done": done, "total": number(live, "total")},
        "seconds_left": None if state != "running" else _seconds_left(run, per_step),
        "seconds_per_step": per_step,
        "elapsed_s": _elapsed_s(run),
        "max_completion_tokens": integer(run.config, "rollout", "max_completion_tokens"),
        "sampling": text(run.config, "data", "sampling"),
        "tokens_per_second": table.last("tokens_per_second"),
        "memory": memory(run),
        "time": seconds_by_phase(run),
        "banners": _findings(run),
        "warnings": warnings[-_MAX_WARNINGS:],
        "num_warnings": len(warnings),
        "problems": run.problems,
    }


def _warnings(run: ViewedRun) -> list[dict[str, Any]]:
    """Return the warnings, equal ones once, with how often and when last they were shown."""
    found: dict[str, dict[str, Any]] = {}
    for message in messages(run):
        if message["level"] != "note":
            earlier = found.pop(message["text"], {"num": 0})
            found[message["text"]] = {**message, "num": earlier["num"] + 1}
    return list(found.values())


def runs(runs: Sequence[ViewedRun], root: Path | None = None) -> dict[str, Any]:
    """Return the list of runs."""
    return {"root": None if root is None else str(root), "runs": [run_entry(run) for run in runs]}


def run_entry(run: ViewedRun) -> dict[str, Any]:
    """Return a run's line in the list of runs, from what was read of the run so far."""
    starts = [event.timestamp for event in run.events if event.event == "start"]
    accuracy = run.last_metrics.eval.last("eval/accuracy")
    model = text(run.config, "model", "path")
    return {
        "id": run.id,
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "step": _step(run),
        "steps": _steps(run),
        "started": starts[0] if starts else number(run.status, "started"),
        "updated": run.updated,
        "reward": run.last_metrics.last("reward"),
        "accuracy": number(run.summary, "accuracy_after") if accuracy is None else accuracy,
        "model": None if model is None else PurePath(model).name or model,
        "algorithm": text(run.config, "algorithm", "name"),
        "banner": next(iter(_findings(run)), None),
        "gone": run.gone,
        "has_all_metrics": run.has_all_metrics,
    }


def _step(run: ViewedRun) -> int | None:
    """Steps done."""
    if len(run.last_metrics.steps):
        return int(run.last_metrics.steps[-1])
    return 0 if len(run.last_metrics.eval.steps) or run.status is not None else None


def _steps(run: ViewedRun) -> int | None:
    """Steps in all."""
    said = integer(run.status, "steps")
    return integer(run.config, "train", "steps") if said is None else said


def _end(run: ViewedRun) -> Finding | None:
    """Say why a run that did not finish ended, and what to do.

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
    table, begin = run.metrics, WallTime(run).start
    if begin is None:
        return None
    starts = [event.timestamp for event in run.events if event.event == "start"] or [begin]
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
    # a run that starts over has no metrics yet
    found, end = run.findings if len(run.last_metrics.steps) else [], _end(run)
    if end is None or not end.is_warning:
        return found
    return [end, *(finding for finding in found if finding.is_warning)]


def _finite(values: FloatArray) -> FloatArray:
    return values[np.isfinite(values)]


_LOGS = "logs"
_MAX_LOGS = 200
_LOG_LINES = 400
_LOG_BYTES = 256 << 10  # read from the end of a file


def log(run: ViewedRun, name: str = "") -> dict[str, Any]:
    """Return the last lines of a log of a run, by default of the one that was written last, without secrets."""
    files, lines, problems = _logs(run.path), [], []
    name = name or next(iter(files), "")
    try:
        if name and name not in files:
            raise FileNotFoundError(errno.ENOENT, "there is no such log")
        if name:
            with regular_file(run.path, f"{_LOGS}/{name}").open("rb") as file:
                file.seek(start := max(0, files[name] - _LOG_BYTES))
                text = file.read(_LOG_BYTES).decode("utf-8", errors="replace")
            if start:
                text = text.partition("\n")[2]  # the rest of a line could begin within a secret
            lines = [hide_in_text(line) for line in text.splitlines()[-_LOG_LINES:]]
    except OSError as error:
        problems.append(f"{_LOGS}/{name} cannot be read: {error.strerror}.")
    listed = [{"name": name, "bytes": size} for name, size in files.items()]
    return {"files": listed, "name": name or None, "lines": lines, "problems": problems}


def _logs(run_path: Path) -> dict[str, int]:
    """Return the sizes of the logs that are not empty by their names, the last written first."""
    found = []
    for path in itertools.islice((run_path / _LOGS).rglob("*.log"), 10 * _MAX_LOGS):
        with suppress(OSError):
            stat = regular_file(run_path, path.relative_to(run_path).as_posix()).stat()
            found.append((-stat.st_mtime, path.relative_to(run_path / _LOGS).as_posix(), stat.st_size))
    return {name: size for _, name, size in sorted(found)[:_MAX_LOGS] if size}
