"""Tiny reward models, and their scores by a plain loop of transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from tiny import CHAT_TEMPLATE, SIZES, VOCAB_SIZE, make_tokenizer

MESSAGES = [{"role": "user", "content": "2+2?"}]


def save_reward_model(
    path: Path, *, num_labels: int = 1, chat_template: str | None = CHAT_TEMPLATE, **overrides: Any
) -> Path:
    """A model folder as a user has it."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        **SIZES,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "num_labels": num_labels,
        "initializer_range": 0.3,
        **overrides,
    }
    AutoModelForSequenceClassification.from_config(Qwen3Config(**settings)).save_pretrained(path)
    make_tokenizer(chat_template=chat_template).save_pretrained(path)
    return path


def naive_scores(path: Path, prompts: list[Any], completions: list[Any], *, label: int = 0) -> list[float]:
    """One sequence at a time. Prompts and completions are lists of messages."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        with torch.no_grad():
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            scores.append(model(input_ids=ids).logits[0, label].item())
    return scores
