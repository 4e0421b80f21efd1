"""The endpoint's API: what requests may ask for, what answers say, and what is refused."""

import json
import socket
from typing import Any

import httpx2
import numpy as np
import pytest

from agents import CALL, END, MESSAGES, TOOLS, ask, decode, encode, play, post

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


def test_a_chat_answer_has_text_counts_and_on_request_exact_tokens():
    answers = []

    def solve(row: Any, base_url: str, api_key: str) -> float:
        answers.append(ask(base_url, api_key, logprobs=True, return_token_ids=True))
        answers.append(ask(base_url, api_key))
        return 0.5

    trajectory = play(solve, "a pet").trajectory
    first, plain = answers
    call = trajectory.calls[0]
    assert first["choices"][0]["message"] == {"role": "assistant", "content": "a pet"}
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["choices"][0]["token_ids"] == call.token_ids.tolist() == [*encode("a pet"), END]
    assert first["prompt_token_ids"] == call.context_ids.tolist()
    logprobs = first["choices"][0]["logprobs"]["content"]
    np.testing.assert_array_equal([entry["logprob"] for entry in logprobs], call.sampling_logprobs)
    assert "".join(entry["token"] for entry in logprobs) == "a pet<|im_end|>"
    total = len(call.context_ids) + len(call.token_ids)
    assert first["usage"] == {
        "prompt_tokens": len(call.context_ids),
        "completion_tokens": len(call.token_ids),
        "total_tokens": total,
    }
    assert plain["choices"][0]["logprobs"] is None and "token_ids" not in plain["choices"][0]
    assert trajectory.rewards == {"solve": 0.5} and trajectory.end == "answer"


def test_tools_are_rendered_and_calls_returned_and_their_exact_tokens_continued():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        choice = ask(base_url, api_key, tools=TOOLS)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "look_up", "arguments": '{"word": "cat"}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "a pet"}]}
        ask(base_url, api_key, [*MESSAGES, choice["message"], result], tools=TOOLS)

    trajectory = play(solve, CALL, "A pet.").trajectory
    first, second = trajectory.calls
    assert "Look up a word." in decode(first.context_ids)
    sampled = [*first.context_ids, *first.token_ids]
    assert second.context_ids[: len(sampled)].tolist() == sampled  # not as the template writes calls
    assert decode(second.context_ids[len(sampled) :]) == "\n<|im_start|>tool\na pet<|im_end|>\n<|im_start|>assistant\n"
    assert trajectory.stats is not None and trajectory.stats.tool_calls == 1
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool", "assistant"]


def test_a_call_cut_by_length_is_continued_with_its_missing_end():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        choice = ask(base_url, api_key, max_completion_tokens=3)["choices"][0]
        assert choice["finish_reason"] == "length"
        ask(base_url, api_key, [*MESSAGES, choice["message"], {"role": "user", "content": "more"}])

    first, second = play(solve, "A domestic animal").trajectory.calls
    suffix = decode(second.context_ids[len(first.context_ids) + 3 :])
    assert suffix == "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_stop_strings_end_a_call_and_are_not_in_the_text():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        choice = ask(base_url, api_key, stop=["Observation:", "never"])["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "Act.\n"
        ask(base_url, api_key, [*MESSAGES, choice["message"], {"role": "user", "content": "go on"}])

    first, second = play(solve, "Act.\nObservation: invented").trajectory.calls
    assert decode(first.token_ids) == "Act.\nObservation:"
    sampled = [*first.context_ids, *first.token_ids]
    assert second.context_ids[: len(sampled)].tolist() == sampled


@pytest.mark.parametrize("reply", ["plain text", CALL])
def test_a_stream_has_the_same_answer(reply: str):
    def solve(row: Any, base_url: str, api_key: str) -> None:
        body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        response = post(base_url, api_key, body)
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done = response.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(encode(reply)) + 1
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == (reply if reply != CALL else "")
        names = [one["function"]["name"] for delta in deltas for one in delta.get("tool_calls", [])]
        assert names == ["look_up"] * (reply == CALL)
        assert chunks[-2]["choices"][0]["finish_reason"] == ("tool_calls" if reply == CALL else "stop")

    assert len(play(solve, reply).trajectory.calls) == 1


def test_text_completions_continue_the_exact_tokens():
    answers = []

    def solve(row: Any, base_url: str, api_key: str) -> None:
        body = {"prompt": "Question", "max_tokens": 4, "logprobs": 0}
        answers.append(post(base_url, api_key, body, "completions").json())
        prompt = f"Question{answers[0]['choices'][0]['text']}\nnext"
        answers.append(post(base_url, api_key, {"prompt": prompt, "stop": "d"}, "completions").json())
        answers.append(post(base_url, api_key, {"prompt": encode("ids")}, "completions").json())

    trajectory = play(solve, "tool and", "abcdef", "x").trajectory
    first, second, third = trajectory.calls
    assert [answer["choices"][0]["text"] for answer in answers] == [decode(first.token_ids), "abc", "x"]
    logprobs = answers[0]["choices"][0]["logprobs"]
    np.testing.assert_array_equal(logprobs["token_logprobs"], first.sampling_logprobs)
    assert "".join(logprobs["tokens"]) == answers[0]["choices"][0]["text"]
    continued = [*first.context_ids, *first.token_ids, *encode("\nnext")]
    assert second.context_ids.tolist() == continued
    assert decode(second.token_ids) == "abcd" and third.context_ids.tolist() == encode("ids")


def test_the_token_api_is_vllms():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        sampling = {"max_tokens": 50, "logprobs": 1, "stop_token_ids": [END, encode("!")[0]], "temperature": 0.1}
        body = {"model": "policy", "token_ids": encode("hi"), "sampling_params": sampling}
        response = post(base_url.removesuffix("/v1"), api_key, body, "inference/v1/generate")
        (choice,) = response.json()["choices"]
        assert choice["token_ids"] == encode("ab!") and choice["finish_reason"] == "stop"
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        wrong = post(base_url.removesuffix("/v1"), api_key, {**body, "token_ids": [10**6]}, "inference/v1/generate")
        assert wrong.status_code == 400 and "vocabulary" in wrong.json()["error"]["message"]

    played = play(solve, "ab!cd")
    assert played.trajectory.end == "answer" and len(played.trajectory.calls) == 1


def test_stop_tokens_are_compared_as_ids():
    first_byte, merged = encode("é")[0], encode("too")[0]  # no text of its own; and a token of other words' text

    def solve(row: Any, base_url: str, api_key: str) -> None:
        ask(base_url, api_key, stop_token_ids=[first_byte])
        ask(base_url, api_key, stop_token_ids=[encode("o")[0]])

    first, second = play(solve, "café au lait", "too old").trajectory.calls
    assert first.token_ids.tolist() == [*encode("caf"), first_byte]
    assert second.token_ids.tolist() == [merged, *encode(" o")] and second.finish_reason == "stop"


def test_sampling_is_the_runs_and_fields_without_effect_are_named_once():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        for _ in range(2):
            ask(base_url, api_key, temperature=0.0, top_p=0.5, user="me", reasoning_effort="low", seed=None)

    notes = play(solve, "ok", num_rows=2).notes
    assert len(notes) == 3
    assert [note.partition("'")[2].partition("'")[0] for note in notes] == ["temperature", "top_p", "reasoning_effort"]
    assert "set by the run" in notes[0] and "not supported" in notes[2]


def test_calls_may_be_left_out_of_training():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        ask(base_url, api_key, train=False)
        ask(base_url, api_key)

    assert [call.trained for call in play(solve, "ok").trajectory.calls] == [False, True]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": IMAGE}, "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
    ({"model": "\ud800"}, "not valid Unicode"),
    ({"tools": [{"name": "look_up"}]}, "tools[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"stop": [1]}, "stop"),
    ({"stream": "yes"}, "stream"),
]


def test_what_would_change_the_sampling_is_refused_by_name():
    allowed = {"n": 1, "response_format": {"type": "text"}, "logit_bias": {}, "tool_choice": "none", "tools": TOOLS}

    def solve(row: Any, base_url: str, api_key: str) -> None:
        for fields, named in REFUSED:
            response = post(base_url, api_key, {"messages": MESSAGES, **fields})
            error = response.json()["error"]
            assert response.status_code == 400, fields
            assert error["type"] == "invalid_request_error" and named in error["message"], error
        ask(base_url, api_key, **allowed)

    played = play(solve, "ok")
    assert played.trajectory.error is None
    assert "Look up" not in decode(played.trajectory.calls[0].context_ids)  # tool_choice: none
    assert played.counts == {"unauthorized_requests": 0, "refused_requests": len(REFUSED)}


def test_garbage_is_refused_and_harms_nothing():
    garbage = [b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b'{"messages": NaN}', b'{"messages": {}}']

    def solve(row: Any, base_url: str, api_key: str) -> None:
        for body in garbage:
            for path in ("chat/completions", "completions"):
                response = post(base_url, api_key, body, path)
                assert response.status_code == 400 and response.json()["error"]["message"], body
        assert post(base_url, api_key, {}, "embeddings").json()["error"]["type"] == "not_found_error"
        assert post(base_url, api_key, {}, "models").status_code == 405
        url = httpx2.URL(base_url)
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert post(base_url, api_key, b"x" * (32 * 2**20 + 1)).status_code == 413
        ask(base_url, api_key)

    assert play(solve, "ok").trajectory.error is None
