"""Keys of the `rollout` section for several turns: tools, environments and agents."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from cohort.config.paths import FunctionPath
from cohort.config.section import Section

# Keys that have no effect on prompts with a single completion.
_TURN_KEYS = (
    "max_turns",
    "max_trajectory_tokens",
    "trajectory_timeout_s",
    "environment_retries",
    "max_failed_ratio",
    "isolate",
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
    endpoint_host: str = Field(
        "127.0.0.1", min_length=1, description="Address on which the endpoint for the agent listens."
    )

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"use": entry} if isinstance(entry, str) else entry for entry in value]

    @field_validator("environment", mode="before")
    @classmethod
    def _read_environment(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"use": value}
        if isinstance(value, dict) and "use" not in value:
            return {name: {"use": entry} if isinstance(entry, str) else entry for name, entry in value.items()}
        return value

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.agent is not None and self.environment is not None:
            raise ValueError("agent and environment both play a row; remove one of the two")
        if self.agent is not None and self.tools:
            raise ValueError("tools has no effect with agent, which brings its own tools; remove one of the two")
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
