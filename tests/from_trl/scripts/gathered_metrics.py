"""A subclass that gathers values of all processes, and evaluates with fewer generations."""

from trl import GRPOConfig, GRPOTrainer


class StatsTrainer(GRPOTrainer):
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        all_rewards = self.accelerator.gather(rewards.to(self.accelerator.device))
        self._metrics["train"]["share_long"].append((all_rewards[:, 0] > 2).float().mean().item())
        return rewards

    def evaluate(self, *args, **kwargs):
        original = self.args.num_generations
        try:
            self.args.num_generations = self.num_generations = 1
            return super().evaluate(*args, **kwargs)
        finally:
            self.args.num_generations = self.num_generations = original


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


rows = [{"prompt": f"say {n}"} for n in range(4)]
args = GRPOConfig("out", max_steps=1, num_generations=2, max_completion_length=4, logging_steps=1)
trainer = StatsTrainer("base", length, args, rows, eval_dataset=rows[:2])
trainer.train()
metrics = trainer.evaluate()
