"""The model of a trajectory: what it keeps of a program's calls, and how limits end a program."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.chat import ChatTemplate, ResponseParser
from cohort.errors import UserError
from cohort.records import ModelCall, Prompt, RolloutGroup, Trajectory
from cohort.rollout import SamplingParams, StepKey
from cohort.rollout.environments.model import RolloutModel, TurnLimits
from cohort.rollout.environments.trajectory import Outcome, Row, TrajectoryRunner
from playing import ScriptedModel, call, load, play, turns_tokenizer
from selection import mostly_slow
from waiting import PATIENCE_S

CODE = '''
import asyncio
import copy

import numpy as np
import torch

class ChangesItsHistory:
    async def run(self, row, model):
        messages = [{"role": "user", "content": "first"}]
        reply = await model.chat(messages)
        messages[0]["content"] = "changed"
        await model.chat([*messages, reply.message, {"role": "user", "content": "go on"}])

class ChangesTheCall:
    async def run(self, row, model):
        reply = await model.chat("first")
        kept = copy.deepcopy(reply.message)
        reply.tool_calls[0].arguments["keys"].append("z")
        await model.chat([{"role": "user", "content": "first"}, kept, {"role": "user", "content": "go on"}])

def sort_in_place(keys: list) -> str:
    """Sort keys.

    Args:
        keys: the keys
    """
    keys.sort()
    return "sorted"

class Quiz:
    def reset(self):
        return "What is it?"

    def get_reward(self):
        return 1.0

class Gathers:
    async def run(self, row, model):
        await asyncio.gather(*(model.chat(f"question {n}") for n in range(3)))

class GathersLater:
    async def run(self, row, model):
        await model.chat("first")
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(model.chat(f"question {n}"))

class WrapsTheLimit:
    async def run(self, row, model):
        try:
            while True:
                await model.chat("again")
        except Exception as error:
            raise RuntimeError("no answer") from error

class FailsAfterTheLimit:
    async def run(self, row, model):
        try:
            while True:
                await model.chat("again")
        except Exception:
            return {}["score"]

class CarriesAnArray:
    """Its messages have a key of the program's own."""

    array = staticmethod(lambda: np.arange(2))

    async def run(self, row, model):
        messages = []
        for n in range(3):
            messages.append({"role": "user", "content": f"{n}", "seen": self.array()})
            reply = await model.chat(messages)
            messages.append(reply.message)

class CarriesATensor(CarriesAnArray):
    array = staticmethod(lambda: torch.arange(2))

class ChangesTheTranscript:
    async def run(self, row, model):
        messages = []
        for n in range(3):
            messages.append({"role": "user", "content": f"{n}"})
            reply = await model.chat(messages)
            messages.append(reply.message)
            for message in model.transcript[:-1]:
                message["content"] = "changed"

class Generates:
    async def run(self, row, model):
        for start in (5, 6):
            await model.generate([start])
        await model.generate([7], train=False)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "e.py").write_text(CODE)
    return tmp_path


class SlowModel(ScriptedModel):
    """Answers when everything else that can run has run."""

    async def generate(self, *args: Any) -> ModelCall:
        for _ in range(20):
            await asyncio.sleep(0)
        return await super().generate(*args)


def program(folder: Path, name: str, script: Callable[..., Any] | ScriptedModel, **rollout: Any) -> Trajectory:
    """The trajectory of a program."""
    rollout = {"environment_retries": 0, **rollout}
    (group,) = play(folder, script, [{"prompt": ""}], environment=f"{folder}/e.py:{name}", **rollout)
    return first(group)


def first(group: RolloutGroup) -> Trajectory:
    return group.trajectories[0]


def decode(token_ids: Any) -> str:
    return str(turns_tokenizer().decode(token_ids.tolist()))


def test_a_history_that_a_program_changes_in_place_is_rendered_again(folder: Path):
    trajectory = program(folder, "ChangesItsHistory", lambda context, key: "hello")
    assert "changed" in decode(trajectory.calls[1].context_ids)


@pytest.mark.parametrize("name", ["CarriesAnArray", "CarriesATensor", "ChangesTheTranscript"])
def test_a_conversation_goes_on_whatever_else_its_messages_have_and_is_done_to_the_transcript(folder: Path, name: str):
    trajectory = program(folder, name, lambda context, key: "hello")
    assert trajectory.error is None and len(trajectory.calls) == 3
    for one, two in pairwise(trajectory.calls):
        whole = [*one.context_ids, *one.token_ids]
        assert two.context_ids.tolist()[: len(whole)] == whole
    assert "changed" not in decode(trajectory.calls[-1].context_ids)


@pytest.mark.parametrize("name", ["ChangesTheCall", "sort_in_place"])
def test_arguments_that_are_changed_in_place_are_not_those_that_were_sampled(folder: Path, name: str):
    text = call("sort_in_place", '{"keys":  ["b", "a"]}')  # not as the template writes it

    def script(context: str, key: Any) -> str:
        return "done" if key.turn else text

    if name == "ChangesTheCall":
        trajectory = program(folder, name, script)
    else:
        trajectory = first(play(folder, script, [{"prompt": "sort"}], tools=[f"{folder}/e.py:{name}"])[0])
        assert trajectory.messages[0]["tool_calls"][0]["function"]["arguments"] == {"keys": ["b", "a"]}
    one, two = trajectory.calls
    whole = [*one.context_ids, *one.token_ids]
    assert two.context_ids.tolist()[: len(whole)] == whole


def test_a_limit_waits_for_the_calls_in_flight(folder: Path):
    trajectory = program(folder, "Gathers", SlowModel(lambda context, key: "hello"), max_turns=2)
    assert (trajectory.end, trajectory.error, len(trajectory.calls)) == ("max_turns", None, 2)


@pytest.mark.parametrize("isolate", mostly_slow([False, True], False, reason="limits in child processes"))
@pytest.mark.parametrize("name", ["GathersLater", "WrapsTheLimit"])
def test_an_exception_raised_from_a_limit_is_the_limit(folder: Path, name: str, isolate: bool):
    trajectory = program(folder, name, SlowModel(lambda context, key: "hello"), max_turns=2, isolate=isolate)
    assert (trajectory.end, trajectory.error, len(trajectory.calls)) == ("max_turns", None, 2)


def test_an_error_of_a_program_after_a_limit_is_an_error(folder: Path):
    trajectory = program(folder, "FailsAfterTheLimit", lambda context, key: "hello", max_turns=2)
    assert trajectory.end == "environment_error" and "KeyError: 'score'" in str(trajectory.error)


def test_a_program_without_a_chat_has_a_message_per_trained_call(folder: Path):
    trajectory = program(folder, "Generates", lambda context, key: f"reply {key.turn}")
    assert trajectory.messages == tuple({"role": "assistant", "content": f"reply {turn}"} for turn in range(2))


def test_only_chats_need_a_chat_template(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns_tokenizer(), "chat_template", None)
    data = {"apply_chat_template": False}
    trajectory = program(folder, "Generates", lambda context, key: "hello", data=data)
    assert (trajectory.end, len(trajectory.calls)) == ("answer", 3)
    trajectory = program(folder, "Gathers", lambda context, key: "hello", data=data)
    assert "no chat template, which chats need" in str(trajectory.error)


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("key", ["tools", "environment"])
def test_tools_and_environment_classes_need_a_chat_template(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, has_template: bool
):
    said = "data.apply_chat_template: false has no effect with"
    if not has_template:
        monkeypatch.setattr(turns_tokenizer(), "chat_template", None)
        said = f"rollout.{key}: the tokenizer has no chat template"
    value = {"tools": [f"{folder}/e.py:sort_in_place"], "environment": f"{folder}/e.py:Quiz"}[key]
    with pytest.raises(UserError, match=said):
        load(folder, data={"apply_chat_template": not has_template}, **{key: value})


class LeavesATask:
    """A program that goes on after it has returned."""

    async def run(self, row: Row, model: RolloutModel) -> Outcome:
        await model.chat("first")
        self.model = model
        self.task = asyncio.create_task(model.chat("in the background"))
        await asyncio.sleep(0)
        return Outcome()

    def release(self, trajectory: Trajectory) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_a_program_leaves_behind_cannot_call_the_model():
    program, tokenizer = LeavesATask(), turns_tokenizer()
    engine = ScriptedModel(lambda context, key: None if key.turn else "hello")
    runner = TrajectoryRunner(
        program,
        template=ChatTemplate(tokenizer),
        parser=ResponseParser(tokenizer),
        limits=TurnLimits(max_turns=4, max_prompt_tokens=100, max_new_tokens=100, timeout_s=PATIENCE_S),
        prompt_column="prompt",
        retries=0,
    )
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array([1]), columns={})
    sampling = SamplingParams(num_generations=1, max_completion_tokens=9, temperature=1.0)
    key = StepKey(purpose="train", seed=0, step=0).call(prompt, 0)

    async def main() -> None:
        trajectory = await runner(engine.generate, tokenizer, prompt, sampling, key)
        assert (trajectory.end, len(trajectory.calls)) == ("answer", 1)
        await asyncio.wait([program.task], timeout=PATIENCE_S)
        assert program.task.cancelled()
        with pytest.raises(RuntimeError, match="after its program had returned"):
            await program.model.chat("later")

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
