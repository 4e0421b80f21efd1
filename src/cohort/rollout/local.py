"""The `local` rollout engine: completions sampled by the training processes themselves."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from cohort.records import Completion, Prompt, RolloutGroup
from cohort.rollout.base import Sampled, SampleRequest, SamplingParams, StreamKey

Sample = Callable[[Sequence[SampleRequest], SamplingParams, StreamKey], list[tuple[Sampled, ...]]]


class LocalEngine:
    """Groups of completions from a sampler in this process, or from the samplers of all ranks."""

    def __init__(self, sample: Sample, tokenizer: Any):
        """Use `sample`, whose weights are the trainer's: loading weights only counts the version.

        Args:
            sample: `Sampler.sample`, or the same over all ranks.
            tokenizer: gives the text of a completion.
        """
        self._sample = sample
        self._tokenizer = tokenizer
        self._policy_version = 0

    def load_weights(self, *, policy_version: int) -> None:
        """Note the version."""
        self._policy_version = policy_version

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[Future[RolloutGroup]]:
        """Sample: one group per prompt, in the order of the prompts, all of them there."""
        requests = [SampleRequest(prompt=prompt, indices=range(sampling.num_generations)) for prompt in prompts]
        groups: list[Future[RolloutGroup]] = [Future() for _ in prompts]
        for future, prompt, sampled in zip(groups, prompts, self._sample(requests, sampling, key), strict=True):
            versions = [self._policy_version] * len(sampled)
            completions = completions_of(sampled, policy_versions=versions, tokenizer=self._tokenizer)
            future.set_result(RolloutGroup(prompt=prompt, completions=completions))
        return groups

    def wait(self, groups: Sequence[Future[RolloutGroup]], *, count: int) -> None:
        """They are there."""

    def close(self) -> None:
        """There is nothing to end."""


def completions_of(
    group: Sequence[Sampled], *, policy_versions: Sequence[int], tokenizer: Any
) -> tuple[Completion, ...]:
    """Completions with the texts of their tokens, whichever engine has sampled them."""
    texts = tokenizer.batch_decode([s.token_ids.tolist() for s in group], skip_special_tokens=True)
    return tuple(
        Completion(
            token_ids=s.token_ids,
            sampling_logprobs=s.sampling_logprobs,
            finish_reason=s.finish_reason,
            policy_version=version,
            text=text,
        )
        for s, version, text in zip(group, policy_versions, texts, strict=True)
    )
