"""Trajectories in several processes are those of one event loop, and none is lost when a process ends."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from cohort.records import RolloutGroup
from json_server import serving
from turn_servers import collect, collecting, replying

ROWS = [{"prompt": f"what is {n}?", "answer": str(n)} for n in range(5)]
TIMES = ("model_s", "environment_s")


def letters(context: str, seed: int) -> str:
    """A reply of a few letters that says what was asked, and which sample it is."""
    return "".join(chr(97 + n) for n in np.random.default_rng([seed, len(context)]).integers(26, size=4 + seed % 7))


def assert_same(found: list[RolloutGroup], expected: list[RolloutGroup]) -> None:
    """All that trajectories have, but how long they took."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.prompt is other.prompt or one.prompt.id == other.prompt.id
        for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
            assert plain(mine) == plain(theirs)


def plain(trajectory: Any) -> dict[str, Any]:
    values = {f.name: getattr(trajectory, f.name) for f in fields(trajectory) if f.name not in ("environment", "stats")}
    calls = [
        {f.name: getattr(call, f.name) for f in fields(call)}
        | {
            name: (getattr(call, name).dtype, getattr(call, name).tolist())
            for name in ("context_ids", "token_ids", "sampling_logprobs")
        }
        for call in trajectory.calls
    ]
    stats = trajectory.stats
    counted = None if stats is None else {f.name: getattr(stats, f.name) for f in fields(stats) if f.name not in TIMES}
    return values | {"calls": calls, "stats": counted}


def test_law_single_completions_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    found = {}
    for num_workers in (1, 3):
        with (
            serving(replying(letters)) as one,
            serving(replying(letters)) as other,
            collecting(tmp_path, [one.url, other.url], num_workers=num_workers) as (collector, _),
        ):
            found[num_workers] = collect(collector, ROWS)
            assert len(one.bodies) + len(other.bodies) == len(ROWS), "a group is one request"
    assert len({t.text for group in found[1] for t in group.trajectories}) == 15
    assert_same(found[3], found[1])
