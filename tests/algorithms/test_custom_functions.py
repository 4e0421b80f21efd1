"""A user's own advantage, policy loss and loss weight: loaded, tried before the run, used on every rank."""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assigned import assign_advantages
from cohort.algorithms import build_algorithm, check_custom_functions
from cohort.config import AlgorithmConfig, CustomFunction, load_config, to_yaml
from cohort.errors import UserError
from cohort.run.folder import config_changes
from runs import assert_same_weights, changed, make_inputs, train
from samples import NAN, advantage_inputs, loss_inputs, scored

OWN = """
    import numpy as np
    import torch
    from cohort.algorithms.advantages import group_mean
    from cohort.packing.batch import LossOutput

    def centred(x):
        return group_mean(x)

    def reinforce(x):
        ratio = torch.exp(x.logprobs - x.old_logprobs)
        return -torch.minimum(ratio * x.advantages, ratio.clamp(0.8, 1.2) * x.advantages)

    def with_metrics(x):
        return LossOutput(per_token_loss=reinforce(x), token_metrics={"mine": x.logprobs})

    def with_entropy(x):
        return reinforce(x) - 0.1 * x.entropy

    def of_sequence(x):  # completions are numbered from 0, also alone
        count = len(x.trajectory_ids.unique())
        sums = torch.zeros(count, dtype=x.logprobs.dtype).index_add(0, x.trajectory_ids, log_ratio(x))
        return -x.advantages * (sums / x.trajectory_ids.bincount(minlength=count))[x.trajectory_ids].exp()

    def per_step(lengths, included):
        return included / max(lengths[included].sum(), 1)

    def scaled(x, *, scale): return scale * group_mean(x)
    def softened(x, tau, floor=0.0): return -x.advantages * torch.sigmoid(tau * (x.logprobs - x.old_logprobs)) - floor
    def to_the_power(lengths, included, power=1.0): return included / lengths**power
    def of_two_rewards(x): return x.reward_parts[..., 0] + x.reward_parts[..., 1]
    def too_short(x): return x.rewards[:1]
    def integers(x): return (x.rewards > 1).long()
    def nan_advantage(x): return x.rewards / 0
    def not_nan_aware(x): return x.rewards - x.rewards.mean(dim=1, keepdim=True)
    def by_std(x): return (x.rewards - x.rewards.nanmean(1, keepdim=True)).nan_to_num(0)
    def raising(x): return x.nothing
    def summed(x): return reinforce(x).sum()
    def as_text(x): return "loss"
    def in_double(x): return reinforce(x).double()
    def detached(x): return reinforce(x).detach()
    def log_of_advantage(x): return x.logprobs * x.advantages.log()
    def over_the_batch(x): return reinforce(x) - x.logprobs.mean()
    def needs_tokens(x): return reinforce(x) + 0 * x.logprobs.max()
    def reference(x): return x.logprobs - x.reference_logprobs
    def everywhere(lengths, included): return np.ones(len(lengths))
    def nowhere(lengths, included): return np.zeros(len(lengths))
    def mean_of_none(lengths, included): return included / included.sum()
    def one_number(lengths, included): return 1.0

    def log_ratio(x): return x.logprobs - x.old_logprobs
    def by_ratio(x): return -x.advantages * log_ratio(x).exp()

    def nan_at_one(x): return -x.advantages * log_ratio(x) / log_ratio(x).abs().sqrt()
    def kink_at_one(x): return -x.advantages * x.logprobs + 0.01 * log_ratio(x).square().sqrt()
    def reference_kink(x): return by_ratio(x) + (x.logprobs - x.reference_logprobs).square().sqrt()
    def only_at_one(x): return -x.advantages * x.logprobs * (log_ratio(x) == 0)
    def bonus_at_one(x): return by_ratio(x) - x.logprobs * (log_ratio(x) == 0)
    def by_place(x): return by_ratio(x) * (x.trajectory_ids + 1)

    def by_plain_std(x): return centred(x) / centred(x).square().nanmean(1, keepdim=True).sqrt()
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
def own(tmp_path, monkeypatch) -> Path:
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own.py"


def check(**keys):
    settings: dict[str, Any] = {"num_generations": 4, "num_rewards": 1, "gradients_in_forward": False}
    settings |= {name: keys.pop(name) for name in settings if name in keys}
    check_custom_functions(AlgorithmConfig(**keys), **settings)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (
            "advantage",
            "too_short",
            ["returned a tensor of shape (1, 4) for rewards (2, 4)", "(2, 4, 4), one per token"],
        ),
        ("advantage", "integers", ["must be a float tensor"]),
        ("advantage", "nan_advantage", ["returned NaN or infinity for a scored completion"]),
        ("advantage", "not_nan_aware", ["returned NaN or infinity for a scored completion"]),
        ("advantage", "raising", ["raised AttributeError", "no attribute 'nothing'", "own.py:"]),
        ("advantage", "missing", ["has no 'missing'"]),
        ("policy_loss", "summed", ["returned a tensor of shape () as per_token_loss", "here (8,), neither summed"]),
        ("policy_loss", "as_text", ["returned a str; must be a tensor [T]"]),
        ("policy_loss", "in_double", ["torch.float64; must have the dtype of the logprobs, torch.float32"]),
        ("policy_loss", "detached", ["no gradient with respect to the logprobs"]),
        ("policy_loss", "log_of_advantage", ["NaN or infinite"]),
        ("policy_loss", "over_the_batch", ["depends on the other completions of its micro-batch"]),
        ("policy_loss", "needs_tokens", ["raised RuntimeError", "was a micro-batch without tokens"]),
        ("policy_loss", "reference", ["raised TypeError"]),
        ("loss_weight", "everywhere", ["returned a nonzero weight for an excluded completion"]),
        ("loss_weight", "nowhere", ["returned 0 for every completion"]),
        ("loss_weight", "mean_of_none", ["returned [nan, nan, nan, nan] for 4 completions"]),
        ("loss_weight", "one_number", ["returned 1.0 for 4 completions; must be one finite number for each"]),
        # what would fail in the run
        ("policy_loss", "nan_at_one", ["NaN or infinite on-policy"]),
        ("policy_loss", "kink_at_one", ["NaN or infinite on-policy"]),
        ("policy_loss", "by_place", ["depends on the other completions of its micro-batch"]),
        ("advantage", "by_plain_std", ["returned NaN or infinity for a scored completion (rewards [[1.0, 1.0, 1.0, "]),
        ("advantage", "of_the_scored", ["raised"]),
        ("loss_weight", "letters", ["returned a list for 4 completions; must be one finite number for each"]),
        ("loss_weight", "imaginary", ["returned a ndarray for 4 completions"]),
        ("loss_weight", "ragged", ["returned a list for 4 completions"]),
    ],
)
def test_a_function_that_breaks_a_rule_is_refused(own: Path, kind: str, name: str, words: list[str]):
    with pytest.raises(UserError) as caught:
        check(**{kind: f"{own}:{name}"})
    assert str(caught.value).startswith(f"algorithm.{kind}: '{own}:{name}'")
    for word in words:
        assert word in str(caught.value)


def test_arguments_reach_own_functions(own: Path):
    config = AlgorithmConfig(
        advantage={"use": "own.py:scaled", "args": {"scale": 3.0}},
        policy_loss={"use": "own.py:softened", "args": {"tau": 2.0, "floor": 1.0}},
        loss_weight={"use": "own.py:to_the_power", "args": {"power": 2}},
    )
    check_custom_functions(config, num_generations=2, num_rewards=1, gradients_in_forward=True)
    algorithm = build_algorithm(config, max_completion_tokens=8)
    rewards = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    assert algorithm.advantage(advantage_inputs(rewards)).tolist() == [[-3.0, 3.0]]
    losses = algorithm.policy_loss(loss_inputs([1.0, 2.0], [1.0, -1.0])).per_token_loss
    assert losses.tolist() == pytest.approx([-0.5 - 1, 4 / 5 - 1])  # sigmoid(2 ln 2) = 4 / 5
    assert algorithm.loss_weight(np.array([1, 2]), np.array([True, True])).tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "missing a required argument: 'tau'. Its arguments: floor, tau"),
        ({"tua": 1.0, "tau": 1.0}, "got an unexpected keyword argument 'tua'; did you mean tau? Its arguments: fl"),
        ({"tau": 1.0, "x": 1.0}, "multiple values for argument 'x'. Its arguments: floor, tau"),
        ({"tau": "much"}, "raised TypeError: "),
        ({"tau": 0.0}, "the loss has no gradient with respect to the logprobs"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(own: Path, args: dict[str, Any], words: str):
    with pytest.raises(UserError) as caught:
        check(policy_loss={"use": f"{own}:softened", "args": args})
    assert str(caught.value).startswith(f"algorithm.policy_loss: '{own}:softened': ") and words in str(caught.value)


def test_arguments_are_part_of_the_configuration(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Found beside the file, changed by an override, written and read again; with others it is another run."""
    (tmp_path / "run.yaml").write_text(
        "model: {path: m}\ndata: {path: d.jsonl}\nrewards: [{use: math}]\n"
        "algorithm: {name: dapo, policy_loss: {use: 'own.py:softened', args: {tau: 0.5}}}\n"
    )
    monkeypatch.chdir("/")
    config = load_config(tmp_path / "run.yaml")
    assert config.algorithm.policy_loss == CustomFunction(f"{own}:softened", {"tau": 0.5})
    assert config.algorithm.clip_high is None  # a built-in loss reads it
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config
    other = load_config(tmp_path / "run.yaml", ["algorithm.policy_loss.args.tau=0.7"])
    assert config_changes(config, other) == {
        "algorithm.policy_loss": (config.algorithm.policy_loss, CustomFunction(f"{own}:softened", {"tau": 0.7}))
    }
    assert repr(other.algorithm.policy_loss) == str({"use": f"{own}:softened", "args": {"tau": 0.7}})


def test_an_own_advantage_is_tried_on_as_many_rewards_as_the_run_has(own: Path):
    check(advantage=f"{own}:of_two_rewards", num_rewards=2)
    with pytest.raises(UserError, match="raised IndexError"):
        check(advantage=f"{own}:of_two_rewards", num_rewards=1)


def test_what_an_own_loss_looks_at_is_found_by_trying_it(own: Path):
    def traits(name: str) -> bool:
        config = AlgorithmConfig(policy_loss=f"{own}:{name}")
        return build_algorithm(config, max_completion_tokens=8).learns_without_advantage

    assert not traits("reinforce")
    assert traits("with_entropy")
    check(policy_loss=f"{own}:of_sequence")
    check(policy_loss=f"{own}:reinforce", gradients_in_forward=True)
    with pytest.raises(UserError, match=r"depends on the other tokens of its completion, but train.gradients_in_f"):
        check(policy_loss=f"{own}:of_sequence", gradients_in_forward=True)
    check(policy_loss=f"{own}:reference", beta=0.1)


def test_an_advantage_that_needs_peers_is_refused_alone(own: Path):
    check(advantage=f"{own}:by_std")
    with pytest.raises(
        UserError, match=r"returned 0 for every completion of groups of 1 .* raise rollout.num_generations"
    ):
        check(advantage=f"{own}:by_std", num_generations=1)


def test_an_own_loss_is_used_as_one_of_ours(own: Path):
    algorithm = build_algorithm(AlgorithmConfig(policy_loss=f"{own}:with_metrics"), max_completion_tokens=8)
    out = algorithm.policy_loss(loss_inputs([1.5, 0.5], [1.0, 1.0]))
    torch.testing.assert_close(out.per_token_loss, torch.tensor([-1.2, -0.5], dtype=torch.float64))
    assert out.token_metrics["mine"].tolist() == pytest.approx(np.log([1.5, 0.5]).tolist())
    weights = build_algorithm(AlgorithmConfig(loss_weight="own.py:per_step"), max_completion_tokens=8).loss_weight
    assert weights(np.array([3, 1]), np.array([True, True])).tolist() == [0.25, 0.25]


def test_the_reference_is_the_policy_at_first(own: Path):
    with pytest.raises(UserError, match="NaN or infinite on-policy"):
        check(policy_loss="own.py:reference_kink", beta=0.1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("policy_loss", "by_ratio"),
        ("policy_loss", "only_at_one"),  # learns in the first update alone
        ("policy_loss", "of_sequence"),
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


def test_a_run_with_own_functions_is_the_run_with_ours(own: Path, tmp_path: Path):
    """The same formulas, written by a user: the same weights; and another function is another run."""
    config = changed(make_inputs(tmp_path, dtype=torch.float64), train={"steps": 3}, model={"dtype": "float64"})
    config = changed(config, eval={"every": 0, "before_training": False})
    ours = {"name": "dr_grpo", "loss_weight": "token_mean"}
    theirs = {"advantage": "own.py:centred", "policy_loss": "own.py:reinforce", "loss_weight": "own.py:per_step"}
    runs = [
        train(changed(config, algorithm=algorithm, run={"dir": str(tmp_path / name), "checkpoint_every": 0}))
        for name, algorithm in {"ours": ours, "theirs": theirs}.items()
    ]
    assert_same_weights(runs[1].final_dir, runs[0].final_dir)
    written = load_config(tmp_path / "theirs" / "config.yaml").algorithm
    assert written.advantage == CustomFunction(f"{own}:centred")
    other = changed(
        config, algorithm=theirs | {"policy_loss": "own.py:with_entropy"}, run={"dir": str(tmp_path / "theirs")}
    )
    with pytest.raises(UserError, match=r"algorithm.policy_loss"):
        train(other)


def test_the_example_of_the_docs_works(own: Path):
    page = (Path(__file__).parents[2] / "docs" / "algorithm-terms.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    (own.parent / "example.py").write_text(code, encoding="utf-8")
    check(advantage="example.py:leave_one_out", policy_loss="example.py:soft_clip", gradients_in_forward=True)
    advantage = build_algorithm(
        AlgorithmConfig(advantage="example.py:leave_one_out"), max_completion_tokens=8
    ).advantage
    rewards = torch.tensor([[1.0, 2.0, torch.nan]], dtype=torch.float64)
    assert advantage(advantage_inputs(rewards))[0, :2].tolist() == [-1.0, 1.0]
