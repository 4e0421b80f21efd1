"""The same losses, gradients and advantages as TRL's own code gives, where its value does not depend on the split.

Losses and gradients are held to a table of what TRL gave, and the table to TRL, where the extra `bench` is installed.
"""

import ast
import importlib.util
import inspect
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cohort.algorithms import AdvantageInputs, build_algorithm
from cohort.config import AlgorithmConfig
from samples import NAN, judged
from trl_losses import CASES, MAX_TOKENS, SEEDS, SPREADS, Step, import_trl, theirs

TABLE = json.loads(Path(__file__).with_name("trl_losses.json").read_text())
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed (pip install '.[bench]')"
)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_that_trl_gave(case: str, spread: float):
    for seed, recorded in zip(SEEDS, TABLE["losses"][case][str(spread)], strict=True):
        our_loss, ours = Step(seed, spread).ours(CASES[case][1])
        assert our_loss == pytest.approx(recorded["loss"], rel=1e-6, abs=1e-12)  # TRL rounds SAPO's tau to float32
        expected = torch.tensor(recorded["gradient"], dtype=torch.float64).view_as(ours)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-9)


@needs_trl
@pytest.mark.parametrize("case", CASES)
def test_the_table_is_what_trl_gives(case: str):
    for spread in SPREADS:
        for seed, recorded in zip(SEEDS, TABLE["losses"][case][str(spread)], strict=True):
            loss, gradient = theirs(case, seed, spread)
            assert loss == pytest.approx(recorded["loss"], rel=1e-9, abs=1e-15)
            assert gradient.flatten().tolist() == pytest.approx(recorded["gradient"], rel=1e-7, abs=1e-12)


def test_the_comparison_notices_another_bound():
    """Negative control."""
    recorded = TABLE["losses"]["grpo"]["0.5"][0]
    our_loss, ours = Step(0, 0.5).ours(AlgorithmConfig(clip_high=0.28))
    assert abs(our_loss - recorded["loss"]) > 1e-4
    assert (ours.flatten() - torch.tensor(recorded["gradient"], dtype=torch.float64)).norm() > 1e-3


@needs_trl
def test_trls_default_cispo_scales_what_is_on_policy():
    """Its cap is epsilon_high itself, 0.2 by default; here the weight of an on-policy token is 1."""
    step = Step(0, 0.0)
    ours = step.ours(AlgorithmConfig(name="cispo"))[1]
    torch.testing.assert_close(step.trl("cispo")[1], 0.2 * ours)
    torch.testing.assert_close(ours, step.trl("dapo")[1])  # the policy gradient


def test_a_delta_within_the_clip_is_where_the_two_papers_differ():
    """So it is refused: the dual clip of arXiv:1912.09729 and TRL's bound are the same only beyond the clip."""
    ratio, advantage = 1.5, -1.0
    dual = max(min(ratio * advantage, 1.2 * advantage), 1.1 * advantage)
    trl = min(min(ratio, 1.1) * advantage, 1.2 * advantage)
    assert (dual, trl) == (-1.1, -1.2)
    with pytest.raises(ValueError, match="must be above 1"):
        AlgorithmConfig(delta=1.1)


def trl_advantages(
    rewards_per_func: torch.Tensor, weights: list[float], group: int, scale: str, how: str
) -> torch.Tensor:
    """The statements of TRL from `rewards_per_func` [N, K] to advantages, compiled by themselves."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(import_trl().GRPOTrainer._generate_and_score_completions)))
    (branches,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "multi_objective_aggregation == 'sum_then" in ast.unparse(node.test)
    )
    names: dict[str, Any] = {
        **vars(import_trl().grpo_trainer),
        "nanstd": import_trl().nanstd,
        "rewards_per_func": rewards_per_func,
        "unscorable_mask": rewards_per_func.isnan().all(dim=1),
        "num_generations": group,
        "device": torch.device("cpu"),
        "self": SimpleNamespace(
            multi_objective_aggregation=how,
            scale_rewards=scale,
            reward_weights=torch.tensor(weights, dtype=torch.float64),
            reward_funcs=weights,
        ),
    }
    exec(compile(ast.Module([branches], []), "trl", "exec"), names)
    return names["advantages"].view(-1, group)


@needs_trl
@pytest.mark.parametrize(
    ("advantage", "scale", "how"),
    [
        ("group_mean_std", "group", "sum_then_normalize"),
        ("group_mean_batch_std", "batch", "sum_then_normalize"),
        ("group_mean", "none", "sum_then_normalize"),
        ("per_reward_mean_std", "group", "normalize_then_sum"),
    ],
)
def test_advantages(advantage: str, scale: str, how: str):
    generator = torch.Generator().manual_seed(0)
    weights = [1.0, 0.3]
    parts_PGK = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    parts_PGK[0, 1, 1] = NAN  # judged by one of two
    parts_PGK[2, 3] = NAN  # not judged
    sums = (parts_PGK * torch.tensor(weights)).nansum(-1).where(~parts_PGK.isnan().all(-1), NAN)
    x = judged(sums)
    x = AdvantageInputs(
        rewards=sums,
        reward_parts=parts_PGK,
        reward_weights=torch.tensor(weights, dtype=torch.float64),
        token_rewards=x.token_rewards,
        lengths=x.lengths,
    )
    ours = build_algorithm(AlgorithmConfig(advantage=advantage), max_completion_tokens=MAX_TOKENS).advantage(x)
    torch.testing.assert_close(ours, trl_advantages(parts_PGK.view(-1, 2), weights, 4, scale, how), equal_nan=True)
