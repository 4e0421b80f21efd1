"""Play a row with tools and, if there is one, an environment class: chat, execute the tool calls, repeat."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from cohort.chat import Reply, append_observation, prompt_messages
from cohort.config.data import SOURCE
from cohort.errors import describe_error
from cohort.processes.child import CLOSE_TIMEOUT_S
from cohort.records import EndReason, Message, Trajectory, TurnStats
from cohort.rollout.environments.environment_class import Environment, EnvironmentInterface
from cohort.rollout.environments.handle import HandlePool
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel, TrajectoryEnded
from cohort.rollout.environments.tools import Tool, ToolExecutor
from cohort.rollout.environments.trajectory import Outcome, Row


@dataclass(slots=True, eq=False)
class ToolLoop:
    """A program that lets the model call tools until it answers without a call."""

    tools: Sequence[Tool]  # plain functions
    _: KW_ONLY
    executor: ToolExecutor
    prompt_column: str  # name of the prompt column in rows
    system_prompt: str | None = None  # system message for prompts that have none
    system_prompts: Mapping[str, str] = field(default_factory=dict)  # by source, for those that have their own
    interface: EnvironmentInterface | None = None  # of the environment class; its methods are tools too
    pool: HandlePool[Any] | None = None  # of instances of that class

    async def run(self, row: Row, model: RolloutModel) -> Outcome:
        """Play one row. A trajectory that reaches a limit is scored as well."""
        tools = [replace(tool, handle=tool.handle.for_trajectory()) for tool in self.tools]
        try:
            return await self._play(row, model, tools)
        finally:
            for tool in tools:
                tool.handle.end_trajectory()

    async def _play(self, row: Row, model: RolloutModel, tools: Sequence[Tool]) -> Outcome:
        if self.interface is None or self.pool is None:
            return await _Play(self.executor, tools, None, model).run(self._messages(row, ""))
        try:
            handle = await self.pool.acquire()
        except Exception as error:
            raise EnvironmentFailure(f"{self.interface.name} could not be created: {describe_error(error)}") from error
        environment = Environment(handle=handle, interface=self.interface, timeout_s=self.executor.timeout_s)
        methods = [Tool(schema=s, handle=handle, of_environment=True) for s in self.interface.schemas]
        try:
            observation = await environment.reset(self.interface.reset_arguments(row, model.key), model.key) or ""
            play = _Play(self.executor, [*tools, *methods], environment, model)
            outcome = await play.run(self._messages(row, observation))
            return replace(outcome, observation=observation)
        except BaseException:  # whatever broke the trajectory may have broken the instance
            self.pool.discard(handle)
            raise

    def release(self, trajectory: Trajectory) -> None:
        """Reuse the environment of a trajectory."""
        if self.pool is not None:
            self.pool.release(trajectory.environment)

    def close(self) -> None:
        """Close all environments, and the processes of tools."""
        if self.pool is not None:
            self.pool.close()
            self.pool.join(CLOSE_TIMEOUT_S)
        for handle in {tool.handle for tool in self.tools}:
            handle.close()
            handle.join(CLOSE_TIMEOUT_S)

    def _messages(self, row: Row, observation: str) -> list[Message]:
        """First messages: the system prompt and the row's prompt, with the observation after its last user message."""
        content = row.get(self.prompt_column) or []
        system_prompt = self.system_prompts.get(str(row.get(SOURCE)), self.system_prompt)
        return prompt_messages(append_observation(content, observation), system_prompt)


@dataclass(slots=True)
class _Play:
    """One trajectory in progress."""

    executor: ToolExecutor
    tools: Sequence[Tool]
    environment: Environment | None
    model: RolloutModel
    counts: Counter[str] = field(default_factory=Counter)  # by field of `TurnStats`

    async def run(self, messages: Sequence[Message]) -> Outcome:
        end: EndReason | None = None
        schemas = [tool.schema for tool in self.tools]
        by_name = {tool.name: tool for tool in self.tools}
        try:
            while True:
                reply = await self.model.chat(messages, tools=schemas or None)
                answers = await self._answers(reply, by_name)
                self.model.transcript = [*self.model.transcript, *answers]  # also if a limit prevents the next turn
                await self._reward_turn()
                if not answers:
                    break
                messages = [*messages, reply.message, *answers]
        except TrajectoryEnded as ended:
            end = ended.end
        environment, stats = self.environment, TurnStats(**self.counts)
        if environment is None:
            return Outcome(end=end, stats=stats)
        return Outcome(
            name=environment.interface.name,
            reward=await environment.reward(),
            environment=await environment.instance(),
            end=end,
            stats=stats,
        )

    async def _answers(self, reply: Reply, tools: Mapping[str, Tool]) -> list[Message]:
        """Messages that answer the reply's tool calls; none if the trajectory ends with this reply."""
        assert reply.call is not None, "RolloutModel.chat sets it"
        cut = reply.call.finish_reason == "length"
        if not tools or (cut and not reply.tool_calls):
            return []
        self.counts.update(malformed_calls=len(reply.errors))
        results = await self.executor.execute(reply.tool_calls, tools)
        self.counts.update(tool_calls=len(results), tool_errors=sum(result.is_error for result in results))
        messages = [result.message for result in results]
        if not reply.errors:
            return messages
        errors = self.executor.cut("\n".join(reply.errors))
        if not messages:  # some templates forget all thoughts once a user message follows
            return [{"role": "tool" if self.model.template.takes_errors_as_results else "user", "content": errors}]
        # templates that pair tool messages with calls have no place for one more message
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{last['content']}\n{errors}"}]

    async def _reward_turn(self) -> None:
        if self.environment is not None and self.environment.interface.has_step_reward:
            self.model.step_rewards.append(await self.environment.step_reward())
