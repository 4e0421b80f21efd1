"""The tasks of `cohort demo`: what each learns, from which base model, with which settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cohort.demo import functions, lookups, tools, word_problems
from cohort.demo.word_problems import Split
from cohort.errors import UserError

ANSWER_PATTERN = r"####\s*(-?\d+)\s*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTask:
    """A task with its base model."""

    intro: str  # first line of the demo
    base_path: Path
    generate: Callable[[int, int, Split], Sequence[Any]]  # seed, count and split -> problems
    development: Callable[[int], Sequence[Any]] | None = None  # count -> problems for tuning; None: held-out ones
    rollout: Mapping[str, Any]  # keys of the section
    train: Mapping[str, Any]
    reward: Mapping[str, Any] = field(
        default_factory=lambda: {"use": "exact", "name": "right", "args": {"pattern": ANSWER_PATTERN}}
    )
    sandbox: Mapping[str, Any] = field(default_factory=dict)


WORDS = DemoTask(
    intro="A model with 0.46 million parameters learns word problems by GRPO: it never sees a solution, only "
    "whether its answer is right.",
    base_path=Path(__file__).parent / "base",
    generate=word_problems.generate,
    rollout={"max_prompt_tokens": 128, "max_completion_tokens": 48},
    train={"steps": 50, "learning_rate": 1e-4},
)

TOOLS = DemoTask(
    intro="A model with 0.48 million parameters learns by GRPO to look up what only a tool knows: it never sees a "
    "solution, only whether its answer is right.",
    base_path=Path(__file__).parent / "tools_base",
    generate=lookups.generate,
    rollout={
        "max_prompt_tokens": 128,
        "max_completion_tokens": 40,
        "tools": (f"{tools.__file__}:look_up",),
        "max_turns": 5,
    },
    train={"steps": 20, "learning_rate": 4e-5},
)

CODE = DemoTask(
    intro="A model with 0.45 million parameters learns by GRPO to write functions of two lines: it never sees a "
    "solution, only whether its code passes the tests.",
    base_path=Path(__file__).parent / "code_base",
    generate=functions.generate,
    development=lambda count: functions.generate(0, count, "development"),
    rollout={"max_prompt_tokens": 64, "max_completion_tokens": 48},
    train={"steps": 10, "learning_rate": 3e-4},
    reward={"use": "code", "name": "passes"},
    sandbox={"confinement": "none"},  # the code is of our own small model: any sandbox will do
)

TASKS: Mapping[str, DemoTask] = {"words": WORDS, "tools": TOOLS, "code": CODE}


def find_task(name: str) -> DemoTask:
    """Return a task by its name.

    Raises:
        UserError: there is none.
    """
    if name not in TASKS:
        raise UserError(f"--task: {name!r} is no task of the demo; must be one of {', '.join(TASKS)}")
    return TASKS[name]
