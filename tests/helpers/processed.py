"""The distribution that sampling parameters make of logits, by transformers' own processors."""

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cohort.rollout import SamplingParams


def processed_log_p(ids: torch.Tensor, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logprobs [N, V] of the tokens that follow `ids` [N, L], in the order of vLLM."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    if sampling.temperature:
        processors += [TemperatureLogitsWarper(sampling.temperature), MinPLogitsWarper(sampling.min_p)]
        processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        processors += [TopPLogitsWarper(sampling.top_p)]
    return torch.log_softmax(processors(ids, logits), dim=-1)


def completion_log_p(
    model: torch.nn.Module, context: list[int], completion: list[int], sampling: SamplingParams
) -> list[float]:
    """Logprob of each token of a completion by a plain forward pass and transformers' processors."""
    ids = torch.tensor([[*context, *completion]])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1]
    before = [ids[:, : len(context) + t] for t in range(len(completion))]
    return [
        processed_log_p(seen, at.unsqueeze(0), sampling)[0, token].item()
        for seen, at, token in zip(before, logits, completion, strict=True)
    ]
