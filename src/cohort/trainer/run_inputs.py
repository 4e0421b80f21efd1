"""Read and check data, tokenizer, rewards and the user's files, before any weights are loaded."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.algorithms import check_custom_functions
from cohort.config import Config, EvalConfig
from cohort.config.algorithm import CustomFunction
from cohort.config.user_code import is_user_code
from cohort.data import PromptRenderer, PromptSet, build_prompts, describe_lost_text, read_rows
from cohort.errors import UserError
from cohort.learner import WorstCaseShard, check_weights
from cohort.models import (
    AdapterSpec,
    check_adapter,
    check_dropout,
    check_lengths,
    check_model_folder,
    check_router_loss,
    load_tokenizer,
    trained_weights,
)
from cohort.plan import RunSchedule, schedule_run
from cohort.records import Prompt
from cohort.rewards import RewardRunner, build_rewards, check_columns, read_trajectories
from cohort.rollout import SamplingParams
from cohort.rollout.environments.build import Environments, load_environments
from cohort.rollout.environments.programs import COLUMN
from cohort.run.log import EVENTS, check_loggers
from cohort.sandbox import SharedSandbox
from cohort.trainer.evaluation import Evaluation, pick_success_reward


def user_files(config: Config) -> dict[str, str]:
    """Return file -> SHA-256 of the files with the run's own rewards, tools, environments, agent and algorithm.

    Of functions named by module, only those that this process has loaded are found; installed packages are left out.
    """
    hashes = {}
    for use in _uses(config):
        where = use.rpartition(":")[0]
        file = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
        if file and is_user_code(file):
            with suppress(OSError):  # an error when the function is loaded
                hashes[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return hashes


def _uses(config: Config) -> Iterator[str]:
    yield from (reward.use for reward in config.rewards)
    yield from (tool.use for tool in config.rollout.tools)
    yield from (spec.use for spec in config.rollout.environments.values())
    yield config.rollout.agent or ""
    yield from (choice.use for choice in dict(config.algorithm).values() if isinstance(choice, CustomFunction))


def changed_files(folder: Path, files: Mapping[str, str], *, steps_done: int) -> list[str]:
    """Return a warning for each file that is another than when the run last started.

    Args:
        folder: run folder, whose last start is compared.
        files: hashes of the files now.
        steps_done: steps of the checkpoint from which the run resumes.
    """
    before: Mapping[str, str] = {}
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(ValueError, AttributeError):  # a line that was cut off
                before = json.loads(line).get("files", before)
    return [
        f"warning: {file} has changed since the run last started: from step {steps_done + 1} on, its functions may "
        f"mean something else than in the steps before"
        for file, found in files.items()
        if before.get(file, found) != found
    ]


Rows = list[dict[str, Any]]
_BFLOAT16_RATE = 1e-5  # lowest learning rate that changes bfloat16 weights
_NUM_ROWS = 1024  # of an environment that brings its own


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

    @property
    def longest_prompt_tokens(self) -> int:
        """Tokens of the longest training prompt, or of what an environment may make of it."""
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
        lost_text = describe_lost_text(self.tokenizer, self.prompts.prompts)
        return [*dropped_prompts, *filter(None, [lost_text]), *self.sandbox.notes, *self.rewards.notes()]


def read_inputs(config: Config) -> Inputs:
    """Read data, tokenizer and rewards, and check that they work together.

    Raises:
        UserError: an input is missing or invalid.
    """
    check_loggers(config.run.log)
    sandbox = SharedSandbox(config.sandbox)
    if config.rollout.has_turns:
        tokenizer = load_tokenizer(config.model)
        environments = read_environments(config, tokenizer, sandbox)
    else:
        tokenizer = environments = None
    check_custom_functions(
        config.algorithm,
        num_generations=config.rollout.num_generations,
        num_rewards=len(config.rewards) + len(environments.rewards if environments else ()),
        gradients_in_forward=config.train.gradients_in_forward,
    )
    rows = read_train_rows(config, environments)
    rewards = read_rewards(config, column_names(rows), environments, sandbox)
    eval_rows = read_eval_rows(config, config.eval, environments) if config.eval else []
    if config.eval:
        # rewards get held-out prompts under the name of the training column
        _check_eval_columns([*column_names(eval_rows), config.data.prompt], rewards)
    tokenizer = tokenizer or load_tokenizer(config.model)
    if config.critic is not None and config.critic.path is not None:
        check_model_folder(config.critic.path, field="critic.path")
    adapter = check_adapter(config.model)
    check_weights(config.optim, trained_weights(config.model))
    check_router_loss(config.model, config.train.router_aux_loss_coef)
    check_dropout(config.model)
    prompts = build_prompts(
        rows,
        _renderer(config, tokenizer, config.data.prompt, environments),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        overlong=config.data.overlong_prompts,
        field="data.path",
        optional=environments is not None and not environments.plays_prompt,
    )
    rewards.check_rows(prompts.prompts, field="data.path")
    check_lengths(
        config.model,
        _longest_prompt_tokens(prompts.prompts, environments, config.rollout.max_prompt_tokens),
        max_new_tokens=config.rollout.max_new_tokens,
        field=config.rollout.max_new_tokens_key,
    )
    evaluation = (
        read_evaluation(config, config.eval, eval_rows, tokenizer, rewards, environments) if config.eval else None
    )
    return Inputs(
        tokenizer=tokenizer,
        prompts=prompts,
        rewards=rewards,
        evaluation=evaluation,
        adapter=adapter,
        schedule=schedule_run(config, num_prompts=len(prompts.prompts)),
        environments=environments,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        sandbox=sandbox,
    )


def describe_lost_updates(config: Config) -> str | None:
    """Return a warning if the weights' dtype rounds away most updates."""
    rate, rounds = config.train.learning_rate, getattr(config.optim, "stochastic_rounding", False)
    if config.model.dtype != "bfloat16" or config.model.adapter is not None or rounds or rate >= _BFLOAT16_RATE:
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
    return max(len(p.token_ids) for p in prompts)


def read_environments(config: Config, tokenizer: Any, sandbox: SharedSandbox | None = None) -> Environments | None:
    """Load the run's tools, environments or agent; None for single completions.

    Raises:
        UserError: something cannot be loaded, or the model's chat template has no tools.
    """
    return load_environments(
        config.rollout,
        tokenizer=tokenizer,
        apply_chat_template=config.data.apply_chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
        prompt_column=config.data.prompt,
        system_prompt=config.data.system_prompt,
        rewards_read_instances=read_trajectories(config.rewards),
        sandbox=sandbox or SharedSandbox(config.sandbox),
    )


def rollout_options(
    config: Config, environments: Environments | None, *, notify: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Return the arguments of `RolloutCollector` that play trajectories of several turns; none for single ones."""
    if environments is None:
        return {}
    wanted = config.rollout.step_rewards
    runner = environments.runner(
        config.rollout,
        prompt_column=config.data.prompt,
        step_rewards_per_token=wanted == "per_token" or (wanted == "auto" and config.algorithm.takes_token_rewards),
    )
    options = {"rollout_function": runner, "release": runner.release, "close_environments": runner.close}
    if environments.agent is not None:
        environments.agent.notify = notify
        options["counts"] = environments.agent.counts
    return options


def read_rewards(
    config: Config, columns: Sequence[str], environments: Environments | None, sandbox: SharedSandbox
) -> RewardRunner:
    """Load the reward functions, and check them against the dataset's columns. Environments add theirs.

    Raises:
        UserError: a function cannot be loaded or called.
    """
    functions = build_rewards(
        config.rewards,
        columns=columns,
        max_completion_tokens=config.rollout.max_trained_tokens,
        sandbox=sandbox,
        device=config.hardware.device,
        run_folder=Path(config.run.dir),
        given=environments.rewards if environments else (),
    )
    return RewardRunner(functions, columns=columns, prompt_column=config.data.prompt)


def _renderer(config: Config, tokenizer: Any, column: str, environments: Environments | None) -> PromptRenderer:
    return PromptRenderer(
        tokenizer,
        prompt_column=column,
        system_prompt=config.data.system_prompt,
        apply_chat_template=config.data.apply_chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
        tools=environments.schemas if environments else None,
    )


def read_evaluation(
    config: Config,
    settings: EvalConfig,
    rows: Rows,
    tokenizer: Any,
    rewards: RewardRunner,
    environments: Environments | None,
) -> Evaluation:
    """Read the held-out prompts and the settings of their evaluation.

    Raises:
        UserError: a prompt or a setting is invalid, or prompts and completions do not fit into the model's context.
    """
    prompts = build_prompts(
        rows[: settings.max_prompts],
        _renderer(config, tokenizer, settings.prompt or config.data.prompt, environments),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        overlong=config.data.overlong_prompts,
        field="eval.path",
        optional=environments is not None and not environments.plays_prompt,
    )
    rewards.check_rows(prompts.prompts, field="eval.path")
    check_lengths(
        config.model,
        _longest_prompt_tokens(prompts.prompts, environments, config.rollout.max_prompt_tokens),
        max_new_tokens=config.eval_max_new_tokens,
        field=config.rollout.max_new_tokens_key if config.rollout.has_turns else "eval.max_completion_tokens",
    )
    return Evaluation(
        prompts=prompts.prompts,
        num_dropped_overlong=prompts.num_dropped_overlong,
        sampling=SamplingParams(
            num_generations=settings.num_samples,
            max_completion_tokens=settings.max_completion_tokens or config.rollout.max_completion_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=config.rollout.stop,
        ),
        seed=config.train.seed,
        success_reward=pick_success_reward(settings.success_reward, [f.name for f in rewards.functions]),
        success_threshold=settings.success_threshold,
        # servers queue requests themselves
        prompts_at_a_time=len(prompts.prompts)
        if config.rollout.uses_servers
        else max(1, config.rollout.max_num_seqs // settings.num_samples),
    )


def read_train_rows(config: Config, environments: Environments | None) -> Rows:
    """Read the rows of the training data, or those that an environment brings, or one without columns.

    Raises:
        UserError: the data cannot be read, do not fit the environment, or are missing without `train.steps`.
    """
    data = config.data
    if data.path is not None:
        rows = read_rows(data.path, field="data.path", split=data.split, name=data.name)
    else:
        assert environments is not None, "checked in the configuration"
        brought = environments.rows(_NUM_ROWS, seed=config.train.seed)
        if brought is None and config.train.steps is None:
            raise UserError("train.steps: missing; a run without data.path needs it")
        rows = brought or [{}]
    return _checked_rows(rows, environments, field="data.path")


def read_eval_rows(config: Config, settings: EvalConfig, environments: Environments | None) -> Rows:
    """Read the rows of the held-out data, as `read_train_rows` does."""
    if settings.path is not None:
        rows = read_rows(settings.path, field="eval.path", split=settings.split, name=settings.name)
    else:
        assert environments is not None and settings.max_prompts is not None, "checked in the configuration"
        brought = environments.rows(settings.max_prompts, seed=config.train.seed + 1)
        rows = brought or [{}] * settings.max_prompts
    return _checked_rows(rows, environments, field="eval.path")


def _checked_rows(rows: Rows, environments: Environments | None, *, field: str) -> Rows:
    if environments is not None:
        environments.check_columns(column_names(rows), [row.get(COLUMN) for row in rows], field=field)
    return rows


def column_names(rows: Rows) -> list[str]:
    """Return the sorted column names of all rows."""
    return sorted({column for row in rows for column in row})


def _check_eval_columns(columns: Sequence[str], rewards: RewardRunner) -> None:
    for i, function in enumerate(rewards.functions):
        check_columns(function, columns, field=f"eval.path, rewards[{i}]")
