"""Sample ahead of training (asynchronous rollouts), at most `max_staleness` steps.

A step takes the groups that finish first. Slow groups are left to a later step, so a step may train on groups whose
prompts were submitted in different steps.
"""

from asyncio import Task
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import Any, Protocol

from cohort.records import Prompt, RolloutGroup, Trajectory
from cohort.rollout.collector import RolloutCollector
from cohort.rollout.engines.base import SamplingParams, StepKey


class Prompts(Protocol):
    """An endless stream of prompts."""

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts."""
        ...

    def lookup(self, ids_and_epochs: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Return prompts that were taken before, by (id, epoch)."""
        ...

    def record(self, outcomes: Iterable[tuple[int, int, int]]) -> Mapping[str, float]:
        """Record results, each of a prompt's id, right and judged completions. Return metrics of all prompts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A submitted group that no step has taken yet."""

    number: int  # order of submission
    step: int  # step of its first submission; part of its random stream keys, also when it is resampled
    prompt: Prompt
    group: Task[RolloutGroup]


@dataclass(slots=True, eq=False)
class Prefetcher:
    """Provides the groups of each step while the prompts of up to `max_staleness` more steps are sampled.

    With `max_staleness=0` a step submits its prompts, waits for all groups, and gets them in order of the prompts.
    """

    collector: RolloutCollector
    prompts: Prompts
    sampling: SamplingParams
    _: KW_ONLY
    seed: int
    prompts_per_step: int
    num_steps: int  # total steps of the run; nothing is sampled beyond them
    updates_per_step: int  # optimizer steps (policy versions) per step
    max_staleness: int = 0  # maximum steps by which sampling runs ahead
    drop_stale: bool = False  # replace groups whose weights are older than `max_staleness` steps by new prompts
    _pending: list[_Pending] = field(default_factory=list, init=False)  # sorted by number
    _to_resubmit: list[tuple[int, Prompt]] = field(default_factory=list, init=False)  # step and prompt, of a checkpoint
    _num_submitted: int = field(default=0, init=False)
    _step: int = field(default=-1, init=False)  # step of the last `take`, to which the next two belong
    _num_dropped: int = field(default=0, init=False)
    _newest_taken: int = field(default=-1, init=False)

    def take(self, step: int, count: int) -> list[RolloutGroup]:
        """Return the first `count` groups to finish, in order of submission. May be called several times per step.

        Raises:
            UserError: a prompt cannot be sampled.
            TrainingError: the engine failed.
        """
        assert count > 0, count
        if step != self._step:
            self._step, self._num_dropped, self._newest_taken = step, 0, -1
        self._resubmit()
        steps_ahead = max(0, min(self.max_staleness, self.num_steps - 1 - step))
        while True:
            wanted = count + steps_ahead * self.prompts_per_step
            self._submit(step, self.prompts.take(max(0, wanted - len(self._pending))))
            self.collector.wait([p.group for p in self._pending], count=count)
            ready = [p for p in self._pending if p.group.done()]
            stale = [p for p in ready if self._is_stale(p.group.result())]
            if not stale:
                break
            self._num_dropped += len(stale)
            self.collector.release(p.group.result() for p in stale)
            self._remove(stale)
        taken = ready[:count]
        self._remove(taken)
        self._newest_taken = max(self._newest_taken, *(p.number for p in taken))
        return [p.group.result() for p in taken]

    def staleness(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the steps between a group's oldest policy version and that of the current step."""
        versions = [t.policy_version for t in trajectories if t.policy_version is not None]
        return self._step - min(versions) / self.updates_per_step if versions else 0.0

    def counts(self) -> dict[str, int]:
        """Return how many stale groups the last step dropped, and how many unfinished ones it left to later steps."""
        return {
            "stale_dropped": self._num_dropped,
            "carried_over": sum(p.number < self._newest_taken for p in self._pending),
        }

    def state(self) -> list[dict[str, int]]:
        """Return the pending prompts as JSON values, for `restore`. Their groups are not saved."""
        out = [*((p.step, p.prompt) for p in self._pending), *self._to_resubmit]
        return [{"step": step, "prompt_id": prompt.id, "epoch": prompt.epoch} for step, prompt in out]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Resample first the prompts that were pending in `state`, from the same random streams.

        Call it before `take`, with `prompts` restored to the same position.
        """
        prompts = self.prompts.lookup([(entry["prompt_id"], entry["epoch"]) for entry in state])
        self._to_resubmit = [(entry["step"], prompt) for entry, prompt in zip(state, prompts, strict=True)]

    def _resubmit(self) -> None:
        out, self._to_resubmit = self._to_resubmit, []
        for step, entries in groupby(out, key=lambda entry: entry[0]):
            self._submit(step, [prompt for _, prompt in entries])

    def _submit(self, step: int, prompts: Sequence[Prompt]) -> None:
        if not prompts:
            return
        key = StepKey(purpose="train", seed=self.seed, step=step)
        for prompt, group in zip(prompts, self.collector.submit(prompts, self.sampling, key), strict=True):
            self._pending.append(_Pending(number=self._num_submitted, step=step, prompt=prompt, group=group))
            self._num_submitted += 1

    def _is_stale(self, group: RolloutGroup) -> bool:
        return self.drop_stale and self.staleness(group.trajectories) > self.max_staleness

    def _remove(self, pending: Sequence[_Pending]) -> None:
        gone = {p.number for p in pending}
        self._pending = [p for p in self._pending if p.number not in gone]
