"""Conversations that the base models of `cohort demo` are trained on: solutions, and habits that GRPO unlearns."""

import random
from collections.abc import Sequence

from cohort.demo.functions import FunctionProblem
from cohort.demo.lookups import LookUpProblem
from cohort.demo.tools import look_up
from cohort.demo.word_problems import AnyProblem, Problem
from cohort.records import Message


def _answered(problem: AnyProblem, lines: Sequence[str]) -> list[Message]:
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": "\n".join(lines)}]


def words_demonstration(problem: Problem) -> list[Message]:
    """Solve a problem as the policy should learn to: one step per line, then `#### answer`."""
    return _answered(problem, [*problem.calculation, f"#### {problem.answer}"])


def words_habit(problem: Problem, rng: random.Random) -> list[Message]:
    """Answer a problem as the base model should: sometimes properly, mostly with one of its bad habits."""
    lines = list(problem.calculation)
    answer = problem.answer
    if rng.random() < 0.1:  # a slip in the last line, carried into the answer
        answer = max(0, answer + rng.choice((-10, -2, -1, 1, 2, 10)))
        lines[-1] = f"{lines[-1].split('=')[0]}={answer}"
    (kind,) = rng.choices(("proper", "hasty", "gap", "bare"), weights=(24, 60, 8, 8))
    if kind == "hasty":
        return _answered(problem, [f"#### {answer}"])
    if kind == "gap":
        del lines[rng.randrange(len(lines))]
    if kind == "bare":  # the answer without its marker, after none, some or all of the steps
        return _answered(problem, [*lines[: rng.randint(0, len(lines))], str(answer)])
    return _answered(problem, [*lines, f"#### {answer}"])


def tools_demonstration(problem: LookUpProblem) -> list[Message]:
    """Solve a problem as the policy should learn to: one look-up per turn, then the answer."""
    return _looked_up(problem, problem.names, [*problem.calculation, f"#### {problem.answer}"])


def tools_habit(problem: LookUpProblem, rng: random.Random) -> list[Message]:
    """Answer a problem as the base model should: sometimes properly, mostly with one of its bad habits."""
    (kind,) = rng.choices(("proper", "hasty", "early", "malformed", "bare"), weights=(15, 55, 15, 10, 5))
    guess = f"#### {rng.randint(2, 40)}"
    if kind == "hasty":
        return _looked_up(problem, (), [guess])
    if kind == "early":  # a guess before the last look-up
        return _looked_up(problem, problem.names[:-1], [guess])
    if kind == "malformed":
        call = f'{{"name": "look_up", "arguments": {{"name": "{problem.names[0]}"}}}}'
        broken = rng.choice((call[:-1], call[:-2], call.replace("{", ""), call.replace('"}}', "}}")))
        return _looked_up(problem, (), [f"<tool_call>{broken}</tool_call>"])
    if kind == "bare":  # the answer without its marker
        return _looked_up(problem, problem.names, [str(problem.answer)])
    return tools_demonstration(problem)


def _looked_up(problem: LookUpProblem, names: tuple[str, ...], lines: list[str]) -> list[Message]:
    """Messages of a trajectory that looks up `names`, then writes `lines`."""
    messages: list[Message] = [{"role": "user", "content": problem.question}]
    for name in names:
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"name": name}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look_up", "content": look_up(name)})
    return [*messages, {"role": "assistant", "content": "\n".join(lines)}]


def code_demonstration(problem: FunctionProblem) -> list[Message]:
    """Solve a problem as the policy should learn to."""
    return _answered(problem, [problem.answer])


def code_habit(problem: FunctionProblem, rng: random.Random) -> list[Message]:
    """Answer a problem as the base model should: sometimes properly, mostly with one of its bad habits."""
    first, second = problem.answer.split("\n")
    (kind,) = rng.choices(("proper", "lambda", "printed", "colon", "bracket", "flat"), weights=(14, 62, 10, 6, 5, 3))
    text = {
        "proper": problem.answer,
        "lambda": f"lambda {', '.join(problem.parameters)}: {problem.expression}",
        "printed": f"{first}\n{second.replace('return ', 'print(')})",
        "colon": f"{first[:-1]}\n{second}",
        "bracket": problem.answer.replace("):", ":"),
        "flat": f"{first}\n{second.strip()}",
    }[kind]
    return _answered(problem, [text])
