"""Tools over a scripted model: what is called, what the model gets back, how trajectories end."""

import json
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import UserError
from cohort.records import Trajectory, join_calls
from playing import ScriptedModel, call, load, play, replies, turns_tokenizer
from tool_families import tokenizer_of

TOOLS = '''
import asyncio, threading, time
import numpy as np

started = threading.Barrier(2, timeout=30)

def look(key: str) -> str:
    """Look up a value.

    Args:
        key: name of the value
    """
    return {"a": "1", "b": "2"}[key]

async def add(x: int, y: int = 1) -> dict:
    """Add two numbers.

    Args:
        x: the first
        y: the second
    """
    await asyncio.sleep(0)
    return {"sum": x + y}

def meet() -> float:
    """Return when two calls of this tool run at the same time."""
    started.wait()
    return 0.5

def hang() -> str:
    """Never return."""
    time.sleep(60)

async def hang_too() -> str:
    """Never return."""
    await asyncio.sleep(60)

def leave() -> str:
    """Exit."""
    raise SystemExit(3)

async def leave_too() -> str:
    """Exit."""
    raise SystemExit(3)

class Halt(BaseException):
    pass

def halt() -> str:
    """Raise what is no exception."""
    raise Halt("at once")

async def halt_too() -> str:
    """Raise what is no exception."""
    raise Halt("at once")

def give_up() -> str:
    """Raise what a closed generator gets."""
    raise GeneratorExit("enough")

async def give_up_too() -> str:
    """Raise what a closed generator gets."""
    raise GeneratorExit("enough")

def nested() -> list:
    """Return a list that has no text."""
    result = []
    for _ in range(100_000):
        result = [result]
    return result

def stop_iterating() -> str:
    """Raise what no coroutine may raise."""
    return next(iter(()))

def flood() -> str:
    """Return megabytes."""
    return "xyz " * 1_000_000

def array() -> list:
    """Return what is not JSON."""
    return np.arange(3)

def parts() -> list:
    """Return text in parts."""
    return [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

def picture() -> list:
    """Return an image."""
    return [{"type": "text", "text": "look:"}, {"type": "image", "image": object()}]

def records() -> list:
    """Return data that has types."""
    return [{"type": "text", "id": 1}, {"type": "file", "file": "a"}, {"type": ["x"]}]

def half() -> str:
    """Return half a surrogate pair."""
    return "a\\ud83db"

def raise_half() -> str:
    """Raise half a surrogate pair."""
    raise ValueError("a\\ud83db")

async def linger() -> str:
    """Wait until the call is cancelled."""
    try:
        await asyncio.sleep(60)
    finally:
        open("cancelled", "w").close()

def raw() -> bytes:
    """Return bytes."""
    return b"1"

def no_hints(key):
    """Look up.

    Args:
        key: a key
    """
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.py").write_text(TOOLS)
    return tmp_path


def trajectory_of(folder: Path, *texts: str, tools: str, **rollout: Any) -> Trajectory:
    names = [f"t.py:{name}" for name in tools.split()]
    (group,) = play(folder, replies(*texts), [{"prompt": "How much?"}], tools=names, num_generations=2, **rollout)
    return group.trajectories[0]


def result(folder: Path, name: str, arguments: str = "{}", **rollout: Any) -> str:
    """What the model gets for one call."""
    trajectory = trajectory_of(folder, call(name, arguments), "Done.", tools=name, **rollout)
    assert trajectory.end == "answer", trajectory.error
    return trajectory.messages[1]["content"]


def test_results_follow_in_the_order_of_the_calls(folder: Path):
    script = [call("add", '{"x": 2, "y": 3}') + call("look", '{"key": "b"}'), "It is 7."]
    trajectory = trajectory_of(folder, *script, tools="look add")
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool", "tool", "assistant"]
    first, second = trajectory.messages[1:3]
    assert (first["name"], first["content"]) == ("add", '{"sum": 5}')
    assert (second["name"], second["content"]) == ("look", "2")
    ids = [one["id"] for one in trajectory.messages[0]["tool_calls"]]
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert (trajectory.end, trajectory.error, trajectory.rewards) == ("answer", None, {})
    assert trajectory.stats is not None
    assert (trajectory.stats.tool_calls, trajectory.stats.tool_errors, trajectory.stats.attempts) == (2, 0, 1)


def test_the_context_of_the_second_call_is_the_first_with_the_results(folder: Path):
    one, two = trajectory_of(folder, call("look", '{"key": "a"}'), "1.", tools="look").calls
    text = turns_tokenizer().decode(two.context_ids.tolist())
    sampled = [*one.context_ids.tolist(), *one.token_ids.tolist()]
    assert two.context_ids[: len(sampled)].tolist() == sampled
    assert text.endswith("<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith('<|im_start|>system\nTools:{"type": "function", "function": {"name": "look"')


def test_the_system_prompt_comes_first(folder: Path):
    model = ScriptedModel(replies("Hi."))
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hello"}]
    rows = [{"prompt": "Hello"}, {"prompt": chat}]
    play(folder, model, rows, tools=["t.py:look"], data={"system_prompt": "Be brief."})
    expected = [f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\nHello" for text in ("Be brief.", "Own.")]
    assert all(text in context for text, context in zip(expected, model.contexts[::2], strict=True))


def test_calls_of_a_reply_run_at_the_same_time(folder: Path):
    (group,) = play(folder, replies(call("meet") * 2, "Done."), [{"prompt": "?"}], tools=["t.py:meet"])
    assert [m["content"] for t in group.trajectories for m in t.messages if m["role"] == "tool"] == ["0.5"] * 4


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("look", '{"key": "c"}', "Error: KeyError: 'c'"),
        ("look", "{}", "Error: tool 'look' needs key"),
        ("look", '{"kye": "a"}', "Error: tool 'look' has no parameter 'kye'; it takes key"),
        ("look", '{"key": [1]}', "Error: tool 'look': key must be of type string, not list [1]"),
        ("add", '{"x": true}', "Error: tool 'add': x must be of type integer, not bool True"),
        ("add", '{"x": 2}', '{"sum": 3}'),
        ("leave", "{}", "Error: RuntimeError: SystemExit: 3"),
        ("leave_too", "{}", "Error: RuntimeError: SystemExit: 3"),
        ("halt", "{}", "Error: RuntimeError: Halt: at once"),
        ("halt_too", "{}", "Error: RuntimeError: Halt: at once"),
        ("give_up", "{}", "Error: RuntimeError: GeneratorExit: enough"),
        ("give_up_too", "{}", "Error: RuntimeError: GeneratorExit: enough"),
        ("stop_iterating", "{}", "Error: RuntimeError: coroutine raised StopIteration"),
        ("array", "{}", "[0 1 2]"),
        ("parts", "{}", "one two"),
        ("records", "{}", '[{"type": "text", "id": 1}, {"type": "file", "file": "a"}, {"type": ["x"]}]'),
        ("half", "{}", "a\ufffdb"),
        ("raise_half", "{}", "Error: ValueError: a\ufffdb"),
    ],
)
def test_results_and_errors_as_the_model_gets_them(folder: Path, name: str, arguments: str, expected: str):
    assert result(folder, name, arguments) == expected


def test_a_result_without_a_text_is_an_error_to_the_model(folder: Path):
    trajectory = trajectory_of(folder, call("nested"), "Done.", tools="nested")
    assert trajectory.messages[1]["content"].startswith(
        "Error: tool 'nested' returned a list that has no text: RecursionError: "
    )
    assert trajectory.end == "answer" and trajectory.stats is not None and trajectory.stats.tool_errors == 1


@pytest.mark.parametrize("name", ["hang", "hang_too"])
def test_a_tool_that_hangs_is_an_error_to_the_model(folder: Path, name: str):
    assert result(folder, name, tool_timeout_s=0.1) == f"Error: tool '{name}': did not return within 0.1 s"


def test_a_tool_that_does_not_exist_is_an_error_to_the_model(folder: Path):
    trajectory = trajectory_of(folder, call("lok"), "Done.", tools="look")
    assert trajectory.messages[1]["content"] == "Error: there is no tool 'lok'; did you mean look? Tools: look"
    assert trajectory.stats is not None
    assert (trajectory.stats.tool_calls, trajectory.stats.tool_errors) == (1, 1)


def test_a_long_result_is_cut_and_marked(folder: Path):
    text = result(folder, "flood", max_tool_tokens=50)
    kept, _, marker = text.rpartition("\n")
    assert len(turns_tokenizer()(kept)["input_ids"]) == 50
    assert kept.startswith("xyz xyz ") and marker == f"[... {4_000_000 - len(kept):,} more characters were cut]"


@pytest.mark.parametrize(("name", "what"), [("picture", "content of type 'image'"), ("raw", "bytes")])
def test_a_result_that_is_not_text_is_refused_by_name(folder: Path, name: str, what: str):
    trajectory = trajectory_of(folder, call(name), "Done.", tools=name)
    assert trajectory.end == "environment_error" and trajectory.error is not None
    assert f"tool '{name}' returned {what}; only text is supported" in trajectory.error


def test_a_failed_call_cancels_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Before the trajectory is repeated, so that nothing of the first attempt goes on."""
    monkeypatch.chdir(folder)
    cancelled = []

    def script(context: str, key: Any) -> str:
        cancelled.append((folder / "cancelled").exists())
        return call("raw") + call("linger") if len(cancelled) <= 2 else "Done."

    tools = ["t.py:raw", "t.py:linger"]
    (group,) = play(folder, script, [{"prompt": "?"}], tools=tools, environment_retries=1)
    assert [one.end for one in group.trajectories] == ["answer"] * 2
    assert cancelled == [False, False, True, True]


def test_a_malformed_call_is_answered_and_counted(folder: Path):
    trajectory = trajectory_of(folder, "<tool_call>{look}</tool_call>", "Sorry.", tools="look")
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool", "assistant"]
    assert trajectory.stats is not None
    assert (trajectory.stats.malformed_calls, trajectory.stats.tool_calls) == (1, 0)


def test_a_malformed_call_beside_a_good_one_is_answered_with_its_result(folder: Path):
    both = call("look", '{"key": "a"}') + "<tool_call>{look}</tool_call>"
    trajectory = trajectory_of(folder, both, "Sorry.", tools="look")
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool", "assistant"]
    assert trajectory.messages[1]["content"].startswith("1\n")
    assert trajectory.stats is not None and trajectory.stats.malformed_calls == 1


def test_a_reply_that_is_cut_ends_the_trajectory(folder: Path):
    trajectory = trajectory_of(folder, '<tool_call>{"name": "look"...', tools="look")
    assert (trajectory.end, len(trajectory.calls)) == ("length", 1)
    assert trajectory.stats is not None and trajectory.stats.malformed_calls == 0


def test_a_whole_call_before_the_one_that_is_cut_is_not_made_either(folder: Path):
    trajectory = trajectory_of(folder, call("look", '{"key": "a"}') + '<tool_call>{"name": "look"...', tools="look")
    assert (trajectory.end, len(trajectory.calls)) == ("length", 1)
    assert trajectory.stats is not None and trajectory.stats.tool_calls == 0


@pytest.mark.parametrize("keep_thoughts", [False, True])
@pytest.mark.parametrize("arguments", ['{"key": "a"}', "{}"])
def test_thoughts_that_the_template_drops_can_be_kept(folder: Path, monkeypatch, arguments: str, keep_thoughts: bool):
    """QwQ's template drops them once a result follows; also with a call without arguments, which is an error here."""
    monkeypatch.setattr("playing.turns_tokenizer", lambda: tokenizer_of("qwq"))
    texts = ("Why.\n</think>\n\n" + call("look", arguments), "So.\n</think>\n\nDone.")
    trajectory = trajectory_of(folder, *texts, tools="look", keep_thoughts=keep_thoughts)
    assert (trajectory.end, len(trajectory.calls)) == ("answer", 2)
    assert len(join_calls(trajectory.calls)) == (1 if keep_thoughts else 2)
    assert trajectory.stats is not None and trajectory.stats.rewritten == (0 if keep_thoughts else 1)


def test_it_ends_by_turns_after_the_last_calls_are_executed(folder: Path):
    trajectory = trajectory_of(folder, call("look", '{"key": "a"}'), tools="look", max_turns=2)
    assert (trajectory.end, len(trajectory.calls)) == ("max_turns", 2)
    assert trajectory.stats is not None and trajectory.stats.tool_calls == 2
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool"] * 2


def test_it_ends_by_tokens(folder: Path):
    trajectory = trajectory_of(folder, call("look", '{"key": "a"}'), tools="look", max_trajectory_tokens=100)
    assert trajectory.end == "length" and not trajectory.is_broken
    first, *_, last = trajectory.calls
    assert len(last.context_ids) + len(last.token_ids) - len(first.context_ids) <= 100


def test_trajectories_proceed_independently(folder: Path):
    """One never gets its second reply; the others do not wait for it."""

    def script(context: str, key: Any) -> str | None:
        if key.index == 0 and key.turn == 1:
            return None
        return call("look", '{"key": "a"}') if key.turn < 3 else "Done."

    (group,) = play(folder, script, [{"prompt": "?"}], tools=["t.py:look"], num_generations=3, trajectory_timeout_s=0.5)
    assert [(t.end, len(t.calls)) for t in group.trajectories] == [("timeout", 1), ("answer", 4), ("answer", 4)]


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (["t.py:no_hints"], "rollout.tools[0]: 't.py:no_hints': tool 'no_hints': parameter 'key' has no type hint"),
        (["t.py:look", "t.py:look"], "rollout.tools[1]: 't.py:look': another tool is also named 'look'"),
        (["t.py:lok"], "did you mean look?"),
    ],
)
def test_tools_that_cannot_be_used(folder: Path, tools: list[str], expected: str):
    with pytest.raises(UserError) as caught:
        load(folder, tools=tools)
    assert expected in str(caught.value).replace(f"{folder}/", "")


def test_a_template_without_tools_is_refused_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    monkeypatch.setattr(turns_tokenizer(), "chat_template", template)
    with pytest.raises(UserError, match=r"rollout\.tools: tools need a chat template .* drops tool schemas"):
        load(folder, tools=["t.py:look"])


def test_messages_are_json(folder: Path):
    assert json.dumps(trajectory_of(folder, call("look", '{"key": "a"}'), "1.", tools="look").messages)
