"""Plan each rank's micro-batches of a step, assuming that all sequences have the maximum length."""

import math
from dataclasses import dataclass

from cohort.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """Micro-batches of one rank in a step."""

    num_training: int  # ranks
    budget_tokens: int  # `train.micro_batch_tokens`, resolved if auto
    completions_per_rank: float  # mean per step
    prompts_per_rank: float
    packed_tokens: int  # T of the largest micro-batch, without a shared prefix
    completions_per_micro_batch: int
    loss_tokens: int
    shared_prefix_tokens: int  # prompt of a group split over micro-batches; 0 if whole groups fit
    num_micro_batches: int


def plan_micro_batches(config: Config, num_training: int, budget_tokens: int) -> MicroBatchPlan:
    """Plan one rank's micro-batches under a token budget."""
    rollout, prompts = config.rollout, config.train.prompts_per_step
    (prompt_tokens, completion_tokens), group = _tokens(config), rollout.num_generations
    group_tokens = prompt_tokens + group * completion_tokens
    share = prompts / num_training
    if group_tokens <= budget_tokens or group == 1:
        groups = max(1, min(budget_tokens // group_tokens, math.ceil(share)))
        completions, packed_tokens, shared_prefix_tokens = groups * group, groups * group_tokens, 0
        number = math.ceil(math.ceil(share) / groups)
    else:
        completions = min(group, max(1, (budget_tokens - prompt_tokens) // completion_tokens))
        packed_tokens, shared_prefix_tokens = completions * completion_tokens, prompt_tokens
        number = math.ceil(share) * math.ceil(group / completions)
    return MicroBatchPlan(
        num_training=num_training,
        budget_tokens=budget_tokens,
        completions_per_rank=share * group,
        prompts_per_rank=share,
        packed_tokens=packed_tokens,
        completions_per_micro_batch=completions,
        loss_tokens=completions * rollout.max_trained_tokens,
        shared_prefix_tokens=shared_prefix_tokens,
        num_micro_batches=number,
    )


def min_budget(config: Config) -> int:
    """Smallest possible `train.micro_batch_tokens`: one prompt with one completion."""
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


def max_useful_budget(config: Config, num_training: int) -> int:
    """Tokens of one rank's share of a step; a larger budget has no effect."""
    prompt_tokens, completion_tokens = _tokens(config)
    group_tokens = prompt_tokens + config.rollout.num_generations * completion_tokens
    return math.ceil(config.train.prompts_per_step / num_training) * group_tokens


def _tokens(config: Config) -> tuple[int, int]:
    """Tokens of a group's shared prompt and of each completion or trajectory. With dropout, prompts are not shared."""
    rollout = config.rollout
    adapter = config.model.adapter
    if config.model.dropout or (adapter is not None and adapter.dropout):
        return 0, rollout.max_prompt_tokens + rollout.max_new_tokens
    return rollout.max_prompt_tokens, max(1, rollout.max_new_tokens - 1)  # the last token is not an input
