"""The demos' base models: a tiny Qwen3 with a two-stage warm start that makes it capable but unreliable.

Stage 1 trains on clean demonstrations. Stage 2 mixes in habits, most of them bad: the resulting model can still solve
a problem properly, but mostly answers immediately and wrongly. This leaves room for reinforcement learning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cohort.records import Message
from tokenizer import ASSISTANT

_IGNORED = -100  # label of tokens without a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Sizes and learning rates of the two stages."""

    clean_steps: int = 1400
    clean_batch_size: int = 16
    clean_learning_rate: float = 3e-2  # Muon's; embeddings and norms take AdamW at a fifth of it
    habit_steps: int = 200
    habit_batch_size: int = 32
    habit_learning_rate: float = 4e-4

    @property
    def num_clean(self) -> int:
        """Number of demonstrations of stage 1."""
        return self.clean_steps * self.clean_batch_size

    @property
    def num_habits(self) -> int:
        """Number of conversations of stage 2."""
        return self.habit_steps * self.habit_batch_size


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """Build a Qwen3 model of about 0.46M parameters with random float32 weights, deterministic in the seed."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # texts are short
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: WarmStart,
    *,
    demonstrations: Sequence[Sequence[Message]],
    habits: Sequence[Sequence[Message]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Train the model in place: stage 1 on demonstrations, stage 2 on mixed habits.

    Args:
        model: model to train.
        tokenizer: its tokenizer.
        settings: sizes and learning rates.
        demonstrations: conversations of stage 1; assistant messages are trained on.
        habits: conversations of stage 2.
        tools: schemas of the tools of all conversations.
    """
    rendered = [tokenize(conversation, tokenizer, tools) for conversation in demonstrations]
    _train(
        model,
        _batches(rendered, tokenizer, settings.clean_batch_size),
        _muon_and_adamw(model, settings.clean_learning_rate),
        "stage 1",
    )
    rendered = [tokenize(conversation, tokenizer, tools) for conversation in habits]
    _train(
        model,
        _batches(rendered, tokenizer, settings.habit_batch_size),
        [torch.optim.AdamW(model.parameters(), lr=settings.habit_learning_rate, weight_decay=0.0)],
        "stage 2",
    )


def tokenize(
    conversation: Sequence[Message], tokenizer: PreTrainedTokenizerFast, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[int], list[int]]:
    """Return token ids and labels of a conversation. Assistant turns have labels, including the end of the turn."""
    text = tokenizer.apply_chat_template(list(conversation), tools=list(tools) or None, tokenize=False)
    token_ids: list[int] = tokenizer(text)["input_ids"]
    start, end = tokenizer.convert_tokens_to_ids(ASSISTANT), tokenizer.eos_token_id
    labels = []
    is_trained = False
    for token in token_ids:
        labels.append(token if is_trained else _IGNORED)
        is_trained = token == start or (is_trained and token != end)
    return token_ids, labels


def _batches(
    rows: Sequence[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerFast, batch_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Return token ids and labels, [batch, longest], right-padded."""
    batches = []
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        width = max(len(token_ids) for token_ids, _ in chunk)
        ids = torch.full((len(chunk), width), tokenizer.pad_token_id)
        labels = torch.full((len(chunk), width), _IGNORED)
        for row, (token_ids, token_labels) in enumerate(chunk):
            ids[row, : len(token_ids)] = torch.tensor(token_ids)
            labels[row, : len(token_ids)] = torch.tensor(token_labels)
        batches.append((ids, labels))
    return batches


def _muon_and_adamw(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest: needs far fewer steps than AdamW at this size."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=learning_rate, momentum=0.9, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=learning_rate / 5, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def _train(
    model: Qwen3ForCausalLM,
    batches: Sequence[tuple[Tensor, Tensor]],
    optimizers: Sequence[torch.optim.Optimizer],
    name: str,
) -> None:
    """Train one epoch with a short warm-up and linear decay of the learning rate to 0."""
    model.train()
    num_steps = len(batches)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / num_steps))
        for optimizer in optimizers
    ]
    for step, (ids, labels) in enumerate(batches):
        # no attention mask needed: a causal model does not see right padding
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"{name}, step {step + 1}: loss {loss.item():.3f}")
