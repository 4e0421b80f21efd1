"""The `rollout` section: one class per engine, so that a key the engine lacks is an error; environments and agents.

The classes also declare what each engine can do; other code reads that instead of testing which engine it is.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from cohort.config.objects import is_unnamed
from cohort.config.section import (
    FunctionPath,
    KeptPath,
    MinP,
    PythonPath,
    RepetitionPenalty,
    Section,
    must_be,
    number_or,
)

# Keys that have no effect on prompts with a single completion.
_TURN_KEYS = (
    "max_turns",
    "max_trajectory_tokens",
    "trajectory_timeout_s",
    "keep_thoughts",
    "environment_retries",
    "max_failed_ratio",
    "isolate",
    "max_concurrent",
)
_TOOL_KEYS = ("max_tool_tokens", "tool_timeout_s")


class EnvironmentSpec(Section):
    """An environment class with its constructor arguments."""

    use: FunctionPath = Field(
        min_length=1,
        description="`file.py:Class` or `package.module:Class`, or `reasoning_gym:NAME`, `verifiers:NAME`, "
        "`textarena:NAME`, `openenv:URL` or `skyrl_gym:NAME`.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the constructor.")
    weight: float = Field(1.0, gt=0, description="Share of a mixture without the column `environment`.")


# Which of the two forms `environment` has. Pydantic adds it to the location of errors, where messages leave it out.
_ONE, _SEVERAL = ENVIRONMENT_FORMS = ("(one)", "(several)")


class ToolSpec(Section):
    """A tool that the model may call."""

    use: FunctionPath = Field(min_length=1, description="`file.py:function`, `package.module:function` or `python`.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="For `python`: `{state: true}` keeps variables during a trajectory."
    )

    @model_validator(mode="after")
    def _check_args(self) -> Self:
        if self.use != "python" and self.args:
            raise ValueError(f"args has no effect with use: {self.use}; only use: python takes it; remove it")
        for name, value in self.args.items():
            if name != "state":
                raise ValueError(f"args: python has no argument {name!r}; it takes state: true or false")
            if not isinstance(value, bool):
                raise ValueError(f"args.state: must be true or false, not {value!r}")
        return self


def _as_spec(entry: Any) -> Any:
    return {"use": entry} if isinstance(entry, str) or callable(entry) else entry


class TurnsConfig(Section):
    """Keys for trajectories of several turns, which all rollout engines have."""

    tools: tuple[ToolSpec, ...] = Field(
        (),
        description="Tools that the model may call: typed Python functions with docstrings, as `file.py:function` or "
        "`package.module:function`; or `python`, which runs code in the sandbox. Needs a chat template with tools.",
    )
    environment: (
        Annotated[
            Annotated[EnvironmentSpec, Tag(_ONE)] | Annotated[dict[str, EnvironmentSpec], Tag(_SEVERAL)],
            Discriminator(lambda value: _SEVERAL if isinstance(value, dict) and "use" not in value else _ONE),
        ]
        | None
    ) = Field(
        None,
        description="Environment class, such as `my_env.py:Wordle` or `{use: my_env.py:Wordle, args: {...}}`; or "
        "several by name, of which the column `environment` of a row selects one (without the column: drawn by "
        "`weight`).",
    )
    agent: FunctionPath | None = Field(
        None,
        description="Function `solve(row, base_url, api_key)` that calls the model through an OpenAI-compatible "
        "endpoint, as `file.py:function` or `package.module:function`.",
    )
    max_turns: int = Field(8, ge=1, description="Maximum model calls of a trajectory that are trained on.")
    max_trajectory_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of a trajectory after the prompt, tool results included. Default: max_turns x "
        "max_completion_tokens.",
    )
    trajectory_timeout_s: float = Field(
        1800.0, gt=0, description="Maximum time of a trajectory in seconds; after it, the trajectory is masked."
    )
    max_tool_tokens: int = Field(
        1024, ge=1, description="Maximum tokens of a tool's result; a longer one is cut and marked."
    )
    tool_timeout_s: float = Field(
        30.0, gt=0, description="Maximum time in seconds of a tool call, and of each call of an environment's methods."
    )
    keep_thoughts: bool = Field(
        False,
        description="Go on from the sampled tokens where the chat template would drop earlier thoughts or otherwise "
        "rewrite the history. The model is then trained on contexts that its template does not render at inference.",
    )
    environment_retries: int = Field(
        1,
        ge=0,
        description="Attempts to repeat a trajectory with a fresh environment if its environment fails. After them it "
        "is masked.",
    )
    max_failed_ratio: float = Field(
        0.5, ge=0, le=1, description="Fraction of a step's trajectories that may fail; above it the run stops."
    )
    step_rewards: Literal["auto", "sum", "per_token"] = Field(
        "auto",
        description="An environment's `step_reward()`: credit each to the last token of its turn, or sum them at the "
        "end. auto: per_token for advantages that take token rewards (such as gae), else sum.",
    )
    isolate: bool = Field(
        False, description="Run environments, tools and agents in child processes, which may crash or hang."
    )
    max_concurrent: int | None = Field(
        None,
        ge=1,
        description="Maximum trajectories that run at the same time, in each process that runs them; others wait for "
        "their turn. Default: no limit.",
    )
    endpoint_host: str = Field(
        "127.0.0.1", min_length=1, description="Address on which the endpoint for the agent listens."
    )

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [_as_spec(entry) for entry in value]

    @field_validator("environment", mode="before")
    @classmethod
    def _read_environment(cls, value: Any) -> Any:
        several = isinstance(value, dict) and "use" not in value
        for entry in value.values() if several else [value]:
            if callable(getattr(entry, "reset", None)) and not isinstance(entry, type):
                kind = type(entry).__name__
                raise ValueError(
                    f"an instance of {kind} plays one trajectory; give {kind}, or a function that makes one"
                )
        return {name: _as_spec(entry) for name, entry in value.items()} if several else _as_spec(value)

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.agent is not None and self.environment is not None:
            raise ValueError("agent and environment both play a row; remove one of the two")
        if self.agent is not None and self.tools:
            raise ValueError("tools has no effect with agent, which brings its own tools; remove one of the two")
        uses = [*(tool.use for tool in self.tools), *(spec.use for spec in self.environments.values()), self.agent]
        if self.isolate and (unnamed := next(filter(is_unnamed, uses), None)) is not None:
            raise ValueError(
                f"isolate: true needs functions and classes that another process can import, and {unnamed!r} is not "
                f"one: define it at the top level of a file, or remove isolate"
            )
        if self.environment == {}:
            raise ValueError("environment: {} names no environment; add one such as {game: my_env.py:Game}")
        for key in () if self.has_turns else _TURN_KEYS:
            self.refuse(key, "single completions", "remove it, or set tools, environment or agent")
        for key in () if self.tools or self.environment is not None else _TOOL_KEYS:
            self.refuse(key, "neither tools nor environment", "remove it")
        if self.environment is None:
            self.refuse("step_rewards", "no environment", "remove it")
        if self.agent is None:
            self.refuse("endpoint_host", "no agent", "remove it")
        return self

    @property
    def has_turns(self) -> bool:
        """Whether trajectories may have several turns."""
        return bool(self.tools) or self.environment is not None or self.agent is not None

    @property
    def environments(self) -> dict[str, EnvironmentSpec]:
        """Environments by the value of the column `environment`; a single one by the empty string."""
        if self.environment is None:
            return {}
        return {"": self.environment} if isinstance(self.environment, EnvironmentSpec) else self.environment


# Server options that Cohort sets, and what to use instead. Weights or requests would not arrive with other values.
_NOT_VLLM_ARGS = {
    "model": "use model.path",
    "trust_remote_code": "use model.trust_remote_code",
    "dtype": "use rollout.dtype",
    "max_model_len": "use rollout.max_prompt_tokens, rollout.max_completion_tokens and rollout.max_trajectory_tokens",
    "max_num_seqs": "use rollout.max_num_seqs",
    "gpu_memory_utilization": "use rollout.gpu_memory_utilization",
    "tensor_parallel_size": "use rollout.tensor_parallel",
    "pipeline_parallel_size": "use rollout.tensor_parallel",
    "data_parallel_size": "use rollout.servers",
    "seed": "use train.seed",
    "enable_sleep_mode": "use hardware.rollout_gpus: shared",
    "host": "remove it (for a server that other machines reach, use `cohort serve --host`)",
    "port": "remove it (for a server that other machines reach, use `cohort serve --port`)",
    **dict.fromkeys(
        ("served_model_name", "api_key", "root_path", "uds", "ssl_keyfile", "ssl_certfile"),
        "remove it (Cohort sends its requests to the server as it started it)",
    ),
    **dict.fromkeys(
        ("worker_extension_cls", "weight_transfer_config"), "remove it (Cohort needs it to send weights to the server)"
    ),
    **dict.fromkeys(
        ("enable_scale_out", "logprobs_mode", "generation_config", "override_generation_config"),
        "remove it (Cohort relies on its own setting to read tokens and logprobs)",
    ),
}


def _vllm_arg(key: str) -> str:
    """Return the name of a server option: vLLM accepts no_x for x: false, and x.y for field y of x."""
    return key.replace("-", "_").removeprefix("no_").partition(".")[0]


class SamplingConfig(TurnsConfig):
    """Keys of all rollout engines, and the capabilities that each engine must declare.

    Capabilities are the class variables and `samples_ahead`. They have no defaults: defining an engine without one of
    them is a `TypeError`.
    """

    uses_servers: ClassVar[bool]
    """Whether servers with their own GPUs and memory sample; the class is then a `ServersConfig`."""
    # samples_ahead (class variable or property): whether later steps are sampled while this one trains. An engine that
    # can do so has the keys max_staleness and stale_completions.
    shares_weights: ClassVar[bool]
    """Whether sampling uses the training weights themselves, so that none need publishing."""
    default_correction: ClassVar[Literal["none", "token_truncate"]]
    """Value of `algorithm.sampling_correction: auto` with this engine."""
    sampled_by: ClassVar[str]
    """Completes "sampled ..." in messages, such as "by vLLM servers"."""
    # Keys with which a run may resume: they affect neither what is learned nor in which order.
    may_change: ClassVar[tuple[str, ...]] = (
        "max_num_seqs",
        # limits of environments that hang or fail, which others never reach
        *("trajectory_timeout_s", "tool_timeout_s", "environment_retries"),
        *("max_failed_ratio", "isolate", "max_concurrent", "endpoint_host"),
    )

    num_generations: int = Field(
        8,
        ge=1,
        description="G, completions per prompt (the group). At least 2 if the advantage compares them.",
    )
    max_prompt_tokens: int = Field(512, ge=1, description="Longest prompt in tokens, after the chat template.")
    max_completion_tokens: int = Field(256, ge=1, description="Longest completion of a model call in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the loss uses the same one.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample from the k most likely tokens; 0 is off.")
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    stop: Annotated[
        tuple[str, ...],
        must_be(
            "a list of texts, such as [</answer>]",
            lambda x: isinstance(x, list | tuple) and all(isinstance(text, str) for text in x),
        ),
    ] = Field(
        (),
        description='Stop strings, such as ["</answer>"]: a completion ends with the token that completes one, in '
        "its text with special tokens. The token is trained, and its text is part of the completion that rewards and "
        "environments read. Evaluation uses them too.",
    )
    max_num_seqs: int = Field(
        256, ge=1, description="Completions sampled at the same time (bounds the KV cache); per server with vllm."
    )
    resample: int = Field(
        0,
        ge=0,
        description="Dynamic sampling (DAPO): maximum rounds per step in which groups whose rewards are all equal are "
        "replaced with groups of new prompts. 0: off.",
    )

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty string would end every completion at once; remove it")
        return value

    @property
    def max_new_tokens(self) -> int:
        """Maximum tokens after the prompt: of a completion, or of a trajectory with tool results."""
        if not self.has_turns:
            return self.max_completion_tokens
        return self.max_trajectory_tokens or self.max_turns * self.max_completion_tokens

    @property
    def max_new_tokens_key(self) -> str:
        """Key that sets `max_new_tokens`."""
        return "rollout.max_trajectory_tokens" if self.has_turns else "rollout.max_completion_tokens"

    @property
    def max_trained_tokens(self) -> int:
        """Maximum tokens that the model samples after a prompt, which are trained; tool results are not."""
        turns = self.max_turns if self.has_turns else 1
        return min(self.max_new_tokens, turns * self.max_completion_tokens)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        missing = sorted(name for name in cls.__class_vars__ | {"samples_ahead"} if not hasattr(cls, name))
        if "engine" in cls.model_fields and missing:
            raise TypeError(f"rollout engine {cls.__name__} must declare {', '.join(missing)}")


class TrainingProcessesConfig(SamplingConfig):
    """Keys of engines that sample in the training processes, one step at a time."""

    uses_servers: ClassVar[Literal[False]] = False
    samples_ahead: ClassVar[Literal[False]] = False
    shares_weights: ClassVar[bool] = True
    default_correction: ClassVar[Literal["none", "token_truncate"]] = "none"


class AutoRolloutConfig(TrainingProcessesConfig):
    """Choose `vllm` if the run trains on GPUs and vLLM is installed and fits, else `local`.

    The choice is written to the run's `config.yaml`, and the run keeps it when it resumes.
    """

    prefers: ClassVar[str] = "vllm"
    """The engine on servers that it chooses if possible."""
    # until the choice is made, the other capabilities are the local engine's
    sampled_by: ClassVar[str] = (
        "by vLLM servers if there are GPUs and vLLM is installed, else by the training processes"
    )
    engine: Literal["auto"] = Field(
        "auto",
        description="vllm if there are GPUs, vLLM is installed, and it can sample this run; else local.",
    )


class LocalRolloutConfig(TrainingProcessesConfig):
    """Sample in the training processes with PyTorch."""

    sampled_by: ClassVar[str] = "by the training processes"
    engine: Literal["local"] = Field("local", description="Sample in the training processes with PyTorch.")


class ObjectRolloutConfig(TrainingProcessesConfig):
    """Sample with an object of your own, given as `cohort.Trainer(engine=...)` (python.md). Files cannot name one."""

    default_correction: ClassVar[Literal["none", "token_truncate"]] = "token_truncate"
    sampled_by: ClassVar[str] = "by the object that is given as cohort.Trainer(engine=...)"
    engine: Literal["object"] = Field("object", description="Sample with an object of your own.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server program cannot sample. The defaults limit nothing."""

    lowest_temperature: float = 0.0  # except 0 itself
    unserved_sampling: tuple[str, ...] = ()  # keys of `rollout` and `eval` that change a token's distribution
    largest_adapter_rank: int | None = None
    serves_dora: bool = True
    unserved_targets: tuple[str, ...] = ()  # layers whose adapters are not served, by the last part of their names


class ServersConfig(SamplingConfig):
    """Keys of engines that sample on servers, which receive the weights after every step.

    `cohort.rollout.engines.servers.setup.ServersSetup` implements all of them, for any kind of server.
    """

    uses_servers: ClassVar[Literal[True]] = True
    shares_weights: ClassVar[bool] = False
    program: ClassVar[str]
    """Name of the server program in messages, such as "vLLM"."""
    server_name: ClassVar[str]
    """Name of a server in messages, such as "vLLM server"."""
    has_serve_command: ClassVar[bool]
    """Whether `cohort serve` can start such a server (`ServersSetup.serve_command`)."""
    limits: ClassVar[ServerLimits] = ServerLimits()
    """What the program cannot sample."""
    tested_versions: ClassVar[dict[str, tuple[str, str]]] = {}
    """Oldest and newest version on which the tests have passed, by the program's package."""
    python_variable: ClassVar[str | None] = None
    """Environment variable with the Python of the program's own environment."""
    may_change: ClassVar[tuple[str, ...]] = (
        *SamplingConfig.may_change,
        "workers",
        # a restarted job has its servers on other machines
        *("urls", "urls.", "secret_file", "api_key_env", "servers", "tensor_parallel", "gpu_memory_utilization"),
        *("start_timeout_s", "request_timeout_s", "max_server_failures", "parity_every", "parity_tolerance"),
    )
    # Keys of servers that the run starts. They have no effect with `urls`; `cohort serve` has options for them.
    managed_server_keys: ClassVar[tuple[str, ...]] = ("servers", "tensor_parallel", "gpu_memory_utilization")

    urls: tuple[str, ...] = Field(
        (),
        description="URLs of running servers to use (`cohort serve` starts one), such as [http://node7:8000]. Default: "
        "the run starts and stops its own servers.",
    )
    secret_file: KeptPath | None = Field(
        None,
        description="File with the secret that servers demand of every request. `cohort serve`, and a run that starts "
        "its own servers, create it if it is missing, readable only by you; with `urls` the run reads it. Default: own "
        "servers get a new secret, which is kept in memory; servers of `urls` are sent none.",
    )
    api_key_env: str | None = Field(
        None,
        min_length=1,
        description="Instead of `secret_file`, for servers of `urls`: environment variable with the key that they "
        "demand of every request, such as a platform's token.",
    )
    servers: Annotated[
        int | Literal["auto"],
        number_or("auto", rule="a whole number of at least 1, or auto", is_valid=lambda n: n >= 1),
    ] = Field("auto", description="Number of servers to start. auto: one per `tensor_parallel` rollout GPUs, 1 on CPU.")
    tensor_parallel: int = Field(
        1, ge=1, description="GPUs per server, over which the model is split (tensor parallelism)."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of the servers' weights. auto: the dtype in which the trainer computes."
    )
    gpu_memory_utilization: Annotated[
        float | Literal["auto"],
        number_or(
            "auto", rule="above 0 and at most 1, or auto", is_valid=lambda share: 0 < share <= 1, types=(int, float)
        ),
    ] = Field(
        "auto",
        description="Fraction of a GPU's memory that a server may use. auto: 0.9, or 0.45 if training shares the GPU.",
    )
    workers: Annotated[
        int | Literal["auto"],
        number_or("auto", rule="a whole number of at least 1, or auto", is_valid=lambda n: n >= 1),
    ] = Field(
        "auto",
        description="Processes that run trajectories and talk to the servers, on each machine that trains; 1: in the "
        "training process of rank 0. auto: in all, one per 512 trajectories at once, while cores are free.",
    )
    start_timeout_s: float = Field(900.0, gt=0, description="Maximum time in seconds that a server may take to start.")
    request_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Maximum time in seconds to sample one prompt's completions. After that the server is considered "
        "hung and the prompt is sent to another one.",
    )
    max_server_failures: int = Field(
        3,
        ge=0,
        description="Failures without a completion in between after which a server is given up (or two with the same "
        "cause). Until then it restarts with back-off and its prompts are resampled. The run ends if none is left.",
    )
    parity_every: int = Field(
        50,
        ge=0,
        description="Compare the servers' logprobs with the trainer's after the first weight update and every N steps "
        "(0: never).",
    )
    parity_tolerance: Annotated[
        float | Literal["auto"],
        number_or("auto", rule="above 0, or auto", is_valid=lambda n: n > 0, types=(int, float)),
    ] = Field(
        "auto",
        description="Maximum mean logprob difference in nats; above it the run stops. auto: 1e-3 if both compute in "
        "float32, else 0.05.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Maximum steps by which sampling runs ahead of training. 0: each step waits for its completions. "
        "1 or more: later steps are sampled while this one trains.",
    )
    stale_completions: Literal["correct", "drop"] = Field(
        "correct",
        description="Groups started more than max_staleness steps ago: correct them with importance weights "
        "(`algorithm.sampling_correction`), or drop (and count) them.",
    )

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not a server URL such as http://node7:8000")
        if len(set(value)) < len(value):
            raise ValueError("lists a server twice")
        return tuple(url.rstrip("/") for url in value)

    @model_validator(mode="after")
    def _check_keys_have_an_effect(self) -> Self:
        for key in self.managed_server_keys if self.urls else ():
            elsewhere = "" if key == "servers" else " (set it with `cohort serve`)"
            self.refuse(key, f"urls, whose servers are already running{elsewhere}")
        if not self.urls:
            self.refuse("api_key_env", "servers that the run starts", "list urls, or use secret_file")
        if self.secret_file is not None:
            self.refuse("api_key_env", "secret_file")
        if self.parity_every == 0:
            self.refuse("parity_tolerance", "parity_every: 0")
        if self.max_staleness == 0:
            self.refuse("stale_completions", "max_staleness: 0")
        return self

    @property
    def samples_ahead(self) -> bool:
        """Whether later steps are sampled while this one trains."""
        return self.max_staleness > 0

    @property
    def can_keep_base(self) -> bool:
        """Whether a sleeping server with an adapter can keep its base model on the GPU, at the size that is planned."""
        return False


class VllmRolloutConfig(ServersConfig):
    """Sample on vLLM servers, which receive the weights after every step."""

    default_correction: ClassVar[Literal["none", "token_truncate"]] = "token_truncate"
    program: ClassVar[str] = "vLLM"
    server_name: ClassVar[str] = "vLLM server"
    has_serve_command: ClassVar[bool] = True
    sampled_by: ClassVar[str] = "by vLLM servers"
    limits: ClassVar[ServerLimits] = ServerLimits(
        lowest_temperature=0.01,  # vLLM silently raises lower ones to this one
        largest_adapter_rank=512,
        serves_dora=False,
        unserved_targets=("embed_tokens", "lm_head"),  # served for few models only
    )
    tested_versions: ClassVar[dict[str, tuple[str, str]]] = {"vllm": ("0.32.0", "0.32.0")}
    python_variable: ClassVar[str] = "COHORT_VLLM_PYTHON"
    may_change: ClassVar[tuple[str, ...]] = (*ServersConfig.may_change, "vllm_python")
    managed_server_keys: ClassVar[tuple[str, ...]] = (*ServersConfig.managed_server_keys, "vllm_python", "vllm_args")
    engine: Literal["vllm"] = Field("vllm", description="Sample on vLLM servers.")
    vllm_python: PythonPath | None = Field(
        None,
        description="Python of the environment in which vLLM is installed. Default: $COHORT_VLLM_PYTHON, or the Python "
        "that runs Cohort.",
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description="More vLLM server options, such as {quantization: fp8, max_num_batched_tokens: 16384}; not "
        "those that Cohort sets.",
    )

    @field_validator("vllm_args")
    @classmethod
    def _check_vllm_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            name = _vllm_arg(key)
            if name in _NOT_VLLM_ARGS:
                raise ValueError(f"{key} is set by Cohort; {_NOT_VLLM_ARGS[name]}")
        return value

    @model_validator(mode="after")
    def _check_speculative_decoding(self) -> Self:
        if self.min_p > 0 and any(_vllm_arg(key) == "speculative_config" for key in self.vllm_args):
            raise ValueError(
                f"min_p: {self.min_p:g}: vLLM does not support it with speculative decoding; use top_p or top_k, or "
                f"remove vllm_args.speculative_config"
            )
        return self

    @property
    def can_keep_base(self) -> bool:
        """Whether a sleeping server with an adapter can keep its base model on the GPU, at the size that is planned."""
        return not self.vllm_args  # which may add to the weights


RolloutConfig = Annotated[
    AutoRolloutConfig | LocalRolloutConfig | ObjectRolloutConfig | VllmRolloutConfig, Field(discriminator="engine")
]
# Configuration class by the value of `rollout.engine`.
ENGINES: dict[str, type[SamplingConfig]] = {
    section.model_fields["engine"].default: section for section in get_args(get_args(RolloutConfig)[0])
}


def preferred_servers() -> type[ServersConfig]:
    """Return the class of the engine that `rollout.engine: auto` chooses if possible."""
    section = ENGINES[AutoRolloutConfig.prefers]
    assert issubclass(section, ServersConfig)
    return section
