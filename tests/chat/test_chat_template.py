"""Suffixes of chat templates by example, and messages and templates that are refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chat_tokenizers as tokenizers
from chat_tokenizers import fixture_template, make_tokenizer
from cohort.chat import ChatTemplate, ResponseParser, tool_schema
from cohort.chat.messages import plain_messages
from cohort.errors import UserError
from cohort.records import FinishReason, Message
from conversations import FAMILIES, LOADERS, MORE, TOOLS, USER, Conversation, answered, called, search
from selection import examples


def suffix_text(
    template: str,
    tokens: tokenizers.Tokens,
    history: list[Message],
    *new: Message,
    sampled: str,
    finish_reason: FinishReason = "stop",
    tools: Any = None,
    **kwargs: Any,
) -> str | None:
    tokenizer = make_tokenizer(fixture_template(template), tokens)
    ids = np.array(tokenizer(sampled, add_special_tokens=False)["input_ids"], dtype=np.int64)
    suffix = ChatTemplate(tokenizer, kwargs=kwargs).suffix(
        history, new, tools, sampled_ids=ids, finish_reason=finish_reason
    )
    return None if suffix is None else tokenizer.decode(suffix.tolist())


RESULT: Message = {"role": "tool", "name": "search", "tool_call_id": "call00001", "content": "found"}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n</tool_call>'


def test_render_writes_the_generation_prompt():
    tokenizer = make_tokenizer(fixture_template("chatml"), tokenizers.CHATML)
    ids = ChatTemplate(tokenizer).render([USER])
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids.tolist()) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_has_written_another_time_before_does_not_end_the_sequence():
    """As those of Llama 3.2, with the date."""
    conversation = Conversation(FAMILIES[0], "fixture", [USER])
    conversation.sample("hello<|im_end|>")
    assert conversation.add(MORE) is not None
    conversation.sample("hello<|im_end|>")
    conversation.rendering.text = "The day before." + conversation.rendering.text
    assert conversation.add(MORE) is not None


def test_suffix_does_not_repeat_the_sampled_end_of_turn_token():
    rest = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    chatml = ("chatml", tokenizers.CHATML, answered(), MORE)
    assert suffix_text(*chatml, sampled="hello<|im_end|>") == rest
    assert suffix_text(*chatml, sampled="hello", finish_reason="length") == "<|im_end|>" + rest
    # ended by a stop string of the program
    assert suffix_text(*chatml, sampled="hello") == "<|im_end|>" + rest
    # ended by a stop string that is a token, but not the end of the turn
    call = ("qwen2_5", tokenizers.CHATML, called(), MORE)
    assert suffix_text(*call, sampled=CALL) == "<|im_end|>" + rest
    assert suffix_text(*chatml, sampled="hello<tool_call>") == "<|im_end|>" + rest  # which the template would not write
    assert suffix_text(*chatml, sampled="hello<|endoftext|>") is None  # another end
    # a turn that the model left empty
    assert suffix_text("chatml", tokenizers.CHATML, answered(""), MORE, sampled="<|im_end|>") == rest
    assert suffix_text("chatml", tokenizers.CHATML, answered(""), MORE, sampled="") == "<|im_end|>" + rest


def test_suffix_of_templates_without_generation_prompt():
    mistral = ("mistral", tokenizers.MISTRAL, answered(), MORE)
    assert suffix_text(*mistral, sampled=" hello</s>") == "[INST]more[/INST]"
    assert suffix_text(*mistral, sampled=" hello", finish_reason="length") == "</s>[INST]more[/INST]"
    sampled = '[TOOL_CALLS][{"name": "search", "arguments": {"query": "cats"}, "id": "call00001"}]</s>'
    tools = [tool_schema(search)]
    with_tools = ("mistral", tokenizers.MISTRAL, called())
    assert suffix_text(*with_tools, RESULT, sampled=sampled, tools=tools) == "[TOOL_RESULTS]found[/TOOL_RESULTS]"
    # the tools move to the last user message
    assert suffix_text(*with_tools, RESULT, MORE, sampled=sampled, tools=tools) is None


def test_line_breaks_may_be_added_tokens():
    tokens = (tokenizers.CHATML[0], [*tokenizers.CHATML[1], "\n"])
    sampled = CALL.replace("\n", "") + "<|im_end|>"
    suffix = suffix_text("qwen2_5", tokens, called(), MORE, sampled=sampled)
    assert suffix == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_another_end_of_turn_token_than_the_templates_starts_a_new_sequence():
    chatml = ("chatml", tokenizers.CHATML, answered(), MORE)
    assert suffix_text(*chatml, sampled="hello<|endoftext|>") is None
    glm = ("glm4moe", tokenizers.GLM, answered(), MORE)
    assert suffix_text(*glm, sampled="\n<think></think>\nhello<|user|>") == "\nmore<|assistant|>"
    assert suffix_text(*glm, sampled="\n<think></think>\nhello<|observation|>") is None


def test_dropped_reasoning_starts_a_new_sequence():
    qwen3 = ("qwen3", tokenizers.QWEN3)
    results = "\n<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    think, sampled = "<think>\nwhy\n</think>\n\n", CALL + "<|im_end|>"
    assert suffix_text(*qwen3, called(reasoning_content="why"), RESULT, sampled=think + sampled) == results
    assert suffix_text(*qwen3, called(reasoning_content="why"), MORE, sampled=think + sampled) is None
    assert suffix_text(*qwen3, called(), RESULT, sampled=sampled) == results
    # an empty block is dropped, too
    empty = "<think>\n\n</think>\n\n"
    assert suffix_text(*qwen3, called(reasoning_content=""), RESULT, sampled=empty + sampled) is None
    # and so is one that the generation prompt begins with
    assert suffix_text(*qwen3, called(), RESULT, sampled=sampled, enable_thinking=False) is None
    # a template that knows no reasoning drops it
    chatml = ("chatml", tokenizers.CHATML, answered(reasoning_content="why"), MORE)
    assert suffix_text(*chatml, sampled="<think>why</think>hello<|im_end|>") is None


def test_reasoning_cut_by_length_is_closed_by_the_suffix():
    qwen3_5 = ("qwen3_5_think", tokenizers.QWEN3, answered("", reasoning_content="why"), RESULT)
    results = "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n"
    rest = f"<|im_end|>\n{results}<|im_start|>assistant\n<think>\n"
    assert suffix_text(*qwen3_5, sampled="why", finish_reason="length") == "\n</think>\n\n" + rest
    assert suffix_text(*qwen3_5, sampled="why\n</think>", finish_reason="length") == rest


def test_text_after_a_call_that_is_cut_by_length_starts_a_new_sequence():
    """The history has no place for it: templates write calls last."""
    qwen3 = ("qwen3", tokenizers.QWEN3, called(), RESULT)
    rest = suffix_text(*qwen3, sampled=CALL, finish_reason="length")
    assert rest is not None and rest.startswith("<|im_end|>")
    assert suffix_text(*qwen3, sampled=CALL + "\n<tool_call>\nhalf", finish_reason="length") is None
    assert suffix_text(*qwen3, sampled=CALL + " and", finish_reason="length") is None


def test_templates_that_search_contents_for_markers_are_seen_to_rewrite_them():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + "
        "(m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    )
    template_object = ChatTemplate(make_tokenizer(template, tokenizers.QWEN3))
    ids = np.array([0])
    for content, is_rewritten in (("<think>why</think>hello", True), ("why hello", False)):
        suffix = template_object.suffix(answered(content), [MORE], sampled_ids=ids, finish_reason="length")
        assert (suffix is None) == is_rewritten


def test_messages_that_look_like_sentinels_are_no_trouble():
    words = " ".join(f"Sentinel0x{number:06d}" for number in range(4))
    history = answered(words)
    suffix = suffix_text("chatml", tokenizers.CHATML, history, MORE, sampled=f"{words}<|im_end|>")
    assert suffix == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    history, new = called(reasoning_content="why"), {"role": "user", "content": words}
    sampled = f"<think>\nwhy\n</think>\n\n{CALL}<|im_end|>"
    assert suffix_text("qwen3", tokenizers.QWEN3, history, new, sampled=sampled) is None  # drops the reasoning


def test_messages_are_normalized():
    tokenizer = make_tokenizer(fixture_template("qwen3"), tokenizers.QWEN3)
    template = ChatTemplate(tokenizer)
    plain = template.render([*called(reasoning_content="why"), RESULT])
    [user, assistant], result = called(), dict(RESULT)
    assistant["tool_calls"][0]["function"]["arguments"] = '{"query":"cats"}'  # as OpenAI's clients write them
    parts = [{"type": "text", "text": "hi"}]
    messages = [{**user, "content": parts}, {**assistant, "reasoning": "why", "refusal": None}, result]
    assert np.array_equal(template.render(messages), plain)
    llama = ChatTemplate(make_tokenizer(fixture_template("llama3_1"), tokenizers.LLAMA3))
    for empty in ([], None):
        assert np.array_equal(llama.render([*answered(tool_calls=empty), MORE]), llama.render([*answered(), MORE]))
    [message] = plain_messages([{"role": "assistant", "content": "hello", "reasoning": "why"}])
    assert message["reasoning_content"] == message["thinking"] == "why"  # templates read one or the other


def test_contents_that_are_not_text_are_refused_by_name():
    template = ChatTemplate(make_tokenizer(fixture_template("chatml"), tokenizers.CHATML))
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(UserError, match=r"message 2 \(role 'tool'\): .* part of type 'image_url'; only text"):
        template.render([USER, {"role": "tool", "content": image}])
    with pytest.raises(UserError, match=r"part of type 'input_audio'"):
        template.suffix(
            answered(),
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            sampled_ids=np.array([0]),
            finish_reason="stop",
        )
    for message, what in [
        ({"role": "user", "content": 7}, r"\(role 'user'\): its content must be text, not int"),
        ({"content": "hi"}, r"a message is \{\"role\": \.\.\., \"content\": \.\.\.\}, not \{'content'"),
        ({"role": "assistant", "reasoning": ["why"]}, "its reasoning must be text, not list"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
            r"its tool_calls must be a list of function calls, not \[\{",
        ),
    ]:
        with pytest.raises(UserError, match=f"^message 1.*{what}"):
            template.render([message])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3) | st.sampled_from(["user", "assistant", "{}"]),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.sampled_from(["name", "type", "text"]), values),
    max_leaves=4,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "reasoning_content", "tool_calls", "function", "name"]), JSON | st.text()
    )
    | st.builds(dict, role=st.sampled_from(["user", "assistant", "tool"]), content=JSON, tool_calls=st.lists(JSON))
    | JSON,
    max_size=3,
)


@examples(500, quick=15)
@given(history=MESSAGES, new=MESSAGES)
def test_any_messages_of_a_client_render_or_are_refused(history: Any, new: Any):
    for name, tokens in (("qwen3", tokenizers.QWEN3), ("gptoss", tokenizers.GPT_OSS)):
        template = ChatTemplate(make_tokenizer(fixture_template(name), tokens))
        for act in (
            lambda template=template: template.render(history),
            lambda template=template: template.suffix(
                [USER, *history, *answered()], new, sampled_ids=np.array([5]), finish_reason="stop"
            ),
        ):
            try:
                ids = act()
            except UserError as error:
                assert str(error)
                continue
            assert ids is None or ids.dtype == np.int64


def test_rejected_messages_name_template_roles_and_error():
    tokenizer = make_tokenizer(fixture_template("gemma3"), tokenizers.GEMMA)
    tokenizer.name_or_path = "google/gemma-3-1b-it"
    template = ChatTemplate(tokenizer)
    rejected = (
        r"the chat template of google/gemma-3-1b-it rejected the messages \(roles: user, assistant, tool\): .*alter"
    )
    for act in (
        lambda: template.render([*answered(), RESULT]),
        lambda: template.suffix(answered(), [RESULT], sampled_ids=np.array([0]), finish_reason="stop"),
    ):
        with pytest.raises(UserError, match=rejected):
            act()
    with pytest.raises(UserError, match="not allowed"):  # half of a surrogate pair, which no tokenizer encodes
        template.render([{"role": "user", "content": "\ud800"}])


def test_new_sequence_where_only_sentinels_are_rejected():
    template = (
        "{% for m in messages %}{{ m.content if m.role == 'user' or m.content == 'hello' else raise_exception('no') }}"
        "<|im_end|>{% endfor %}"
    )
    ids = np.array([0])
    chat = ChatTemplate(make_tokenizer(template, tokenizers.CHATML))
    assert chat.suffix(answered(), [MORE], sampled_ids=ids, finish_reason="length") is None


@pytest.mark.parametrize("source", LOADERS)
def test_check_tools_refuses_templates_without_tools(source: str):
    for family in FAMILIES:
        tokenizer = make_tokenizer(LOADERS[source](family.name), family.tokens)
        ChatTemplate(tokenizer).check_tools(TOOLS)
        ResponseParser(tokenizer).check_tools()
    for name, tokens, message in [
        ("gemma3", tokenizers.GEMMA, r"rejected the messages \(roles: user, assistant, tool\)"),
        ("llama3", tokenizers.LLAMA3, "drops tool schemas and tool calls of assistant messages"),
    ]:
        tokenizer = make_tokenizer(LOADERS[source](name), tokens)
        ChatTemplate(tokenizer).check_tools(None)
        with pytest.raises(UserError, match=f"tools need a chat template that renders them, but .*{message}"):
            ChatTemplate(tokenizer).check_tools(TOOLS)
        with pytest.raises(UserError, match=r"known format of tool calls.* Set response_template"):
            ResponseParser(tokenizer).check_tools()


def test_what_a_template_rewrites_is_known_and_can_be_kept():
    tokenizer = make_tokenizer(fixture_template("qwen3"), tokenizers.QWEN3)
    template = ChatTemplate(tokenizer)
    assert template.rewrites(TOOLS) == "drops thoughts before a new user message"
    assert ChatTemplate(tokenizer, kwargs={"enable_thinking": False}).rewrites() == (
        "changes earlier turns before a new user message"
    )
    assert ChatTemplate(make_tokenizer(fixture_template("qwen2_5"), tokenizers.CHATML)).rewrites(TOOLS) is None

    def ids(text: str) -> np.ndarray:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"])

    user, more = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
    for answer, sampled in [
        ({"content": "hello", "reasoning_content": "why"}, "<think>\nwhy\n</think>\n\nhello<|im_end|>"),
        ({"content": "", "reasoning_content": "why"}, "<think>\nwhy<|im_end|>"),
        ({"content": "hello", "reasoning_content": ""}, "<think>\n\n</think>\n\nhello<|im_end|>"),
    ]:
        history = [user, {"role": "assistant", **answer}]
        arguments = {"sampled_ids": ids(sampled), "finish_reason": "stop"}
        assert template.suffix(history, [more], **arguments) is None
        kept = template.suffix(history, [more], **arguments, keep_history=True)
        assert tokenizer.decode(kept) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_errors_of_malformed_calls_are_tool_messages_where_the_template_takes_them():
    strict = "{% for m in messages %}{{ raise_exception('no call') if m.role == 'tool' else m.content }}{% endfor %}"
    for template, takes in ((fixture_template("qwen3"), True), (strict, False)):
        assert ChatTemplate(make_tokenizer(template, tokenizers.QWEN3)).takes_errors_as_results is takes
