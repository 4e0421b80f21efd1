"""An asynchronous reward beside one that does not score every row."""

import asyncio

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


async def judge(prompts, completions, completion_ids, trainer_state, **kwargs):
    async def one(ids):
        await asyncio.sleep(0.001)
        return len(ids) / 10 + trainer_state.global_step

    return await asyncio.gather(*(one(ids) for ids in completion_ids))


def math_only(completions, task, log_metric=None, log_extra=None, **kwargs):
    scores = [float("1" in c) if t == "math" else None for c, t in zip(completions, task)]
    if log_extra:
        log_extra("task", task)
    if log_metric:
        log_metric("num_math", sum(t == "math" for t in task))
    return scores


dataset = Dataset.from_list([{"prompt": f"say {n}", "task": "math" if n % 2 else "chat"} for n in range(8)])
args = GRPOConfig("out", max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=4)
args.logging_steps = 1
trainer = GRPOTrainer("base", [judge, math_only], args, dataset)
trainer.train()
