"""TRL's own parser with a YAML file, as in its example scripts."""

import sys

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

RECIPE = """
model_name_or_path: base
dataset_name: rows.jsonl
dtype: float32
use_peft: true
lora_r: 4
lora_target_modules: [q_proj, v_proj]
output_dir: out
max_steps: 1
num_generations: 2
max_completion_length: 4
learning_rate: 1.0e-5
use_vllm: false
report_to: []
"""


def main(script_args, training_args, model_args):
    training_args.model_init_kwargs = dict(
        revision="main", attn_implementation=model_args.attn_implementation, dtype=model_args.dtype
    )
    dataset = load_dataset("json", data_files=script_args.dataset_name)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[lambda completions, **kwargs: [float(len(c)) for c in completions]],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split].rename_column("question", "prompt"),
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    return trainer


with open("recipe.yaml", "w") as file:
    file.write(RECIPE)
sys.argv = ["grpo.py", "--config", "recipe.yaml", "--beta", "0.01"]
trainer = main(*TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config())
