"""What the page's requests answer: one frozen dataclass per answer, and their JSON.

Field names are those of the JSON; a trailing underscore, for words that Python reserves, is dropped there. Series are
numpy arrays or lists of floats in which NaN means missing. Texts of `problems` say what of the run folder could not be
read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np

from cohort.health.findings import Finding
from cohort.records import BoolArray, FloatArray, IntArray
from cohort_view.step_records import (
    AccuracyPoint,
    Completion,
    CompletionRow,
    EvalQuestion,
    Evaluations,
    Flips,
    Group,
    GroupCompletion,
    GroupRow,
    ShownTokens,
    Step,
    StepFile,
    StepList,
    TextDiff,
    TokenColumns,
)

__all__ = [
    "AccuracyPoint",
    "BoolArray",
    "ChangedKey",
    "Completion",
    "CompletionRow",
    "ConfigInfo",
    "Curve",
    "Curves",
    "Difference",
    "Differences",
    "EvalQuestion",
    "Evaluations",
    "Event",
    "Flips",
    "FloatArray",
    "Group",
    "GroupCompletion",
    "GroupRow",
    "IntArray",
    "Machine",
    "Mark",
    "MarkKind",
    "Measured",
    "MemoryPart",
    "MemoryPeaks",
    "MemorySummary",
    "MessageLevel",
    "MetricInfo",
    "MetricList",
    "Now",
    "PlannedPhase",
    "Progress",
    "RunEntry",
    "RunFile",
    "RunList",
    "RunMessage",
    "RunState",
    "ShownTokens",
    "Status",
    "Step",
    "StepFile",
    "StepList",
    "TextDiff",
    "TokenColumns",
    "to_json",
]

RunState = Literal["starting", "running", "finished", "stopped"]
MessageLevel = Literal["fault", "warning", "note"]
MarkKind = Literal["restart", "warning", "checkpoint", "fault", "evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of events.jsonl."""

    timestamp: float  # Unix seconds; NaN if the line has none
    step: int | None
    event: str
    values: Mapping[str, Any]  # all other keys, secrets hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The run's status.json."""

    timestamp: float  # Unix seconds of the last change
    phase: str
    pid: int | None = None
    host: str | None = None
    step: int | None = None
    steps: int | None = None
    phase_since: float | None = None
    done: float | None = None  # progress within the phase
    total: float | None = None
    started: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run in the list of runs."""

    id: str
    name: str
    path: str
    state: RunState
    step: int | None
    steps: int | None
    started: float | None  # Unix seconds
    updated: float | None
    reward: float | None
    accuracy: float | None
    model: str | None
    algorithm: str | None
    banner: Finding | None  # the most important
    gone: str | None  # that its folder is gone or was emptied
    has_all_metrics: bool  # or only the last, of a long run that was not opened yet


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """The runs that the page shows."""

    root: str | None
    runs: Sequence[RunEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress within a phase; its unit depends on the phase."""

    done: float
    total: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A part of the plan's memory prediction."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Peak memory so far against the plan's prediction, per process."""

    peak_bytes: float | None
    predicted_bytes: float | None
    capacity_bytes: float | None
    parts: Sequence[MemoryPart]  # of the phase with the predicted peak, largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """A message that the run showed its user."""

    timestamp: float | None
    step: int | None
    level: MessageLevel
    text: str
    num: int = 1  # how often it was shown; step and time are of the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A metric's first and last value of a run so far, the steps that they are of, and its curve."""

    first: float | None
    first_step: int | None
    last: float | None
    last_step: int | None
    spark: FloatArray  # at most 120 points


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Where a run stands."""

    id: str
    state: RunState
    stopped: str | None  # how a user stopped the run, and what to do; that it died is a banner
    step: int | None
    steps: int | None
    phase: str | None
    phase_since: float | None
    progress: Progress | None
    seconds_left: float | None
    seconds_per_step: float | None
    elapsed_s: float | None
    numbers: Mapping[str, Measured]  # by metric
    tokens_per_second: float | None
    memory: MemorySummary
    banners: Sequence[Finding]
    warnings: Sequence[RunMessage]  # notes are left out
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """A metric that a run has."""

    name: str
    group: str
    kind: Literal["train", "eval"]
    unit: str
    description: str
    last: float | None
    num_points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricList:
    """All metrics of a run."""

    metrics: Sequence[MetricInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one run."""

    run: str
    name: str
    x: FloatArray  # [points] steps, or seconds since the start
    y: FloatArray  # [points] NaN: missing
    total: int  # points before downsampling
    means: FloatArray | None  # [points] mean of all values of the point's bucket; None: not downsampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to a run, at a place of the x axis."""

    x: float
    kind: MarkKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Metrics of one or several runs."""

    curves: Sequence[Curve]
    marks: Mapping[str, Sequence[Mark]]  # by run


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A configuration key in which runs differ. A run without the key is not in `values`."""

    key: str
    values: Mapping[str, Any]  # by run


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What differs between the configurations of runs."""

    keys: Sequence[Difference]
    unknown: Sequence[str]  # runs whose configuration is missing or cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPhase:
    """The plan's memory prediction for a phase."""

    phase: str
    measured: str | None  # the phase of MemoryPeaks that covers it
    parts: Sequence[MemoryPart]  # largest first
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeaks:
    """Peak memory by phase in bytes per process, and what the plan predicts."""

    peaks: Mapping[str, float]  # by measured phase
    plan: Sequence[PlannedPhase]
    capacity_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run asks of its machine."""

    phases: Sequence[str]
    x: IntArray  # steps
    seconds: Mapping[str, FloatArray]  # by phase
    totals: Mapping[str, float]  # seconds of all steps by phase, of evaluations, checkpoints, and other; the run's time
    num_steps: int
    memory: MemoryPeaks
    marks: Sequence[Mark]
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedKey:
    """A configuration key whose value is not the default."""

    key: str
    value: Any
    default: Any  # None for a required key


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A file of a run folder, or a folder with all that is in it."""

    path: str
    bytes: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigInfo:
    """Configuration and provenance of a run, without secrets."""

    config: Mapping[str, Any]
    yaml: str
    changed: Sequence[ChangedKey]
    versions: Mapping[str, Any]
    command: str | None
    commit: str | None
    plan: Mapping[str, Any]
    starts: Sequence[Mapping[str, Any]]
    files: Sequence[RunFile]
    problems: Sequence[str]


def to_json(value: Any) -> str:
    """Return JSON in ASCII. NaN and infinities become null, numpy values plain ones, anything else its text."""
    return json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and np.isfinite(value).all():
            return value.tolist()
        return [_plain(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name.removesuffix("_"): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return str(value)
