"""Mutated configurations, data and rewards: each ends with a message for the user, never with a traceback or a hang."""

import csv
import io
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cohort.config import load_config, to_yaml
from cohort.data import read_rows
from cohort.errors import UserError
from cohort_check import check_file
from fuzzing import KEYS, VALUES, cases, failures, mutated_bytes, mutated_text
from reward_samples import MESSAGES, group, score_texts

EXAMPLES = [path.read_text() for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))]
EXAMPLES.append(
    """\
model: {path: m, adapter: {rank: 8}, quantization: nf4}
data: {path: d.jsonl, prompt: question}
rewards:
  - {use: math, weight: 0.5, args: {}}
  - {use: "r.py:f"}
algorithm:
  name: dapo
  beta: 0.01
  policy_loss: {use: "l.py:f", args: {tau: 0.5, on: true}}
rollout: {engine: vllm, num_generations: 8, max_staleness: 1}
train: {steps: 10, seed: 3, micro_batch_tokens: auto}
optim: {name: adafactor, clip_threshold: 1.5}
eval: {path: e.jsonl, every: 5}
hardware: {processes: 2}
run: {dir: runs/a, log: [tensorboard]}
"""
)
TRL = """\
model_name_or_path: m
num_generations: 8
per_device_train_batch_size: 8
reward_funcs: [accuracy]
beta: 0.04
"""
SWIFT = "swift rlhf --rlhf_type grpo --model m --num_generations 8 --per_device_train_batch_size 8\n"
VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8\n"
FOREIGN = [("t.yaml", TRL), ("s.sh", SWIFT), ("v.sh", VERL)]


def assert_messages_only(found: list[str]) -> None:
    assert not found, f"{len(found)} cases:\n" + "\n".join(found[:5])


def test_configurations(tmp_path: Path):
    def one(rng: random.Random) -> str:
        file = tmp_path / "run.yaml"
        text = mutated_text(rng.choice(EXAMPLES), rng)
        file.write_text(text, encoding="utf-8", errors="replace")
        overrides = [f"{rng.choice(KEYS)}.{rng.choice(KEYS)}={rng.choice(VALUES)}"] if rng.random() < 0.3 else []
        config = load_config(file, overrides)
        assert load_config(_written(tmp_path / "again.yaml", to_yaml(config))) == config
        return text

    assert_messages_only(failures(cases(5000, 300), one))


def _written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def test_files_that_are_checked(tmp_path: Path):
    def one(rng: random.Random) -> str:
        name, text = rng.choice([*(("run.yaml", example) for example in EXAMPLES), *FOREIGN])
        file = tmp_path / name
        file.write_text(mutated_text(text, rng), encoding="utf-8", errors="replace")
        check_file(file, world_sizes=(1, 2, 8)).as_json()
        return text

    assert_messages_only(failures(cases(2000, 100), one))


ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n), "level": n} for n in range(4)]


def _csv() -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, ROWS[0])
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue().encode()


def _parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), out)
    return out.getvalue()


DATA = {
    "d.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "d.json": json.dumps(ROWS).encode(),
    "d.csv": _csv(),
    "d.parquet": _parquet(),
}


def test_data(tmp_path: Path):
    def one(rng: random.Random) -> str:
        name = rng.choice(list(DATA))
        (tmp_path / name).write_bytes(mutated_bytes(DATA[name], rng))
        rows = read_rows(str(tmp_path / name), field="data.path")
        assert all(isinstance(row, dict) for row in rows)
        return name

    assert_messages_only(failures(cases(3000, 300), one))


class Odd:
    """Raises wherever it is looked at."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("odd")

    __len__ = __iter__ = __float__ = __int__ = __str__ = __repr__ = __eq__ = __bool__ = __getitem__ = _raise  # type: ignore[assignment]
    __hash__ = object.__hash__


class BadMessageError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def _raises(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


VALUES_OF_REWARDS: list[Callable[[], Any]] = [
    *(
        lambda v=v: v
        for v in (None, 1, 1.5, True, math.nan, math.inf, 1e308, 10**400, "1", b"1", 1j, [], {}, object, ...)
    ),
    Odd,
    lambda: (n for n in range(2)),
    lambda: pa.array([1.0]),
    lambda: {1.0, 2.0},
]
WHOLE_RETURNS: list[Callable[[], Any]] = [
    *VALUES_OF_REWARDS,
    *map(
        _raises,
        (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(), BadMessageError(), MemoryError()),
    ),
    *map(_raises, (RecursionError("deep"), BaseException("all"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"))),
]


def test_rewards():
    def one(rng: random.Random) -> str:
        if rng.random() < 0.5:
            make = rng.choice(WHOLE_RETURNS)
            score_texts(lambda completions, **kw: make(), ["a", "b"], timeout_s=30.0)
        else:
            values = [rng.choice(VALUES_OF_REWARDS) for _ in range(rng.choice((2, 2, 2, 0, 1, 3)))]
            score_texts(lambda completions, **kw: [value() for value in values], ["a", "b"], timeout_s=30.0)
        return ""

    assert group("q", ["a"]) and MESSAGES
    assert_messages_only(failures(cases(1000, 200), one))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim: {name: adafactor, clip_threshold: 0.5}", "optim.clip_threshold: 0.5: input should be greater than"),
        ("rewards: [{use: math, args: &a {x: *a}}]", "anchor contains itself"),
        ("[" * 1000, "not valid YAML"),
        ('run: {dir: "a\\0b"}', "a path cannot contain a null character"),
        (f"run: {{dir: {'x' * 300}}}", "limited to 255 bytes"),
    ],
)
def test_kinds_that_were_tracebacks(tmp_path: Path, text: str, said: str, cohort):
    section = text.partition(":")[0]
    others = "" if text[0] in "[{" else re.sub(rf"^{section}:.*\n(  .*\n)*", "", EXAMPLES[-1], flags=re.MULTILINE)
    file = _written(tmp_path / "run.yaml", f"{others}{text}\n")
    for command in (("train", file), ("check", file), ("plan", file, "--gpus", "1")):
        ended = cohort(*command)
        assert "Traceback" not in ended.err + ended.out
        assert ended.code in (1, 2), ended
        if command[0] == "train":
            assert said in ended.err


def test_a_section_that_is_a_number_and_a_key_below_it(tmp_path: Path, cohort):
    text = "model: {path: m}\ndata: {path: d.jsonl}\nrewards: [{use: math}]\nalgorithm: 4\n"
    file = _written(tmp_path / "run.yaml", text + "rollout: {num_generations: {name: grpo}}\n")
    ended = cohort("check", file)
    assert ended.code == 1
    assert "algorithm: 4: a section is a mapping of keys" in ended.out


def test_a_folder_of_very_many_files_is_not_walked(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("cohort.data.files._MOST_FILES", 10)
    for number in range(12):
        (tmp_path / f"{number}").touch()
    with pytest.raises(UserError, match=r"eval\.path='.*': the folder .* has more than 10 files; use the one that"):
        read_rows(str(tmp_path), field="eval.path")
