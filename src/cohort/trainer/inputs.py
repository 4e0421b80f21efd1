"""Build the inputs of a run from its parts: prompts, rewards and evaluation, checked before any weights are loaded."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cohort.algorithms import check_custom_functions
from cohort.config import Config, EvalConfig
from cohort.config.data import SOURCE
from cohort.data import (
    PromptRenderer,
    PromptSet,
    PromptStream,
    RowStream,
    SampledPrompts,
    StreamedPrompts,
    Successes,
    build_prompt,
    build_prompts,
    columns_of,
    describe_lost_text,
    describe_row,
    longest_tokens,
    values_of,
)
from cohort.errors import UserError, excerpt, suggest
from cohort.learner import WorstCaseShard, check_weights
from cohort.models import (
    AdapterSpec,
    check_adapter,
    check_dropout,
    check_lengths,
    check_model_folder,
    check_router_loss,
    trained_weights,
)
from cohort.plan import RunSchedule, schedule_run
from cohort.records import FloatArray, Prompt
from cohort.rewards import RewardFunction, RewardRunner, build_rewards, check_columns
from cohort.rewards.math_workers import workers_per_process
from cohort.rollout import SamplingParams
from cohort.rollout.environments.build import Environments
from cohort.rollout.environments.programs import COLUMN
from cohort.run.log import check_loggers
from cohort.sandbox import SharedSandbox
from cohort.trainer.evaluation import Evaluation, pick_success_reward
from cohort.trainer.parts import Parts, Rows

_BFLOAT16_RATE = 1e-5  # lowest learning rate that changes bfloat16 weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of a run that are available without its weights."""

    tokenizer: Any
    prompts: PromptSet
    rewards: RewardRunner
    evaluation: Evaluation | None
    adapter: AdapterSpec | None  # None: all weights are trained
    schedule: RunSchedule
    environments: Environments | None  # None: single completions
    max_prompt_tokens: int
    sandbox: SharedSandbox
    engine: Any  # the user's object that samples; None: an engine of Cohort's
    num_left_out: int  # rows that are not trained on because their prompts are held out
    pass_rates: FloatArray | None  # [R] of `data.pass_rate`; NaN: unknown
    stream: RowStream | None  # of `data.stream`; `prompts` are then its first ones
    render: Callable[[int, Mapping[str, Any]], Prompt | None]  # a row of the stream; None if it is too long

    def prompt_stream(
        self, config: Config, *, check: Callable[[Sequence[Prompt]], None] = lambda prompts: None
    ) -> PromptStream | StreamedPrompts:
        """Return the training prompts in the order of the run, from the first one.

        Args:
            config: configuration of the run.
            check: called with each prompt of a stream.
        """
        data = config.data
        if self.stream is not None:

            def render(number: int, row: Mapping[str, Any]) -> Prompt | None:
                if (prompt := self.render(number, row)) is not None:
                    row_name = f"data.path: row {number + 1}"
                    self.rewards.check_rows([(number, prompt.columns)], describe=lambda _: row_name)
                    check([prompt])
                return prompt

            options: dict[str, Any] = {"shuffle": data.shuffle, "buffer_size": data.buffer_size}
            return StreamedPrompts(self.stream, render, seed=config.train.seed, **options)
        successes = Successes(
            int(self.prompts.ids.max()) + 1,
            num_generations=config.rollout.num_generations,
            exploration=data.exploration if data.sampling == "by_success" else 1.0,
            pass_rates=self.pass_rates,
        )
        return PromptStream(
            self.prompts, seed=config.train.seed, shuffle=data.shuffle, weights=data.weights, successes=successes
        )

    @property
    def longest_prompt_tokens(self) -> int:
        """Tokens of the longest training prompt, or of what an environment may make of it; a bound for large data."""
        if self.stream is not None:
            return self.max_prompt_tokens
        return _longest_prompt_tokens(self.prompts.prompts, self.environments, self.max_prompt_tokens)

    def worst_case_shard(self, dp_size: int) -> WorstCaseShard:
        """A rank's largest possible share of a step on `dp_size` ranks."""
        return WorstCaseShard(
            prompt_tokens=self.longest_prompt_tokens,
            completion_tokens=self.schedule.max_new_tokens,
            num_generations=self.schedule.num_generations,
            num_sequences=math.ceil(self.schedule.completions_per_step / dp_size),
        )

    @property
    def longest_sequence_tokens(self) -> int:
        """Input tokens of the longest possible sequence in training or evaluation."""
        longest = self.longest_prompt_tokens + self.schedule.max_new_tokens
        if self.evaluation is not None:
            prompt = _longest_prompt_tokens(self.evaluation.prompts, self.environments, self.max_prompt_tokens)
            limit = self.evaluation.sampling.max_completion_tokens  # of a model call
            longest = max(longest, prompt + (self.schedule.max_new_tokens if self.environments else limit))
        return longest - 1  # the last token is never an input

    def notes(self, max_prompt_tokens: int) -> list[str]:
        """Messages for the user about prompts, the sandbox and the rewards."""
        counts = [("training", self.prompts.num_dropped_overlong, len(self.prompts.prompts))]
        if self.evaluation is not None:
            counts.append(("held-out", self.evaluation.num_dropped_overlong, len(self.evaluation.prompts)))
        dropped_prompts = [
            f"dropped {dropped} {kind} prompts over rollout.max_prompt_tokens={max_prompt_tokens}, {left} left"
            for kind, dropped, left in counts
            if dropped
        ]
        if self.num_left_out:
            dropped_prompts.append(f"left out {self.num_left_out} training rows with the prompts of held-out ones")
        lost_text = describe_lost_text(self.tokenizer, self.prompts.prompts)
        rewrites = self.environments.notes() if self.environments is not None else []
        return [*dropped_prompts, *filter(None, [lost_text]), *rewrites, *self.sandbox.notes, *self.rewards.notes()]


def build_inputs(config: Config, parts: Parts | None = None) -> Inputs:
    """Check that the parts of a run work together, and build its prompts, rewards and evaluation.

    Args:
        config: configuration of the run.
        parts: objects of the run. Default: those that the configuration names.

    Raises:
        UserError: a part is missing or invalid.
    """
    parts = parts or Parts(config)
    check_loggers(config.run.log)
    environments, field = parts.environments, config.data.field
    check_custom_functions(
        config.algorithm,
        num_generations=config.rollout.num_generations,
        num_rewards=len(config.rewards) + len(environments.rewards if environments else ()),
        gradients_in_forward=config.train.gradients_in_forward,
    )
    _check_environment_columns(parts.rows, environments, field=field)
    rewards = build_reward_runner(config, parts, column_names(parts.rows))
    if config.eval is not None:
        # rewards get held-out prompts under the name of the training column
        _check_eval_columns([*column_names(parts.eval_rows), config.data.prompt], rewards, field=config.eval.field)
    tokenizer, adapter = parts.tokenizer, _check_model(config)
    rendering = _rendering(config, parts, column=config.data.prompt, field=field)
    weighted = config.data.weights is not None
    prompts = build_prompts(parts.rows, **rendering, weighted=weighted, on_progress=parts.on_progress)
    _check_answers(rewards, prompts.prompts, parts.rows, field=field)
    _check_context(
        config,
        prompts.prompts,
        environments,
        is_stream=parts.stream is not None,
        max_new_tokens=config.rollout.max_new_tokens,
        field=config.rollout.max_new_tokens_key,
    )
    return Inputs(
        tokenizer=tokenizer,
        prompts=prompts,
        rewards=rewards,
        evaluation=None if config.eval is None else build_evaluation(config, config.eval, parts, rewards),
        adapter=adapter,
        schedule=schedule_run(config, num_prompts=_num_prompts(config, prompts)),
        environments=environments,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        sandbox=parts.sandbox,
        engine=parts.engine,
        pass_rates=_read_pass_rates(parts.rows, config.data.pass_rate),
        stream=parts.stream,
        render=partial(build_prompt, columns=columns_of(parts.rows), **rendering),
        num_left_out=parts.training_rows.num_left_out if config.data.is_given and not config.data.stream else 0,
    )


def _num_prompts(config: Config, prompts: PromptSet) -> int:
    """Return the prompts of an epoch; for a stream, those of the run."""
    if config.data.stream and config.train.steps is not None:
        return config.train.steps * config.train.prompts_per_step
    return len(prompts.prompts)


def _read_pass_rates(rows: Rows, column: str | None) -> FloatArray | None:
    """Read `data.pass_rate`, [R]; NaN where a row has none.

    Raises:
        UserError: there is no such column, or a value is not a share.
    """
    if column is None:
        return None
    where, names = f"data.pass_rate={column!r}", column_names(rows)
    if column not in names:
        raise UserError(f"{where}: the data has no such column{suggest(column, names, 'Columns')}")
    rates = np.full(len(rows), np.nan)
    for row, value in enumerate(values_of(rows, column)):
        if value is None or value == "":
            continue
        try:
            rates[row] = float(value)
        except (TypeError, ValueError):
            rates[row] = -1
        if not (0 <= rates[row] <= 1 or np.isnan(rates[row])):
            at = f"{where}: {describe_row(rows, row)}"
            raise UserError(f"{at}: must be a share of right answers, 0 to 1, not {excerpt(value)}")
    return rates


def _check_model(config: Config) -> AdapterSpec | None:
    """Check the settings against the model's files, without its weights. Return the adapter to train, if any."""
    if config.critic is not None and config.critic.path is not None:
        check_model_folder(config.critic.path, field="critic.path")
    adapter = check_adapter(config.model)
    check_weights(config.optim, trained_weights(config.model))
    check_router_loss(config.model, config.train.router_aux_loss_coef)
    check_dropout(config.model)
    return adapter


def describe_lost_updates(config: Config) -> str | None:
    """Return a warning if the weights' dtype rounds away most updates."""
    rate, rounds = config.train.learning_rate, getattr(config.optim, "stochastic_rounding", False)
    has_own_rate = config.optim.name == "custom"
    if config.model.dtype != "bfloat16" or config.model.adapter is not None or rounds or has_own_rate:
        return None
    if rate >= _BFLOAT16_RATE:
        return None
    stochastic = "optim.stochastic_rounding: true, " if hasattr(config.optim, "stochastic_rounding") else ""
    return (
        f"warning: model.dtype: bfloat16 rounds away most updates at train.learning_rate: {rate:g}, so that little is "
        f"learned; use model.dtype: float32 (matrix products are bfloat16 on GPUs all the same), {stochastic}or a "
        f"learning rate of at least {_BFLOAT16_RATE:g} (docs/memory.md)"
    )


def _longest_prompt_tokens(prompts: Sequence[Prompt], environments: Environments | None, max_prompt_tokens: int) -> int:
    """Return the length of the longest prompt; environments may make any prompt that long."""
    if environments is not None and not environments.plays_prompt:
        return max_prompt_tokens
    return longest_tokens(prompts)


def _check_context(
    config: Config,
    prompts: Sequence[Prompt],
    environments: Environments | None,
    *,
    max_new_tokens: int,
    field: str,
    is_stream: bool = False,
) -> None:
    """Check that prompts and completions fit into the model's context."""
    longest = _longest_prompt_tokens(prompts, environments, config.rollout.max_prompt_tokens)
    if is_stream:  # later ones may be longer
        longest = config.rollout.max_prompt_tokens
    try:
        check_lengths(config.model, longest, max_new_tokens=max_new_tokens, field=field)
    except UserError:
        # the longest may be shorter than its bound
        if not isinstance(prompts, SampledPrompts) or (environments is not None and not environments.plays_prompt):
            raise
        check_lengths(config.model, longest_tokens(prompts, exact=True), max_new_tokens=max_new_tokens, field=field)


def _check_answers(rewards: RewardRunner, prompts: Sequence[Prompt], data: Rows, *, field: str) -> None:
    rows: Iterable[tuple[int, Mapping[str, Any]]] = ((prompt.id, prompt.columns) for prompt in prompts)
    if isinstance(prompts, SampledPrompts):
        rows = prompts.rows(rewards.checked_columns())
    rewards.check_rows(rows, describe=lambda number: f"{field}: {describe_row(data, number)}")


def build_reward_runner(config: Config, parts: Parts, columns: Sequence[str]) -> RewardRunner:
    """Return the rewards of a run, those of its environments included.

    Raises:
        UserError: a reward cannot be called with these columns of the data.
    """
    given = parts.environments.rewards if parts.environments is not None else ()
    functions = build_reward_functions(config, parts, columns, given=given)
    return RewardRunner(functions, columns=columns, prompt_column=config.data.prompt)


def build_reward_functions(
    config: Config, parts: Parts, columns: Sequence[str], **options: Any
) -> tuple[RewardFunction, ...]:
    """Return the functions of the `rewards` section with their settings. `options` are those of `build_rewards`.

    Raises:
        UserError: a function cannot be called with these columns of the data.
    """
    return build_rewards(
        config.rewards,
        columns=columns,
        functions=parts.rewards,
        max_completion_tokens=config.rollout.max_trained_tokens,
        sandbox=parts.sandbox,
        device=config.hardware.device,
        run_folder=Path(config.run.dir),
        num_workers=workers_per_process(config.hardware.reward_workers),
        **options,
    )


def render_prompts(config: Config, parts: Parts, rows: Rows, *, column: str, field: str) -> PromptSet:
    """Render the prompts of rows as the run does, with its tools.

    Raises:
        UserError: a prompt is invalid, or none is short enough.
    """
    rendering = _rendering(config, parts, column=column, field=field)
    return build_prompts(rows, **rendering, on_progress=parts.on_progress)


def _rendering(config: Config, parts: Parts, *, column: str, field: str) -> dict[str, Any]:
    """Return the arguments of `build_prompts` besides the rows."""
    environments, data = parts.environments, config.data
    return {
        "renderer": PromptRenderer(
            parts.tokenizer,
            prompt_column=column,
            system_prompt=data.system_prompt,
            apply_chat_template=data.apply_chat_template,
            chat_template_kwargs=data.chat_template_kwargs,
            tools=environments.schemas if environments else None,
            system_prompts=data.system_prompts,
        ),
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
        "overlong": data.overlong_prompts,
        "field": field,
        "optional": environments is not None and not environments.plays_prompt,
    }


def build_evaluation(config: Config, settings: EvalConfig, parts: Parts, rewards: RewardRunner) -> Evaluation:
    """Build the held-out prompts and the settings of their evaluation.

    Raises:
        UserError: a prompt or a setting is invalid, or prompts and completions do not fit into the model's context.
    """
    field = settings.field
    _check_environment_columns(parts.eval_rows, parts.environments, field=field)
    rows, column = parts.eval_rows[: settings.max_prompts], settings.prompt or config.data.prompt
    prompts = render_prompts(config, parts, rows, column=column, field=field)
    _check_answers(rewards, prompts.prompts, rows, field=field)
    _check_context(
        config,
        prompts.prompts,
        parts.environments,
        max_new_tokens=config.eval_max_new_tokens,
        field=config.rollout.max_new_tokens_key if config.rollout.has_turns else "eval.max_completion_tokens",
    )
    return Evaluation(
        prompts=prompts.prompts,
        num_dropped_overlong=prompts.num_dropped_overlong,
        sampling=SamplingParams(
            num_generations=settings.num_samples,
            max_completion_tokens=settings.max_completion_tokens or config.rollout.max_completion_tokens,
            repetition_penalty=settings.repetition_penalty,
            temperature=settings.temperature,
            min_p=settings.min_p,
            top_k=settings.top_k,
            top_p=settings.top_p,
            stop=config.rollout.stop,
        ),
        seed=config.train.seed,
        success_reward=pick_success_reward(settings.success_reward, [f.name for f in rewards.functions]),
        success_threshold=settings.success_threshold,
        # other files may have a column of this name, with anything in it
        source_column=SOURCE if settings.sources or (config.data.sources and settings.rows is not None) else None,
        # servers queue requests themselves
        prompts_at_a_time=len(prompts.prompts)
        if config.rollout.uses_servers
        else max(1, config.rollout.max_num_seqs // settings.num_samples),
    )


def column_names(rows: Rows) -> list[str]:
    """Return the sorted column names of all rows."""
    return sorted(columns_of(rows))


def _check_environment_columns(rows: Rows, environments: Environments | None, *, field: str) -> None:
    if environments is not None:
        names = column_names(rows)
        values = set(map(str, filter(None, values_of(rows, COLUMN)))) if COLUMN in names else ()
        environments.check_columns(names, values, field=field)


def _check_eval_columns(columns: Sequence[str], rewards: RewardRunner, *, field: str) -> None:
    for i, function in enumerate(rewards.functions):
        check_columns(function, columns, field=f"{field}, rewards[{i}]")
