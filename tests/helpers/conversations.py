"""Conversations over chat templates: what models of a family write, and a trajectory that keeps exact tokens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import chat_tokenizers as tokenizers
from chat_tokenizers import fixture_template, make_tokenizer, trl_template
from cohort.chat import ChatTemplate, Rendering, ResponseParser, tool_schema
from cohort.chat.messages import arguments_as_text, takes_text_arguments
from cohort.records import FinishReason, IntArray, Message, ModelCall

Calls = Sequence[tuple[str, dict[str, Any]]]


def search(query: str, limit: int = 3) -> str:
    """Search the web.

    Args:
        query: what to look for
        limit: maximum number of results
    """
    return query * limit


TOOLS = [tool_schema(search)]
CATS: Calls = [("search", {"query": "cats", "limit": 2})]
TWO: Calls = [("search", {"query": "cats"}), ("search", {"query": "too lazy"})]


# What models write, as they were trained to: reasoning, content and calls to text, with the end-of-turn token.


def qwen2_5(reasoning: str, content: str, calls: Calls) -> str:
    texts = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(args)}}}\n</tool_call>' for name, args in calls
    ]
    return "\n".join(filter(None, [content, *texts])) + "<|im_end|>"


def qwen3(reasoning: str, content: str, calls: Calls) -> str:
    return (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + qwen2_5("", content, calls)


def qwen3_5(reasoning: str, content: str, calls: Calls) -> str:
    texts = []
    for name, args in calls:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in args.items())
        texts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    text = content + ("\n\n" if content and calls else "") + "\n".join(texts)
    return f"{reasoning}\n</think>\n\n{text}<|im_end|>"


def llama3_1(reasoning: str, content: str, calls: Calls) -> str:
    texts = [f'{{"name": "{name}", "parameters": {json.dumps(args)}}}' for name, args in calls]
    return content + "".join(texts) + "<|eot_id|>"


def glm(reasoning: str, content: str, calls: Calls) -> str:
    text = f"\n<think>{reasoning}</think>" + (f"\n{content}" if content else "")
    for name, args in calls:
        values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in args.items())
        text += f"\n<tool_call>{name}\n{values}</tool_call>"
    return text + ("<|observation|>" if calls else "<|user|>")


def gpt_oss(reasoning: str, content: str, calls: Calls) -> str:
    if not calls:
        return (
            f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
        ) + f"<|channel|>final<|message|>{content}<|return|>"
    [(name, args)] = calls
    before = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    return f"{before} to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(args)}<|call|>"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template, its control tokens and what its models write."""

    name: str
    tokens: tokenizers.Tokens
    write: Callable[[str, str, Calls], str]
    reasons: bool = False
    calls: Calls = field(default_factory=lambda: TWO)  # what a turn of several calls may be
    rewrites: tuple[bool, bool, bool]  # after calls, after further calls, after an answer and a user message


QWEN2_5 = Family(name="qwen2_5", tokens=tokenizers.CHATML, write=qwen2_5, rewrites=(False, False, False))
QWEN3 = Family(name="qwen3", tokens=tokenizers.QWEN3, write=qwen3, reasons=True, rewrites=(False, False, True))
QWEN3_5 = Family(
    name="qwen3_5_think", tokens=tokenizers.QWEN3, write=qwen3_5, reasons=True, rewrites=(False, False, True)
)
LLAMA3_1 = Family(name="llama3_1", tokens=tokenizers.LLAMA3, write=llama3_1, calls=CATS, rewrites=(False, False, False))
GLM = Family(name="glm4moe", tokens=tokenizers.GLM, write=glm, reasons=True, rewrites=(False, False, True))
GPT_OSS = Family(
    name="gptoss", tokens=tokenizers.GPT_OSS, write=gpt_oss, reasons=True, calls=CATS, rewrites=(False, False, True)
)
FAMILIES = [QWEN2_5, QWEN3, QWEN3_5, LLAMA3_1, GLM, GPT_OSS]
LOADERS: dict[str, Callable[[str], str]] = {"fixture": fixture_template, "trl": trl_template}


class Conversation:
    """A trajectory as a rollout keeps it: exact tokens, parsed messages, and a new sequence after each rewrite."""

    def __init__(self, family: Family, source: str, messages: list[Message], tools: Any = TOOLS, **kwargs: Any) -> None:
        self.tokenizer = make_tokenizer(LOADERS[source](family.name), family.tokens)
        self.template = ChatTemplate(self.tokenizer, kwargs=kwargs)
        self.parser = ResponseParser(self.tokenizer)
        self.messages, self.tools, self.kwargs = messages, tools, kwargs
        self.context_ids = self.template.render(messages, tools)
        self.calls: list[ModelCall] = []
        self.rendering = Rendering()

    def ids(self, text: str) -> IntArray:
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def text(self, ids: IntArray) -> str:
        return self.tokenizer.decode(ids.tolist())

    def rendered(self, new: Sequence[Message]) -> str:
        """The template's own rendering of the whole conversation."""
        messages = [
            {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
            for message in (*self.messages, *new)  # as later versions of transformers do
        ]
        if takes_text_arguments(self.tokenizer):
            messages = arguments_as_text(messages)
        variables = {"xml_tools": self.tools} if "xml_tools" in self.tokenizer.chat_template else {}
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tools, add_generation_prompt=True, tokenize=False, **variables, **self.kwargs
        )

    def sample(self, sampled: str | IntArray, finish_reason: FinishReason = "stop") -> None:
        """Let the model write a turn."""
        ids = self.ids(sampled) if isinstance(sampled, str) else sampled
        call = ModelCall(
            context_ids=self.context_ids,
            token_ids=ids,
            sampling_logprobs=np.zeros(len(ids)),
            finish_reason=finish_reason,
            policy_version=0,
        )
        self.calls.append(call)
        self.reply = self.parser.parse(ids, context_ids=self.context_ids, tools=self.tools)
        self.messages = [*self.messages, self.reply.message]

    def add(self, *new: Message) -> IntArray | None:
        """Append messages after the sampled turn; return the suffix, with what was rendered before and without."""
        call = self.calls[-1]
        suffix, alone = (
            self.template.suffix(
                self.messages,
                new,
                self.tools,
                sampled_ids=call.token_ids,
                finish_reason=call.finish_reason,
                rendering=rendering,
            )
            for rendering in (self.rendering, None)
        )
        assert np.array_equal(suffix, alone) if suffix is not None else alone is None
        self.messages = [*self.messages, *new]
        if suffix is None:
            self.context_ids = self.template.render(self.messages, self.tools)
        else:
            self.context_ids = np.concatenate([call.context_ids, call.token_ids, suffix])
        return suffix

    def results(self) -> list[Message]:
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": f"found {index}"}
            for index, call in enumerate(self.reply.tool_calls)
        ]


USER: Message = {"role": "user", "content": "hi"}
MORE: Message = {"role": "user", "content": "more"}


def answered(content: str = "hello", **keys: Any) -> list[Message]:
    return [USER, {"role": "assistant", "content": content, **keys}]


def called(**keys: Any) -> list[Message]:
    function = {"name": "search", "arguments": {"query": "cats"}}
    return answered("", tool_calls=[{"id": "call00001", "type": "function", "function": function}], **keys)
