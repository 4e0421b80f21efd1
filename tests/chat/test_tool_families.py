"""Families of models with tools: every reply is read as it was meant, and sequences are what templates render."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.chat import ChatTemplate, Reply
from conversations import MORE, Conversation
from playing import save_model
from runs import metric, train
from selection import mostly_slow, slow
from tiny import write_jsonl
from tool_families import CATS, FAMILIES, TOOLS, USER, VALUES, Case, ToolFamily, cases, reader_of, tokenizer_of

NAMES = [family.name for family in FAMILIES]
over_families = pytest.mark.parametrize("family", FAMILIES, ids=NAMES)


def ids_of(family: ToolFamily, text: str) -> np.ndarray:
    return np.array(tokenizer_of(family.name)(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def read(family: ToolFamily, ids: np.ndarray, finish: str) -> Reply:
    context_ids, parser = reader_of(family.name)
    return parser.parse(ids, context_ids=context_ids, tools=TOOLS, finish_reason=finish)


def calls_of(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in reply.tool_calls]


def wrong(family: ToolFamily, case: Case) -> list[str]:
    """What a reply should be and is not."""
    reply = read(family, ids_of(family, case.text), case.finish)
    said = {"calls": calls_of(reply), "malformed": bool(reply.errors), "cut": reply.is_cut}
    meant = {"calls": list(case.calls), "malformed": case.outcome == "malformed", "cut": case.outcome == "cut off"}
    if case.content is not None:
        said["content"], meant["content"] = reply.content, case.content
    if case.outcome != "malformed" and case.thought is not None:
        said["thought"], meant["thought"] = reply.reasoning or "", case.thought
    found = [f"{key} is {said[key]!r}, not {meant[key]!r}" for key in said if said[key] != meant[key]]
    if case.outcome == "malformed" and not any(case.quoted in error for error in reply.errors):
        found.append(f"{reply.errors} do not quote the model")
    return [f"{case.name}, {case.text!r}: {text}" for text in found]


@over_families
def test_replies_are_read_as_they_are_meant(family: ToolFamily):
    replies = cases(family)
    assert len(replies) >= 12
    assert [text for case in replies for text in wrong(family, case)] == []


@pytest.mark.parametrize("every", mostly_slow([False, True], False, reason="one reply of several calls is cut"))
@over_families
def test_law_what_is_executed_of_a_prefix_is_a_prefix_of_the_calls(family: ToolFamily, every: bool):
    thought = "why" if family.thought else ""
    number = 1 if family.syntax.single else 3
    several = [VALUES["nested"][0], CATS, VALUES["braces in a string"][0]][:number]
    replies = [(family.reply(thought, "" if family.syntax.alone else "Look.", several), several)]
    if every:
        replies += [(case.text, list(case.calls)) for case in cases(family) if case.outcome in ("calls", "answer")]
    for text, calls in replies:
        ids = ids_of(family, text)
        for end in range(0, len(ids), 1 if every else 5):
            for finish in ["stop", "length"] if every else [("stop", "length")[end % 2]]:
                reply, start = read(family, ids[:end], finish), tokenizer_of(family.name).decode(ids[:end])
                made = calls_of(reply)
                assert made == list(calls[: len(made)]), (finish, start)
                if finish == "length" and not start.endswith(family.syntax.inside or "never"):
                    assert not reply.errors, start  # what is cut is not malformed


@over_families
def test_law_sequences_are_what_the_template_renders_or_a_documented_exception(family: ToolFamily):
    template = replace(family, name=family.template or family.name)
    chat = Conversation(template, "fixture", [USER], TOOLS, **family.kwargs)
    two = [CATS] if family.syntax.single else VALUES["two calls"]
    rewrites = []
    for content, calls in (("", [CATS]), ("", two), ("Two cats.", []), ("Bye.", [])):
        opened = not family.thought or family.thought[0] or chat.text(chat.context_ids).rstrip().endswith(_OPENINGS)
        writer = family if opened else replace(family, thought=None)
        thought = "look" if writer.thought else ""
        sampled = writer.reply(thought, content, calls)
        chat.sample(sampled)
        assert (chat.reply.content, chat.reply.reasoning or "", calls_of(chat.reply)) == (content, thought, list(calls))
        new = chat.results() or [MORE]
        whole = chat.rendered(new)
        rewritten = not whole.startswith(chat.text(chat.context_ids) + sampled)
        assert (chat.add(*new) is None) == rewritten
        assert chat.text(chat.context_ids) == whole
        rewrites.append(rewritten)
    assert tuple(rewrites[:3]) == family.rewrites


_OPENINGS = ("<think>", "<|START_THINKING|>")
CODE = '''
def search(query: str) -> str:
    """Search.

    Args:
        query: words
    """
    return query

def long(completions, **kwargs):
    return [float(len(str(text))) for text in completions]
'''


@over_families
def test_tools_are_accepted_and_a_model_can_be_told_why_its_call_is_malformed(family: ToolFamily):
    template = ChatTemplate(tokenizer_of(family.name), kwargs=family.kwargs)
    template.check_tools(TOOLS)
    reader_of(family.name)[1].check_tools()
    reply = read(family, ids_of(family, family.turn("", "", family.syntax.malformed[0])), "stop")
    answer = {"role": "tool" if template.takes_errors_as_results else "user", "content": "NOT A CALL"}
    ids = template.render([USER, reply.message, answer], TOOLS)
    assert "NOT A CALL" in tokenizer_of(family.name).decode(ids)


@pytest.mark.parametrize(
    ("name", "malformed", "good"),
    [
        ("qwen3", '<tool_call>{"nme": 1}</tool_call>', '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        (
            "glm4_5",
            "<tool_call>now\n" + "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n" * 2 + "</tool_call>",
            "<tool_call>now\n</tool_call>",
        ),
        ("olmo3", "<function_calls>now(</function_calls>", "<function_calls>now()</function_calls>"),
    ],
)
def test_a_malformed_call_ends_where_it_says(name: str, malformed: str, good: str):
    """The call after it is made, and a limit that comes later has not cut it off."""
    (family,) = (f for f in FAMILIES if f.name == name)
    reply = read(family, ids_of(family, malformed + good), "stop")
    assert (calls_of(reply), len(reply.errors)) == ([("now", {})], 1)
    assert malformed in reply.errors[0] and good not in reply.errors[0]
    reply = read(family, ids_of(family, f"{malformed} So I"), "length")
    assert (len(reply.errors), reply.is_cut) == (1, False)


@pytest.mark.parametrize(
    "family",
    [
        family if family.name in ("qwen3", "mistral_v7") else pytest.param(family, marks=slow("two families train"))
        for family in FAMILIES
    ],
    ids=NAMES,
)
def test_a_run_with_tools_trains(family: ToolFamily, tmp_path: Path):
    (tmp_path / "tools.py").write_text(CODE)
    save_model(tmp_path / "base", tokenizer_of(family.name))
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "find cats"}, {"prompt": "find dogs"}])
    lengths = {"max_prompt_tokens": 4000, "max_completion_tokens": 6, "max_turns": 2}
    train(
        {
            "model": {"path": str(tmp_path / "base")},
            "data": {"path": str(tmp_path / "train.jsonl"), "chat_template_kwargs": dict(family.kwargs)},
            "rollout": {"num_generations": 2, "engine": "local", "tools": [f"{tmp_path}/tools.py:search"], **lengths},
            "rewards": [{"use": f"{tmp_path}/tools.py:long"}],
            "train": {"steps": 1, "prompts_per_step": 2},
            "run": {"dir": str(tmp_path / "run")},
        }
    )
    assert metric(tmp_path / "run", "grad_norm")
