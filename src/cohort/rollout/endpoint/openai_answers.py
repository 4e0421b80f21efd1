"""Answers in the form of OpenAI's API and of vLLM's token API.

K context tokens and C sampled tokens of a call.
"""

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from cohort.chat import Reply
from cohort.records import ModelCall
from cohort.rollout.endpoint.openai_requests import ChatRequest, Request, RequestError, TextRequest, TokenRequest

Body = dict[str, Any]


def chat_answer(reply: Reply, call: ModelCall, request: ChatRequest, tokenizer: Any) -> Body:
    """Return the body of a chat completion."""
    message: Body = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": one.id,
                "type": "function",
                "function": {"name": one.name, "arguments": json.dumps(one.arguments, ensure_ascii=False)},
            }
            for one in reply.tool_calls
        ]
    finish_reason = "tool_calls" if reply.tool_calls and call.finish_reason == "stop" else call.finish_reason
    logprobs = {"content": [*_chat_logprobs(call, tokenizer)]} if request.logprobs else None
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": logprobs}
    body = _body("chat.completion", "chatcmpl", choice, call, request)
    if request.return_token_ids:
        choice["token_ids"] = call.token_ids.tolist()
        body["prompt_token_ids"] = call.context_ids.tolist()
    return body


def text_answer(text: str, call: ModelCall, request: TextRequest, tokenizer: Any) -> Body:
    """Return the body of a text completion."""
    choice: Body = {"index": 0, "text": text, "finish_reason": call.finish_reason, "logprobs": None}
    if request.logprobs:
        tokens = [tokenizer.decode([token]) for token in call.token_ids.tolist()]
        lengths = [len(token) for token in tokens]
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": call.sampling_logprobs.tolist(),
            "text_offset": [sum(lengths[:index]) for index in range(len(tokens))],
            "top_logprobs": None,
        }
    if request.return_token_ids:
        choice["token_ids"] = call.token_ids.tolist()
        choice["prompt_token_ids"] = call.context_ids.tolist()
    return _body("text_completion", "cmpl", choice, call, request)


def token_answer(call: ModelCall, request: TokenRequest) -> Body:
    """Return the body of vLLM's token API."""
    token_ids, logprobs = call.token_ids.tolist(), call.sampling_logprobs.tolist()
    entries = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": token_ids,
        "finish_reason": call.finish_reason,
        "logprobs": {"content": entries} if request.logprobs else None,
    }
    return {
        "request_id": f"generate-{uuid.uuid4().hex}",
        "choices": [choice],
        "prompt_token_ids": call.context_ids.tolist(),
        "usage": _usage(call),
    }


def models_answer() -> Body:
    """Return the list of models."""
    return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "cohort"}]}


def error_answer(error: RequestError) -> Body:
    """Return the body of an error."""
    kind = {401: "authentication_error", 404: "not_found_error"}.get(error.status, "invalid_request_error")
    kind = "server_error" if error.status >= 500 else kind
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def as_stream(body: Body, *, include_usage: bool) -> str:
    """Return a chat or text completion as server-sent events. Everything has been sampled before."""
    chunks = _chat_chunks(body) if body["object"] == "chat.completion" else iter([body["choices"][0]])
    events = []
    kept: Body = {key: body[key] for key in ("id", "created", "model", "prompt_token_ids") if key in body}
    kept["object"] = f"{body['object']}.chunk" if body["object"] == "chat.completion" else body["object"]
    for choice in chunks:
        events.append({**kept, "choices": [choice], **({"usage": None} if include_usage else {})})
        kept.pop("prompt_token_ids", None)  # in the first event only
    if include_usage:
        events.append({**kept, "choices": [], "usage": body["usage"]})
    return "".join(f"data: {data}\n\n" for data in (*map(json.dumps, events), "[DONE]"))


def _chat_chunks(body: Body) -> Iterator[Body]:
    choice = body["choices"][0]
    message = choice["message"]
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    deltas += [{"tool_calls": [{"index": index, **one}]} for index, one in enumerate(message.get("tool_calls", []))]
    for delta in deltas:
        yield {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    ending = {key: value for key, value in choice.items() if key != "message"}
    yield {**ending, "delta": {}}


def _body(kind: str, prefix: str, choice: Body, call: ModelCall, request: Request) -> Body:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": _usage(call),
    }


def _usage(call: ModelCall) -> Body:
    num_context, num_sampled = len(call.context_ids), len(call.token_ids)
    return {
        "prompt_tokens": num_context,
        "completion_tokens": num_sampled,
        "total_tokens": num_context + num_sampled,
    }


def _chat_logprobs(call: ModelCall, tokenizer: Any) -> Iterator[Body]:
    """Entries of the sampled tokens, [C]."""
    for token_id, logprob in zip(call.token_ids.tolist(), call.sampling_logprobs.tolist(), strict=True):
        token = tokenizer.decode([token_id])
        yield {"token": token, "bytes": list(token.encode()), "logprob": logprob, "top_logprobs": []}
