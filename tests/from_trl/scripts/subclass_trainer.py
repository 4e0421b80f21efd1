"""A trainer with arguments of its own, rewards that it changes, and metrics that it adds."""

import torch
from trl import GRPOConfig, GRPOTrainer


class ClippedGRPOTrainer(GRPOTrainer):
    def __init__(self, *args, reward_cap: float = 1.0, **kwargs):
        self.reward_cap = reward_cap
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._metrics["train"]["capped"].append((rewards > self.reward_cap).float().mean().item())
        return torch.clamp(rewards, max=self.reward_cap)

    def log(self, logs, start_time=None):
        logs["reward_cap"] = self.reward_cap
        super().log(logs, start_time)

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        metrics["eval_seen"] = 1
        return metrics


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


rows = [{"prompt": f"say {n}"} for n in range(4)]
args = GRPOConfig(
    "out", max_steps=2, num_generations=2, max_completion_length=4, logging_steps=1, eval_strategy="epoch"
)
trainer = ClippedGRPOTrainer("base", length, args, rows, eval_dataset=rows[:2], reward_cap=2.0)
trainer.train()
