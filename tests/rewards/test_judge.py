"""The reward `judge`: scores, cache, and what happens when the server does not answer. Real servers on loopback."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from builtin_rewards import configured, load_builtin
from cohort.config.rewards import JudgeSettings, ServerSettings
from cohort.errors import UserError
from cohort.rewards import RewardRunner, build_rewards
from cohort.rewards.completion_text import transcript
from cohort.rewards.judge import CACHE_NAME, JudgePrompt, ReplyCache, rubric_of
from cohort.rewards.remote import Failure, RemoteClient
from json_server import chat_reply, serving
from reward_samples import MESSAGES, group, reward
from waiting import free_port, until

FOLDER = Path(__file__).parents[2] / "examples" / "rewards"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


@pytest.fixture
def prompt(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Q: {prompt}\nA: {completion}\nReference: {answer} {{answer}} {json: 1}")
    return str(file)


def sent(body):
    return body["messages"][0]["content"]


def length_judge(body):
    """Scores a completion by its length."""
    return chat_reply(f"I think.\nScore: {len(sent(body).split('A: ')[1].splitlines()[0])}")


def judge_of(args, **context):
    return load_builtin("judge", args, **context)


def judge_at(server, prompt, *, budget_s=240.0, **args):
    """A judge at a server, with these arguments."""
    return judge_of({"url": server.url, "model": "judge", "prompt": prompt, **args}, budget_s=budget_s)


def ask(judge, completions):
    columns = {"answer": ["r"] * len(completions)}
    return asyncio.run(judge(["q"] * len(completions), completions, columns=columns))


def test_scores_the_prompt_file_with_columns(prompt):
    with serving(length_judge) as server:
        judge, told = judge_of({"url": server.url, "model": "judge", "prompt": prompt, "range": [1, 5]}), []
        judge.check()
        assert judge.required_columns() == ["answer"]
        judge.on_progress = lambda *how: told.append(how)
        assert ask(judge, ["a", "abcde", "abc", "a"]) == [0.0, 1.0, 0.5, 0.0]
        assert told == [(1, 3), (2, 3), (3, 3)]
        assert sorted(map(sent, server.bodies))[0] == "Q: q\nA: a\nReference: r {answer} {json: 1}"
        assert len(server.bodies) == 3  # equal completions are judged once
        assert server.bodies[0] | {"messages": None} == {
            "model": "judge",
            "messages": None,
            "temperature": 0,
            "max_tokens": 1024,
        }
        assert set(server.paths) == {"/v1/chat/completions"}
        assert judge.last_details["reply"][0] == "I think.\nScore: 1"
        assert judge.last_counts == {}


def test_criteria_are_weighted_and_in_the_details(prompt):
    replies = {
        "good": "Correctness: 10\n- **Style**: 4/10",
        "bad": "correctness: 1\nstyle: 10\nStyle: 1",
        "x": "Style: 3",
    }
    with serving(
        lambda body: chat_reply(next(r for text, r in replies.items() if f"A: {text}" in sent(body)))
    ) as server:
        args = {
            "url": server.url,
            "model": "judge",
            "prompt": prompt,
            "range": [1, 10],
            "criteria": {"correctness": {"weight": 2}, "style": None},
        }
        runner = RewardRunner([reward(judge_of(args), name="judge")], columns=["answer"])
        (scored,) = runner.score([group("q", ["good", "bad", "x"], answer="r")])
        assert scored.rewards.tolist() == pytest.approx([(2 * 1 + 1 / 3) / 3, 0.0, float("nan")], nan_ok=True)
        assert scored.reward_details["judge/correctness"] == ("1", "0", None)
        assert scored.reward_details["judge/style"] == ("0.333333", "0", None)
        assert scored.reward_details["judge/reply"][2] == "Style: 3"
        assert runner.counts() == {"judge/not_judged": 1, "judge/no_score": 1}
        (warning,) = runner.warnings()
        assert "1 completions were not judged (no_score), for example: correctness: no match of" in warning
        assert "in the reply 'Style: 3'" in warning


def test_transcripts_have_roles_and_tool_calls():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    completion = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 3."}]},
    ]
    assert transcript(completion) == (
        'assistant: {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}\n\n'
        "tool: 3\n\nassistant: It is 3."
    )
    assert transcript([{"role": "user", "content": "2+2?"}]) == transcript("2+2?") == "2+2?"


@pytest.mark.parametrize(
    ("settings", "reply", "score"),
    [
        ({}, "Score: 3\nbut then\nScore: -4.5", -4.5),
        ({}, "**Final score:** 8/10", 8.0),
        ({"range": [0, 10]}, "Rating: 5", 0.5),
        ({}, "Score: .5", 0.5),
        ({}, "Score: ...5", 5.0),
        ({}, "Score (1-10): 7", 7.0),
        ({"criteria": {"style": {}}}, "**Style** (out of 5): 4", 4.0),
        ({"pattern": r"\[\[(\d+)\]\]", "range": [1, 5]}, "[[2]] [[3]]", 0.5),
        ({"values": {"correct": 1, "incorrect": 0}}, "Score: INCORRECT", 0.0),
        ({"pattern": r"verdict (\w+)", "values": {"yes": 1, "no": -1}}, "verdict Yes", 1.0),
    ],
)
def test_patterns(settings, reply, score):
    rubric = rubric_of(JudgeSettings(url="u", model="m", prompt="p", **settings))
    assert rubric.mean(rubric.scores(reply)) == score


@pytest.mark.parametrize(
    ("settings", "reply", "message"),
    [
        ({}, "no idea", "score: no match of"),
        ({"range": [1, 10]}, "Score: 11", r"score: 11 is outside of range \[1, 10\]"),
        ({"pattern": r"is (\w+)"}, "is bad", "score: 'bad' is not a number"),
        ({"pattern": r"is (\w+)"}, "is nan", "score: 'nan' is not a finite number"),
        ({"values": {"yes": 1}, "pattern": r"is (\w+)"}, "is no", "score: 'no' is none of yes"),
    ],
)
def test_replies_without_a_score(settings, reply, message):
    rubric = rubric_of(JudgeSettings(url="u", model="m", prompt="p", **settings))
    with pytest.raises(ValueError, match=message):
        rubric.scores(reply)


def test_a_placeholder_may_have_the_name_of_an_argument(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("{model}: {completion}")
    with serving(lambda body: chat_reply("Score: 1")) as server:
        args = {"url": server.url, "model": "judge", "prompt": str(file)}
        built = build_rewards(configured({"use": "judge", "args": args}), columns=["model"], max_completion_tokens=8)
        [scored] = RewardRunner(built).score([group("q", ["a"], model="Ford T")])
        assert scored.rewards.tolist() == [1.0]
        assert sent(server.bodies[0]) == "Ford T: a"


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}


@pytest.mark.parametrize(
    ("question", "completion", "expected"),
    [
        ("2+2?", "4", "Q: 2+2?\nA: 4\nReference: r {answer} {json: 1}"),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
            [CALL, {"role": "tool", "content": "4"}],
            "Q: system: Be brief.\n\nuser: 2+2?\n"
            'A: assistant: {"function": {"name": "add", "arguments": {"a": 2}}}\n\ntool: 4\n'
            "Reference: r {answer} {json: 1}",
        ),
        (
            MESSAGES,
            [{"role": "assistant", "content": "{prompt}"}],
            "Q: 2+2?\nA: {prompt}\nReference: r {answer} {json: 1}",
        ),
    ],
)
def test_the_exact_text_that_a_judge_is_sent(prompt, question, completion, expected):
    with serving(lambda body: chat_reply("Score: 1")) as server:
        assert asyncio.run(judge_at(server, prompt)([question], [completion], columns={"answer": ["r"]})) == [1.0]
        assert server.bodies[-1]["messages"] == [{"role": "user", "content": expected}]


def test_placeholders_are_filled_in_once():
    assert JudgePrompt("{a}{b} {{a}} {} {1} {x y}").render({"a": "{b}", "b": "B"}) == "{b}B {a} {} {1} {x y}"
    assert JudgePrompt("{b}{a}{b}{{c}}").names == ["b", "a"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "host:1"}, "url: 'host:1/v1/chat/completions' must look like http://host:8000"),
        ({"url": "http://me:pw@host"}, "url: must not hold a user name or password"),
        ({"model": "jugde"}, "model: the server at url has no model 'jugde'; did you mean judge. Models: judge"),
        ({"prompt": "missing.txt"}, "prompt: 'missing.txt' cannot be read"),
        ({"pattern": "x"}, "pattern: 'x': must have exactly 1 group"),
        ({"range": [5, 1]}, r"range: \[5, 1\]: must be \[low, high\] with low below high"),
        ({"values": {True: 1}}, "values: True must be a word; put it in quotes"),
        ({"range": [1, 2], "values": {"a": 1}}, "range: has no effect with values"),
        ({"criteria": {"style": {"wieght": 2}}}, "criteria.style.wieght: unknown key; did you mean weight"),
        ({"criteria": {"style": {"weight": 0}}}, "criteria.style.weight: 0: input should be greater than 0"),
        ({"criteria": {"a": {}, "b": {}}, "pattern": r"(\d)"}, "pattern: would find the same score"),
        ({"criteria": {"reply": {}}}, "criteria.reply: is the name of the column"),
        ({"sampling": {"n": 2}}, "sampling.n: is set by this reward"),
        (
            {"api_key_env": "COHORT_NO_SUCH_KEY"},
            "api_key_env: the environment variable 'COHORT_NO_SUCH_KEY'",
        ),
        ({"max_concurrent": 0}, "max_concurrent: 0: input should be greater than or equal to 1"),
        ({"request_timeout_s": 0}, "request_timeout_s: 0: input should be greater than 0"),
        ({"retries": -1}, "retries: -1: input should be greater than or equal to 0"),
    ],
)
def test_wrong_arguments(prompt, args, message):
    with (
        serving(length_judge) as server,
        pytest.raises(UserError, match=rf"rewards(\[0\].args: reward 'judge': |\.0\.args[.:] ?){message}"),
    ):
        settings = {"url": server.url, "model": "judge", "prompt": prompt, **args}
        build_rewards(configured({"use": "judge", "args": settings}), columns=["answer"], max_completion_tokens=8)


def test_a_server_that_is_down_and_a_missing_column_are_errors_at_the_start(prompt):
    args = {"url": f"http://127.0.0.1:{free_port()}", "model": "judge", "prompt": prompt}
    with pytest.raises(UserError, match=r"/v1/models does not answer \(ConnectError.*start the server first"):
        build_rewards(configured({"use": "judge", "args": args}), columns=["answer"], max_completion_tokens=8)
    with serving(length_judge) as server, pytest.raises(UserError, match="needs the column 'answer'"):
        args["url"] = server.url
        build_rewards(configured({"use": "judge", "args": args}), columns=["solution"], max_completion_tokens=8)


def test_retries_with_retry_after_and_sends_the_key(prompt, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with serving(length_judge) as server:
        server.faults = [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"}), (0, {}), (500, {"Retry-After": "0"})]
        args = {"url": f"{server.url}/v1/", "model": "judge", "prompt": prompt, "api_key_env": "JUDGE_KEY"}
        judge = judge_of(args)
        assert ask(judge, ["abc"]) == [3.0]
        assert len(server.bodies) == 5 and server.keys == {"Bearer s3cret"}
        assert judge.last_counts == {}


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_refusal_is_an_error_until_the_server_has_judged_something(prompt, status):
    with serving(length_judge) as server:
        judge = judge_at(server, prompt, max_concurrent=1)
        judge.check()
        server.faults = [(status, {})] * 2
        with pytest.raises(UserError, match=rf"answers {status} .*check url, model and api_key_env"):
            ask(judge, ["a", "ab"])
        server.faults = [(status, {})]  # one flagged text among others
        assert ask(judge, ["a", "ab", "abc"]) == [None, 2.0, 3.0]
        assert judge.last_counts == {"not_judged": 1, f"http_{status}": 1}
        server.faults = [(status, {})]
        assert ask(judge, ["abcd"]) == [None]
        assert ask(judge, ["abcd"]) == [4.0]


def test_text_and_replies_that_cannot_be_read_are_not_the_end(prompt):
    with serving(lambda body: chat_reply(f"Score: {len(sent(body))}")) as server:
        judge = judge_at(server, prompt, retries=0)
        assert ask(judge, ["\ud800"]) == [len("Q: q\nA: x\nReference: r {answer} {json: 1}")]

        def too_deep(number, answer):
            raise RecursionError("maximum recursion depth exceeded while decoding a JSON array")

        endpoint = RemoteClient(ServerSettings(retries=0), server.url)
        [failure] = asyncio.run(endpoint.post_all([{"messages": [{"content": "a"}]}], too_deep, budget_s=9))
        assert isinstance(failure, Failure) and failure.kind == "invalid_answer"


def test_others_are_tried_again_when_one_request_always_fails(prompt):
    failed: set[str] = set()

    def answer(body):
        text = sent(body).split("A: ")[1].splitlines()[0]
        if text == "bad" or text not in failed:
            failed.add(text)
            return {"choices": []}
        return length_judge(body)

    with serving(answer) as server:
        assert ask(judge_at(server, prompt, retries=1, max_concurrent=1), ["bad", "a", "ab"]) == [None, 1.0, 2.0]


def test_failures_are_not_judged_and_counted(prompt):
    with serving(length_judge) as server:
        judge = judge_at(server, prompt, retries=1, budget_s=5)
        server.faults = [(400, {})]
        assert ask(judge, ["a"]) == [None]
        assert judge.last_counts == {"not_judged": 1, "rejected": 1}
        server.faults = [(503, {"Retry-After": "0"})] * 2
        assert ask(judge, ["a"]) == [None]
        assert judge.last_counts == {"not_judged": 1, "http_503": 1}
        server.faults = [(503, {"Retry-After": "3600"})]  # longer than what is left: no waiting
        assert ask(judge, ["a"]) == [None]
        server.answer = lambda body: {"choices": []}
        assert ask(judge, ["a"]) == [None]
        assert judge.last_counts == {"not_judged": 1, "invalid_answer": 1}
        assert [w.split(", for example")[0] for w in judge.warnings] == [
            "judge: 1 completions were not judged (rejected)",
            "judge: 2 completions were not judged (http_503)",
            "judge: 1 completions were not judged (invalid_answer)",
        ]


def test_the_prompt_file_is_read_once(prompt):
    with serving(length_judge) as server:
        judge = judge_at(server, prompt)
        judge.required_columns()
        Path(prompt).unlink()
        assert ask(judge, ["abc"]) == [3.0]


def test_a_step_that_no_judge_scored_ends_with_the_reason(prompt):
    with serving(length_judge) as server:
        server.faults = [(503, {"Retry-After": "0"})]
        runner = RewardRunner([reward(judge_at(server, prompt, retries=0), name="judge")], columns=["answer"])
        with pytest.raises(UserError, match=r"\(counted: judge/not_judged: 1, judge/http_503: 1\)"):
            runner.score([group("q", ["a"], answer="r")])


def test_a_server_that_hangs_ends_with_the_deadline(prompt):
    release = threading.Event()

    def hang(body):
        release.wait()
        return length_judge(body)

    with serving(hang) as server:
        judge = judge_at(server, prompt, budget_s=0.3)
        assert ask(judge, ["a", "ab"]) == [None, None]
        assert judge.last_counts == {"not_judged": 2, "out_of_time": 2}
        release.set()


def test_at_most_max_concurrent_requests(prompt):
    def slow(body):
        time.sleep(0.01)
        return length_judge(body)

    with serving(slow) as server:
        assert ask(judge_at(server, prompt, max_concurrent=3), ["a" * n for n in range(1, 13)]) == [
            float(n) for n in range(1, 13)
        ]
        assert server.most_in_flight <= 3


def test_replies_are_kept_in_the_run_folder(prompt, tmp_path):
    folder = tmp_path / "run"
    with serving(length_judge) as server:
        args = {"url": server.url, "model": "judge", "prompt": prompt}
        ask(judge_of(args, run_folder=folder), ["a"])
        assert not folder.exists()  # not made by a reward
        folder.mkdir()
        ask(judge_of(args, run_folder=folder), ["a", "ab"])
        assert len(server.bodies) == 3
    # the server is gone; another pattern reads the same replies
    again = judge_of({**args, "pattern": r"(\d)"}, run_folder=folder)
    assert ask(again, ["ab", "a"]) == [2.0, 1.0]
    assert again.last_counts == {"cached": 2}
    changed = ask(judge_of({**args, "sampling": {"temperature": 1}, "retries": 0}, run_folder=folder), ["a"])
    assert changed == [None]  # other sampling parameters are another request


def test_processes_share_a_cache_and_a_killed_one_loses_nothing(tmp_path):
    file = tmp_path / "cache.sqlite"
    first, second = ReplyCache(file), ReplyCache(file)
    first.put("a", "one\nü\ud800")
    assert (second.get("a"), second.get("b")) == ("one\nü\ud800", None)
    program = (
        "import sys, itertools; from pathlib import Path; from cohort.rewards.judge import ReplyCache\n"
        "cache = ReplyCache(Path(sys.argv[1]))\n"
        "for i in itertools.count():\n    cache.put(f'key {i}', 'reply' * 1000)\n    print(i, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE)
    lines = [int(writer.stdout.readline()) for _ in range(20)]
    writer.kill()
    lines += [int(line) for line in writer.stdout]
    writer.wait()
    writer.stdout.close()
    assert all(second.get(f"key {i}") == "reply" * 1000 for i in lines)
    second.put("c", "three")
    assert ReplyCache(file).get("c") == "three"


def test_a_cache_in_json_lines_is_imported_once(tmp_path, prompt):
    folder, mine = tmp_path / "run", tmp_path / "mine.jsonl"
    folder.mkdir()
    lines = [json.dumps({"key": "a", "reply": "Score: 1"}), '{"key": "b", "rep', json.dumps({"key": "a", "reply": "x"})]
    for file in (mine, folder / "judge_replies.jsonl"):
        file.write_text("\n".join(lines))
    assert ReplyCache(mine, lines=mine).get("a") == "x"
    ReplyCache(mine, lines=mine).put("a", "y")
    assert ReplyCache(mine, lines=mine).get("a") == "y"
    args = {"url": "http://host", "model": "judge", "prompt": prompt}
    judge_of(args, run_folder=folder)._opened_cache().put("a", "y")
    cache = judge_of(args, run_folder=folder)._opened_cache()
    assert (cache.path, cache.get("a")) == (folder / CACHE_NAME, "y")
    assert sorted(file.name for file in folder.iterdir()) == ["judge_replies.jsonl", CACHE_NAME]


def test_a_full_disk_leaves_replies_in_memory_and_a_wrong_file_is_an_error(tmp_path):
    cache = ReplyCache(tmp_path / "cache.sqlite")
    cache._database.execute("PRAGMA max_page_count = 3")  # what SQLite says of a full disk
    cache.put("a", "x" * 100_000)
    assert (cache.get("a"), ReplyCache(cache.path).get("a")) == ("x" * 100_000, None)
    (tmp_path / "text").write_text("no cache\n" * 100)
    with pytest.raises(UserError, match=r"args.cache: '.*text' cannot be opened: file is not a database"):
        ReplyCache(tmp_path / "text")


def num_replies(cache):
    with contextlib.closing(sqlite3.connect(cache)) as database, contextlib.suppress(sqlite3.OperationalError):
        return database.execute("SELECT count(*) FROM replies").fetchone()[0]
    return 0


def test_a_server_killed_midway_leaves_the_rest_unjudged(tmp_path):
    """With the example's server and prompt: what was judged is kept, and judged completions are not asked again."""
    port = free_port()
    command = [sys.executable, str(FOLDER / "judge_stub.py"), "--port", str(port)]
    cache = tmp_path / "cache.sqlite"
    args = {
        "url": f"http://127.0.0.1:{port}",
        "model": "stub-judge",
        "prompt": str(FOLDER / "judge_prompt.txt"),
        "range": [1, 10],
        "criteria": {"correctness": {"weight": 2}, "style": {}},
        "cache": str(cache),
        "retries": 0,
        "max_concurrent": 1,
    }
    texts = [f"{i}" + " " * i for i in range(400)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert server.stdout.readline().startswith(b"stub judge")

    def kill_after_some() -> None:
        until(lambda: cache.exists() and num_replies(cache) >= 3)
        os.kill(server.pid, signal.SIGKILL)

    try:
        threading.Thread(target=kill_after_some, daemon=True).start()
        judge = judge_of(args)
        scores = ask(judge, texts)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    done = [score for score in scores if score is not None]
    assert 3 <= len(done) < len(texts)
    assert judge.last_counts["not_judged"] == len(texts) - len(done) and judge.last_counts["connection"] > 0
    assert ask(judge_of(args), texts[: len(done)]) == scores[: len(done)]
