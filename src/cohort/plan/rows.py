"""How a step's completions become the micro-batches of each process.

All sequences are taken to have the longest length.
"""

import math
from dataclasses import dataclass

from cohort.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What one process computes in a step."""

    budget_tokens: int  # `train.micro_batch_tokens`, where that is auto what was found
    completions: float  # of the step on one process, in the mean
    prompts: float
    row_tokens: int  # of the largest micro-batch
    row_completions: int
    scored_tokens: int
    kept_prompt_tokens: int  # of a group that is computed in parts; 0 where whole groups fit
    num_micro_batches: int


def plan_rows(config: Config, num_training: int, budget_tokens: int) -> Rows:
    """Micro-batches of one process under a budget, when all sequences have the longest length."""
    rollout, prompts = config.rollout, config.train.prompts_per_step
    (before, after), group = _tokens(config), rollout.num_generations
    group_tokens = before + group * after
    share = prompts / num_training
    if group_tokens <= budget_tokens or group == 1:
        groups = max(1, min(budget_tokens // group_tokens, math.ceil(share)))
        row, completions, kept = groups * group_tokens, groups * group, 0
        number = math.ceil(math.ceil(share) / groups)
    else:
        completions = min(group, max(1, (budget_tokens - before) // after))
        row = completions * after
        kept = before
        number = math.ceil(share) * math.ceil(group / completions)
    return Rows(
        budget_tokens=budget_tokens,
        completions=share * group,
        prompts=share,
        row_tokens=row,
        row_completions=completions,
        scored_tokens=completions * rollout.max_completion_tokens,
        kept_prompt_tokens=kept,
        num_micro_batches=number,
    )


def smallest_budget(config: Config) -> int:
    """The least that `train.micro_batch_tokens` can be: one prompt with its completion."""
    return config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens


def group_share_tokens(config: Config, num_training: int) -> int:
    """Tokens of a whole step's share of one process: no budget needs to be larger."""
    before, after = _tokens(config)
    group = before + config.rollout.num_generations * after
    return math.ceil(config.train.prompts_per_step / num_training) * group


def _tokens(config: Config) -> tuple[int, int]:
    """Of a group's prompt, computed once, and of each completion. With dropout every completion has its own prompt."""
    rollout = config.rollout
    if config.model.adapter is not None and config.model.adapter.dropout:
        return 0, rollout.max_prompt_tokens + rollout.max_completion_tokens
    return rollout.max_prompt_tokens, max(1, rollout.max_completion_tokens - 1)  # the last token is not an input
