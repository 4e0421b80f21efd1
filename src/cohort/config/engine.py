"""`rollout.engine: auto` in a configuration that is decided."""

from typing import Literal

from cohort.config.load import config_from_dict
from cohort.config.rollout import LOWEST_TEMPERATURE, AutoRolloutConfig
from cohort.config.schema import Config
from cohort.errors import UserError


def with_engine(config: Config, engine: Literal["local", "vllm"]) -> Config:
    """The configuration with this engine in the place of `rollout.engine: auto`; another engine stays.

    Raises:
        UserError: something in the configuration does not go with it.
    """
    if not isinstance(config.rollout, AutoRolloutConfig):
        return config
    settings = config.model_dump()
    return config_from_dict({**settings, "rollout": {**settings["rollout"], "engine": engine}})


def with_planned_engine(config: Config) -> tuple[Config, str | None]:
    """The configuration as a run on GPUs with vLLM has it, and why that is not vLLM where it is not."""
    reason = why_not_vllm(config)
    return with_engine(config, "vllm" if reason is None else "local"), reason


def why_not_vllm(config: Config) -> str | None:
    """What in the configuration rules vLLM out; None where it can sample."""
    if config.model.adapter is not None and config.model.adapter.dora:
        return "model.adapter.dora: true, and it samples with plain LoRA only"
    if config.rollout.temperature < LOWEST_TEMPERATURE:
        return f"rollout.temperature: {config.rollout.temperature:g} is below what it samples at"
    try:
        with_engine(config, "vllm")
    except UserError as error:
        return str(error)
    return None
