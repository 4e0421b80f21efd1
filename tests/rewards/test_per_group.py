"""Rewards that score each group by itself are the same for any number of ranks."""

from pathlib import Path
from typing import Any

import pytest

from builtin_rewards import configured
from cohort.errors import UserError
from cohort.rewards import build_rewards
from cohort.rewards.load_rewards import load_per_group
from cohort.rewards.math_workers import workers_per_process
from rank_rewards import FUNCTIONS, NAMESAKES, scores_of_one_process
from ranks import run_ranks
from selection import mostly_slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return scores_of_one_process(str(folder), 5)


def test_each_group_is_scored_by_itself(one: dict[str, Any]):
    first, second = one["steps"]
    assert first == second  # although the processes that grade answers were killed in between
    rewards, parts, details, counts, logged = eval(first, {"nan": None})
    assert parts["math"] == [1.0, 0.0, 1.0] * 5 and parts["kill_workers"] == [1.0] * 15
    assert parts["longest"] == [*[0.5] * 3, 0.0, 0.5, 0.0, *[0.5] * 3, None, None, None, *[0.5] * 3]
    assert parts["spread"] == [0.2] * 9 + [None] * 3 + [0.2] * 3
    assert rewards[:2] == [1.0 + 1.0 + 0.5 + 0.2 - 1.0, 1.0 + 0.0 + 0.5 + 0.2 - 1.0]
    assert details == {"seen": ["3 at 5"] * 15} and counts == {}
    assert 0.33 < logged["share"] < 0.35
    assert one["error"].startswith("reward 'longest' raised RuntimeError: unlucky (at ")
    assert "in longest" in one["cause"]
    assert one["ranks"] == (
        "rewards: 'kill_workers', 'format', 'math', 'longest', 'spread' on all ranks, each for its share of the "
        "groups; 'overlong' on rank 0, once per step"
    )


@pytest.mark.parametrize("world_size", mostly_slow([2, 3], 3, reason="three ranks have it"))
def test_rewards_do_not_depend_on_the_number_of_ranks(
    folder: Path, tmp_path: Path, one: dict[str, Any], world_size: int
):
    (several,) = run_ranks(world_size, tmp_path, ("scores", str(folder), "5"))
    assert several.pop("cause").splitlines()[-1] == one["cause"].splitlines()[-1] == "RuntimeError: unlucky"
    assert several == {name: value for name, value in one.items() if name != "cause"}


def test_ranks_agree_on_names_and_wait_for_the_slowest(tmp_path: Path):
    (tmp_path / "namesakes.py").write_text(NAMESAKES)
    named, slow = run_ranks(2, tmp_path, ("namesakes", str(tmp_path)), ("slow rank",))
    assert named["details"] == [{"told": ("a",) * 3, "told_2": ("b",) * 3}] * 2
    assert slow["seconds"] > 1.5


def test_other_ranks_make_no_rewards_of_rank_0(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cohort.sandbox.SharedSandbox.open", lambda _: pytest.fail("starts a sandbox"))
    configs = configured({"use": "code"}, {"use": "open_r1.len"}, {"use": "open_r1.format"}, {"use": "math"})
    assert [*load_per_group(configs, max_completion_tokens=2, num_workers=1)] == [2, 3]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"use": "math", "per_group": True}, "'math' is built in; remove it"),
        ({"use": "f.py:f", "per_group": True, "isolate": True}, "remove one of the two"),
        ({"use": "object:f", "per_group": True}, "needs a function that another process can import"),
    ],
)
def test_per_group_where_it_has_no_effect_is_refused(reward: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        configured(reward)


def test_what_only_rank_0_has_is_refused(tmp_path: Path):
    (tmp_path / "f.py").write_text("def f(completions, trajectories): ...\n")
    configs = configured({"use": f"{tmp_path}/f.py:f", "per_group": True})
    with pytest.raises(UserError, match=r"rewards\[0\].per_group: reward 'f' takes 'trajectories'"):
        build_rewards(configs, columns=[], max_completion_tokens=2)


def test_workers_of_a_machine_are_shared_by_its_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cohort.rewards.math_workers.usable_cores", lambda: 48)
    assert (workers_per_process(), workers_per_process(5)) == (16, 5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (workers_per_process(), workers_per_process(5), workers_per_process(32)) == (6, 1, 4)
