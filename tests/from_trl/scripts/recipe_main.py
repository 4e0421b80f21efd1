"""The shape of Open-R1's script: a main function, metrics into files, a card, an evaluation at the end."""

import logging
import os
import sys

import datasets
import transformers
from datasets import load_dataset
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

logger = logging.getLogger(__name__)


def accuracy_reward(completions, solution, **kwargs):
    return [float(s in c[0]["content"]) for c, s in zip(completions, solution)]


def format_reward(completions, **kwargs):
    return [float(c[0]["content"].endswith(".")) for c in completions]


REWARD_FUNCS_REGISTRY = {"accuracy": accuracy_reward, "format": format_reward}


def main(training_args):
    set_seed(training_args.seed)
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)])
    log_level = training_args.get_process_log_level()
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    logger.warning(
        f"Process rank: {training_args.local_rank}, device: {training_args.device}, n_gpu: {training_args.n_gpu}"
    )
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)

    dataset = load_dataset("json", data_files={"train": "rows.jsonl", "test": "rows.jsonl"})
    dataset = dataset.map(lambda x: {"prompt": [{"role": "user", "content": x["question"]}], "solution": x["answer"]})
    for split in dataset:
        if "messages" in dataset[split].column_names:
            dataset[split] = dataset[split].remove_columns("messages")

    trainer = GRPOTrainer(
        model="base",
        reward_funcs=[REWARD_FUNCS_REGISTRY[func] for func in ("accuracy", "format")],
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"].select(range(3)) if training_args.eval_strategy != "no" else None,
    )
    checkpoint = training_args.resume_from_checkpoint or last_checkpoint
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(dataset["train"])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    trainer.save_model(training_args.output_dir)
    if trainer.accelerator.is_main_process:
        trainer.create_model_card(dataset_name="me/rows", tags=["open-r1"])
        trainer.model.config.use_cache = True
        trainer.model.config.save_pretrained(training_args.output_dir)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name="me/rows")
    return trainer


if __name__ == "__main__":
    trainer = main(
        GRPOConfig(
            output_dir="out",
            max_steps=2,
            num_generations=4,
            gradient_accumulation_steps=2,
            max_completion_length=4,
            eval_strategy="steps",
            eval_steps=1,
            lr_scheduler_type="cosine",
            log_completions=True,
            report_to=["tensorboard"],
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    )
