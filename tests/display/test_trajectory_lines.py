"""Trajectories as text: every token once, with its mark."""

from dataclasses import replace

import numpy as np

from cohort.display.trajectory import conversation_lines, end_line, reward_line, segments, trajectory_lines
from cohort.records import ModelCall, Prompt, ScoredGroup, Trajectory, TurnStats


def a_call(context: str, sampled: str, *, trained: bool = True, cut: bool = False) -> ModelCall:
    """A call whose tokens are characters."""
    return ModelCall(
        context_ids=np.array([ord(c) for c in context]),
        token_ids=np.array([ord(c) for c in sampled]),
        sampling_logprobs=np.zeros(len(sampled)),
        finish_reason="length" if cut else "stop",
        policy_version=0,
        trained=trained,
    )


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


LOOK = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"key": "ä"}}}]}
RESULT = {"role": "tool", "name": "look", "content": "1"}
ANSWER = {"role": "assistant", "content": "one"}
TWO_TURNS = Trajectory(
    calls=(a_call("Q?\n", "call$"), a_call("Q?\ncall$<1>", "one$")),
    messages=(LOOK, RESULT, ANSWER),
    text="",
    end="answer",
    stats=TurnStats(tool_calls=2, tool_errors=1, attempts=2, model_s=1.5, environment_s=0.25),
)


def shown(trajectory: Trajectory, **options: int) -> list[str]:
    options = {"width": 80, "max_lines": 12, **options}
    return [text for _, text in trajectory_lines(trajectory, decode, **options)]


def test_prompt_turns_tool_calls_and_results():
    assert shown(TWO_TURNS) == [
        "prompt, 3 tokens",
        "  · Q?",
        "turn 1, 5 tokens trained, stop",
        "  ▌ call$",
        '  → look(key="ä")',
        "tool look, 3 tokens masked",
        "  · <1>",
        "turn 2, 4 tokens trained, stop",
        "  ▌ one$",
    ]


def test_results_after_the_last_turn():
    trajectory = replace(TWO_TURNS, calls=TWO_TURNS.calls[:1], messages=(LOOK, RESULT), end="max_turns")
    assert shown(trajectory)[-3:] == [
        '  → look(key="ä")',
        "after the last turn, not seen by the model",
        "  tool look: 1",
    ]


def test_simulated_user_and_rewritten_history():
    calls = (
        a_call("U", "hi", trained=False),
        a_call("P", "a"),
        a_call("Uhi+", "yo", trained=False, cut=True),
        a_call("R", "b", cut=True),
    )
    assert shown(replace(TWO_TURNS, calls=calls, messages=())) == [
        "context of a call that is not trained, 1 token",
        "  · U",
        "model call 1, 2 tokens not trained, stop",
        "  · hi",
        "prompt, 1 token",
        "  · P",
        "turn 1, 1 token trained, stop",
        "  ▌ a",
        "context of a call that is not trained (continued), 1 token",
        "  · +",
        "model call 3, 2 tokens not trained, cut by the length limit",
        "  · yo",
        "history was rewritten: a new sequence starts, 1 token masked",
        "  · R",
        "turn 2, 1 token trained, cut by the length limit",
        "  ▌ b",
    ]


def test_marked_tokens_are_those_that_are_trained():
    trained = [s.token_ids.tolist() for s in segments(TWO_TURNS) if s.trained]
    assert np.concatenate(trained).tolist() == TWO_TURNS.sampled_token_ids.tolist()


def test_long_text_is_wrapped_and_cut_and_nothing_reaches_the_terminal():
    trajectory = replace(TWO_TURNS, calls=(a_call("x" * 50 + "\x1b[31m\n" + "\n".join("abcdefgh"), "y"),), messages=())
    lines = shown(trajectory, width=24, max_lines=6)
    assert lines[1:] == [
        *["  · " + "x" * 20] * 2,
        "  · [6 more lines]",
        "  · f",
        "  · g",
        "  · h",
        "turn 1, 1 token trained, stop",
        "  ▌ y",
    ]
    assert "\\x1b[31m" in "".join(shown(trajectory, width=200))


def test_how_it_ended():
    assert end_line(TWO_TURNS) == (
        "end: answer; 2 turns, 9 trained tokens; 2 tool calls, 1 failed, 1 retry; 1.50 s in the model, 0.25 s elsewhere"
    )
    assert end_line(Trajectory.single_turn(a_call("Q", "A"), text="A")) == "end: answer; 1 turn, 1 trained token"


def test_rewards_by_part():
    trajectory = replace(TWO_TURNS, step_rewards=(0.5, 1.0), metrics={"guesses": 3.0})
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array([1]), columns={})
    parts = {"exact": np.array([1.0, np.nan]), "Game": np.array([0.5, np.nan])}
    group = ScoredGroup(
        prompt=prompt, trajectories=(trajectory, TWO_TURNS), rewards=np.array([2.0, np.nan]), reward_parts=parts
    )
    assert reward_line(group, 0, {"exact": 1.0, "Game": 2.0}) == (
        "reward: 2 = exact 1, Game 0.5 (weight 2); by turn: 0.5, 1; metrics: guesses 3"
    )
    assert reward_line(group, 1, {}) == "reward: not scored"


def test_a_conversation_has_a_line_per_message():
    assert conversation_lines(TWO_TURNS.messages) == [
        'assistant: → look(key="ä")',
        "tool look: 1",
        "assistant: one",
    ]


def test_lines_are_broken_at_spaces_and_keep_every_character():
    text = "Look up what a person wants-to have:  \tor what it costs. " + "x" * 30
    trajectory = replace(TWO_TURNS, calls=(a_call(text, "y"),), messages=())
    lines = [line.removeprefix("  · ") for line in shown(trajectory, width=24) if line.startswith("  · ")]
    assert lines[0] == "Look up what a "
    assert "".join(lines) == text.replace("\t", "\\t")
    assert max(map(len, lines)) <= 20
