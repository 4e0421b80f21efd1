"""Advantages by TRL's own statements, of three groups of four completions with two rewards.

P prompts, G generations, N = P x G completions, K rewards.
"""

import ast
import inspect
import textwrap
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from cohort.algorithms import AdvantageInputs
from samples import NAN, advantage_inputs
from trl_parts import import_trl

WEIGHTS = [1.0, 0.3]
ADVANTAGES = {  # scale_rewards and multi_objective_aggregation of TRL
    "group_mean_std": ("group", "sum_then_normalize"),
    "group_mean_batch_std": ("batch", "sum_then_normalize"),
    "group_mean": ("none", "sum_then_normalize"),
    "per_reward_mean_std": ("group", "normalize_then_sum"),
}


def inputs() -> AdvantageInputs:
    """Random rewards; one completion that one reward of two scored, and one that none did."""
    parts_PGK = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts_PGK[0, 1, 1] = NAN
    parts_PGK[2, 3] = NAN
    weights_K = torch.tensor(WEIGHTS, dtype=torch.float64)
    sums = (parts_PGK * weights_K).nansum(-1).where(~parts_PGK.isnan().all(-1), NAN)
    return replace(advantage_inputs(sums), reward_parts=parts_PGK, reward_weights=weights_K)


def their_advantages(advantage: str) -> torch.Tensor:
    """TRL's [P, G] of the same rewards; NaN where nothing was scored."""
    x = inputs()
    return trl_advantages(x.reward_parts.flatten(0, 1), WEIGHTS, x.rewards.shape[1], *ADVANTAGES[advantage])


def as_row(advantages: torch.Tensor) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [None if a != a else a for a in advantages.flatten().tolist()]


def trl_advantages(
    rewards_per_func: torch.Tensor, weights: list[float], group: int, scale: str, how: str
) -> torch.Tensor:
    """The statements of TRL from `rewards_per_func` [N, K] to advantages [P, G], compiled by themselves."""
    trl = import_trl()
    tree = ast.parse(textwrap.dedent(inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)))
    (branches,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "multi_objective_aggregation == 'sum_then" in ast.unparse(node.test)
    )
    names: dict[str, Any] = {
        **vars(trl.grpo_trainer),
        "nanstd": trl.nanstd,
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
