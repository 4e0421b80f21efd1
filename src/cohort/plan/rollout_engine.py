"""What `rollout.engine: auto` comes to: what vLLM cannot sample, and whether it fits beside training."""

from typing import Protocol

from cohort.config import Config
from cohort.config.load import config_from_dict
from cohort.config.rollout import LOWEST_TEMPERATURE
from cohort.errors import UserError
from cohort.plan.adapter import requested_adapter
from cohort.plan.hardware import Hardware
from cohort.plan.room import why_it_does_not_fit
from cohort.plan.shape import ModelShape
from cohort.plan.split import DoesNotFitError, split_gpus

_LARGEST_RANK = 512  # that vLLM has room for
_NOT_SERVED = ("embed_tokens", "lm_head")  # vLLM has no adapters there, but for a few models


class Adapter(Protocol):
    """What of an adapter decides whether vLLM can sample with it."""

    @property
    def rank(self) -> int:
        """Rank of the addition to each weight."""

    @property
    def dora(self) -> bool:
        """Whether it is DoRA."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the layers that it is on, whole or only their last parts."""


def with_engine(config: Config, engine: str) -> Config:
    """The configuration with this engine in the place of `rollout.engine: auto`; another engine stays.

    Raises:
        UserError: something in the configuration does not go with it.
    """
    if config.rollout.engine != "auto":
        return config
    settings = config.model_dump()
    return config_from_dict({**settings, "rollout": {**settings["rollout"], "engine": engine}})


def with_planned_engine(
    config: Config, shape: ModelShape | None = None, hardware: Hardware | None = None
) -> tuple[Config, str | None]:
    """The configuration as a run on GPUs with vLLM has it, and why that is not vLLM where it is not.

    Args:
        config: of the run.
        shape: of its model.
        hardware: that it is to run on. Without either, memory is not looked at.

    Raises:
        UserError: numbers of the configuration contradict each other or the machines.
    """
    if config.rollout.engine != "auto":
        return config, None
    reason = why_not_vllm(config)
    if reason is None and shape is not None and hardware is not None:
        problem = why_vllm_does_not_fit(config, shape, hardware)
        reason = None if problem is None else f"vLLM does not fit beside training: {problem}"
    return with_engine(config, "vllm" if reason is None else "local"), reason


def why_not_vllm(config: Config) -> str | None:
    """What in a configuration with `rollout.engine: auto` rules vLLM out; None where it can sample.

    Raises:
        UserError: the adapter of `model.adapter.path` cannot be read.
    """
    adapter = config.model.adapter
    reason = why_not_sampled(config, None if adapter is None else requested_adapter(adapter))
    if reason is not None:
        return reason
    try:
        with_engine(config, "vllm")
    except UserError as error:
        return str(error)
    return None


def why_not_sampled(config: Config, adapter: Adapter | None) -> str | None:
    """What vLLM cannot sample of a run, and what it can; None where it can sample all of it.

    Args:
        config: of the run, with any engine.
        adapter: of the policy, as it is configured or as it is in the model.
    """
    temperatures = {"rollout": config.rollout.temperature, "eval": config.eval.temperature if config.eval else 0.0}
    for section, temperature in temperatures.items():
        if 0 < temperature < LOWEST_TEMPERATURE:
            return (
                f"{section}.temperature: {temperature:g} is below what vLLM samples at; use {LOWEST_TEMPERATURE:g} "
                f"or more"
            )
    if adapter is None:
        return None
    if adapter.dora:
        return "model.adapter.dora: true: vLLM samples with plain LoRA only; use dora: false"
    if adapter.rank > _LARGEST_RANK:
        return f"model.adapter.rank: {adapter.rank} is more than vLLM has room for; use at most {_LARGEST_RANK}"
    outside = [name for name in adapter.modules if name.rpartition(".")[-1] in _NOT_SERVED]
    if outside:
        return (
            f"model.adapter.targets: {', '.join(outside)}: vLLM samples with adapters inside of layers only; use "
            f"all-linear"
        )
    return None


def why_vllm_does_not_fit(config: Config, shape: ModelShape, hardware: Hardware) -> str | None:
    """Why servers and training have too little memory by the plan; None where they fit.

    `hardware.rollout_gpus` asks for servers, whether they fit by the plan or not. Of several nodes one samples.

    Args:
        config: of a run that vLLM is not ruled out for.
        shape: of its model.
        hardware: that it is to run on.

    Raises:
        UserError: numbers of the configuration contradict each other or the machines.
    """
    config = with_engine(config, "vllm")
    rollout = config.rollout
    assert rollout.uses_servers
    if config.hardware.rollout_gpus != "auto":
        return None
    if hardware.nodes > 1:
        return why_it_does_not_fit(config, rollout, shape, hardware, (hardware.nodes - 1) * hardware.gpus_per_node)
    try:
        split = split_gpus(config, num_gpus=hardware.gpus_per_node, shape=shape, hardware=hardware)
    except DoesNotFitError as error:
        return str(error)
    return why_it_does_not_fit(config, rollout, shape, hardware, split.num_processes, shared=split.shared)
