"""Read and check data, tokenizer and rewards, before any weights are loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cohort.algorithms import check_custom_functions
from cohort.config import Config, EvalConfig
from cohort.data import PromptRenderer, PromptSet, build_prompts, read_rows
from cohort.engine import WorstCaseShard, check_weights
from cohort.evaluation import Evaluation, pick_success_reward
from cohort.metrics import check_loggers
from cohort.models import (
    AdapterSpec,
    check_adapter,
    check_lengths,
    check_model_folder,
    check_router_loss,
    load_tokenizer,
    trained_weights,
)
from cohort.plan import RunSchedule, plan_run
from cohort.rewards import RewardRunner, build_rewards, check_columns
from cohort.rollout import SamplingParams

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of a run that are available without its weights."""

    tokenizer: Any
    prompts: PromptSet
    rewards: RewardRunner
    evaluation: Evaluation | None
    adapter: AdapterSpec | None  # None: all weights are trained
    plan: RunSchedule

    @property
    def longest_prompt_tokens(self) -> int:
        """Tokens of the longest training prompt."""
        return max(len(p.token_ids) for p in self.prompts.prompts)

    def worst_case_shard(self, dp_size: int) -> WorstCaseShard:
        """A rank's largest possible share of a step on `dp_size` ranks."""
        return WorstCaseShard(
            prompt_tokens=self.longest_prompt_tokens,
            completion_tokens=self.plan.max_completion_tokens,
            num_generations=self.plan.num_generations,
            num_sequences=math.ceil(self.plan.completions_per_step / dp_size),
        )

    @property
    def longest_sequence_tokens(self) -> int:
        """Input tokens of the longest possible sequence in training or evaluation."""
        longest = self.longest_prompt_tokens + self.plan.max_completion_tokens
        if self.evaluation is not None:
            longest_prompt = max(len(p.token_ids) for p in self.evaluation.prompts)
            longest = max(longest, longest_prompt + self.evaluation.sampling.max_completion_tokens)
        return longest - 1  # the last token is never an input

    def notes(self, max_prompt_tokens: int) -> list[str]:
        """Messages for the user about dropped prompts."""
        counts = [("training", self.prompts.num_dropped_overlong, len(self.prompts.prompts))]
        if self.evaluation is not None:
            counts.append(("held-out", self.evaluation.num_dropped_overlong, len(self.evaluation.prompts)))
        return [
            f"dropped {dropped} {kind} prompts over rollout.max_prompt_tokens={max_prompt_tokens}, {left} left"
            for kind, dropped, left in counts
            if dropped
        ]


def read_inputs(config: Config) -> Inputs:
    """Read data, tokenizer and rewards, and check that they work together.

    Raises:
        UserError: an input is missing or invalid.
    """
    check_loggers(config.run.log)
    check_custom_functions(
        config.algorithm,
        num_generations=config.rollout.num_generations,
        num_rewards=len(config.rewards),
        gradients_in_forward=config.train.gradients_in_forward,
    )
    rows = read_rows(config.data.path, field="data.path", split=config.data.split, name=config.data.name)
    rewards = read_rewards(config, column_names(rows))
    eval_rows = read_eval_rows(config.eval) if config.eval else []
    if config.eval:
        # rewards get held-out prompts under the name of the training column
        _check_eval_columns([*column_names(eval_rows), config.data.prompt], rewards)
    tokenizer = load_tokenizer(config.model)
    if config.critic is not None and config.critic.path is not None:
        check_model_folder(config.critic.path, field="critic.path")
    adapter = check_adapter(config.model)
    check_weights(config.optim, trained_weights(config.model))
    check_router_loss(config.model, config.train.router_aux_loss_coef)
    prompts = build_prompts(
        rows,
        _renderer(config, tokenizer, config.data.prompt),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        overlong=config.data.overlong_prompts,
        field="data.path",
    )
    check_lengths(config.model, prompts.prompts, max_completion_tokens=config.rollout.max_completion_tokens)
    evaluation = read_evaluation(config, config.eval, eval_rows, tokenizer, rewards) if config.eval else None
    return Inputs(
        tokenizer=tokenizer,
        prompts=prompts,
        rewards=rewards,
        evaluation=evaluation,
        adapter=adapter,
        plan=plan_run(config, num_prompts=len(prompts.prompts)),
    )


def read_rewards(config: Config, columns: Sequence[str]) -> RewardRunner:
    """Load the reward functions, and check them against the dataset's columns.

    Raises:
        UserError: a function cannot be loaded or called.
    """
    limit = config.rollout.max_completion_tokens
    functions = build_rewards(config.rewards, columns=columns, max_completion_tokens=limit)
    return RewardRunner(functions, columns=columns, prompt_column=config.data.prompt)


def _renderer(config: Config, tokenizer: Any, column: str) -> PromptRenderer:
    return PromptRenderer(
        tokenizer,
        prompt_column=column,
        system_prompt=config.data.system_prompt,
        apply_chat_template=config.data.apply_chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def read_evaluation(
    config: Config, settings: EvalConfig, rows: Rows, tokenizer: Any, rewards: RewardRunner
) -> Evaluation:
    """Read the held-out prompts and the settings of their evaluation.

    Raises:
        UserError: a prompt or a setting is invalid, or prompts and completions do not fit into the model's context.
    """
    prompts = build_prompts(
        rows[: settings.max_prompts],
        _renderer(config, tokenizer, settings.prompt or config.data.prompt),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        overlong=config.data.overlong_prompts,
        field="eval.path",
    )
    limit = settings.max_completion_tokens or config.rollout.max_completion_tokens
    check_lengths(config.model, prompts.prompts, max_completion_tokens=limit, field="eval.max_completion_tokens")
    return Evaluation(
        prompts=prompts.prompts,
        num_dropped_overlong=prompts.num_dropped_overlong,
        sampling=SamplingParams(
            num_generations=settings.num_samples,
            max_completion_tokens=limit,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        ),
        seed=config.train.seed,
        success_reward=pick_success_reward(settings.success_reward, [f.name for f in rewards.functions]),
        success_threshold=settings.success_threshold,
        # servers queue requests themselves
        prompts_at_a_time=len(prompts.prompts)
        if config.rollout.uses_servers
        else max(1, config.rollout.max_num_seqs // settings.num_samples),
    )


def read_eval_rows(settings: EvalConfig) -> Rows:
    """Read the rows of the held-out data."""
    return read_rows(settings.path, field="eval.path", split=settings.split, name=settings.name)


def column_names(rows: Rows) -> list[str]:
    """Return the sorted column names of all rows."""
    return sorted({column for row in rows for column in row})


def _check_eval_columns(columns: Sequence[str], rewards: RewardRunner) -> None:
    for i, function in enumerate(rewards.functions):
        check_columns(function, columns, field=f"eval.path, rewards[{i}]")
