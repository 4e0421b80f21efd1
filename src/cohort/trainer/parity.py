"""Check that servers and trainer compute the same logprobs for the same completions (law 5).

A server that missed an update, serves a different model or computes in a different precision samples from a
distribution that is not the policy's. Without this check training would continue, and the metrics would look normal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from cohort.algorithms import build_sequences
from cohort.config import Config
from cohort.errors import TrainingError
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import FloatArray, Prompt, RolloutGroup, TrainSequence
from cohort.rollout import RolloutCollector, SamplingParams, StepKey
from cohort.rollout.engines.setup import StartedEngine
from cohort.trainer.worker import Worker, run_forward_only

# Returns the groups that each server sampled, by server address.
SampleOnEach = Callable[[Sequence[Prompt], SamplingParams, StepKey], Mapping[str, Sequence[RolloutGroup]]]
_NUM_PROMPTS, _NUM_COMPLETIONS, _MAX_TOKENS = 4, 2, 64


_NUM_COMPARED = 1000  # prompts whose lengths are compared


def probe_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Choose a few training prompts of different lengths; the longest one stresses caches most."""
    some = prompts[:: -(-len(prompts) // _NUM_COMPARED)]
    by_length = sorted(some, key=lambda prompt: (-len(prompt.token_ids), prompt.id))
    places = np.linspace(0, len(by_length) - 1, min(_NUM_PROMPTS, len(by_length))).astype(int)
    return [by_length[place] for place in places]


def probe_sampling(sampling: SamplingParams) -> SamplingParams:
    """Return sampling parameters for few, short completions, sampled from the policy itself."""
    return replace(
        sampling.unmodified(),
        num_generations=_NUM_COMPLETIONS,
        max_completion_tokens=min(_MAX_TOKENS, sampling.max_completion_tokens),
    )


def check_parity(
    workers: WorkerGroup[Worker],
    sampled: Mapping[str, Sequence[RolloutGroup]],
    *,
    tolerance: float,
    steps_done: int,
) -> dict[str, float]:
    """Compare the servers' logprobs with the trainer's.

    Args:
        workers: compute logprobs with the current weights.
        sampled: groups by server, sampled from the weights published last.
        tolerance: maximum mean difference, in nats.
        steps_done: number of steps done, for the error message.

    Returns:
        Mean and maximum absolute difference, each of the server for which it is largest.

    Raises:
        TrainingError: a server's logprobs differ by more than `tolerance`.
    """
    differences = {server: _differences(workers, groups) for server, groups in sampled.items()}
    for server, (_, difference) in differences.items():
        if not difference.mean() <= tolerance:  # also catches NaN
            raise TrainingError(_message(server, *differences[server], tolerance=tolerance, steps_done=steps_done))
    return {
        "sampling/parity/mean": max(float(d.mean()) for _, d in differences.values()),
        "sampling/parity/max": max(float(d.max()) for _, d in differences.values()),
    }


def _differences(
    workers: WorkerGroup[Worker], groups: Sequence[RolloutGroup]
) -> tuple[list[TrainSequence], FloatArray]:
    """Return the sequences of groups, and the absolute logprob differences of all their loss tokens."""
    sequences = build_sequences(groups)
    trainer_logprobs = run_forward_only(workers, sequences, {"logprobs"}).logprobs
    differences = (np.abs(trainer_logprobs[s.index] - s.sampling_logprobs) for s in sequences)
    return sequences, np.concatenate(list(differences))


def _message(
    server: str, sequences: Sequence[TrainSequence], difference: FloatArray, *, tolerance: float, steps_done: int
) -> str:
    return (
        f"parity: after step {steps_done} the logprobs of {server} differ from the trainer's by "
        f"{difference.mean():.3g} nats on average and {difference.max():.3g} at most, over {len(difference)} tokens of "
        f"{len(sequences)} completions; the mean must be at most {tolerance:g}. The server does not sample from this "
        f"policy. Usual causes: a different model or dtype on the server, a missed weight update, a cache of old "
        f"weights, a different implementation of the model. If it is only rounding, raise rollout.parity_tolerance"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGate:
    """Compares the servers' logprobs with the trainer's after the first publish and every `every` steps."""

    sample_on_each: SampleOnEach
    workers: WorkerGroup[Worker]
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    seed: int
    every: int
    tolerance: float  # maximum mean difference, in nats

    def is_due(self, steps_done: int) -> bool:
        """Whether to compare after `steps_done` steps."""
        return steps_done % self.every == 0

    def check(self, steps_done: int) -> dict[str, float]:
        """Sample on every server and compare. Raises as `check_parity` does."""
        key = StepKey(purpose="parity", seed=self.seed, step=steps_done)
        sampled = self.sample_on_each(self.prompts, self.sampling, key)
        return check_parity(self.workers, sampled, tolerance=self.tolerance, steps_done=steps_done)


def make_parity_gate(
    config: Config,
    prompts: Sequence[Prompt],
    workers: WorkerGroup[Worker],
    started: StartedEngine,
    collector: RolloutCollector,
) -> ParityGate | None:
    """Create the parity gate of a run; None if no servers sample, or `rollout.parity_every` is 0."""
    rollout = config.rollout
    if started.sample_on_each_server is None:
        return None
    assert rollout.uses_servers
    if rollout.parity_every == 0:
        return None
    tolerance = rollout.parity_tolerance
    if tolerance == "auto":
        policy = workers.local.policy
        rounds = torch.bfloat16 in (started.servers_dtype, policy.dtype, policy.compute_dtype)
        tolerance = 0.05 if rounds else 1e-3
    return ParityGate(
        sample_on_each=partial(started.sample_on_each_server, collector),
        workers=workers,
        prompts=probe_prompts(prompts),
        sampling=probe_sampling(SamplingParams.for_training(rollout)),
        seed=config.train.seed,
        every=rollout.parity_every,
        tolerance=tolerance,
    )
