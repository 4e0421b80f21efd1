"""Score groups with every reward function, validate the results and combine them.

P prompts, G generations per prompt, N completions of the step, R rewards.
"""

import dataclasses
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cohort.errors import TrainingError, UserError, excerpt
from cohort.ranks.stopping import NEVER_STOPPED
from cohort.records import FloatArray, IntArray, Prompt, RolloutGroup, ScoredGroup
from cohort.rewards.answers import expected_answer
from cohort.rewards.arguments import Sample, rollout_arguments
from cohort.rewards.builtin import BuiltinReward
from cohort.rewards.call import AsyncCaller, as_number, call_sync, describe_value
from cohort.rewards.caught import REPEATS, Caught, caught_exceptions, describe_caught, first_few, is_constant
from cohort.rewards.function import (
    ChecksRows,
    Reports,
    ReportsProgress,
    RewardFunction,
    RewardLog,
    TrainerProgress,
    is_async,
    keyword_parameters,
    mean_metrics,
    reports_of,
    unique_names,
)
from cohort.rewards.gates import GatedParts, selects, stages
from cohort.rewards.per_group import (
    GroupCalls,
    GroupScorer,
    GroupValues,
    OnRanks,
    OnThisRank,
    details_of,
    is_per_group,
    raise_first,
    split_evenly,
)

MAX_ABS_REWARD = 1e30  # squares of larger rewards overflow on the way to the loss


class RewardRunner:
    """Calls each reward function once per step, on all completions of all groups.

    A function gets the keyword arguments in its signature, or everything if it has `**kwargs`: `prompts`,
    `completions`, `completion_ids` and the dataset columns, each with one entry per completion, its own `args`, and
    TRL's `trainer_state`, `log_metric`, `log_extra` and, in runs with environments, `environments`. One that names
    `trajectories` gets the `Trajectory` records.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        columns: Collection[str] = (),
        prompt_column: str | None = None,
    ) -> None:
        """Create a runner. Functions with the same name get the suffixes `_2`, `_3`, ...

        Args:
            functions: at least one.
            columns: names of the dataset's columns; one missing from all rows of a step is passed as all None.
            prompt_column: column with the prompts, passed as in the dataset.

        Raises:
            UserError: there is no function.
        """
        if not functions:
            raise UserError("rewards: at least one reward is needed, for example `rewards: [{use: math}]`")
        names = unique_names([f.name for f in functions])
        self.functions = tuple(dataclasses.replace(f, name=name) for f, name in zip(functions, names, strict=True))
        self._index = {f.name: n for n, f in enumerate(self.functions)}
        self._parameters = {f.name: keyword_parameters(f.function) for f in self.functions}
        self._columns = tuple(columns)
        self._prompt_column = prompt_column
        self._async_caller = AsyncCaller()
        self.stop = NEVER_STOPPED  # whether the run was asked to stop: calls end
        self.notify: Callable[[str], None] | None = None  # shows `last_warnings` of functions that have them
        # called with a function's name, its verdicts that are done, and all of the call
        self.on_progress: Callable[[str, int, int], None] = lambda name, done, total: None
        self.trainer_progress: Callable[[], TrainerProgress] = (
            TrainerProgress  # for functions that take `trainer_state`
        )
        self.log_folder: Path | None = None  # for the tracebacks of functions
        self.scorer = GroupScorer(lambda: dict(enumerate(self.functions)))
        # calls rewards that score each group by itself
        self.on_ranks: OnRanks = OnThisRank(self.scorer, lambda: self.stop)
        self._logs: dict[str, RewardLog] = {}  # by function, of its last call
        # of rewards that score each group by itself, in the last `score`
        self._told: dict[str, Reports] = {}
        self._details: dict[str, Mapping[str, Sequence[str | None]]] = {}
        self._logged: list[Mapping[str, Sequence[float]]] = []  # metrics since the last `take_logged`
        self._num_nan: Counter[str] = Counter()  # completions for which a function returned NaN, in the last `score`
        self._told_of_nan: set[str] = set()
        self._not_called: set[str] = {f.name for f in self.functions if not isinstance(f.function, BuiltinReward)}
        # of a function's first call, until its values are read: what it caught of how many completions; its arguments
        self._first_calls: dict[str, tuple[tuple[Caught | None, int], dict[str, Any]]] = {}
        self.seconds: dict[str, float] = {}  # wall time of each function that the last `score` called
        self.num_judged: dict[str, int] = {}  # its completions, for functions that report progress

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by name."""
        return {f.name: f.weight for f in self.functions}

    def checked_columns(self) -> set[str] | None:
        """Return the columns that `check_rows` reads; None: perhaps all."""
        columns: set[str] = set()
        for f in self.functions:
            if isinstance(f.function, BuiltinReward):
                columns |= {*f.function.required_columns(), *f.where}
            elif isinstance(f.function, ChecksRows):
                return None
        return columns

    def check_rows(self, rows: Iterable[tuple[int, Mapping[str, Any]]], *, describe: Callable[[int], str]) -> None:
        """Check rows, with their numbers, with the rewards that are for them and can (`ChecksRows`).

        `describe` says how messages name a row.

        Raises:
            UserError: a reward cannot score a row.
        """
        checked = [f for f in self.functions if isinstance(f.function, ChecksRows)]
        for number, row in rows if checked else ():
            for f in checked:
                assert isinstance(f.function, ChecksRows)
                if selects(f, row):
                    try:
                        f.function.check_row(row, **f.args)
                    except UserError as error:
                        raise UserError(f"{describe(number)}: reward {f.name!r}: {error}") from error

    def score(
        self, groups: Sequence[RolloutGroup], *, require_scores: bool = True, during: str = ""
    ) -> list[ScoredGroup]:
        """Score groups and return them in the same order. Trajectories that infrastructure broke are not scored.

        Args:
            groups: groups of one or several prompts.
            require_scores: raise an error if no function scores any completion.
            during: phase of the run, for messages.

        Raises:
            UserError: a function raised, hung, or returned anything but one number or None per completion; or no
                completion was scored although required.
            TrainingError: infrastructure broke all trajectories although a score is required.
        """
        samples = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        if not samples:
            return [ScoredGroup(prompt=g.prompt, trajectories=(), rewards=np.zeros(0), reward_parts={}) for g in groups]
        if require_scores and all(trajectory.is_broken for _, trajectory in samples):
            ends = " or ".join(sorted({trajectory.end for _, trajectory in samples}))
            reason = next((t.error.partition("\n\n")[0] for _, t in samples if t.error), "")
            first = f"; the first error:\n\n{reason}" if reason else ""
            when = during and f" in {during}"
            raise TrainingError(f"rollout: all {len(samples)} trajectories{when} ended with {ends}{first}")
        group_N = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
        parts, details = self._score_parts(samples, group_N, during)
        rewards_N = self._weighted_sum(parts)
        if require_scores and np.isnan(rewards_N).all():
            raise UserError(self._describe_unscored(sum(not trajectory.is_broken for _, trajectory in samples)))
        scored, start = [], 0
        for group in groups:
            own = slice(start, start + len(group.trajectories))
            start = own.stop
            scored.append(
                ScoredGroup(
                    prompt=group.prompt,
                    trajectories=group.trajectories,
                    rewards=rewards_N[own],
                    reward_parts={name: part_N[own] for name, part_N in parts.items()},
                    reward_details={name: tuple(details_N[own]) for name, details_N in details.items()},
                    answer=self._answer(group.prompt),
                )
            )
        return scored

    def _answer(self, prompt: Prompt) -> str | None:
        rewards = [f for f in self.functions if selects(f, prompt.columns)]
        named = {name for f in rewards for name in self._parameters[f.name].names}
        return expected_answer(prompt.columns, [f.function for f in rewards], named)

    def counts(self) -> dict[str, int]:
        """Return `reward name/event` -> completions of the last step, from functions with `last_counts`."""
        counted = {
            f"{f.name}/{kind}": number
            for f in self.functions
            if f.name in self.seconds
            for kind, number in self._reports(f).last_counts.items()
        }
        return counted | {f"{name}/nan": number for name, number in self._num_nan.items()}

    def take_logged(self, own: Mapping[str, float], *, prefix: str = "") -> dict[str, float]:
        """Return `own` and the means of what functions logged by `log_metric` since the last call.

        Args:
            own: the run's metrics.
            prefix: of the names that functions log.

        Raises:
            UserError: a function logs a metric of the run.
        """
        logged = {f"{prefix}{name}": value for name, value in mean_metrics(self._logged).items()}
        self._logged = []
        if taken := sorted(logged.keys() & own.keys()):
            raise UserError(
                f"log_metric({taken[0].removeprefix(prefix)!r}, ...): the run itself has a metric of this name"
            )
        return {**own, **logged}

    def notes(self) -> list[str]:
        """Return messages of the rewards for the start of the run."""
        return [note for f in self.functions for note in reports_of(f.function).notes]

    def describe_ranks(self) -> str:
        """Say which rewards run on all ranks, and which on rank 0 alone."""
        places = {True: "on all ranks, each for its share of the groups", False: "on rank 0, once per step"}
        named = {
            place: [repr(f.name) for f in self.functions if is_per_group(f) == key] for key, place in places.items()
        }
        return "rewards: " + "; ".join(f"{', '.join(names)} {place}" for place, names in named.items() if names)

    def warnings(self) -> list[str]:
        """Return warnings of the rewards for the run's summary."""
        return [warning for f in self.functions for warning in reports_of(f.function).warnings]

    def _score_parts(
        self, samples: Sequence[Sample], group_N: IntArray, during: str
    ) -> tuple[dict[str, FloatArray], dict[str, list[str | None]]]:
        """Return values and details of each function.

        It goes stage by stage: behind a gate, functions only see what the gate lets through.
        """
        self.seconds, self.num_judged = {}, {}
        self._logs, self._num_nan, self._told, self._details = {}, Counter(), {}, {}
        parts = GatedParts(samples)
        details: dict[str, list[str | None]] = {}
        for stage in stages(self.functions):
            numbers = {f.name: np.flatnonzero(parts.to_score(f)).tolist() for f in stage}
            chosen = {name: [samples[i] for i in of_one] for name, of_one in numbers.items()}
            called = [f for f in stage if chosen[f.name]]
            returned = self._call_all([f for f in called if not is_per_group(f)], chosen)
            groups = {name: group_N[of_one].tolist() for name, of_one in numbers.items()}
            returned |= self._call_per_group([f for f in called if is_per_group(f)], chosen, groups)
            for warning in (w for f in called for w in self._reports(f).last_warnings):
                self._notify(warning, during)
            for f in called:
                for name, values in self._details_of(f, len(chosen[f.name])).items():
                    of_sample = dict(zip(numbers[f.name], values, strict=True))
                    details[name] = [of_sample.get(i) for i in range(len(samples))]
            for f in stage:
                values_N = _checked(f, returned.get(f.name, []), chosen[f.name])
                self._tell_of_nan(f, values_N, returned.get(f.name, []), during)
                self._tell_of_caught(f, values_N, during)
                parts.add(f, values_N)
            parts.close_gates(stage)
        self._logged += [log.metrics for log in self._logs.values()]
        return parts.values, details

    def _details_of(self, reward: RewardFunction, count: int) -> Mapping[str, Sequence[str | None]]:
        """Return what a function tells of each of its `count` completions, by column."""
        if is_per_group(reward):
            return self._details[reward.name]
        return details_of(reward, self._logs.get(reward.name, RewardLog()), count)

    def _notify(self, text: str, during: str) -> None:
        if self.notify is not None:
            self.notify(f"{text}{during and f' ({during})'}")

    def _tell_of_nan(self, reward: RewardFunction, values_N: FloatArray, returned: Sequence[Any], during: str) -> None:
        """Count values that are NaN, and say once that they are not scores."""
        number = int(np.isnan(values_N).sum()) - sum(value is None for value in returned)
        if number:
            self._num_nan[reward.name] = number
            if reward.name not in self._told_of_nan:
                self._told_of_nan.add(reward.name)
                text = f"reward {reward.name!r} returned NaN for {number} of {len(returned)} completions"
                self._notify(f"{text}, which counts as not scored, like None", during)

    def _tell_of_caught(self, reward: RewardFunction, values_N: FloatArray, during: str) -> None:
        """After a function's first call: if all values are equal, say which exceptions it caught."""
        (caught, count), arguments = self._first_calls.pop(reward.name, ((None, 0), {}))
        if not is_constant(values_N.tolist()):
            return
        if caught is None and arguments:
            few, count = first_few(arguments, count)
            with suppress(UserError), caught_exceptions() as caught:
                call_sync(reward, few)
        if caught:
            self._notify(describe_caught(reward.name, caught, count, float(values_N[0])), during)

    def _call_all(
        self,
        functions: Sequence[RewardFunction],
        chosen: Mapping[str, Sequence[Sample]],
    ) -> dict[str, Any]:
        """Call each function with its samples."""
        returned = {}
        for f in functions:
            if not is_async(f.function):
                arguments = self._arguments(f, chosen[f.name])
                with self._calling([f], chosen, arguments):
                    returned[f.name] = call_sync(f, arguments, stop=self.stop)
        if together := [f for f in functions if is_async(f.function)]:
            calls = [(f, self._arguments(f, chosen[f.name])) for f in together]
            with self._calling(together, chosen):
                values = self._async_caller.call_all(calls, stop=self.stop)
            returned |= {f.name: value for f, value in zip(together, values, strict=True)}
        return returned

    def _call_per_group(
        self,
        functions: Sequence[RewardFunction],
        chosen: Mapping[str, Sequence[Sample]],
        groups: Mapping[str, Sequence[int]],
    ) -> dict[str, list[Any]]:
        """Call functions that score each group by itself, each rank those of its share of the groups.

        Args:
            functions: called together.
            chosen: their samples, by name.
            groups: number of the group of each sample, by name.
        """
        if not functions:
            return {}
        together: dict[str, list[list[Sample]]] = {}  # the samples of each call, by name
        shares: list[list[GroupCalls]] = [[] for _ in range(self.on_ranks.count)]
        last = 1 + max(max(groups[f.name]) for f in functions)
        for f in functions:
            by_group: dict[int, list[Sample]] = {}
            for number, sample in zip(groups[f.name], chosen[f.name], strict=True):
                by_group.setdefault(number, []).append(sample)
            calls = [[by_group[n] for n in split if n in by_group] for split in split_evenly(last, self.on_ranks.count)]
            if isinstance(f.function, BuiltinReward):
                calls = [[[sample for group in of_rank for sample in group]] if of_rank else [] for of_rank in calls]
            for share, of_rank in zip(shares, calls, strict=True):
                arguments = [self._rollout_arguments(f, samples) for samples in of_rank]
                counts = [len(samples) for samples in of_rank]
                index = self._index[f.name]
                share.append(GroupCalls(index=index, name=f.name, arguments=arguments, counts=counts))
            together[f.name] = [samples for of_rank in calls for samples in of_rank]
        with self._calling(functions, chosen):
            is_told = any(f.per_group and self._parameters[f.name].accepts("trainer_state") for f in functions)
            returned = self.on_ranks(shares, self.trainer_progress() if is_told else TrainerProgress())
            raise_first([values for of_rank in returned for values in of_rank])
        values = {f.name: [of_rank[n] for of_rank in returned] for n, f in enumerate(functions)}
        return {f.name: self._merge(f, values[f.name], together[f.name]) for f in functions}

    def _merge(
        self, reward: RewardFunction, returned: Sequence[GroupValues], calls: Sequence[Sequence[Sample]]
    ) -> list[Any]:
        """Keep what all ranks returned for a reward, in the order of its calls, and return its values."""
        for of_call, samples in zip((v for r in returned for v in r.values), calls, strict=True):
            _checked(reward, of_call, samples)
        told = self._told[reward.name] = Reports()
        told.last_counts = sum((r.event_counts for r in returned), Counter())
        told.last_warnings = [warning for r in returned for warning in r.warnings]
        self._logged += [metrics for r in returned for metrics in r.metrics]
        details = [of_call for r in returned for of_call in r.details]
        self._details[reward.name] = {
            name: [
                text
                for of_call, samples in zip(details, calls, strict=True)
                for text in of_call.get(name, (None,) * len(samples))
            ]
            for name in dict.fromkeys(name for of_call in details for name in of_call)
        }
        if reward.name in self._first_calls and not is_async(reward.function):
            self._first_calls[reward.name] = (None, len(calls[0])), self._arguments(reward, calls[0])
        return [value for r in returned for of_call in r.values for value in of_call]

    def _reports(self, reward: RewardFunction) -> Reports:
        """Return what a reward tells of its last call, or of those on all ranks."""
        return self._told.get(reward.name) or reports_of(reward.function)

    @contextmanager
    def _calling(
        self,
        functions: Sequence[RewardFunction],
        chosen: Mapping[str, Sequence[Sample]],
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Iterator[None]:
        """Watch a call of functions: its time, its progress, and its traceback if it fails.

        Args:
            functions: called together.
            chosen: their samples, by name.
            arguments: of a single synchronous function.
        """
        own = self._not_called.intersection(f.name for f in functions)
        self._not_called -= own
        watched: AbstractContextManager[Caught | None] = caught_exceptions() if own and not REPEATS else nullcontext()
        start = time.perf_counter()
        try:
            with self._reporting(functions, chosen), watched as caught:
                yield
        except UserError as error:
            self._save_traceback(functions, error)
            raise
        self.seconds |= {f.name: time.perf_counter() - start for f in functions}  # async functions ran together
        if len(functions) > 1:  # asynchronous functions, which only child processes tell apart
            caught = None
        for f in functions:
            if f.name in own:
                watched_here = caught, len(chosen[f.name])
                found = reports_of(f.function).last_caught or watched_here
                self._first_calls[f.name] = found, dict(arguments)

    def _save_traceback(self, functions: Sequence[RewardFunction], error: UserError) -> None:
        """Write the traceback of an exception in user code to the log folder."""
        if self.log_folder is not None and error.__cause__ is not None and not isinstance(error.__cause__, UserError):
            names = "-".join("".join(c if c.isalnum() else "_" for c in f.name) for f in functions)
            with suppress(OSError):
                self.log_folder.mkdir(exist_ok=True)
                text = "".join(traceback.format_exception(error.__cause__))
                (self.log_folder / f"reward-{names}.txt").write_text(text, encoding="utf-8", errors="replace")

    @contextmanager
    def _reporting(self, functions: Sequence[RewardFunction], chosen: Mapping[str, Sequence[Sample]]) -> Iterator[None]:
        """Pass on the progress of functions that report it, from its start to its end."""
        sizes = {f.name: len(chosen[f.name]) for f in functions if isinstance(f.function, ReportsProgress)}
        for f in functions:
            if isinstance(f.function, ReportsProgress):
                f.function.on_progress = partial(self.on_progress, f.name)
                self.on_progress(f.name, 0, sizes[f.name])
        try:
            yield
        finally:
            for name, size in sizes.items():
                self.on_progress(name, size, size)
        self.num_judged |= sizes

    def _arguments(self, reward: RewardFunction, samples: Sequence[Sample]) -> dict[str, Any]:
        """Build a function's arguments, its own included."""
        arguments = self._rollout_arguments(reward, samples)
        if isinstance(reward.function, BuiltinReward):
            return arguments
        log = self._logs[reward.name] = RewardLog()
        trl = log.arguments(self.trainer_progress())
        accepts = self._parameters[reward.name].accepts
        return {**arguments, **{name: value for name, value in trl.items() if accepts(name)}, **reward.args}

    def _rollout_arguments(self, reward: RewardFunction, samples: Sequence[Sample]) -> dict[str, Any]:
        return rollout_arguments(
            reward,
            samples,
            parameters=self._parameters[reward.name],
            columns=self._columns,
            prompt_column=self._prompt_column,
        )

    def _weighted_sum(self, parts: Mapping[str, FloatArray]) -> FloatArray:
        """Return the sum for each completion that is scored, else NaN."""
        parts_RN = np.stack([parts[f.name] for f in self.functions])
        weights_R1 = np.array([[f.weight] for f in self.functions])
        has_number_RN = ~np.isnan(parts_RN)
        scored_N = has_number_RN[[not f.shapes for f in self.functions]].any(axis=0)
        with np.errstate(over="ignore"):  # reported below
            sums_N = np.where(has_number_RN, weights_R1 * parts_RN, 0.0).sum(axis=0)
        if not (np.abs(sums_N) <= MAX_ABS_REWARD).all():
            raise UserError(f"rewards: the weighted sum of the rewards exceeds {MAX_ABS_REWARD:g}; use smaller weights")
        return np.where(scored_N, sums_N, np.nan)

    def _describe_unscored(self, count: int) -> str:
        counted = ", ".join(f"{name}: {number}" for name, number in self.counts().items())
        return (
            f"no reward scored any of the {count} completions of this step: "
            f"{', '.join(repr(f.name) for f in self.functions if not f.shapes)} returned None for all of them, so "
            f"there is nothing to learn from; check the answer column{counted and f' (counted: {counted})'}"
        )


def _checked(reward: RewardFunction, returned: Any, samples: Sequence[Sample]) -> FloatArray:
    """Validate and convert to one float64 per completion, NaN for None."""
    if not isinstance(returned, list):
        raise UserError(
            f"reward {reward.name!r} returned {describe_value(returned)}; it must return a list with one number or "
            f"None for each of the {len(samples)} completions"
        )
    if len(returned) != len(samples):
        raise UserError(
            f"reward {reward.name!r} returned {len(returned)} values for {len(samples)} completions; it must return "
            f"one number or None for each{_odd_one_out(returned, samples)}"
        )
    parts_N = np.empty(len(samples))
    for i, value in enumerate(returned):
        number = as_number(value)
        if number is None or abs(number) > MAX_ABS_REWARD:
            prompt, trajectory = samples[i]
            raise UserError(
                f"reward {reward.name!r} returned {describe_value(value)} at position {i} (prompt {prompt.id}), for "
                f"the completion {excerpt(trajectory.text)}; it must be a number from "
                f"{-MAX_ABS_REWARD:g} to {MAX_ABS_REWARD:g}, or None for not scored"
            )
        parts_N[i] = number
    return parts_N


def _odd_one_out(values: Sequence[Any], samples: Sequence[Sample]) -> str:
    """Describe the first completion without a value, or the first value without a completion."""
    if len(values) < len(samples):
        i = len(values)
        return f". The first without one is position {i}, the completion {excerpt(samples[i][1].text)}"
    i = len(samples)
    return f". The first one too many is position {i}, {excerpt(values[i])}; the last completion is " + excerpt(
        samples[-1][1].text
    )
