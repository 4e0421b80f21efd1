"""Law 5: the sampler's weights are the trainer's. Both compute the logprobs of the same fresh completions.

A server that kept an old head, lost an update, serves another model or computes in another precision samples from a
distribution that is not the policy's. Training goes on then and learns from it; the numbers look as always.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cohort.algorithms import bare_sequences
from cohort.config import Config
from cohort.errors import TrainingError
from cohort.records import FloatArray, Prompt, RolloutGroup, TrainSequence
from cohort.rollout import SamplingParams, StreamKey
from cohort.trainer.worker import Worker
from cohort.trainer.worker_calls import compute_estimates
from cohort.trainer.worker_group import WorkerGroup

# The groups of every server, by its address.
SampleOnEach = Callable[[Sequence[Prompt], SamplingParams, StreamKey], Mapping[str, Sequence[RolloutGroup]]]
_NUM_PROMPTS, _NUM_COMPLETIONS, _MOST_TOKENS = 4, 2, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What is sampled to compare: few completions, of the longest prompts among others, as caches hold those."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    seed: int

    def key(self, steps_done: int) -> StreamKey:
        """Names the random streams of the comparison after so many steps."""
        return StreamKey(purpose="parity", seed=self.seed, step=steps_done)


def make_probe(prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> Probe:
    """A probe of a run.

    Args:
        prompts: of the run.
        sampling: as the run samples. The probe leaves top-p and top-k out, under which logprobs are of another
            distribution than the policy's.
        seed: of the run.
    """
    by_length = sorted(prompts, key=lambda prompt: (-len(prompt.token_ids), prompt.id))
    places = np.linspace(0, len(by_length) - 1, min(_NUM_PROMPTS, len(by_length))).astype(int)
    return Probe(
        prompts=tuple(by_length[place] for place in places),
        sampling=replace(
            sampling,
            num_generations=_NUM_COMPLETIONS,
            max_completion_tokens=min(_MOST_TOKENS, sampling.max_completion_tokens),
            top_p=1.0,
            top_k=0,
        ),
        seed=seed,
    )


def check_parity(
    workers: WorkerGroup[Worker],
    sampled: Mapping[str, Sequence[RolloutGroup]],
    *,
    tolerance: float,
    steps_done: int,
) -> dict[str, float]:
    """Compare what servers have sampled with the trainer's own numbers.

    Args:
        workers: compute the logprobs with the weights as they are.
        sampled: by server, of the weights that were published last.
        tolerance: largest mean difference, in nats.
        steps_done: for the message.

    Returns:
        metrics: the mean and the largest difference of a logprob, over the servers the largest.

    Raises:
        TrainingError: a server's logprobs are others than the trainer's.
    """
    differences = {server: _differences(workers, groups) for server, groups in sampled.items()}
    for server, (_, difference) in differences.items():
        if not difference.mean() <= tolerance:  # NaN is no parity either
            raise TrainingError(_story(server, *differences[server], tolerance=tolerance, steps_done=steps_done))
    return {
        "sampling/parity/mean": max(float(d.mean()) for _, d in differences.values()),
        "sampling/parity/max": max(float(d.max()) for _, d in differences.values()),
    }


def _differences(
    workers: WorkerGroup[Worker], groups: Sequence[RolloutGroup]
) -> tuple[list[TrainSequence], FloatArray]:
    """The completions of some groups, and the absolute differences of their loss tokens' logprobs."""
    sequences = bare_sequences(groups)
    ours = compute_estimates(workers, sequences, {"logprobs"}).logprobs
    return sequences, np.concatenate([np.abs(ours[s.index] - s.sampling_logprobs)[s.loss_mask] for s in sequences])


def _story(
    server: str, sequences: Sequence[TrainSequence], difference: FloatArray, *, tolerance: float, steps_done: int
) -> str:
    return (
        f"parity: after step {steps_done} the logprobs of {server} differ from the trainer's by "
        f"{difference.mean():.3g} nats in the mean and {difference.max():.3g} at most, over {len(difference)} tokens "
        f"of {len(sequences)} completions; {tolerance:g} in the mean is allowed. What it samples is not this policy. "
        f"Usual causes: another model or dtype on the server, weights that did not arrive, a cache of old weights, "
        f"another implementation of this model. Where it is rounding alone, raise rollout.parity_tolerance"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGate:
    """Compares the servers' numbers with the trainer's, after the first publish and every so many steps."""

    sample_on_each: SampleOnEach
    workers: WorkerGroup[Worker]
    probe: Probe
    every: int
    tolerance: float  # nats, in the mean

    def due(self, steps_done: int) -> bool:
        """Whether to compare after so many steps."""
        return steps_done % self.every == 0

    def check(self, steps_done: int) -> dict[str, float]:
        """Sample on every server, and compare.

        Raises:
            TrainingError: a server's logprobs are others than the trainer's.
        """
        key = self.probe.key(steps_done)
        sampled = self.sample_on_each(self.probe.prompts, self.probe.sampling, key)
        return check_parity(self.workers, sampled, tolerance=self.tolerance, steps_done=steps_done)


def make_parity_gate(
    config: Config,
    prompts: Sequence[Prompt],
    workers: WorkerGroup[Worker],
    *,
    sample_on_each: SampleOnEach,
    servers_dtype: torch.dtype,
) -> ParityGate | None:
    """Make the gate of a run that uses servers; None where `rollout.parity_every` is 0."""
    rollout = config.rollout
    assert rollout.uses_servers
    if rollout.parity_every == 0:
        return None
    tolerance = rollout.parity_tolerance
    if tolerance == "auto":
        policy = workers.local.policy
        rounds = torch.bfloat16 in (servers_dtype, policy.dtype, policy.compute_dtype)
        tolerance = 0.05 if rounds else 1e-3
    return ParityGate(
        sample_on_each=sample_on_each,
        workers=workers,
        probe=make_probe(prompts, SamplingParams.for_training(rollout), seed=config.train.seed),
        every=rollout.parity_every,
        tolerance=tolerance,
    )
