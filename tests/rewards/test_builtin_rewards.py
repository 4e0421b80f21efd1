"""The rewards choice, number, exact_set, regex and json_schema on literal cases."""

import dataclasses
import json
import pickle
import sys

import pytest

from builtin_rewards import Builtin, load_builtin
from cohort.config import RewardConfig, load_config
from cohort.errors import UserError
from cohort.rewards import RewardRunner, build_rewards
from cohort.rewards.completion_text import after_thinking, completion_text
from cohort.trainer.inputs import build_inputs
from commands import set_up
from reward_samples import MESSAGES, group, reward
from tiny import copy_task_rows, write_jsonl


def test_choice_arguments():
    f = Builtin("choice")
    assert f(["B", "B", "B"], answer=[1, "0", None], first_number=0) == [1.0, 0.0, None]
    assert f(["B", "B"], gold=[2, 2.0], answer_column="gold", first_number=1) == [1.0, 1.0]
    assert f(["I pick C; not D", "none"], answer=["C", "C"], pattern=r"pick (\w)") == [1.0, 0.0]
    assert f(["The answer is E"], answer=["D"], letters="ABCD") == [0.0]
    with pytest.raises(UserError, match=r"column 'answer' holds 1, which is none of the choices .*first_number"):
        f(["B"], answer=[1])
    with pytest.raises(UserError, match="holds 'E', which is none of the choices ABCD"):
        f(["B"], answer=["E"], letters="ABCD")


def test_a_long_text_and_a_long_number():
    assert Builtin("number")(["#### " * 5000 + "7", "9" * 500], answer=[7, 1]) == [1.0, 0.0]


def test_number_tolerances_are_exact():
    f = Builtin("number")
    assert f(["1.1", "1.11", "0.9"], answer=[1, 1, 1], abs_tol=0.1) == [1.0, 0.0, 1.0]
    assert f(["110", "110.1"], answer=[100, 100], rel_tol=0.1) == [1.0, 0.0]
    big = 12345678901234567890
    assert f([str(big), str(big + 1)], answer=[str(big)] * 2, rel_tol=0.0) == [1.0, 0.0]
    assert f(["x=3 y=4", "y"], answer=[3, 3], pattern=r"x=(\d)") == [1.0, 0.0]
    with pytest.raises(UserError, match="column 'answer' holds 'many', which is not plainly a number: a number is"):
        f(["1"], answer=["many"])


def test_exact_set():
    f = Builtin("exact_set")
    assert f(["b, a", "a,b,a", "a", "", "A,b"], answer=["a,b"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert f(["<think>c</think>b, a"], answer=[["a", "b"]]) == [1.0]
    assert f(["2;1", "1"], gold=[[1, 2], None], answer_column="gold", separator=";") == [1.0, None]
    assert f(["A, B", "B"], answer=["b,a"] * 2, ignore_case=True) == [1.0, 0.0]
    listed = ["first [a], then [a, b]", "no list", "[]"]
    assert f(listed, answer=["b,a", "b,a", ""], pattern=r"\[([^\]]*)\]") == [1.0, 0.0, 1.0]


def test_regex():
    f = Builtin("regex")
    assert f(["a cat\nsat", "a dog", ""], pattern="^sat") == [1.0, 0.0, 0.0]
    assert f([" cat\n", "a cat"], pattern="cat", whole=True) == [1.0, 0.0]
    assert f(["I am sorry", "fine"], pattern="(?i)SORRY", negate=True) == [0.0, 1.0]
    assert f([[{"role": "assistant", "content": "cat"}]], pattern="cat") == [1.0]


@pytest.mark.parametrize(("reward", "answer"), [(Builtin("number"), "7"), (Builtin("choice"), "B")])
def test_an_answer_is_read_in_the_last_100_000_characters(reward, answer):
    assert reward([answer + "\n" * 99_999, answer + "\n" * 100_000], answer=[answer] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("package", "extra", "config"),
    [
        ("jsonschema", "json-schema", RewardConfig(use="json_schema", args={"schema": {"type": "object"}})),
        ("reasoning_gym", "reasoning-gym", RewardConfig(use="reasoning_gym")),
        ("openai", "judge", RewardConfig(use="model", args={"url": "http://host"})),
    ],
)
def test_a_missing_package_is_named_before_the_run(monkeypatch, package, extra, config):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"needs the package {package}; install it with `pip .* 'cohort-rl\[{extra}\]'"
    ):
        build_rewards([config], columns=["answer", "metadata"], max_completion_tokens=8)


@pytest.mark.parametrize(
    ("use", "args", "column", "values", "texts", "expected"),
    [
        ("choice", {"answer_column": "pattern"}, "pattern", ["A", "B"], ["B", "B"], [0.0, 1.0]),
        ("number", {"answer_column": "abs_tol"}, "abs_tol", [7, 8], ["8", "8"], [0.0, 1.0]),
        ("exact", {"answer_column": "pattern"}, "pattern", ["x", "y"], ["y", "y"], [0.0, 1.0]),
        ("exact", {"answer_column": "completions"}, "completions", ["x", "y"], ["y", "y"], [0.0, 1.0]),
        ("exact", {"answer_column": "completion"}, "completion", ["x", "y"], ["y", "y"], [0.0, 1.0]),
        ("exact_set", {"answer_column": "separator"}, "separator", ["a", "b"], ["b", "b"], [0.0, 1.0]),
        ("math", {"answer_column": "deadline_s"}, "deadline_s", [7, 8], ["8", "8"], [0.0, 1.0]),
        (
            "open_r1.code_format",
            {"language_column": "language"},
            "language",
            ["c", "java"],
            ["<think>\nx\n</think>\n<answer>\n```java\n1```\n</answer>"] * 2,
            [0.0, 1.0],
        ),
        pytest.param(
            "json_schema",
            {"schema_column": "schema"},
            "schema",
            [{"type": "array"}, {"type": "number"}],
            ["1", "1"],
            [0.0, 1.0],
            marks=pytest.mark.extras,
        ),
    ],
)
def test_a_column_may_have_the_name_of_an_argument(use, args, column, values, texts, expected):
    functions = build_rewards([RewardConfig(use=use, args=args)], columns=[column], max_completion_tokens=8)
    groups = [group("q", [text], **{column: value}) for text, value in zip(texts, values, strict=True)]
    assert [scored.rewards[0] for scored in RewardRunner(functions, columns=[column]).score(groups)] == expected


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 40}}}]}
RESULT = {"role": "tool", "content": "42"}


FINALS = {  # the answer 42 as each of them reads it
    "So 42.": {"math": 42, "number": 42},
    "42": {"exact": "42", "exact_set": ["42"]},
    r"\boxed{42}": {"trl.accuracy": "42", "open_r1.accuracy": "42"},
}


def test_what_a_tool_returns_is_not_the_answer():
    """A limit may end a trajectory after a tool's message."""
    golds = {use: gold for finals in FINALS.values() for use, gold in finals.items()}
    configs = [RewardConfig(use=use, name=use, args={"answer_column": use}) for use in golds]
    runner = RewardRunner(build_rewards(configs, columns=list(golds), max_completion_tokens=8))
    for final, uses in FINALS.items():
        answered = [CALL, RESULT, {"role": "assistant", "content": final}]
        for content in ("What is 40 + 2?", MESSAGES):
            [scored] = runner.score([turns(content, [CALL, RESULT], answered, **golds)])
            for use in uses:
                assert scored.reward_parts[use].tolist() == [0.0, 1.0], use


def turns(content, *transcripts, **columns):
    """A group of trajectories of several turns."""
    made = group(content, ["a"] * len(transcripts), **columns)
    trajectories = [
        dataclasses.replace(
            trajectory,
            messages=tuple(messages),
            text="\n".join(m["content"] or '<call>{"a": 42}</call>' for m in messages if m["role"] == "assistant"),
        )
        for trajectory, messages in zip(made.trajectories, transcripts, strict=True)
    ]
    return dataclasses.replace(made, trajectories=tuple(trajectories))


def test_the_text_of_several_turns_is_a_plain_text_to_others():
    seen = []

    def f(completions):
        seen.extend(pickle.loads(pickle.dumps(completions)))
        return [0.0]

    functions = [reward(f, name="f"), reward(load_builtin("regex", {"pattern": "<call>"}))]
    [scored] = RewardRunner(functions).score([turns("q", [CALL, RESULT])])
    assert seen == ['<call>{"a": 42}</call>'] and type(seen[0]) is str and scored.rewards.tolist() == [1.0]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}, RESULT]
    assert [completion_text(c) for c in (parts, [RESULT], [], [{"content": None}])] == ["42", "", "", ""]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.extras
def test_json_schema():
    f = Builtin("json_schema")
    texts = [
        '{"n": 1}',
        '{"n": "1"}',
        "{}",
        "no JSON",
        'So:\n```json\n{"n": 2}\n```\nDone.',
        '<think>{</think>{"n": 3}',
    ]
    assert f(texts, schema=SCHEMA) == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert f(["NaN", "1e999", "[" * 100_000], schema={"type": "number"})[::2] == [0.0, 0.0]
    schemas = [json.dumps(SCHEMA), SCHEMA, None, '{"type": "array"}']
    assert f(['{"n": 1}'] * 4, schema_column="s", s=schemas) == [1.0, 1.0, None, 0.0]
    with pytest.raises(UserError, match="column 's' holds 'x': not JSON"):
        f(["1"], schema_column="s", s=["x"])


@pytest.mark.extras
def test_json_schema_takes_bounded_time():
    f = Builtin("json_schema")
    fenced = "```json\n[1]" + " " * 300_000 + "\n```"
    assert f(["[" + "1," * 99_998 + end for end in ("11]", "111]")] + [fenced], schema={}) == [1.0, 0.0, 1.0]
    many = json.dumps([{"a": i} for i in range(15_000)])
    assert f([many, many[:-1] + ', {"a": 7.0}]'], schema={"uniqueItems": True}) == [1.0, 0.0]


@pytest.mark.extras
@pytest.mark.parametrize(
    ("items", "is_unique"),
    [
        ("[1, true, null, 0, false]", True),
        ("[1, 1.0]", False),
        ('[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]', False),
        ('["1", 1, [1], {"1": 1}]', True),
        ("[1e999, 1e998]", False),
    ],
)
def test_json_schema_compares_items_as_json(items, is_unique):
    assert Builtin("json_schema")([items, items], schema={"uniqueItems": True}) == [float(is_unique)] * 2
    assert Builtin("json_schema")([items], schema={"uniqueItems": False}) == [1.0]


@pytest.mark.extras
def test_json_schema_fetches_nothing_and_checks_the_schema():
    f = Builtin("json_schema")

    def checked(schema):
        load_builtin("json_schema", {"schema": schema}).check()

    with pytest.raises(ValueError, match="schema is not a JSON schema: 'intger' is not valid"):
        checked({"type": "intger"})
    remote = r"schema: \$ref 'http://127.0.0.1:9/s' leads to nothing in the schema. Other documents are not fetched"
    with pytest.raises(ValueError, match=remote):
        checked({"properties": {"a": {"$ref": "http://127.0.0.1:9/s"}}})
    with pytest.raises(UserError, match=r"the column 's' holds .*http://127\.0\.0\.1:9/s"):
        f(["1"], schema_column="s", s=['{"$ref": "http://127.0.0.1:9/s"}'])
    with pytest.raises(ValueError, match=r"schema: \$ref '#/\$defs/citty' leads to nothing in the schema\.$"):
        checked({"$defs": {"city": {}}, "items": {"$ref": "#/$defs/citty"}})
    with pytest.raises(ValueError, match="schema refers to itself without end"):
        checked({"$ref": "#"})
    tree = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}
    assert f(["[[], [[]]]", "[[1]]"], schema=tree) == [1.0, 0.0]
    draft_7 = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/n",
        "definitions": {"n": {}},
    }
    assert f(["1"], schema=draft_7) == [1.0]
    assert f(['{"type": 1}', "{}"], schema={"$ref": "https://json-schema.org/draft/2020-12/schema"}) == [0.0, 1.0]
    assert f(["1"], schema={"enum": [{"$ref": "#/nowhere"}, 1]}) == [1.0]


@pytest.mark.parametrize(
    ("settings", "rows", "words"),
    [
        (
            {"use": "number"},
            [{"answer": "3 1/2"}, {"answer": None}, {"answer": r"2\sqrt{3}"}],
            [r"data.path: row 3: reward 'number': the column 'answer' holds '2\\sqrt{3}'", "use {use: math}"],
        ),
        ({"use": "number"}, [{"answer": "5-3"}], ["row 1", "'5-3', which is not plainly a number"]),
        ({"use": "number", "where": {"kind": "n"}}, [{"answer": "x", "kind": "m"}, {"answer": 4, "kind": "n"}], None),
        (
            {"use": "choice", "args": {"letters": "ABCD", "first_number": 0}},
            [{"answer": 3.0}, {"answer": 4}],
            ["row 2: reward 'choice': the column 'answer' holds 4, which is none of the choices ABCD"],
        ),
    ],
)
def test_answers_are_checked_at_the_start(tmp_path, settings, rows, words):
    write_jsonl(tmp_path / "data.jsonl", [{"question": copy_task_rows(1)[0]["question"], **row} for row in rows])
    config = load_config(set_up(tmp_path, rewards=[settings]))
    if words is None:
        build_inputs(config)
        return
    with pytest.raises(UserError) as caught:
        build_inputs(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("<think>3</think>4", "4"),
        ("3</think> 4", " 4"),
        ("<think>3</think>5</think>4", "4"),
        ("<think>4</think>", ""),  # no answer
        ("<think>4", "<think>4"),
    ],
)
def test_answers_stand_behind_the_last_end_of_thoughts(text, answer):
    assert after_thinking(text) == answer
    for use, right in (("exact", "4"), ("exact_set", "4"), ("number", "4"), ("math", "4")):
        assert Builtin(use)([text], answer=[right]) == Builtin(use)([answer], answer=[right]), use
    letters = [part.translate({ord("3"): "C", ord("4"): "D", ord("5"): "E"}) for part in (text, answer)]
    assert len(set(Builtin("choice")(letters, answer=["D"] * 2))) == 1
