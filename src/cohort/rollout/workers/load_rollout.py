"""What runs the trajectories of a configuration: in the training process, or in each rollout worker.

Needs no torch, so that a worker starts fast and stays small.
"""

from collections.abc import Callable
from typing import Any

from cohort.config import Config
from cohort.rollout.environments.build import Environments, load_environments
from cohort.sandbox import SharedSandbox


def load_rollout(config: Config, tokenizer: Any, notify: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer and the options of the `RolloutCollector` of a rollout worker.

    Args:
        config: configuration of the run.
        tokenizer: the model's; None to load it.
        notify: shows a message to the user.

    Raises:
        UserError: something cannot be loaded.
    """
    if tokenizer is None:
        from cohort.models import load_tokenizer  # takes seconds

        tokenizer = load_tokenizer(config.model)
    environments = environments_of(
        config, tokenizer=tokenizer, rewards_read_instances=False, sandbox=SharedSandbox(config.sandbox)
    )
    return tokenizer, collector_options(config, environments, notify=notify)


def environments_of(
    config: Config, *, tokenizer: Any, rewards_read_instances: bool, sandbox: SharedSandbox
) -> Environments | None:
    """Load the tools, environments or agent of a configuration. Other arguments are those of `load_environments`."""
    return load_environments(
        config.rollout,
        tokenizer=tokenizer,
        apply_chat_template=config.data.apply_chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
        prompt_column=config.data.prompt,
        system_prompt=config.data.system_prompt,
        system_prompts=config.data.system_prompts,
        rewards_read_instances=rewards_read_instances,
        sandbox=sandbox,
    )


def collector_options(
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
