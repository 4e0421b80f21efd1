"""What the trial of a user's own function finds before the run: edges that every run comes to."""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assigned import assign_advantages
from cohort.algorithms import build_algorithm, check_custom_functions
from cohort.config import AlgorithmConfig
from cohort.errors import UserError
from samples import NAN, scored

OWN = """
    import numpy as np
    import torch

    def log_ratio(x): return x.logprobs - x.old_logprobs
    def by_ratio(x): return -x.advantages * log_ratio(x).exp()

    def nan_at_one(x): return -x.advantages * log_ratio(x) / log_ratio(x).abs().sqrt()
    def kink_at_one(x): return -x.advantages * x.logprobs + 0.01 * log_ratio(x).square().sqrt()
    def reference_kink(x): return by_ratio(x) + (x.logprobs - x.reference_logprobs).square().sqrt()
    def only_at_one(x): return -x.advantages * x.logprobs * (log_ratio(x) == 0)
    def bonus_at_one(x): return by_ratio(x) - x.logprobs * (log_ratio(x) == 0)
    def by_place(x): return by_ratio(x) * (x.trajectory_ids + 1)

    def of_sequence(x):
        count = len(x.trajectory_ids.unique())
        sums = torch.zeros(count, dtype=x.logprobs.dtype).index_add(0, x.trajectory_ids, log_ratio(x))
        return -x.advantages * (sums / x.trajectory_ids.bincount(minlength=count))[x.trajectory_ids].exp()

    def centred(x): return x.rewards - x.rewards.nanmean(1, keepdim=True)
    def by_std(x): return centred(x) / centred(x).square().nanmean(1, keepdim=True).sqrt()
    def of_the_scored(x): return centred(x) + torch.stack([r[~r.isnan()].min() for r in x.rewards])[:, None]

    def overwriting(x):
        x.rewards.nan_to_num_(0.0)
        x.token_rewards.zero_()
        return x.rewards - x.rewards.mean(1, keepdim=True)

    def letters(lengths, included): return ["a"] * len(lengths)
    def imaginary(lengths, included): return included * 1j
    def ragged(lengths, included): return [[1.0], [1.0, 2.0], 0.0, 1.0]
    def listed(lengths, included): return [0.25 * bool(each) for each in included]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own.py"


def check(**keys: Any) -> None:
    check_custom_functions(AlgorithmConfig(**keys), num_generations=4, num_rewards=1, gradients_in_forward=False)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("policy_loss", "nan_at_one", "NaN or infinite on-policy"),
        ("policy_loss", "kink_at_one", "NaN or infinite on-policy"),
        ("policy_loss", "by_place", "depends on the other completions of its micro-batch"),
        ("advantage", "by_std", r"returned NaN or infinity for a scored completion \(rewards \[\[1.0, 1.0, 1.0, 1.0\]"),
        ("advantage", "of_the_scored", "raised RuntimeError|raised IndexError"),
        ("loss_weight", "letters", "returned a list for 4 completions; must be one finite number for each"),
        ("loss_weight", "imaginary", "returned a ndarray for 4 completions"),
        ("loss_weight", "ragged", "returned a list for 4 completions"),
    ],
)
def test_what_would_fail_in_the_run_is_refused_before_it(own: Path, kind: str, name: str, words: str):
    with pytest.raises(UserError, match=words) as caught:
        check(**{kind: f"{own}:{name}"})
    assert str(caught.value).startswith(f"algorithm.{kind}: '{own}:{name}'")


def test_the_reference_is_the_policy_at_first(own: Path):
    with pytest.raises(UserError, match="NaN or infinite on-policy"):
        check(policy_loss="own.py:reference_kink", beta=0.1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("policy_loss", "by_ratio"),
        ("policy_loss", "only_at_one"),  # learns in the first update alone
        ("policy_loss", "of_sequence"),  # completions are numbered from 0, also alone
        ("advantage", "centred"),
        ("loss_weight", "listed"),
    ],
)
def test_what_works_in_a_run_is_accepted(own: Path, kind: str, name: str):
    check(**{kind: f"own.py:{name}"})


def test_what_a_loss_learns_without_advantage_is_seen_on_policy_too(own: Path):
    for name, expected in {"only_at_one": False, "bonus_at_one": True}.items():
        algorithm = build_algorithm(AlgorithmConfig(policy_loss=f"own.py:{name}"), max_completion_tokens=8)
        assert algorithm.learns_without_advantage == expected


def test_an_advantage_that_writes_into_its_rewards_scores_nobody(own: Path):
    """A completion that no reward scored stays that, and has no loss."""
    algorithm = build_algorithm(AlgorithmConfig(advantage="own.py:overwriting"), max_completion_tokens=8)
    kept: list[torch.Tensor] = []

    def watched(x):
        before = (x.rewards.clone(), x.token_rewards.clone())
        advantages = advantage(x)
        kept.extend((x.rewards, before[0], x.token_rewards, before[1]))
        return advantages

    advantage = algorithm.advantage
    sequences = assign_advantages([scored([1.0, NAN, 3.0], [2, 3, 1])], replace(algorithm, advantage=watched))
    torch.testing.assert_close(kept[0], kept[1], equal_nan=True)
    torch.testing.assert_close(kept[2], kept[3])
    assert [bool(s.loss_weights.any()) for s in sequences] == [True, False, True]
