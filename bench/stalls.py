"""How long rewards, parsers and the console take over completions that are written to stall them.

    python bench/stalls.py [--quick]

Each of 42 shapes of a completion goes through every built-in reward, the parser of replies of each family of models and
the console; results of judged programs go through the comparison with what is expected. Seconds of processor time, each
in a forked process that is ended after `--limit` seconds.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import marshal
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from chat_tokenizers import GEMMA, fixture_template, make_tokenizer
from cohort.chat import ChatTemplate, ResponseParser
from cohort.config.hardware import SandboxConfig
from cohort.config.rewards import REWARD_SETTINGS, CodeSettings, JudgeSettings
from cohort.display.console import ConsoleDisplay
from cohort.display.trajectory import trajectory_lines
from cohort.records import Prompt, RolloutGroup, ScoredGroup, Trajectory
from cohort.rewards import RewardFunction, RewardRunner
from cohort.rewards.builtin import RewardContext
from cohort.rewards.code import CodeReward
from cohort.rewards.completion_text import messages_of, plain_text
from cohort.rewards.judge import JudgePrompt, content_key, rubric_of
from cohort.rewards.load_rewards import BUILTINS
from cohort.rewards.math import GradedReward
from cohort.rewards.math_worker import GRADERS
from cohort.rewards.reasoning_gym import answer_in_tags
from cohort.run.log import StepReport
from cohort.sandbox import SharedSandbox
from cohort.sandbox.pool import Sandbox
from cohort.sandbox.process import Limits, ProcessResult
from conversations import FAMILIES, TOOLS
from harness import machine, markdown
from samples import answer

Task = Callable[[], object]  # what is measured
RESULTS = "results"  # of judged programs


def _nested(opening: str, inner: str, closing: str) -> Callable[[int], str]:
    def text(size: int) -> str:
        depth = max(1, size // (len(opening) + len(closing)))
        return opening * depth + inner + closing * depth

    return text


def _repeated(unit: str, start: str = "", end: str = "") -> Callable[[int], str]:
    return lambda size: start + unit * ((size - len(start) - len(end)) // len(unit)) + end


# Name -> text of about so many characters.
SHAPES: Mapping[str, Callable[[int], str]] = {
    "a fence and letters": _repeated("a", "```"),
    "a fence and blanks": _repeated(" ", "```"),
    "a fence, a line break and blanks": _repeated(" ", "```\n"),
    "a fence and dashes": _repeated("-", "```python"),
    "backticks": _repeated("`"),
    "opening fences": _repeated("```python\nx = 1\n"),
    "<think>": _repeated("<think>"),
    "</think>": _repeated("</think>"),
    "<think> and line breaks": _repeated("\n", "<think>\n"),
    "<answer>": _repeated("<answer>"),
    "<answer></answer>": _repeated("<answer>1</answer>"),
    "<answer> and many ends": _repeated("\n</answer> ", "<think>\n\n</think>\n<answer>\n"),
    "nested brackets": _nested("[", "1", "]"),
    "opening brackets": _repeated("([{"),
    "nested JSON": _nested('{"a":', "1", "}"),
    "flat JSON": _repeated("1,", "[", "1]"),
    "different objects": lambda size: json.dumps([{"a": number} for number in range(size // 13)]),
    "boxes that stay open": _repeated(r"\boxed{"),
    "boxes": _repeated(r"\boxed{7} "),
    "a box and letters": _repeated("a ", r"\boxed{"),
    "####": _repeated("#### 7\n"),
    "hashes": _repeated("#"),
    "digits": _repeated("7"),
    "digits and commas": _repeated("1,234,"),
    "numbers": _repeated("12 345 "),
    "commas": _repeated(","),
    "nested fractions": _nested(r"\frac{", "1", "}{2}"),
    "fractions": _repeated(r"\frac{1}{2} "),
    "dollars": _repeated("$7"),
    "backslashes": _repeated("\\"),
    "emphasis": _repeated("*a* _"),
    "surrogates and zero-width characters": _repeated("\ud800\u200b"),
    "combining marks": _repeated("\u0301", "e"),
    "the same words": _repeated("the answer is "),
    "choices": _repeated("A or B, not "),
    "JSON calls": _repeated('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
    "JSON calls that stay open": _repeated('<tool_call>{"name": "f", "parameters": '),
    "XML calls that stay open": _repeated("<tool_call><function=f><parameter=a>"),
    "arguments that stay open": _repeated("<arg_key>a</arg_key><arg_value>", "<tool_call>f\n"),
    "channels": _repeated("<|channel|>commentary to=functions.f "),
    "one long line": _repeated("a"),
    "blanks and line breaks": _repeated(" \n"),
}

# --- rewards -----------------------------------------------------------------------------------------------------

_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "json_schema": {"schema": {"type": "array", "items": {"type": ["number", "object"]}, "uniqueItems": True}},
    "open_r1.repetition_penalty": {"ngram_size": 3, "max_penalty": -1.0},
    "open_r1.soft_overlong": {"max_completion_len": 100, "soft_punish_cache": 10},
    "overlong": {"buffer_tokens": 10},
    "regex": {"pattern": r"answer: (\d+)$"},
    "trl.cosine": {"max_len": 100},
    "trl.soft_overlong": {"max_completion_len": 100, "soft_punish_cache": 10},
}
_COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "choice": {"answer": "B"},
    "code": {"tests": {"inputs": ["1"], "outputs": ["2"]}},
    "exact": {"answer": "7"},
    "exact_set": {"answer": "7, 8"},
    "math": {"answer": "7"},
    "number": {"answer": "7"},
}

_WALL_S = 36_000.0  # deadlines by the clock, which a busy machine must not reach
_NOT_CALLED = ("judge", "model", "reasoning_gym")  # need a server, a model or a package: see `_texts`


class Replies:
    """A backend of the sandbox that gives the same output for every job."""

    name = "replies"
    counts_processes = True
    guest_filter = b""

    def __init__(self, output: bytes) -> None:
        self._output = output

    def missing(self) -> str | None:
        """See `Backend`."""
        return None

    def run(self, settings: str, request: Any, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """See `Backend`. TOKEN in the output becomes the job's secret."""
        token = str(marshal.loads(bytes.fromhex(request.decode())).get("token"))
        output = self._output.replace(b"TOKEN", token.encode())[: limits.channel_bytes]
        return ProcessResult(output=output, errors=b"", ending="exited", exit_code=0, wall_s=0.0)


class HereWorkers:
    """Grades mathematics in this process."""

    count = 1

    def grade(self, pairs: Sequence[tuple[str, str]], *, deadline_s: float, end: float, grader: str) -> list[str]:
        """See `MathWorkers`."""
        return [GRADERS[grader](*pair) for pair in pairs]


BEGUN = b'{"ready": true}\n{"begun": true}\n'


def code_reward(output: bytes) -> CodeReward:
    """The reward `code` with programs that all return the same."""
    sandbox = Sandbox(backend=Replies(output), limits=Limits.of(SandboxConfig()), max_concurrent=1)
    opened = SimpleNamespace(open=lambda: sandbox)
    return CodeReward(CodeSettings(), RewardContext(timeout_s=_WALL_S, max_completion_tokens=100, sandbox=opened))


def _group(text: str, columns: Mapping[str, Any]) -> RolloutGroup:
    prompt = Prompt(id=0, epoch=0, content="?", token_ids=np.arange(4), columns=columns)
    ids = np.frombuffer(text.encode(errors="replace"), np.uint8)
    return RolloutGroup(prompt=prompt, trajectories=(answer(prompt, ids, text=text), answer(prompt, [7], text="7")))


def _reward(name: str) -> Callable[[str], Task]:
    """A step's call of a built-in reward; mathematics is graded in this process."""
    if name == "code":
        reward: Any = code_reward(BEGUN)
    else:
        settings = REWARD_SETTINGS[name].model_validate(_ARGUMENTS.get(name, {}))
        sandbox = SharedSandbox(SandboxConfig())
        reward = BUILTINS[name](settings, RewardContext(timeout_s=_WALL_S, max_completion_tokens=100, sandbox=sandbox))
    if isinstance(reward, GradedReward):
        reward.workers = HereWorkers()
    columns = _COLUMNS.get(name, {"solution": "$7$"})
    runner = RewardRunner([RewardFunction(name=name, function=reward, timeout_s=_WALL_S)])
    return lambda text: lambda group=_group(text, columns): runner.score([group])


def _judge(text: str) -> Task:
    """A request to a judge, and a reply that is as long."""
    criteria = {"style": {}, "correctness": {}}
    rubric = rubric_of(JudgeSettings(url="http://host", model="m", prompt="p", criteria=criteria))

    def task() -> None:
        content_key({"messages": [JudgePrompt("{completion}").render({"completion": text})]})
        with contextlib.suppress(ValueError):
            rubric.scores(text)

    return task


def _parser(family: str, tokens: Any) -> Callable[[str], Task]:
    """Parsing of a reply with a family's chat template."""
    tokenizer = make_tokenizer(fixture_template(family), tokens)
    parser = ResponseParser(tokenizer)
    context = ChatTemplate(tokenizer, kwargs={}).render([{"role": "user", "content": "hi"}], TOOLS)

    def prepare(text: str) -> Task:
        parts = [text[i : i + 1000].encode(errors="replace").decode() for i in range(0, len(text), 1000)]  # is faster
        ids = np.concatenate([np.array(ids) for ids in tokenizer(parts, add_special_tokens=False)["input_ids"]])
        return lambda: parser.parse(ids, context_ids=context, tools=TOOLS)

    return prepare


def _console(text: str) -> Task:
    """A step that shows a completion, and one that shows a conversation."""
    console = Console(file=io.StringIO(), width=200)
    display = ConsoleDisplay(show_completions_every=1, console=console)
    prompt = Prompt(id=0, epoch=0, content=text, token_ids=np.arange(4), columns={})
    single = answer(prompt, [7], text=text)
    call = {"function": {"name": "f", "arguments": {"a": text}}}
    messages = tuple({"role": role, "content": text, "tool_calls": [call]} for role in ("assistant", "tool"))
    group = ScoredGroup(
        prompt=prompt,
        trajectories=(single, Trajectory(calls=single.calls, messages=messages, text=text, end="answer")),
        rewards=np.array([0.0, 1.0]),
        reward_parts={},
    )
    names = ("reward", "completions/mean_length", "completions/clipped_ratio", "tokens_per_second")
    report = StepReport(steps_done=1, metrics=dict.fromkeys(names, 1.0), groups=[group])
    return lambda: display.step(report)


def _rollout(text: str) -> Task:
    """`cohort rollout`, which shows all tokens."""
    trajectory = answer(Prompt(id=0, epoch=0, content="?", token_ids=np.arange(4), columns={}), [7])
    return lambda: list(trajectory_lines(trajectory, lambda ids: text, width=100, max_lines=20))


def tasks() -> dict[str, Callable[[], Callable[[str], Task]]]:
    """Name -> what makes what prepares a task for a text."""
    missing = () if importlib.util.find_spec("jsonschema") else ("json_schema",)
    found: dict[str, Callable[[], Callable[[str], Task]]] = {
        name: partial(_reward, name) for name in BUILTINS if name not in (*_NOT_CALLED, *missing)
    }
    found["judge"] = lambda: _judge
    found["model"] = lambda: lambda text: lambda: json.dumps(plain_text(messages_of("?", text)))
    found["reasoning_gym"] = lambda: lambda text: lambda: answer_in_tags(text)
    for family in FAMILIES:
        found[f"parser of {family.name}"] = partial(_parser, family.name, family.tokens)
    found["parser of gemma3"] = partial(_parser, "gemma3", GEMMA)
    return {**found, "console": lambda: _console, "cohort rollout": lambda: _rollout}


# --- what a judged program returns -------------------------------------------------------------------------------

_PRIME = 2**61 - 1  # numbers that are equal modulo it have one hash


def _record(fields: str) -> bytes:
    return b'{"token": "TOKEN", %s}\n' % fields.encode()


def results(size: int) -> dict[str, tuple[bytes, Any]]:
    """Name -> output of the guest program of about so many bytes, and the tests of the row."""
    number = size // 40
    same_hash = [_PRIME * i for i in range(number)]
    floats = [float(odd) * 2.0 ** (61 * power) for power in range(16) for odd in range(1, number // 16)]
    pairs = json.dumps([[key, 0] for key in same_hash])
    any_set = f"{{{', '.join(map(str, range(number)))}}}"
    any_dict = f"{{{', '.join(f'{key}: 0' for key in range(number))}}}"
    float_set = f"{{{', '.join(f'{i}.5' for i in range(len(floats)))}}}"
    cases = [{"call": f"f({i})", "expected": 1} for i in range(100)]
    files = {"files": {"test_a.py": "\n".join(f"def test_{i}(): ..." for i in range(100))}}
    deep = "[" * 975 + "]" * 975
    lines = "1.0 " * (size // 4)

    def repeated(record: bytes) -> bytes:
        return BEGUN + record * (size // len(record))

    return {
        "a set of numbers with one hash": (
            BEGUN + _record(f'"case": 0, "value": {json.dumps({"s": same_hash})}'),
            [f"assert f() == {any_set}"],
        ),
        "a set of floats with 16 for each hash": (
            BEGUN + _record(f'"case": 0, "value": {json.dumps({"s": floats})}'),
            [f"assert f() == {float_set}"],
        ),
        "a dict of keys with one hash": (
            BEGUN + _record(f'"case": 0, "value": {{"d": {pairs}}}'),
            [f"assert f() == {any_dict}"],
        ),
        "a value nested 975 deep": (BEGUN + _record(f'"case": 0, "value": {deep}'), ["assert f() == [[]]"]),
        "a name nested 975 deep": (BEGUN + _record(f'"test": {deep}, "passed": true'), files),
        "empty records": (repeated(b"{}\n"), cases),
        "records without a case": (repeated(_record('"x": 1')), cases),
        "errors in each record": (repeated(_record('"error": "x", "case": 7')), cases),
        "records of one test": (repeated(_record('"test": "test_a.py::test_0[x]", "passed": true')), files),
        "numbers as text": (
            BEGUN + json.dumps({"case": 0, "output": lines, "exit": 0}).encode(),
            {"inputs": ["1"], "outputs": [lines.replace("1.0", "1.00")]},
        ),
    }


# --- measuring ---------------------------------------------------------------------------------------------------


def measure(prepare: Sequence[Callable[[], Task]], limit_s: float) -> list[float | None]:
    """Return the processor seconds of each task, in forks that are killed at the limit: None."""
    seconds: list[float | None] = []
    gc.collect()
    gc.freeze()  # what forks share is not searched for garbage, page by page
    while len(seconds) < len(prepare):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _measure_and_exit(prepare[len(seconds) :], limit_s, write)
        os.close(write)
        with open(read) as lines:
            seconds += [float(line) for line in lines]
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == -signal.SIGPROF:
            seconds.append(None)
        elif status:
            raise SystemExit(f"task {len(seconds)} of {len(prepare)} ended with {status}")
    return seconds


def _measure_and_exit(prepare: Sequence[Callable[[], Task]], limit_s: float, write: int) -> None:
    try:
        for prepared in prepare:
            task = prepared()
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends the process, also within `re`
            start = time.process_time()
            task()
            taken = time.process_time() - start
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(write, f"{taken}\n".encode())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 kB instead of 1 MB: to see that it runs")
    parser.add_argument("--kb", type=int, nargs="+", default=[1000], help="lengths")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="NAME", help="default: all")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="what gets the completions, or results; default: all")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a task is ended")
    parser.add_argument("--json", action="store_true", help="print the seconds of each task, null beyond the limit")
    args = parser.parse_args()
    sizes = [20_000] if args.quick else [1000 * kb for kb in args.kb]
    found: dict[str, dict[str, list[float | None]]] = {}
    for name, make in tasks().items():
        if args.only is None or name in args.only:
            prepare = make()
            prepare("7")()  # imports and compiles
            texts = [SHAPES[shape](size) for shape in args.shapes for size in sizes]
            found[name] = _by_size(args.shapes, measure([partial(prepare, text) for text in texts], args.limit))
    if args.only is None or RESULTS in args.only:
        given = [results(size) for size in sizes]
        judging = [partial(_judging, *of_size[what]) for what in given[0] for of_size in given]
        found[RESULTS] = _by_size(list(given[0]), measure(judging, args.limit))
    if args.json:
        print(json.dumps(found))
        return
    print(machine(), flush=True)
    rows = []
    for name, of_shapes in found.items():
        worst = {shape: max(args.limit if s is None else s for s in seconds) for shape, seconds in of_shapes.items()}
        slowest = max(worst, key=worst.__getitem__)
        shown = f"> {args.limit:g}" if None in of_shapes[slowest] else f"{worst[slowest]:.2f}"
        rows.append([name, slowest, shown, str(sum(seconds >= 1 for seconds in worst.values()))])
    print(markdown(["what", "slowest shape", "seconds", "shapes of 1 s or more"], rows))


def _by_size(names: Sequence[str], seconds: Sequence[float | None]) -> dict[str, list[float | None]]:
    number = len(seconds) // len(names)
    return {name: list(seconds[i * number : (i + 1) * number]) for i, name in enumerate(names)}


def _judging(output: bytes, tests: Any) -> Task:
    reward = code_reward(output)
    return lambda: reward(["x"], columns={"tests": [tests]})


if __name__ == "__main__":
    main()
