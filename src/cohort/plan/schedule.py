"""Number of steps of a run, the contents of a step and its micro-batches. No divisibility rules."""

import math
from dataclasses import dataclass

from cohort.config import Config
from cohort.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSchedule:
    """Steps, batch sizes and schedule of a run. One step is one rollout; step N: N steps are done."""

    num_prompts: int  # in the training data
    has_data: bool  # False: an environment without rows, which stands for one prompt
    prompts_per_step: int
    num_generations: int
    max_new_tokens: int  # after the prompt
    updates_per_rollout: int  # optimizer steps per step
    num_steps: int
    eval_every: int  # 0: before and after training only; unused without evaluation
    evaluates: bool
    evaluates_before: bool
    eval_temperature: float  # 0: greedy; unused without evaluation
    checkpoint_every: int  # 0: never
    completions_every: int  # 0: never

    @property
    def completions_per_step(self) -> int:
        """Prompts per step times generations."""
        return self.prompts_per_step * self.num_generations

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps to see every training prompt once."""
        return self.num_prompts / self.prompts_per_step

    def evaluates_at(self, steps_done: int) -> bool:
        """Whether to evaluate after `steps_done` steps (0: before the first)."""
        if not self.evaluates:
            return False
        if steps_done == 0:
            return self.evaluates_before
        return steps_done == self.num_steps or (self.eval_every > 0 and steps_done % self.eval_every == 0)

    def saves_at(self, steps_done: int) -> bool:
        """Whether to save a checkpoint after `steps_done` steps."""
        return self.checkpoint_every > 0 and (steps_done % self.checkpoint_every == 0 or steps_done == self.num_steps)

    def writes_completions_at(self, steps_done: int) -> bool:
        """Whether to write the completions of step `steps_done`."""
        return self.completions_every > 0 and steps_done % self.completions_every == 0


def schedule_run(config: Config, *, num_prompts: int) -> RunSchedule:
    """Plan a run's steps from its configuration and the number of training prompts.

    Raises:
        UserError: the warm-up of policy and critic is longer than the run.
    """
    train = config.train
    epochs = train.epochs if train.epochs is not None else 1.0
    num_steps = train.steps if train.steps is not None else math.ceil(epochs * num_prompts / train.prompts_per_step)
    waits, warmup = config.critic.warmup_steps if config.critic else 0, train.num_warmup_steps(num_steps)
    if waits and waits + warmup >= num_steps:
        key = f"train.warmup_ratio: {train.warmup_ratio:g}" if train.warmup_ratio else f"train.warmup_steps: {warmup}"
        raise UserError(
            f"critic.warmup_steps: {waits} plus {key} leaves none of the run's {num_steps} steps at the full learning "
            f"rate; use at most {max(0, num_steps - warmup - 1)}"
        )
    if train.warmup_steps > num_steps:
        raise UserError(
            f"train.warmup_steps: {train.warmup_steps} exceeds the run's {num_steps} steps "
            f"({num_prompts} prompts, {train.prompts_per_step} per step); use at most {num_steps}"
        )
    return RunSchedule(
        num_prompts=num_prompts,
        has_data=config.data.is_given or num_prompts > 1,
        prompts_per_step=train.prompts_per_step,
        num_generations=config.rollout.num_generations,
        max_new_tokens=config.rollout.max_new_tokens,
        updates_per_rollout=train.updates_per_rollout,
        num_steps=num_steps,
        eval_every=config.eval.every if config.eval else 0,
        evaluates=config.eval is not None,
        evaluates_before=config.eval is not None and config.eval.before_training,
        eval_temperature=config.eval.temperature if config.eval else 0.0,
        checkpoint_every=config.run.checkpoint_every,
        completions_every=config.run.completions_every,
    )


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


def group_budget(config: Config) -> int:
    """Tokens of one group; a larger budget splits no group."""
    prompt_tokens, completion_tokens = _tokens(config)
    return prompt_tokens + config.rollout.num_generations * completion_tokens


def max_useful_budget(config: Config, num_training: int) -> int:
    """Tokens of one rank's share of a step; a larger budget has no effect."""
    return math.ceil(config.train.prompts_per_step / num_training) * group_budget(config)


def _tokens(config: Config) -> tuple[int, int]:
    """Tokens of a group's shared prompt and of each completion or trajectory. With dropout, prompts are not shared."""
    rollout = config.rollout
    adapter = config.model.adapter
    if config.model.dropout or (adapter is not None and adapter.dropout):
        return 0, rollout.max_prompt_tokens + rollout.max_new_tokens
    return rollout.max_prompt_tokens, max(1, rollout.max_new_tokens - 1)  # the last token is not an input
