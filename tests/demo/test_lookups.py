"""The task of `cohort demo --task tools`: problems, tool, tokenizer and base model."""

import asyncio
import json
import random
import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cohort.chat import ChatTemplate, ResponseParser, tool_schema
from cohort.demo.lookups import STORIES, LookUpProblem, generate, split_of
from cohort.demo.tasks import ANSWER_PATTERN, TOOLS, find_task
from cohort.demo.tools import look_up
from cohort.errors import UserError
from cohort.records import ModelCall, Prompt
from cohort.rollout import CallKey, SamplingParams
from cohort.rollout.environments.model import TurnLimits
from cohort.rollout.environments.tool_loop import ToolLoop
from cohort.rollout.environments.tools import ToolExecutor, load_tools
from cohort.rollout.environments.trajectory import TrajectoryRunner
from habits import tools_demonstration, tools_habit
from pretrain import tokenize

SCHEMAS = (tool_schema(look_up),)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TOOLS.base_path)


def test_entries_never_change():
    assert [look_up(name) for name in ("Mia Hill", "red kite", "old lamp")] == ["cold flute", "14", "10"]
    for name in ("", "kite", "Mia", "red", "red Hill", "Mia kite", "red kite "):
        with pytest.raises(ValueError, match=f"there is no entry '{name}'"):
            look_up(name)


def test_look_ups_lead_to_the_answer():
    problems = generate(0, 1000) + generate(0, 256, "heldout")
    assert {len(problem.names) for problem in problems} == {1, 2, 3}
    for problem in problems:
        results = [look_up(name) for name in problem.names]
        for number, name in enumerate(problem.names):
            assert name in problem.question or name in results[:number], problem
        numbers = [int(result) for result in results if result.isdecimal()]
        assert not any(re.search(rf"\b{n}\b", problem.question) for n in numbers if n not in (2, 3, 4)), problem
        for line in problem.calculation:
            a, sign, b, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", line).groups()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)
            assert {int(a), int(b)} <= {*numbers, *map(int, re.findall(r"\d+", problem.question))}
        assert problem.answer == (int(problem.calculation[-1].split("=")[1]) if problem.calculation else numbers[-1])


def test_no_name_is_in_both_splits():
    train, heldout = (
        {name for problem in generate(0, 3000, split) for name in problem.names} for split in ("train", "heldout")
    )
    assert not train & heldout
    assert {split_of(name) for name in heldout} == {"heldout"}
    problems = generate(0, 256, "heldout")
    assert len({problem.question for problem in problems}) == 256
    assert min(Counter(len(problem.names) for problem in problems).values()) > 30


def test_habits_are_mostly_bad():
    problems = generate(0, 2000)
    rng = random.Random(0)
    kinds = Counter(kind_of(problem, tools_habit(problem, rng)) for problem in problems)
    assert 0.1 < kinds["proper"] / 2000 < 0.2 and 0.5 < kinds["hasty"] / 2000 < 0.75
    assert kinds["malformed"] > 100 and kinds["early"] > 50 and kinds["bare"] > 50


def kind_of(problem: LookUpProblem, conversation) -> str:
    texts = [message["content"] for message in conversation if message["role"] == "assistant"]
    if "<tool_call>" in texts[0]:
        body = re.fullmatch(r"<tool_call>(.*)</tool_call>", texts[0])[1]
        with pytest.raises(json.JSONDecodeError):
            json.loads(body)
        return "malformed"
    if conversation == tools_demonstration(problem):
        return "proper"
    if not re.search(ANSWER_PATTERN, texts[-1]):
        return "bare"
    return "hasty" if len(texts) == 1 else "early"


def test_every_story_occurs_and_its_words_are_tokens():
    for problem in generate(5, 300):
        assert len(tokenizer()(problem.question)["input_ids"]) < 26
    assert len(STORIES) == 6


def test_only_assistant_turns_are_trained():
    problem = next(problem for problem in generate(0, 50) if len(problem.names) == 2)
    token_ids, labels = tokenize(tools_demonstration(problem), tokenizer(), SCHEMAS)
    trained = tokenizer().decode([token for token in labels if token >= 0])
    calls = (
        f'<tool_call>{{"name": "look_up", "arguments": {{"name": "{n}"}}}}</tool_call><|end|>' for n in problem.names
    )
    assert trained == "".join(calls) + "\n".join([*problem.calculation, f"#### {problem.answer}<|end|>"])
    assert all(label in (-100, token) for token, label in zip(token_ids, labels, strict=True))


def test_a_run_continues_conversations_as_the_base_model_was_trained():
    """The contexts of a run's model calls are those of the demonstrations, token by token."""
    for problem in generate(1, 12):
        token_ids, labels = tokenize(tools_demonstration(problem), tokenizer(), SCHEMAS)
        trajectory = asyncio.run(played(problem, token_ids, labels))
        last = trajectory.calls[-1]
        assert [*last.context_ids, *last.token_ids] == token_ids
        assert len(trajectory.calls) == 1 + len(problem.names) and trajectory.end == "answer"
        assert trajectory.stats.tool_calls == len(problem.names) and trajectory.stats.tool_errors == 0


async def played(problem: LookUpProblem, token_ids: list[int], labels: list[int]):
    """The trajectory of a model that samples what the demonstration has after the context."""

    async def generate(context_ids, sampling, key):
        length = len(context_ids)
        assert context_ids.tolist() == token_ids[:length] and labels[length] >= 0
        end = token_ids.index(tokenizer().eos_token_id, length) + 1
        sampled = np.array(token_ids[length:end])
        return ModelCall(
            context_ids=context_ids,
            token_ids=sampled,
            sampling_logprobs=np.zeros(len(sampled)),
            finish_reason="stop",
            policy_version=0,
        )

    executor = ToolExecutor(tokenizer=tokenizer(), max_tokens=100, timeout_s=60.0)
    runner = TrajectoryRunner(
        ToolLoop(load_tools(TOOLS.rollout["tools"]), executor=executor, prompt_column="question"),
        template=ChatTemplate(tokenizer()),
        parser=ResponseParser(tokenizer()),
        limits=TurnLimits(max_turns=5, max_prompt_tokens=128, max_new_tokens=200, timeout_s=60.0),
        prompt_column="question",
        retries=0,
    )
    prompt = Prompt(id=0, epoch=0, content=problem.question, token_ids=np.zeros(0, np.int64), columns={})
    sampling = SamplingParams(num_generations=1, max_completion_tokens=40, temperature=1.0)
    key = CallKey(purpose="train", seed=0, step=1, epoch=0, prompt_id=0, index=0, turn=0)
    return await runner(generate, tokenizer(), prompt, sampling, key)


def test_the_chat_template_has_tools():
    ChatTemplate(tokenizer()).check_tools(SCHEMAS)
    ResponseParser(tokenizer()).check_tools()
    with pytest.raises(Exception, match="the roles are system, user, assistant and tool, not critic"):
        tokenizer().apply_chat_template([{"role": "critic", "content": ""}], tokenize=False)


def test_an_unknown_task_is_refused():
    with pytest.raises(UserError, match="--task: 'tool' is no task of the demo; must be one of words, tools"):
        find_task("tool")
