"""Right answers so far, by prompt, and how likely each prompt is to be worth sampling.

R rows of the data, G completions per group.
"""

import base64
import math
from collections.abc import Iterable

import numpy as np

from cohort.records import FloatArray, IntArray

_DECAY = 0.5  # of the counts of earlier groups at each new one: the policy has changed since
# Of the Beta prior of a prompt's success rate. Below 1: most prompts are nearly always right, or wrong. With this one,
# a group that is all right is followed by a mixed one with probability 1 - 2 ** -0.25 = 0.16, for any G.
_PRIOR = 0.25
_NEVER, _SOMETIMES, _ALWAYS = 1, 2, 3  # right in the last group; 0: not sampled yet
_OUTCOMES = {"never": _NEVER, "sometimes": _SOMETIMES, "always": _ALWAYS}
_FIELDS = np.dtype([("row", "<i8"), ("right", "<f4"), ("judged", "<f4"), ("last", "i1")])


class Successes:
    """Counts of right answers by prompt, and the probability that a prompt is sampled when its turn comes.

    That is the probability that its next group is mixed, i.e. has right and wrong completions, given a success rate
    with a Beta posterior; at least `exploration`. Prompts of which nothing is known are always sampled.

    Success rates from decayed counts: MoPPS, arXiv:2507.04632; skipping with a floor: GRESO, arXiv:2506.02177.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        num_generations: int = 1,
        exploration: float = 1.0,
        pass_rates: FloatArray | None = None,
    ) -> None:
        """Start without results.

        Args:
            num_rows: R; ids of prompts are less.
            num_generations: G.
            exploration: least probability; 1 samples every prompt.
            pass_rates: [at least R] success rates known before, each of which counts as much as a group; NaN: unknown.
        """
        self._num_generations = num_generations
        self._exploration = exploration
        self._right = np.zeros(num_rows, np.float32)  # completions, decayed
        self._judged = np.zeros(num_rows, np.float32)
        self._last = np.zeros(num_rows, np.int8)
        if pass_rates is not None:
            rates = pass_rates[:num_rows]
            is_known = ~np.isnan(rates)
            self._judged[is_known] = num_generations
            self._right[is_known] = num_generations * rates[is_known]

    def probability(self, row: int) -> float:
        """Return how likely a prompt is sampled when its turn comes."""
        right, judged = float(self._right[row]), float(self._judged[row])
        if self._exploration >= 1 or judged == 0:
            return 1.0
        all_right = self._all_equal(right, judged)
        all_wrong = self._all_equal(judged - right, judged)
        return max(self._exploration, 1 - all_right - all_wrong)

    def _all_equal(self, equal: float, judged: float) -> float:
        """E[p^G] of p ~ Beta(prior + equal, prior + judged - equal)."""
        # a product, not `lgamma`, whose last bit depends on the platform
        alpha, total = _PRIOR + equal, 2 * _PRIOR + judged
        return math.prod((alpha + i) / (total + i) for i in range(self._num_generations))

    def record(self, row: int, *, right: int, judged: int) -> None:
        """Add a group: `judged` completions, of which `right` are right."""
        if judged == 0:
            return
        self._right[row] = _DECAY * self._right[row] + right
        self._judged[row] = _DECAY * self._judged[row] + judged
        self._last[row] = _NEVER if right == 0 else _ALWAYS if right == judged else _SOMETIMES

    def metrics(self, num_prompts: int) -> dict[str, float]:
        """Count prompts by how their last group was; of `num_prompts`, the rest have had none."""
        counts = np.bincount(self._last, minlength=len(_OUTCOMES) + 1)
        metrics = {f"prompts/{name}_right": float(counts[outcome]) for name, outcome in _OUTCOMES.items()}
        return {**metrics, "prompts/not_sampled": num_prompts - sum(metrics.values())}

    def state(self) -> str:
        """Return the counts of all sampled prompts, for `restore`."""
        rows: IntArray = np.flatnonzero(self._last)
        saved = np.empty(len(rows), _FIELDS)
        saved["row"] = rows
        for name, values in self._arrays():
            saved[name] = values[rows]
        return base64.b64encode(saved.tobytes()).decode()

    def restore(self, state: str) -> None:
        """Continue from a saved `state`."""
        saved = np.frombuffer(base64.b64decode(state), _FIELDS)
        for name, values in self._arrays():
            values[saved["row"]] = saved[name]

    def _arrays(self) -> Iterable[tuple[str, np.ndarray]]:
        return (("right", self._right), ("judged", self._judged), ("last", self._last))
