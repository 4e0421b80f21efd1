"""Texts, gold answers and the verdict of a careful person, through the real rewards.

Each line of `pairs/NAME.jsonl` has `text`, `gold` (what the column holds), `verdict` ("right", "wrong" or "unscored"),
`why`, and `args` of the reward where it needs them. For `open_r1.accuracy` and `trl.accuracy` the verdict is that of
the packages. With `known_limit` the reward says otherwise, and docs/rewards.md says so.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from builtin_rewards import Builtin
from cohort.config.hardware import SandboxConfig
from cohort.rewards.code import extract_code
from cohort.sandbox import SharedSandbox

FOLDER = Path(__file__).with_name("pairs")
COLUMN_ARGUMENTS = {"code": "tests_column", "json_schema": "schema_column", "regex": None, "format": None}
VERDICTS = {"right": 1.0, "wrong": 0.0, "unscored": None}

Pair = Mapping[str, Any]
NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def read(name: str) -> list[Pair]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def expected(pair: Pair) -> float | None:
    value = VERDICTS[pair["verdict"]]
    return 1.0 - value if pair.get("known_limit") and value is not None else value


def rewards(name: str, pairs: list[Pair]) -> dict[int, float | None]:
    """The reward of each pair, with one call for all that have the same arguments."""
    sandbox = SharedSandbox(SandboxConfig(confinement="none", cpu_s=1)) if name == "code" else None
    function = Builtin(name, sandbox=sandbox)
    groups = defaultdict(list)
    for i, pair in enumerate(pairs):
        groups[json.dumps(pair.get("args", {}))].append(i)
    column = COLUMN_ARGUMENTS.get(name, "answer_column")
    values = {}
    for args, members in groups.items():
        columns = {"gold": [pairs[i]["gold"] for i in members], column: "gold"} if column else {}
        values |= zip(
            members, function([pairs[i]["text"] for i in members], **columns, **json.loads(args)), strict=True
        )
    return values


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extras] * (name == "json_schema")) for name in NAMES]
)
def test_pairs(name):
    pairs = read(name)
    values = rewards(name, pairs)
    wrong = [(values[i], pair) for i, pair in enumerate(pairs) if values[i] != expected(pair)]
    assert not wrong, f"{len(wrong)} of {len(pairs)}: " + "\n".join(f"{value}: {pair}" for value, pair in wrong)


def text_has(text: str, gold: Any, args: Any) -> bool:
    return str(gold) in text


def is_json(text: str, gold: Any, args: Any) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_python(text: str, gold: Any, args: Any) -> bool:
    try:
        compile(extract_code(text), "code", "exec")
    except SyntaxError:
        return False
    return True


CARELESS: Mapping[str, Callable[[str, Any, Mapping[str, Any]], bool]] = {
    "choice": lambda text, gold, args: re.search(rf"\b{gold}\b", text) is not None,
    "code": is_python,
    "exact_set": lambda text, gold, args: all(str(item) in text for item in gold or ()),
    "regex": lambda text, gold, args: args["pattern"] in text,
    "format": lambda text, gold, args: "</think>" in text,
    "json_schema": is_json,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_pairs_are_hard(name):
    """There are 100, and a grader that looks for the answer in the text errs in 40."""
    pairs = read(name)
    assert len({json.dumps([p["text"], p["gold"], p.get("args")]) for p in pairs}) == len(pairs) >= 100
    careless = CARELESS.get(name, text_has)
    errs = [careless(p["text"], p["gold"], p.get("args", {})) != (p["verdict"] == "right") for p in pairs]
    assert sum(errs) >= 40
