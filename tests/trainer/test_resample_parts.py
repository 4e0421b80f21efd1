"""Dynamic sampling where an advantage looks at each reward by itself (GDPO): sums hide rewards that differ."""

from pathlib import Path

import pytest

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig
from cohort.metrics.rollouts import has_equal_rewards
from samples import scored
from test_training import changed, make_inputs, metric, train

REWARDS = """
def a(completions, **_):
    return [float(i % 2) for i in range(len(completions))]

def b(completions, **_):
    return [1.0 - i % 2 for i in range(len(completions))]

def same(completions, **_):
    return [0.5] * len(completions)
"""


def test_a_group_teaches_gdpo_where_a_part_differs_and_the_sum_does_not():
    group = scored([1.0] * 4, [3] * 4, parts={"a": [0.0, 1.0, 0.0, 1.0], "b": [1.0, 0.0, 1.0, 0.0]})
    assert has_equal_rewards(group) and not has_equal_rewards(group, parts=["a", "b"])
    equal = scored([1.0] * 4, [3] * 4, parts={"a": [0.5] * 4, "b": [0.5] * 4})
    assert has_equal_rewards(equal, parts=["a", "b"])
    gdpo = build_algorithm(AlgorithmConfig(name="gdpo"), max_completion_tokens=3)
    sequences = assign_advantages([group, equal], gdpo, reward_weights={"a": 1.0, "b": 0.5})
    assert all(s.advantages.any() for s in sequences[:4]), "of another weight, they do not cancel"
    assert not any(s.advantages.any() for s in sequences[4:]), "what is replaced would have taught nothing"


@pytest.mark.parametrize(
    ("algorithm", "names", "replaced"),
    [("grpo", ("a", "b"), 0.5), ("gdpo", ("a", "b"), 0.0), ("gdpo", ("same", "a"), 0.5)],
)
def test_which_groups_a_run_replaces(tmp_path: Path, algorithm: str, names: tuple[str, str], replaced: float):
    """`grpo` sees sums of 1 and asks for as many groups once more; `gdpo` does so where each reward is equal.

    A reward of weight 0 is looked at by nobody.
    """
    (tmp_path / "judges.py").write_text(REWARDS)
    weights = [1.0, 0.0 if "same" in names else 1.0]
    config = changed(make_inputs(tmp_path), algorithm={"name": algorithm}, rollout={"resample": 1}, train={"steps": 1})
    judges = zip(names, weights, strict=True)
    rewards = [{"use": f"{tmp_path}/judges.py:{name}", "weight": weight} for name, weight in judges]
    run = train({**config, "rewards": rewards, "eval": None})
    assert metric(run.run_dir, "rollout/resampled_ratio") == [replaced]
