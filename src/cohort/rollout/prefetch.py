"""Sampling ahead of training: the prompts of the next steps are sampled while this one trains, so many steps at most.

A step gets the groups that are there first. One that takes long is left to a later step instead of holding this one
up, so that a step may train on groups whose prompts were given out in different steps.
"""

from asyncio import Task
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from cohort.records import Prompt, RolloutGroup, Trajectory
from cohort.rollout.collector import RolloutCollector
from cohort.rollout.engines.base import SamplingParams, StreamKey


class Prompts(Protocol):
    """Where prompts come from: an endless stream."""

    def take(self, n: int) -> list[Prompt]:
        """The next `n`."""
        ...

    def again(self, visits: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Prompts that were taken before, by (id, epoch)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A group that has been asked for and that no step has taken."""

    number: int  # in the order in which groups are asked for
    step: int  # that it was first asked for in; names its random streams, also when it has to be sampled again
    prompt: Prompt
    group: Task[RolloutGroup]


class Prefetcher:
    """Takes the groups of a step from a collector that samples the prompts of up to `max_staleness` more steps.

    With `max_staleness` 0 a step asks for its groups, waits for all of them, and gets them in the order of the prompts.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        prompts: Prompts,
        sampling: SamplingParams,
        *,
        seed: int,
        prompts_per_step: int,
        num_steps: int,
        updates_per_step: int,
        max_staleness: int = 0,
        drop_stale: bool = False,
    ):
        """Start no rollout yet.

        Args:
            collector: samples.
            prompts: where they come from.
            sampling: of every completion.
            seed: of the run.
            prompts_per_step: groups of a step.
            num_steps: of the run; nothing is sampled for steps after it.
            updates_per_step: policy versions between two steps.
            max_staleness: steps by which sampling may run ahead.
            drop_stale: leave out groups whose weights are older than `max_staleness` steps; their prompts are given up,
                and new ones take their places.
        """
        self._collector = collector
        self._prompts = prompts
        self._sampling = sampling
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._num_steps = num_steps
        self._updates_per_step = updates_per_step
        self._max_staleness = max_staleness
        self._drop_stale = drop_stale
        self._pending: list[_Pending] = []  # in the order of their numbers
        self._to_ask_again: list[tuple[int, Prompt]] = []  # step and prompt, of the run that this one goes on with
        self._num_asked = 0
        self._step = -1  # that groups were last taken for; what follows is of this step
        self._num_dropped = 0
        self._newest_taken = -1

    def take(self, step: int, count: int) -> list[RolloutGroup]:
        """The first `count` groups to be there, the ones asked for first in front. A step may take several times.

        Raises:
            UserError: a prompt cannot be sampled.
            TrainingError: the engine cannot go on.
        """
        assert count > 0, count
        if step != self._step:
            self._step, self._num_dropped, self._newest_taken = step, 0, -1
        self._ask_again()
        steps_ahead = max(0, min(self._max_staleness, self._num_steps - 1 - step))
        while True:
            wanted = count + steps_ahead * self._prompts_per_step
            self._ask(step, self._prompts.take(max(0, wanted - len(self._pending))))
            self._collector.wait([p.group for p in self._pending], count=count)
            ready = [p for p in self._pending if p.group.done()]
            stale = [p for p in ready if self._is_too_old(p.group.result())]
            if not stale:
                break
            self._num_dropped += len(stale)
            self._forget(stale)
        taken = ready[:count]
        self._forget(taken)
        self._newest_taken = max(self._newest_taken, *(p.number for p in taken))
        return [p.group.result() for p in taken]

    def staleness(self, trajectories: Sequence[Trajectory]) -> float:
        """Steps between the weights that began a group and those of the step that groups are being taken for."""
        versions = [t.policy_version for t in trajectories if t.policy_version is not None]
        return self._step - min(versions) / self._updates_per_step if versions else 0.0

    def counts(self) -> dict[str, int]:
        """Of the last step: groups dropped because of their age, and groups passed over because they were not there."""
        return {
            "stale_dropped": self._num_dropped,
            "carried_over": sum(p.number < self._newest_taken for p in self._pending),
        }

    def state(self) -> list[dict[str, int]]:
        """Which prompts are out, in plain JSON values: what `restore` needs. Their groups are not kept."""
        out = [*((p.step, p.prompt) for p in self._pending), *self._to_ask_again]
        return [{"step": step, "prompt_id": prompt.id, "epoch": prompt.epoch} for step, prompt in out]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Sample first what was out when `state` was taken, from the same random streams.

        To be called before anything is taken, with the prompts where they were then.
        """
        prompts = self._prompts.again([(entry["prompt_id"], entry["epoch"]) for entry in state])
        self._to_ask_again = [(entry["step"], prompt) for entry, prompt in zip(state, prompts, strict=True)]

    def _ask_again(self) -> None:
        out, self._to_ask_again = self._to_ask_again, []
        for step, entries in groupby(out, key=lambda entry: entry[0]):
            self._ask(step, [prompt for _, prompt in entries])

    def _ask(self, step: int, prompts: Sequence[Prompt]) -> None:
        if not prompts:
            return
        key = StreamKey(purpose="train", seed=self._seed, step=step)
        for prompt, group in zip(prompts, self._collector.submit(prompts, self._sampling, key), strict=True):
            self._pending.append(_Pending(number=self._num_asked, step=step, prompt=prompt, group=group))
            self._num_asked += 1

    def _is_too_old(self, group: RolloutGroup) -> bool:
        return self._drop_stale and self.staleness(group.trajectories) > self._max_staleness

    def _forget(self, some: Sequence[_Pending]) -> None:
        gone = {p.number for p in some}
        self._pending = [p for p in self._pending if p.number not in gone]
