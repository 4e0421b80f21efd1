"""Losses of a step by TRL's own code and by ours, where TRL's value does not depend on the split; and advantages.

What is run of TRL is `GRPOTrainer._compute_loss`, on a stand-in for the trainer, with everything in one micro-batch of
one process.

    python tests/helpers/trl_losses.py > tests/algorithms/trl_losses.json

writes what TRL gives, so that it can be compared with where TRL is not installed.
"""

import json
from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig
from cohort.packing.batch import LossInputs
from trl_advantages import ADVANTAGES, as_row, their_advantages
from trl_parts import import_trl

SPREADS, SEEDS = (0.0, 0.02, 0.5), range(3)
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
        self.reference = self.logprobs().detach() + 0.3 * random(B, C)
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
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum() * settings.get("steps_per_generation", 1),
        }
        trl = import_trl()
        compute = trl.GMPOTrainer if loss_type == "gmpo" else trl.GRPOTrainer
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
                reference_logprobs=self.reference[self.mask],
                entropy=torch.zeros(len(ids)),
                advantages=self.advantages[ids],
                trajectory_ids=ids,
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
        beta=settings.pop("beta", 0.0),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.pop("off_policy_mask_threshold", None),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        get_gamma_weights=import_trl().GRPOTrainer.get_gamma_weights,
        get_off_policy_mask=import_trl().GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


CASES: dict[str, tuple[dict[str, Any], AlgorithmConfig]] = {
    "grpo": ({"loss_type": "grpo"}, AlgorithmConfig()),
    "grpo, clip-higher": ({"loss_type": "grpo", "epsilon_high": 0.28}, AlgorithmConfig(clip_high=0.28)),
    "grpo, delta": ({"loss_type": "grpo", "delta": 1.5}, AlgorithmConfig(delta=1.5)),
    "grpo, KL": ({"loss_type": "grpo", "beta": 0.1}, AlgorithmConfig(beta=0.1)),
    "grpo, KL with its ratio": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        AlgorithmConfig(beta=0.1, kl_unbiased=True),
    ),
    "dapo, KL": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1},
        AlgorithmConfig(name="dapo", beta=0.1),
    ),
    "grpo, off-policy mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        AlgorithmConfig(off_policy_mask_threshold=0.05),
    ),
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
    "luspo, KL": (
        {"loss_type": "luspo", "level": "sequence", "epsilon": 0.2, "beta": 0.1},
        AlgorithmConfig(name="luspo", clip_low=0.2, clip_high=0.2, beta=0.1),
    ),
    "gspo_token, of equal advantages": (
        {"loss_type": "grpo", "level": "sequence", "epsilon": 0.2},
        AlgorithmConfig(name="gspo_token", clip_low=0.2, clip_high=0.2),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, AlgorithmConfig(name="cispo", clip_high=0.5)),
    "sapo": ({"loss_type": "sapo"}, AlgorithmConfig(name="sapo")),
    "vespo": ({"loss_type": "vespo"}, AlgorithmConfig(name="vespo")),
    "gmpo": ({"loss_type": "gmpo", "epsilon": 0.4}, AlgorithmConfig(name="gmpo")),
}


def theirs(case: str, seed: int, spread: float) -> tuple[float, torch.Tensor]:
    """TRL's loss and gradient of a case."""
    return Step(seed, spread).trl(**CASES[case][0])


def default_cispo() -> list[float]:
    """TRL's gradient, in rows, of tokens that are on policy, with its default cap."""
    return in_rows(Step(0, 0.0).trl("cispo")[1])


def in_rows(gradient: torch.Tensor) -> list[float]:
    """To twelve digits."""
    return [float(f"{x:.12g}") for x in gradient.flatten().tolist()]


def main() -> None:
    """Print the table: by case, spread and seed the loss and the gradient, in rows; and advantages."""
    table = {
        case: {
            str(spread): [
                {"loss": loss, "gradient": in_rows(gradient)}
                for loss, gradient in (theirs(case, seed, spread) for seed in SEEDS)
            ]
            for spread in SPREADS
        }
        for case in CASES
    }
    advantages = {name: as_row(their_advantages(name)) for name in ADVANTAGES}
    print(
        json.dumps({"trl": version("trl"), "losses": table, "default_cispo": default_cispo(), "advantages": advantages})
    )


if __name__ == "__main__":
    main()
