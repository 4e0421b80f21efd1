"""The most copied script: conversations with a system prompt, five rewards, LoRA, and arguments of 2025."""

import re

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "Answer in <answer>...</answer>."


def extract_xml_answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def get_questions(split="train"):
    data = load_dataset("json", data_files="rows.jsonl")[split]
    return data.map(
        lambda x: {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": x["question"]}],
            "answer": x["answer"],
        }
    )


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    assert prompts[0][-1]["role"] == "user"
    return [2.0 if extract_xml_answer(r) == a else 0.0 for r, a in zip(responses, answer)]


def int_reward_func(completions, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if any(c.isdigit() for c in r) else 0.0 for r in responses]


def soft_format_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if re.search(r"<answer>.*</answer>", c[0]["content"]) else 0.0 for c in completions]


model = AutoModelForCausalLM.from_pretrained("base", torch_dtype=torch.bfloat16, device_map=None)
tokenizer = AutoTokenizer.from_pretrained("base")
tokenizer.pad_token = tokenizer.eos_token
training_args = GRPOConfig(
    output_dir="out",
    run_name="Qwen-GRPO-gsm8k",
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    num_generations=4,
    max_prompt_length=256,
    max_completion_length=8,
    num_train_epochs=1,
    save_steps=100,
    max_grad_norm=0.1,
    report_to="none",
    log_on_each_node=False,
)
peft_config = LoraConfig(
    r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.05
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[soft_format_reward_func, int_reward_func, correctness_reward_func],
    args=training_args,
    train_dataset=get_questions(),
    peft_config=peft_config,
)
trainer.train()
trainer.save_model("final")
