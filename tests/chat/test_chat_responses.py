"""Parsed replies: content, reasoning, tool calls, and errors for calls that cannot be parsed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import chat_tokenizers as tokenizers
from chat_tokenizers import fixture_template, make_tokenizer
from cohort.chat import ChatTemplate, Reply, ResponseParser
from cohort.errors import UserError
from selection import examples

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "description": "how many"},
        "exact": {"type": "boolean", "description": "whether"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "-", "parameters": PARAMETERS}}]
FAMILIES = {
    "chatml": tokenizers.CHATML,
    "qwen2_5": tokenizers.CHATML,
    "qwen3": tokenizers.QWEN3,
    "qwen3_5_think": tokenizers.QWEN3,
    "llama3_1": tokenizers.LLAMA3,
    "glm4moe": tokenizers.GLM,
    "gptoss": tokenizers.GPT_OSS,
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return make_tokenizer(fixture_template(name), FAMILIES[name])


def parse(tokenizer: PreTrainedTokenizerFast, text: str, **kwargs: Any) -> Reply:
    """Parse a sampled text after a user message and the generation prompt."""
    context_ids = ChatTemplate(tokenizer, kwargs=kwargs).render([{"role": "user", "content": "hi"}])
    token_ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    return ResponseParser(tokenizer).parse(token_ids, context_ids=context_ids, tools=TOOLS)


def calls_of(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in reply.tool_calls]


def json_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def test_message_of_a_reply_is_the_chat_message_for_the_history():
    reply = parse(
        family_tokenizer("qwen3"),
        "<think>\nwhy\n</think>\n\nLook.\n" + json_call('{"city": "Rome"}') + "<|im_end|>",
    )
    [call] = reply.tool_calls
    assert len(call.id) == 9
    assert reply.message == {
        "role": "assistant",
        "content": "Look.",
        "reasoning_content": "why",
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        ],
    }
    assert parse(family_tokenizer("chatml"), "hello<|im_end|>").message == {"role": "assistant", "content": "hello"}


def test_several_calls_have_ids_of_their_own_that_are_the_same_in_every_run():
    text = json_call('{"city": "Rome"}') + "\n" + json_call('{"city": "Oslo", "days": 2}') + "<|im_end|>"
    first, second = (parse(family_tokenizer("qwen2_5"), text) for _ in range(2))
    assert calls_of(first) == [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo", "days": 2})]
    assert first == second
    assert len({call.id for call in first.tool_calls}) == 2
    longer = parse(family_tokenizer("qwen2_5"), text.replace("Rome", "Paris"))
    assert not {call.id for call in longer.tool_calls} & {call.id for call in first.tool_calls}


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen2_5", json_call('{"city": "Rome", "days": "3", "exact": "true"}')),
        (
            "qwen3_5_think",
            "why\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm4moe",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        ),
        ("llama3_1", '{"name": "weather", "parameters": {"city": "Rome", "days": "3", "exact": "true"}}<|eot_id|>'),
        (
            "llama3_1",
            '{"type": "function", "name": "weather", "parameters": {"city": "Rome", "days": 3, "exact": true}}'
            "<|eom_id|>",
        ),
        (
            "gptoss",
            " to=functions.weather<|channel|>commentary json<|message|>"
            '{"city": "Rome", "days": 3, "exact": true}<|call|>',
        ),
        (
            "gptoss",
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant to=functions.weather<|channel|>commentary "
            '<|constrain|>json<|message|>{"city": "Rome", "days": "3", "exact": "true"}<|call|>',
        ),
        (
            "gptoss",
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Rome", "days": 3, "exact": true}<|call|>',
        ),
    ],
)
def test_arguments_are_cast_by_the_schema(family: str, text: str):
    reply = parse(family_tokenizer(family), text)
    assert reply.errors == ()
    assert calls_of(reply) == [("weather", {"city": "Rome", "days": 3, "exact": True})]


def test_strings_stay_strings():
    text = "</think><tool_call><function=weather><parameter=city>75001</parameter></function></tool_call>"
    assert calls_of(parse(family_tokenizer("qwen3_5_think"), text)) == [("weather", {"city": "75001"})]


def test_prewritten_reasoning_is_seen_in_the_context():
    assert parse(family_tokenizer("qwen3_5_think"), "why\n</think>\n\nhello<|im_end|>").reasoning == "why"
    assert parse(family_tokenizer("qwen3_5_think"), "cut in the mid").reasoning == "cut in the mid"
    off = parse(family_tokenizer("qwen3"), "hello<|im_end|>", enable_thinking=False)
    assert (off.content, off.reasoning) == ("hello", "")
    assert parse(family_tokenizer("qwen3"), "hello<|im_end|>").reasoning is None


def test_a_context_without_an_assistants_turn_is_no_part_of_the_reply():
    tokenizer = family_tokenizer("qwen3")
    ids = [np.array(tokenizer(text)["input_ids"]) for text in (f"<think>{json_call('{}')}", "hello")]
    assert ResponseParser(tokenizer).parse(ids[1], context_ids=ids[0]).message == {
        "role": "assistant",
        "content": "hello",
    }


def test_templates_without_reasoning_keep_it_in_the_content():
    reply = parse(family_tokenizer("qwen2_5"), "<think>why</think>hello<|im_end|>")
    assert (reply.content, reply.reasoning) == ("<think>why</think>hello", None)


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("qwen2_5", json_call('{"city": "Rome"'), "Expecting ',' delimiter"),
        ("qwen2_5", '<tool_call>\n{"name": "weather", "argu', "Unterminated string"),
        ("qwen2_5", "<tool_call>\n[1]\n</tool_call>", 'an object with a "name" and "arguments"'),
        ("qwen2_5", '<tool_call>\n{"arguments": {}}\n</tool_call>', 'an object with a "name" and "arguments"'),
        ("qwen2_5", json_call("[1, 2]"), "the arguments are an object with one value per parameter, not list"),
        ("qwen2_5", json_call('{"city": "\\ud800"}'), "surrogates not allowed"),
        ("qwen2_5", json_call("[" * 100_000), "it is nested too deeply"),
        ("gptoss", " to=functions.weather<|channel|>commentary json<|message|>Rome<|call|>", "Expecting value"),
    ],
)
def test_malformed_calls_are_errors_for_the_model(family: str, text: str, reason: str):
    reply = parse(family_tokenizer(family), text)
    assert reply.tool_calls == ()
    [error] = reply.errors
    assert error.startswith("The tool call cannot be parsed: ")
    assert reason in error
    assert len(error) < 500
    assert reply.content  # the history shows what was wrong


def test_a_malformed_call_does_not_spoil_the_others():
    text = "Look.\n" + json_call('{"city": "Rome"}') + json_call("{") + json_call('{"city": "Oslo"}') + "<|im_end|>"
    reply = parse(family_tokenizer("qwen2_5"), text)
    assert calls_of(reply) == [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})]
    assert len(reply.errors) == 1
    assert reply.content.startswith("Look.\n<tool_call>")


def test_calls_that_the_chat_template_rejects_are_errors():
    call = '{"name": "weather", "parameters": {}}'
    reply = parse(family_tokenizer("llama3_1"), f"{call}; {call}<|eot_id|>")
    assert reply.tool_calls == ()
    assert reply.errors == ("The tool calls cannot be made: This model only supports single tool-calls at once!",)
    assert reply.content.count('"weather"') == 2


def test_missing_arguments_are_none_and_encoded_ones_are_decoded():
    tokenizer = family_tokenizer("qwen2_5")
    assert calls_of(parse(tokenizer, '<tool_call>{"name": "weather"}</tool_call>')) == [("weather", {})]
    assert calls_of(parse(tokenizer, json_call("null"))) == [("weather", {})]
    assert calls_of(parse(tokenizer, '<tool_call>{"name": "weather"}<|im_end|>')) == [("weather", {})]  # never closed
    assert calls_of(parse(tokenizer, json_call('"{\\"days\\": 2}"'))) == [("weather", {"days": 2})]


def test_control_tokens_do_not_get_into_the_content():
    reply = parse(
        family_tokenizer("gptoss"), "<|channel|>final<|message|>see <|channel|>analysis<|message|>x<|return|>"
    )
    assert reply.content == "see analysisx"


def test_tokenizers_own_response_template_comes_first():
    tokenizer = make_tokenizer(fixture_template("mistral"), tokenizers.MISTRAL)
    tokenizer.response_template = {
        "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
        "fields": {
            "content": {"close": "</s>"},
            "tool_calls": {
                "open": "[TOOL_CALLS]",
                "close": "</s>",
                "content": "json",
                "transform_each": True,
                "transform": {"id": "{id}", "function": {"name": "{name}", "arguments": "{arguments}"}},
            },
        },
    }
    ResponseParser(tokenizer).check_tools()
    text = (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"days": "2"}, "id": "aaaaaaaaa"}, '
        '{"name": "weather", "arguments": {}, "id": "bbbbbbbbb"}]</s>'
    )
    reply = parse(tokenizer, text)
    assert calls_of(reply) == [("weather", {"days": 2}), ("weather", {})]
    assert [call.id for call in reply.tool_calls] == ["aaaaaaaaa", "bbbbbbbbb"]
    assert len(parse(tokenizer, '[TOOL_CALLS][{"name": "weather"}]</s>').errors) == 1


def test_response_templates_that_do_not_fit_are_refused_at_start():
    tokenizer = family_tokenizer("chatml")
    assert ResponseParser(tokenizer).parse(np.array([0]), context_ids=np.array([0])).errors == ()
    tokenizer.response_template = {"fields": {"content": {"opens": "x"}}}
    with pytest.raises(UserError, match=r"response_template is invalid: .*opens"):
        ResponseParser(tokenizer)
    wrong = family_tokenizer("llama3_1")
    wrong.response_template = {
        "start_anchor": "assistant",
        "fields": {"tool_calls": {"open": "<call>", "close": "</call>", "content": "json"}},
    }
    with pytest.raises(UserError, match="does not parse the tool calls that the chat template renders"):
        ResponseParser(wrong).check_tools()
    del wrong.response_template["fields"]["tool_calls"]
    wrong.response_template["fields"]["content"] = {}
    with pytest.raises(UserError, match="known format of tool calls"):
        ResponseParser(wrong).check_tools()


def test_a_turn_of_too_many_calls_makes_the_first_of_them():
    text = "Look.\n" + "\n".join(json_call(f'{{"days": {number}}}') for number in range(203)) + "<|im_end|>"
    reply = parse(family_tokenizer("qwen3"), text)
    assert calls_of(reply) == [("weather", {"days": number}) for number in range(200)]
    [error] = reply.errors
    assert error.startswith("A turn has at most 200 tool calls and reasoning blocks")
    assert reply.content.startswith("Look.\n<tool_call>") and reply.content.count("weather") == 3


PIECES = st.one_of(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>"),
            *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|channel|>", "<|message|>"),
            *("<|call|>", "<|end|>", "<|start|>", " to=functions.f", "commentary json", "<|im_end|>", "<|eot_id|>"),
            *(
                '{"name": "weather", "parameters": ',
                '{"name": "weather", "arguments": ',
                "{}",
                "}",
                "null",
                '"\\ud800"',
            ),
        ]
    ),
    st.text(max_size=8),
)


@pytest.mark.parametrize("family", FAMILIES)
@examples(500, quick=15)
@given(pieces=st.lists(PIECES, max_size=12), noise=st.lists(st.integers(0, 400), max_size=8))
def test_parsing_never_raises_and_what_it_gives_can_be_rendered(family: str, pieces: list[str], noise: list[int]):
    tokenizer = family_tokenizer(family)
    template, user = ChatTemplate(tokenizer), {"role": "user", "content": "hi"}
    text = "".join(pieces).encode(errors="ignore").decode()
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *noise]  # some ids beyond the vocabulary
    reply = ResponseParser(tokenizer).parse(
        np.array(ids, dtype=np.int64), context_ids=template.render([user]), tools=TOOLS
    )
    assert all(isinstance(error, str) and error for error in reply.errors)
    template.render([user, reply.message, user])
