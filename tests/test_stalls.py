"""Completions and results of programs that are written to stall the trainer take time linear in their length."""

import json
from pathlib import Path

import pytest

from forked import fork, run_module
from selection import slow
from waiting import PATIENCE_S

SHAPES = [
    "a fence and blanks",
    "<answer>",
    "nested JSON",
    "boxes that stay open",
    "digits and commas",
    "numbers",
    "surrogates and zero-width characters",
    "the same words",
    "JSON calls",
    "arguments that stay open",
]
QUICK = ["choice", "code", "number", "parser of gptoss", "trl.accuracy", "console", "cohort rollout", "results"]
LIMIT_S = 20.0
NOISE_S = 0.1  # shorter times are taken for this: a busy machine multiplies them


def seconds(folder: Path, names: list[str]) -> dict[tuple[str, str], list[float | None]]:
    """Processor seconds of each shape at 100 and 400 kB, by `bench/stalls.py`; None beyond the limit."""
    out, err = folder / "out", folder / "err"
    out.unlink(missing_ok=True)
    arguments = ["--json", "--kb", "100", "400", "--limit", str(LIMIT_S), "--shapes", *SHAPES]
    arguments += ["--only", *names] if names else []
    process = fork(run_module, "stalls", *arguments, out=out, err=err, OMP_NUM_THREADS=1)
    process.join(PATIENCE_S)
    assert process.exitcode == 0, err.read_text()
    found = json.loads(out.read_text())
    return {(name, shape): taken for name, shapes in found.items() for shape, taken in shapes.items()}


def stalls(taken: list[float | None]) -> bool:
    """Whether four times the length takes more than six times as long."""
    short, long = taken
    return short is None or long is None or long > 6 * max(short, NOISE_S)


def test_what_a_stall_is():
    assert [stalls(taken) for taken in ([0.01, 0.59], [0.3, 1.7], [0.2, 1.3], [1.0, None])] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("names", [QUICK, pytest.param([], marks=slow("some of these"), id="all")])
def test_time_grows_with_the_length(tmp_path: Path, names: list[str]):
    failed = {key: taken for key, taken in seconds(tmp_path, names).items() if stalls(taken)}
    for _ in range(2):  # times of a busy machine may jump once, but not three times
        if failed:
            again = seconds(tmp_path, sorted({name for name, _ in failed}))
            failed = {key: again[key] for key in failed if stalls(again[key])}
    assert not failed
