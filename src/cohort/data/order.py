"""Order of prompts: endless, seeded, and resumable at any prompt.

N = prompts in the set.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cohort.data.content import Content
from cohort.data.prompts import PromptSet, SampledPrompts
from cohort.data.successes import Successes
from cohort.errors import UserError
from cohort.records import FloatArray, IntArray, Prompt


class PromptStream:
    """An endless stream of prompts: epoch after epoch, each prompt at most once per epoch.

    An epoch's order depends only on (seed, epoch), not on how many prompts are taken at a time. A prompt whose turn it
    is is passed over with a probability that depends on its successes so far. The state is the position in the order
    and the successes.
    """

    def __init__(
        self,
        prompts: PromptSet,
        *,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
        successes: Successes | None = None,
    ) -> None:
        """Start at the first prompt.

        Args:
            prompts: the prompts.
            seed: of all orders.
            shuffle: whether epochs are shuffled. False: every epoch is in file order.
            weights: of the sources of a mixture, from which prompts come in turn; each has its own epochs. An epoch of
                the stream is then as many prompts as there are.
            successes: decides which prompts are passed over. None: none.
        """
        assert len(prompts.prompts), "build_prompts never returns an empty set"
        self._prompts = prompts.prompts
        self._ids = prompts.ids
        self._successes = successes or Successes(int(self._ids.max()) + 1)
        self._seed = seed
        self._shuffle = shuffle
        self._weights = None if weights is None else list(weights)
        self._mixture = None if weights is None else _Mixture(prompts.sources, weights, seed=seed, shuffle=shuffle)
        digest = self._prompts.digest if isinstance(self._prompts, SampledPrompts) else None
        self._fingerprint = digest or self._fingerprint_of_rows
        self._num_passed = 0  # prompts whose turn has come, sampled or not

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, continuing into the next epoch if needed.

        `Prompt.epoch` is set, so that two visits of a row differ even within one step.
        """
        assert n >= 0, n
        taken: list[Prompt] = []
        while len(taken) < n:
            epoch, place = self._visit(self._num_passed)
            if self._is_sampled(place, epoch):
                taken.append(dataclasses.replace(self._prompts[place], epoch=epoch))
            self._num_passed += 1
        return taken

    def record(self, outcomes: Iterable[tuple[int, int, int]]) -> dict[str, float]:
        """Record the results of groups and return metrics of all prompts.

        Prompts are passed over by the results that were recorded before they are taken. Record those of a step at its
        end: then what a step takes depends on earlier steps only.

        Args:
            outcomes: `Prompt.id`, number of right completions, and number of judged ones, of each group.
        """
        for row, right, judged in outcomes:
            self._successes.record(row, right=right, judged=judged)
        return self._successes.metrics(len(self._prompts))

    def skip_epoch(self) -> None:
        """Continue with the next epoch, unless one has just begun."""
        self._num_passed += -self._num_passed % len(self._prompts)

    def epochs(self) -> float:
        """Return how many epochs are done or skipped."""
        return self._num_passed / len(self._prompts)

    def lookup(self, ids_and_epochs: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Return prompts taken before, by `Prompt.id` and `Prompt.epoch`, without advancing the stream."""
        if isinstance(self._prompts, SampledPrompts):
            found = [self._prompts.by_id(prompt_id) for prompt_id, _ in ids_and_epochs]
        else:
            by_id = {prompt.id: prompt for prompt in self._prompts} if ids_and_epochs else {}
            found = [by_id[prompt_id] for prompt_id, _ in ids_and_epochs]
        return [
            dataclasses.replace(prompt, epoch=epoch) for prompt, (_, epoch) in zip(found, ids_and_epochs, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON values, for `restore`.

        `epoch` is the number of finished passes, `position` the number of prompts whose turn has come in the current
        one, in [0, N).
        """
        epoch, position = divmod(self._num_passed, len(self._prompts))
        return {"epoch": epoch, "position": position, "successes": self._successes.state(), **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`.

        Raises:
            UserError: the state belongs to another dataset, seed or order. The stream is unchanged.
        """
        for key, here in {"weights": None, **self._identity()}.items():
            if state.get(key) != here and not (key == "prompts_sha256" and state.get(key) == self._fingerprint_of_rows):
                raise UserError(
                    f"data.path: the saved position belongs to a different order of prompts: it was saved with "
                    f"{key}={state.get(key)!r}, but this run has {key}={here!r}; use the dataset, train.seed and "
                    "data settings of the saved run, or a new run.dir"
                )
        self._num_passed = int(state["epoch"]) * len(self._prompts) + int(state["position"])
        self._successes.restore(state.get("successes", ""))

    def _identity(self) -> dict[str, Any]:
        identity = {
            "num_prompts": len(self._prompts),
            "prompts_sha256": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }
        return identity if self._weights is None else {**identity, "weights": self._weights}

    def _visit(self, index: int) -> tuple[int, int]:
        """Return the epoch and the place of the prompt whose turn it is at an index."""
        if self._mixture is not None:
            return self._mixture.visit(index)
        epoch, position = divmod(index, len(self._prompts))
        return epoch, int(_epoch_order(len(self._prompts), self._seed, epoch, self._shuffle)[position])

    def _is_sampled(self, place: int, epoch: int) -> bool:
        probability = self._successes.probability(int(self._ids[place]))
        return probability >= 1 or _epoch_draws(len(self._prompts), self._seed, epoch)[place] < probability

    @functools.cached_property
    def _fingerprint_of_rows(self) -> str:
        """Needs all rows. Runs whose data were read into memory have it even for large data."""
        return _fingerprint(self._prompts)


class _Mixture:
    """The order of a weighted mixture: sources in turn, so that each has its share of any stretch of prompts.

    The next prompt is of the source that lacks most to its share. Each source visits its prompts once per epoch of its
    own.
    """

    def __init__(self, sources: Sequence[tuple[str, int]], weights: Sequence[float], *, seed: int, shuffle: bool):
        """Mix sources, given as name and number of prompts up to its end."""
        ends = [end for _, end in sources]
        self._starts = [0, *ends[:-1]]
        self._sizes = [end - start for start, end in zip(self._starts, ends, strict=True)]
        assert all(self._sizes), "build_prompts refuses sources without a prompt"
        self._shares = [weight / sum(weights) for weight in weights]
        self._seed, self._shuffle = seed, shuffle
        self._counts = [0] * len(ends)  # prompts of each source among the first ones

    def visit(self, index: int) -> tuple[int, int]:
        """Return the epoch and the position of the prompt at an index of the stream."""
        if index < sum(self._counts):
            self._counts = [0] * len(self._counts)
        while (num := sum(self._counts)) <= index:
            lacks = [share * (num + 1) - n for share, n in zip(self._shares, self._counts, strict=True)]
            source = lacks.index(max(lacks))
            self._counts[source] += 1
        epoch, position = divmod(self._counts[source] - 1, self._sizes[source])
        order = _epoch_order(self._sizes[source], self._seed, epoch, self._shuffle, source + 1)
        return epoch, self._starts[source] + int(order[position])


@functools.lru_cache(maxsize=16)
def _epoch_order(num_prompts: int, seed: int, epoch: int, shuffle: bool, source: int = 0) -> IntArray:
    """[N] permutation of one epoch, of one source of a weighted mixture (from 1) or of all prompts (0)."""
    if not shuffle:
        return np.arange(num_prompts)
    # Not `Generator.permutation`: NumPy guarantees the raw stream of a bit generator across releases, but not the
    # output of a Generator, and a run must resume exactly after an upgrade.
    bits = np.random.Philox(np.random.SeedSequence((seed, epoch, source) if source else (seed, epoch)))
    return np.argsort(bits.random_raw(num_prompts), kind="stable")


@functools.lru_cache(maxsize=16)
def _epoch_draws(num_prompts: int, seed: int, epoch: int) -> FloatArray:
    """[N] uniform numbers in [0, 1] that decide which prompts an epoch passes over."""
    bits = np.random.Philox(np.random.SeedSequence((seed, epoch, 0, 1)))  # the order of no source
    return bits.random_raw(num_prompts) / 2.0**64


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of row numbers, contents and the columns passed to rewards.

    Token ids are excluded: chat templates may insert today's date, and a run must resume tomorrow.
    """
    digest = hashlib.sha256()
    entries: Iterable[tuple[int, Content, Mapping[str, Any]]] = (
        ((row, content, columns) for content, (row, columns) in zip(prompts.contents(), prompts.rows(), strict=True))
        if isinstance(prompts, SampledPrompts)
        else ((prompt.id, prompt.content, dict(prompt.columns)) for prompt in prompts)
    )
    for entry in entries:
        digest.update(json.dumps(entry, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
