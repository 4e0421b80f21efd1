"""The same losses, gradients and advantages as TRL's own code gives, where its value does not depend on the split.

Needs the extra `bench`; left out without it. What is run is `GRPOTrainer._compute_loss` and the statements of TRL that
make advantages, on stand-ins for the trainer, with everything in one micro-batch of one process.
"""

import ast
import inspect
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cohort.algorithms import AdvantageInputs, build_algorithm
from cohort.batch import LossInputs
from cohort.config import AlgorithmConfig
from samples import NAN, judged

pytest.importorskip("trl", reason="TRL is in the extra `bench`")
with pytest.MonkeyPatch.context() as patch:
    # it would take the folder of our tests with vLLM for vLLM
    patch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, "vllm", "test_runs.py").exists()])
    patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer import grpo_trainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import nanstd

LENGTHS = [3, 7, 1, 5]
B, C, H, V, MAX_TOKENS = 4, 7, 5, 11, 12


class Step:
    """A head whose logprobs of four completions of unequal length depend on one matrix."""

    def __init__(self, seed: int, spread: float):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.targets = random(B, C, H), torch.randint(V, (B, C), generator=generator)
        self.head = random(H, V).requires_grad_()
        self.old = self.logprobs().detach() + spread * random(B, C)
        self.advantages = random(B)
        self.mask = torch.arange(C) < torch.tensor(LENGTHS).unsqueeze(1)

    def logprobs(self) -> torch.Tensor:
        return (self.hidden @ self.head).log_softmax(-1).gather(-1, self.targets.unsqueeze(-1)).squeeze(-1)

    def trl(self, loss_type: str, **settings: Any) -> tuple[float, torch.Tensor]:
        """TRL's loss and the head's gradient."""
        trainer = stand_in(loss_type, self.logprobs(), **settings)
        inputs = {
            "prompt_ids": torch.zeros(B, 1, dtype=torch.int64),
            "prompt_mask": torch.ones(B, 1, dtype=torch.int64),
            "completion_ids": self.targets,
            "completion_mask": self.mask.long(),
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "num_items_in_batch": self.mask.sum() * settings.get("steps_per_generation", 1),
        }
        compute = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
        loss = compute._compute_loss(trainer, None, inputs)
        return loss.item(), torch.autograd.grad(loss, self.head)[0]

    def ours(self, config: AlgorithmConfig) -> tuple[float, torch.Tensor]:
        algorithm = build_algorithm(config, max_completion_tokens=MAX_TOKENS)
        ids = torch.arange(B).repeat_interleave(torch.tensor(LENGTHS))
        out = algorithm.policy_loss(
            LossInputs(
                logprobs=self.logprobs()[self.mask],
                old_logprobs=self.old[self.mask],
                sampling_logprobs=self.old[self.mask],
                reference_logprobs=None,
                entropy=torch.zeros(len(ids)),
                advantages=self.advantages[ids],
                sequence_ids=ids,
            )
        )
        weights_N = algorithm.loss_weight(np.array(LENGTHS), np.ones(B, dtype=bool))
        loss = (torch.from_numpy(weights_N)[ids] * out.per_token_loss).sum()
        return loss.item(), torch.autograd.grad(loss, self.head)[0]


def stand_in(loss_type: str, logprobs: torch.Tensor, **settings: Any) -> SimpleNamespace:
    """What `_compute_loss` looks at of a trainer, with TRL's defaults."""
    epsilon = settings.pop("epsilon", 0.2)
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    return SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=settings.pop("level", "token"),
        epsilon_low=epsilon,
        epsilon_high=settings.pop("epsilon_high", epsilon),
        args=SimpleNamespace(**{**args, **settings}),
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


CASES: dict[str, tuple[dict[str, Any], AlgorithmConfig]] = {
    "grpo": ({"loss_type": "grpo"}, AlgorithmConfig()),
    "grpo, clip-higher": ({"loss_type": "grpo", "epsilon_high": 0.28}, AlgorithmConfig(clip_high=0.28)),
    "grpo, delta": ({"loss_type": "grpo", "delta": 1.5}, AlgorithmConfig(delta=1.5)),
    "dr_grpo": ({"loss_type": "dr_grpo"}, AlgorithmConfig(name="dr_grpo")),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, AlgorithmConfig(name="dapo")),
    "dapo, two steps on one generation batch": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "steps_per_generation": 2},
        AlgorithmConfig(name="dapo"),
    ),
    "bnpo": ({"loss_type": "bnpo"}, AlgorithmConfig(name="bnpo")),
    "gspo": (
        {"loss_type": "grpo", "level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        AlgorithmConfig(name="gspo"),
    ),
    "gspo, wide": (
        {"loss_type": "grpo", "level": "sequence", "epsilon": 0.5},
        AlgorithmConfig(name="gspo", clip_low=0.5, clip_high=0.5),
    ),
    "luspo": (
        {"loss_type": "luspo", "level": "sequence", "epsilon": 0.2},
        AlgorithmConfig(name="luspo", clip_low=0.2, clip_high=0.2),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, AlgorithmConfig(name="cispo", clip_high=0.5)),
    "sapo": ({"loss_type": "sapo"}, AlgorithmConfig(name="sapo")),
    "vespo": ({"loss_type": "vespo"}, AlgorithmConfig(name="vespo")),
    "gmpo": ({"loss_type": "gmpo", "epsilon": 0.4}, AlgorithmConfig(name="gmpo")),
}


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(case: str, spread: float):
    settings, config = CASES[case]
    for seed in range(5):
        step = Step(seed, spread)
        (their_loss, theirs), (our_loss, ours) = step.trl(**settings), step.ours(config)
        assert our_loss == pytest.approx(their_loss, rel=1e-6, abs=1e-12)  # TRL rounds SAPO's tau to float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)


def test_the_comparison_notices_another_bound():
    """Negative control."""
    (their_loss, theirs), (our_loss, ours) = (
        Step(0, 0.5).trl("grpo"),
        Step(0, 0.5).ours(AlgorithmConfig(clip_high=0.28)),
    )
    assert abs(our_loss - their_loss) > 1e-4 and (ours - theirs).norm() > 1e-3


def test_trls_default_cispo_scales_what_is_on_policy():
    """Its cap is epsilon_high itself, 0.2 by default; here the weight of an on-policy token is 1."""
    step = Step(0, 0.0)
    ours, theirs = step.ours(AlgorithmConfig(name="cispo"))[1], step.trl("cispo")[1]
    torch.testing.assert_close(theirs, 0.2 * ours)
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
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))
    (branches,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "multi_objective_aggregation == 'sum_then" in ast.unparse(node.test)
    )
    names: dict[str, Any] = {
        **vars(grpo_trainer),
        "nanstd": nanstd,
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
