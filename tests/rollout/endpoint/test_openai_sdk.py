"""OpenAI's SDK, unchanged, against the endpoint."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agents import CALL, LIMITS, MESSAGES, TOOLS, encode, play
from cohort.config import config_from_dict
from cohort.config.user_code import load_function
from cohort.records import join_calls

pytestmark = pytest.mark.extras


def client_of(base_url: str, api_key: str, **options: Any) -> Any:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    return openai.OpenAI(base_url=base_url, api_key=api_key, **options)


def test_a_loop_with_tools_keeps_one_sequence():
    def solve(row: Any, base_url: str, api_key: str) -> float:
        client = client_of(base_url, api_key)
        messages: list[Any] = list(MESSAGES)
        while True:
            answer = client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS, temperature=0.2)
            message = answer.choices[0].message
            messages.append(message)
            if answer.choices[0].finish_reason != "tool_calls":
                return float(message.content == "A pet.")
            for call in message.tool_calls:
                word = json.loads(call.function.arguments)["word"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{word}: a pet"})

    trajectory = play(solve, CALL, CALL, "A pet.").trajectory
    assert trajectory.error is None and trajectory.rewards == {"solve": 1.0}
    assert len(trajectory.calls) == 3 and len(join_calls(trajectory.calls)) == 1


def test_the_agent_of_the_page(tmp_path: Path):
    pytest.importorskip("openai", reason="openai is not installed")
    text = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    ((name, code),) = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    (raw,) = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (tmp_path / name).write_text(code)
    config = config_from_dict(raw, base_dir=tmp_path)
    solve = load_function(str(config.rollout.agent), field="rollout.agent")
    trajectory = play(solve, "2+2=5 #### 5", "2+2=4 #### 4").trajectory
    assert trajectory.error is None and trajectory.rewards == {"solve": 0.5} and len(trajectory.calls) == 2
    assert trajectory.messages[1]["content"] == "That is wrong. Try again."


@pytest.mark.parametrize("reply", ["plain text", CALL])
def test_streams_have_the_same_answer(reply: str):
    def solve(row: Any, base_url: str, api_key: str) -> None:
        client = client_of(base_url, api_key)
        with client.chat.completions.stream(
            model="gpt-5", messages=MESSAGES, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        message = final.choices[0].message
        assert final.usage.completion_tokens == len(encode(reply)) + 1
        if reply == CALL:
            assert final.choices[0].finish_reason == "tool_calls"
            assert json.loads(message.tool_calls[0].function.arguments) == {"word": "cat"}
        else:
            assert final.choices[0].finish_reason == "stop" and message.content == reply
        chunks = client.chat.completions.create(model="gpt-5", messages=MESSAGES, stream=True)
        next(iter(chunks))
        chunks.close()  # hangs up

    trajectory = play(solve, reply).trajectory
    assert trajectory.error is None and len(trajectory.calls) == 2


def test_the_asynchronous_client_answers_with_exact_tokens():
    openai = pytest.importorskip("openai", reason="openai is not installed")
    answers = []

    async def solve(row: Any, base_url: str, api_key: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            extra = {"return_token_ids": True}
            answers.append(
                await client.chat.completions.create(
                    model="gpt-5", messages=MESSAGES, logprobs=True, max_tokens=2, extra_body=extra
                )
            )
            answers.append(await client.completions.create(model="gpt-5", prompt="Once", stop=["a"], max_tokens=9))
            assert [model.id async for model in client.models.list()] == ["policy"]

    trajectory = play(solve, "upon a time").trajectory
    assert trajectory.error is None
    chat, text = answers
    (choice,) = chat.choices
    assert choice.finish_reason == "length" and choice.token_ids == trajectory.calls[0].token_ids.tolist()
    assert chat.prompt_token_ids == trajectory.calls[0].context_ids.tolist()
    np.testing.assert_array_equal(
        [entry.logprob for entry in choice.logprobs.content], trajectory.calls[0].sampling_logprobs
    )
    assert text.choices[0].text == "upon " and text.choices[0].finish_reason == "stop"


def test_errors_are_the_sdks_and_limits_are_not_repeated():
    openai = pytest.importorskip("openai", reason="openai is not installed")

    def solve(row: Any, base_url: str, api_key: str) -> None:
        client = client_of(base_url, api_key)
        with pytest.raises(openai.AuthenticationError):
            client_of(base_url, "sk-other").chat.completions.create(model="gpt-5", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="n: 2 is not supported") as refused:
            client.chat.completions.create(model="gpt-5", messages=MESSAGES, n=2)
        assert refused.value.param == "n" and refused.value.code == "unsupported_value"
        for _ in range(3):
            client.chat.completions.create(model="gpt-5", messages=MESSAGES)

    played = play(solve, "ok", limits=replace(LIMITS, max_turns=2))
    assert played.trajectory.end == "max_turns" and len(played.trajectory.calls) == 2
    assert played.counts == {"unauthorized_requests": 1, "refused_requests": 1}
