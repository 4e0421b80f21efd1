"""Build the program of a run from `rollout.tools`, `rollout.environment` and `rollout.agent`."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cohort.chat import ChatTemplate, ResponseParser
from cohort.config.rollout import EnvironmentSpec, SamplingConfig
from cohort.config.user_code import error_location, load_function
from cohort.errors import UserError, describe_error, suggest
from cohort.rollout.environments.child_process import ChildPool, ChildProcess, UserCode
from cohort.rollout.environments.environment_class import EnvironmentInterface
from cohort.rollout.environments.handle import HandlePool, InstanceHandle
from cohort.rollout.environments.model import NO_TEMPLATE, TurnLimits
from cohort.rollout.environments.programs import COLUMN, IsolatedProgram, Mixture, UserProgram
from cohort.rollout.environments.sources import LIBRARIES, EnvironmentSource, Rows, find_source
from cohort.rollout.environments.tool_loop import ToolLoop
from cohort.rollout.environments.tools import Schema, ToolExecutor, load_tools
from cohort.rollout.environments.trajectory import Program, TrajectoryRunner
from cohort.sandbox import SharedSandbox

if TYPE_CHECKING:
    from cohort.rollout.endpoint.agent import AgentProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """The program of a run, and what the rest of the run must know of it."""

    program: Program
    template: ChatTemplate | None  # None if the tokenizer has none
    parser: ResponseParser
    rewards: tuple[str, ...]  # names of the rewards that trajectories get from the program
    schemas: tuple[Schema, ...]  # of the tools that every row has
    keep_thoughts: bool  # `rollout.keep_thoughts`
    plays_prompt: bool  # trajectories start with the row's prompt as it is, so every row needs one
    reset_columns: Mapping[str, tuple[str, ...]]  # columns that `reset` needs, by class
    names: tuple[str, ...]  # values of the column `environment`; empty without a mixture
    sources: tuple[EnvironmentSource, ...]
    agent: "AgentProgram | None" = None  # the program, if it is an agent

    def notes(self) -> list[str]:
        """Say what the chat template changes of sampled turns."""
        if self.template is None:
            return []
        change = self.template.rewrites(self.schemas)
        only_results_follow = self.plays_prompt and self.template.takes_errors_as_results
        if change is None or (only_results_follow and "user message" in change):
            return []
        if self.keep_thoughts:
            return [
                f"the chat template {change}; rollout.keep_thoughts trains on the sampled history instead, which the "
                "model will not see at inference"
            ]
        return [
            f"the chat template {change}: such trajectories are trained as several sequences (turns/rewritten); "
            "rollout.keep_thoughts: true trains on the sampled history instead"
        ]

    def rows(self, count: int, *, seed: int) -> Rows | None:
        """Return the rows that the environment brings for a run without data; None if it brings none.

        Raises:
            UserError: several environments bring rows.
        """
        sources = [source for source in self.sources if source.rows is not None]
        if len(sources) > 1:
            names = " and ".join(source.name for source in sources)
            raise UserError(f"data.path: missing, and {names} both bring rows; use one of them, or a data file")
        return sources[0].rows(count, seed) if sources and sources[0].rows is not None else None

    def check_columns(self, columns: Collection[str], values: Collection[Any], *, field: str) -> None:
        """Check that rows have the columns that `reset` needs and name environments that exist.

        Args:
            columns: names of all columns.
            values: values of the column `environment`.
            field: key of the data in messages.

        Raises:
            UserError: a column is missing, or a name is unknown.
        """
        for name, required in self.reset_columns.items():
            for parameter in required:
                if parameter not in columns:
                    raise UserError(
                        f"{field}: {name}.reset needs {parameter!r}, which is no column of the data"
                        f"{suggest(parameter, sorted(columns), 'Columns')}"
                    )
        unknown = sorted({str(value) for value in values if value is not None} - {*self.names})
        if self.names and unknown:
            raise UserError(
                f"{field}: column {COLUMN!r}: {unknown[0]!r} is not in rollout.environment"
                f"{suggest(unknown[0], self.names, 'Environments')}"
            )

    def runner(self, rollout: SamplingConfig, *, prompt_column: str, step_rewards_per_token: bool) -> TrajectoryRunner:
        """Return the rollout function that plays trajectories within the run's limits."""
        return TrajectoryRunner(
            self.program,
            template=self.template,
            parser=self.parser,
            limits=TurnLimits(
                max_turns=rollout.max_turns,
                max_prompt_tokens=rollout.max_prompt_tokens,
                max_new_tokens=rollout.max_new_tokens,
                timeout_s=rollout.trajectory_timeout_s,
            ),
            prompt_column=prompt_column,
            retries=rollout.environment_retries,
            max_concurrent=rollout.max_concurrent,
            step_rewards_per_token=step_rewards_per_token,
            keep_thoughts=rollout.keep_thoughts,
        )


def load_environments(
    rollout: SamplingConfig,
    *,
    tokenizer: Any,
    apply_chat_template: bool,
    chat_template_kwargs: Mapping[str, Any],
    prompt_column: str,
    system_prompt: str | None,
    system_prompts: Mapping[str, str] = MappingProxyType({}),
    rewards_read_instances: bool = True,
    sandbox: SharedSandbox | None = None,
) -> Environments | None:
    """Load tools, environments or the agent, and check that the model's chat template has what they need.

    Args:
        rollout: the `rollout` section.
        tokenizer: the model's.
        apply_chat_template: False is refused for what chats by itself: tools and environment classes.
        chat_template_kwargs: variables of the chat template.
        prompt_column: name of the prompt column in rows.
        system_prompt: system message for prompts that have none.
        system_prompts: those of sources of the data that have their own.
        rewards_read_instances: whether a reward function gets the environments' instances.
        sandbox: the run's, for the tool `python` and libraries that need it. Default: one of its own.

    Returns:
        None for single completions.

    Raises:
        UserError: something cannot be loaded or used.
    """
    if not rollout.has_turns:
        return None
    load = _Loader(
        rollout=rollout,
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer, kwargs=chat_template_kwargs) if tokenizer.chat_template else None,
        prompt_column=prompt_column,
        system_prompt=system_prompt,
        system_prompts=system_prompts,
        apply_chat_template=apply_chat_template,
        rewards_read_instances=rewards_read_instances,
        sandbox=sandbox,
    )
    parts = load.parts()
    weights = {name: spec.weight for name, spec in rollout.environments.items()}
    is_mixture = isinstance(rollout.environment, dict)
    part = next(iter(parts.values()))
    only = None if len(parts) > 1 else part.interface
    return Environments(
        program=Mixture({n: p.program for n, p in parts.items()}, weights) if is_mixture else part.program,
        template=load.template,
        parser=load.parser,
        rewards=tuple(dict.fromkeys(p.reward for p in parts.values() if p.reward is not None)),
        schemas=(*load.tool_schemas, *(only.schemas if only else ())),
        keep_thoughts=rollout.keep_thoughts,
        plays_prompt=rollout.environment is None and rollout.agent is None,
        reset_columns={} if only is None or is_mixture else {only.name: only.required_columns},
        names=tuple(parts) if is_mixture else (),
        sources=tuple(p.source for p in parts.values() if p.source is not None),
        agent=part.agent,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A program of the configuration: one of a mixture, or the only one."""

    program: Program
    reward: str | None = None  # name of its reward
    interface: EnvironmentInterface | None = None  # of an environment class
    source: EnvironmentSource | None = None  # of an environment
    agent: "AgentProgram | None" = None  # the program, if it is an agent


@dataclass(kw_only=True)
class _Loader:
    """Loads the parts of a run's program and checks each against the chat template."""

    rollout: SamplingConfig
    tokenizer: Any
    template: ChatTemplate | None
    prompt_column: str
    system_prompt: str | None
    system_prompts: Mapping[str, str]
    apply_chat_template: bool
    rewards_read_instances: bool
    sandbox: SharedSandbox | None

    def __post_init__(self) -> None:
        """Load the tools."""
        rollout = self.rollout
        self.parser = ResponseParser(self.tokenizer)
        self.tools = load_tools(rollout.tools, isolate=rollout.isolate, sandbox=self.sandbox)
        self.tool_schemas = [tool.schema for tool in self.tools]
        self.executor = ToolExecutor(
            tokenizer=self.tokenizer, max_tokens=rollout.max_tool_tokens, timeout_s=rollout.tool_timeout_s
        )
        self._check_tools(self.tool_schemas, field="rollout.tools")

    def parts(self) -> dict[str, _Part]:
        """Load what the run plays: environments by name, or one thing under the empty name."""
        environment = self.rollout.environment
        if self.rollout.agent is not None:
            return {"": self.agent(self.rollout.agent)}
        if isinstance(environment, dict):
            parts = {n: self.environment(s, field=f"rollout.environment.{n}") for n, s in environment.items()}
            _check_names(parts, environment)
            return parts
        if environment is not None:
            return {"": self.environment(environment, field="rollout.environment")}
        return {"": _Part(program=self.tool_loop())}

    def tool_loop(self, interface: EnvironmentInterface | None = None, pool: HandlePool[Any] | None = None) -> ToolLoop:
        """Return the program for tools and, if given, an environment class."""
        return ToolLoop(
            self.tools,
            executor=self.executor,
            prompt_column=self.prompt_column,
            system_prompt=self.system_prompt,
            system_prompts=self.system_prompts,
            interface=interface,
            pool=pool,
        )

    def environment(self, spec: EnvironmentSpec, *, field: str) -> _Part:
        """Load an environment class or a program."""
        source = find_source(spec, field=field, isolate=self.rollout.isolate, sandbox=self.sandbox)
        isolate = self.rollout.isolate and not source.has_own_processes
        code = _user_code(source, spec, field=field) if isolate else None
        if source.is_program:
            self._refuse_system_prompt()
            if self.tools:
                raise UserError(f"rollout.tools has no effect with {source.name}.run(row, model); remove it")
            self._check_tools(source.schemas, field=field)
            return _Part(program=_user_program(source, code, field=field), reward=source.name, source=source)
        assert source.kind is not None, "only programs are functions"
        self._chat_template(field)
        interface = EnvironmentInterface.of(source.kind, field=field)
        self._check_tools([*self.tool_schemas, *interface.schemas], field=field)
        timeout_s = self.rollout.tool_timeout_s
        create: Callable[..., Any] = partial(
            InstanceHandle.create, source.create, name=source.name, timeout_s=timeout_s
        )
        if code is not None:
            create = partial(ChildProcess.start, replace(code, copies_attributes=self.rewards_read_instances))
        return _Part(
            program=self.tool_loop(interface, HandlePool(create)),
            reward=interface.name if interface.gives_reward else None,
            interface=interface,
            source=source,
        )

    def agent(self, use: str) -> _Part:
        """Load an agent."""
        from cohort.rollout.endpoint.agent import AgentProgram  # needs an HTTP server, which other runs do not

        self._refuse_system_prompt()
        field, rollout = "rollout.agent", self.rollout
        solve = load_function(use, field=field)
        name = getattr(solve, "__name__", type(solve).__name__)
        code = UserCode(name=name, key=field, functions={"solve": use})
        program = AgentProgram(
            solve,
            name=name,
            host=rollout.endpoint_host,
            batches_requests=not rollout.uses_servers,
            pool=ChildPool(code) if rollout.isolate else None,
        )
        return _Part(program=program, reward=name, agent=program)

    def _refuse_system_prompt(self) -> None:
        if self.system_prompt is not None or self.system_prompts:
            raise UserError(
                "data.system_prompt has no effect with programs and agents, which write their own messages; remove it"
            )

    def _chat_template(self, field: str) -> ChatTemplate:
        """Return the chat template of tools and environment classes, which always chat."""
        if not self.apply_chat_template:
            raise UserError(
                f"data.apply_chat_template: false has no effect with {field}: tools and environment classes chat; "
                f"remove it"
            )
        if self.template is None:
            raise UserError(f"{field}: {NO_TEMPLATE}")
        return self.template

    def _check_tools(self, schemas: Sequence[Schema], *, field: str) -> None:
        names = [schema["function"]["name"] for schema in schemas]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{field}: a tool of rollout.tools is also named {twice!r}; rename one of the two")
        if schemas:
            template = self._chat_template(field)
            try:
                template.check_tools(schemas)
                self.parser.check_tools()
            except UserError as error:
                raise UserError(f"{field}: {error}") from error


def _check_names(parts: Mapping[str, _Part], specs: Mapping[str, EnvironmentSpec]) -> None:
    """Check that different environments of a mixture do not give rewards of one name.

    Raises:
        UserError: two do.
    """
    first: dict[str, tuple[str, EnvironmentSource]] = {}  # by name of the reward
    for key, part in parts.items():
        if part.reward is None or part.source is None:
            continue
        other, source = first.setdefault(part.reward, (key, part.source))
        is_other_function = source.kind is None and specs[key].use != specs[other].use
        if source.kind is not part.source.kind or is_other_function:
            raise UserError(
                f"rollout.environment.{key}: its reward would have the name {part.reward!r}, as that of "
                f"rollout.environment.{other} has; rename one of the two"
            )


def _user_code(source: EnvironmentSource, spec: EnvironmentSpec, *, field: str) -> UserCode:
    """Return what a child process loads instead of calling `source.create`."""
    if source.kind is None:
        return UserCode(name=source.name, key=field, functions={"run": spec.use})
    of_library = spec.use.partition(":")[0] in LIBRARIES
    return UserCode(name=source.name, key=field, use=spec.use, args=spec.args, of_library=of_library)


def _user_program(source: EnvironmentSource, code: UserCode | None, *, field: str) -> Program:
    """Create a program: with its one instance, or with `code` for child processes, each of which will have one.

    Raises:
        UserError: its constructor raised, or its `run` is not a coroutine function.
    """
    refusal = f"{field}: the `run` of {source.name} must be `async def run(self, row, model)`"
    if code is not None:
        if source.kind is not None and not inspect.iscoroutinefunction(getattr(source.kind, "run", None)):
            raise UserError(refusal)
        return IsolatedProgram(ChildPool(code), name=source.name)
    try:
        instance = source.create()
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{field}: {source.name}() raised {describe_error(error)} (at {error_location(error)})"
        ) from error
    run = getattr(instance, "run", instance)
    if not inspect.iscoroutinefunction(run):
        raise UserError(refusal)
    return UserProgram(run, name=source.name, instance=instance)
