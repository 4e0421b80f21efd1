"""The `rollout` section: one class per engine, so that a key that the engine lacks is an error.

Other code asks these classes for an engine's capabilities instead of testing which engine it is.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cohort.config.section import Section

# vLLM samples at this temperature where it is told a lower one, and does not say so.
LOWEST_TEMPERATURE = 0.01
# What Cohort itself says to a server, and where a user says it. Without it weights do not arrive, or requests do not.
_NOT_VLLM_ARGS = {
    "model": "use model.path",
    "trust_remote_code": "use model.trust_remote_code",
    "dtype": "use rollout.dtype",
    "max_model_len": "use rollout.max_prompt_tokens and rollout.max_completion_tokens",
    "max_num_seqs": "use rollout.max_num_seqs",
    "gpu_memory_utilization": "use rollout.gpu_memory_utilization",
    "tensor_parallel_size": "use rollout.tensor_parallel",
    "pipeline_parallel_size": "use rollout.tensor_parallel",
    "data_parallel_size": "use rollout.servers",
    "seed": "use train.seed",
    "enable_sleep_mode": "use hardware.rollout_gpus: shared",
    "host": "remove it (`cohort serve --host` says where a server for other machines listens)",
    "port": "remove it (`cohort serve --port` says where a server for other machines listens)",
    **dict.fromkeys(
        ("served_model_name", "api_key", "root_path", "uds", "ssl_keyfile", "ssl_certfile"),
        "remove it (requests of the run go to a server as Cohort starts it)",
    ),
    **dict.fromkeys(("worker_extension_cls", "weight_transfer_config"), "remove it (the weights reach a server by it)"),
    **dict.fromkeys(
        ("enable_scale_out", "logprobs_mode", "generation_config", "override_generation_config"),
        "remove it (tokens and logprobs are read as Cohort sets it)",
    ),
}


def _or_auto(rule: str, kind: type | UnionType, keeps_rule: Callable[[Any], bool]) -> BeforeValidator:
    """Allow `auto`, and numbers of a kind that keep to a rule."""

    def check(value: Any) -> Any:
        if value == "auto" or (isinstance(value, kind) and not isinstance(value, bool) and keeps_rule(value)):
            return value
        raise ValueError(f"must be {rule}, or auto")

    return BeforeValidator(check)


class SamplingConfig(Section):
    """Keys that all rollout engines share, and the capabilities that each engine declares: `samples_ahead` and the
    class variables. None has a default: a class with a key `engine` that lacks one is refused where it is defined.
    """

    uses_servers: ClassVar[bool]
    """Whether servers sample, which have GPUs and memory of their own; the class is then a `ServersConfig`."""
    # samples_ahead, a class variable or a property: whether completions of later steps are sampled while this one
    # trains. An engine that can has the keys max_staleness and stale_completions.
    shares_weights: ClassVar[bool]
    """Whether the training processes sample with the very weights that they train, so that none are published."""
    default_correction: ClassVar[Literal["none", "token_truncate"]]
    """`algorithm.sampling_correction: auto`: what the engine's logprobs need beside the trainer's."""
    setup: ClassVar[str]
    """Module and name of what sets the engine up for a run, as `cohort.trainer.rollout_engines.EngineSetup` has it."""
    sampled_by: ClassVar[str]
    """Who samples, in the words of messages."""

    num_generations: int = Field(
        8,
        ge=1,
        description="G, completions per prompt (the group). At least 2 where they are judged against each other.",
    )
    max_prompt_tokens: int = Field(512, ge=1, description="Longest prompt in tokens, after the chat template.")
    max_completion_tokens: int = Field(256, ge=1, description="Longest completion in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the loss uses the same one.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0 is off.")
    max_num_seqs: int = Field(
        256, ge=1, description="Completions sampled at the same time (bounds the KV cache), by each server with vllm."
    )
    resample: int = Field(
        0,
        ge=0,
        description="Dynamic sampling (DAPO): groups whose rewards are all equal, from which an advantage within the "
        "group learns nothing, are replaced by those of new prompts, in at most so many rounds a step. 0: off.",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        missing = sorted(name for name in cls.__class_vars__ | {"samples_ahead"} if not hasattr(cls, name))
        if "engine" in cls.model_fields and missing:
            raise TypeError(f"{cls.__name__} is a rollout engine and must declare {', '.join(missing)}")

    def in_folders(self, folders: Sequence[Path]) -> Self:
        """The section with its relative paths replaced by absolute ones of the first folder that has them."""
        return self


class TrainingProcessesConfig(SamplingConfig):
    """Sampling in the training processes, step by step."""

    uses_servers: ClassVar[Literal[False]] = False
    samples_ahead: ClassVar[Literal[False]] = False
    shares_weights: ClassVar[bool] = True
    default_correction: ClassVar[Literal["none", "token_truncate"]] = "none"
    setup: ClassVar[str] = "cohort.trainer.local_rollouts:TrainingProcesses"


class AutoRolloutConfig(TrainingProcessesConfig):
    """Sampling of completions by vLLM where the run trains on GPUs, vLLM is installed and fits, else as `local`.

    The engine that was chosen is in the run's `config.yaml`, and the run goes on with it.
    """

    # the other capabilities are the local engine's as long as nobody has chosen
    sampled_by: ClassVar[str] = "by vLLM servers where vLLM is installed beside GPUs, else by the training processes"
    engine: Literal["auto"] = Field(
        "auto",
        description="vllm on a machine with GPUs and vLLM, where it fits by the plan and can sample the run; else "
        "local.",
    )


class LocalRolloutConfig(TrainingProcessesConfig):
    """Sampling of completions in the training processes, with torch."""

    sampled_by: ClassVar[str] = "by the training processes"
    engine: Literal["local"] = Field("local", description="Sampling in the training processes, with torch.")


class ServersConfig(SamplingConfig):
    """Keys of engines that sample with servers, which get the weights after every step.

    `cohort.trainer.server_rollouts.ServersSetup` gives effect to all of them, whatever program the servers are.
    """

    uses_servers: ClassVar[Literal[True]] = True
    shares_weights: ClassVar[bool] = False
    server_name: ClassVar[str]
    """What a person calls a server, such as "vLLM server"."""
    cohort_serve_starts_them: ClassVar[bool]
    """Whether `cohort serve` starts such a server."""
    # Of servers that a run starts itself. Next to `urls` they have no effect, and `cohort serve` takes them.
    keys_of_own_servers: ClassVar[tuple[str, ...]] = ("servers", "tensor_parallel", "gpu_memory_utilization")

    urls: tuple[str, ...] = Field(
        (),
        description="Servers that someone else runs (`cohort serve` starts one), such as [http://node7:8000]. Default: "
        "the run starts and ends servers of its own.",
    )
    servers: Annotated[int | Literal["auto"], _or_auto("a whole number of at least 1", int, lambda n: n >= 1)] = Field(
        "auto", description="Servers that the run starts. auto: one for each `tensor_parallel` rollout GPUs; 1 on CPU."
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share the model inside one server.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of the servers' weights. auto: that in which the trainer computes."
    )
    gpu_memory_utilization: Annotated[
        float | Literal["auto"], _or_auto("above 0 and at most 1", int | float, lambda share: 0 < share <= 1)
    ] = Field(
        "auto", description="Share of a GPU's memory for a server. auto: 0.9, or 0.45 where training shares the GPU."
    )
    start_timeout_s: float = Field(900.0, gt=0, description="Longest wait for a server to answer after its start.")
    request_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Longest wait for the completions of one prompt; then its server counts as hung, and the prompt "
        "goes to another one.",
    )
    max_server_failures: int = Field(
        3,
        ge=0,
        description="A server that fails is started again, with back-off, and its prompts are sampled again; at so "
        "many failures, or two ends in the same way, with no completion between it is given up. The run ends when no "
        "server is left.",
    )
    parity_every: int = Field(
        50,
        ge=0,
        description="Compare the servers' logprobs with the trainer's after the first publish of weights and every so "
        "many steps; 0: never.",
    )
    parity_tolerance: Annotated[float | Literal["auto"], _or_auto("above 0", int | float, lambda n: n > 0)] = Field(
        "auto",
        description="Largest mean difference of logprobs, in nats, at which the run goes on. auto: 1e-3 where both "
        "compute in float32, 0.05 otherwise.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Steps by which sampling may run ahead of training. 0: each step waits for its completions. At 1 "
        "or more the next steps' completions are sampled while this step trains.",
    )
    stale_completions: Literal["correct", "drop"] = Field(
        "correct",
        description="What becomes of groups that were begun more than max_staleness steps ago: trained on with "
        "importance weights (`algorithm.sampling_correction`), or dropped and counted.",
    )

    @field_validator("urls")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not the address of a server, such as http://node7:8000")
        if len(set(value)) < len(value):
            raise ValueError("names a server twice")
        return tuple(url.rstrip("/") for url in value)

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        theirs, told = "urls: the servers are someone else's", ", and `cohort serve` takes it on its command line"
        without_effect = [(key, theirs + told * (key != "servers")) for key in self.keys_of_own_servers if self.urls]
        without_effect += [("parity_tolerance", "parity_every: 0")] * (self.parity_every == 0)
        without_effect += [("stale_completions", "max_staleness: 0")] * (self.max_staleness == 0)
        for key, reason in without_effect:
            # the default may be written out: a run's own config.yaml has every key
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} has no effect with {reason}; remove one of the two")
        return self

    @property
    def samples_ahead(self) -> bool:
        """Whether completions of later steps are sampled while this one trains."""
        return self.max_staleness > 0


class VllmRolloutConfig(ServersConfig):
    """Sampling of completions by vLLM servers, which get the weights after every step."""

    default_correction: ClassVar[Literal["none", "token_truncate"]] = "token_truncate"
    setup: ClassVar[str] = "cohort.trainer.vllm_rollouts:VllmSetup"
    server_name: ClassVar[str] = "vLLM server"
    cohort_serve_starts_them: ClassVar[bool] = True
    sampled_by: ClassVar[str] = "by vLLM servers"
    keys_of_own_servers: ClassVar[tuple[str, ...]] = (
        *ServersConfig.keys_of_own_servers,
        "vllm_python",
        "vllm_args",
    )
    engine: Literal["vllm"] = Field("vllm", description="Sampling by vLLM servers.")
    vllm_python: str | None = Field(
        None,
        description="Python of the environment that vLLM is installed in. Default: $COHORT_VLLM_PYTHON, or the one "
        "that runs Cohort.",
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description="More options of the server, such as {quantization: fp8, max_num_batched_tokens: 16384}; none that "
        "Cohort sets itself.",
    )

    @field_validator("vllm_args")
    @classmethod
    def _nothing_that_cohort_sets(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            # vLLM takes no_x for x: false, and x.y for a part of x
            name = key.replace("-", "_").removeprefix("no_").partition(".")[0]
            if name in _NOT_VLLM_ARGS:
                raise ValueError(f"{key} is set by Cohort; {_NOT_VLLM_ARGS[name]}")
        return value

    def in_folders(self, folders: Sequence[Path]) -> Self:
        """The section with an absolute `vllm_python` where one of the folders has it."""
        if self.vllm_python is None:
            return self
        python = os.path.expanduser(self.vllm_python)
        # not resolved: the python of an environment is a link to another one, and knows itself by the link's name
        files = (str((folder / python).absolute()) for folder in folders if os.path.isfile(folder / python))
        return self.model_copy(update={"vllm_python": next(files, python)})


RolloutConfig = Annotated[AutoRolloutConfig | LocalRolloutConfig | VllmRolloutConfig, Field(discriminator="engine")]
# By the value of `rollout.engine`.
ENGINES: dict[str, type[SamplingConfig]] = {
    section.model_fields["engine"].default: section for section in get_args(get_args(RolloutConfig)[0])
}
