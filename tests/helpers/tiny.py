"""Tiny models, tokenizers and data of the tests, made here and loaded the way users load theirs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from cohort.models import Policy
from cohort.packing import pack
from cohort.packing.batch import TrainBatch
from cohort.records import TrainSequence

CONFIGS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
# Like any other up to 512 tokens, but rows cannot be shared, as frequencies could depend on their longest sequence
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>"]


def make_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and the special tokens of a chat."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {token: i for i, token in enumerate(SPECIAL + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


VOCAB_SIZE = len(make_tokenizer())
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(
    kind: str = "llama", *, tie: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A model of some tens of thousands of random weights."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        **SIZES,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "initializer_range": 0.15,  # wide enough for distributions that are not uniform
        **overrides,
    }
    return AutoModelForCausalLM.from_config({**CONFIGS, "mistral": MistralConfig}[kind](**settings), dtype=dtype)


def make_policy(kind: str = "llama", *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Policy:
    return policy_of(make_model(kind, dtype=dtype, **overrides))


def make_gemma2(
    *, dtype: torch.dtype = torch.float32, attn_implementation: str | None = None, **overrides: Any
) -> PreTrainedModel:
    """A model with softcapped logits whose first layer sees a window of 8 tokens."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        **SIZES,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "vocab_size": VOCAB_SIZE,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": None,
        "initializer_range": 0.15,
        **overrides,
    }
    return AutoModelForCausalLM.from_config(
        Gemma2Config(**settings), dtype=dtype, attn_implementation=attn_implementation
    )


def policy_of(model: PreTrainedModel) -> Policy:
    return Policy(model, device=torch.device("cpu"), compute_dtype=model.dtype, pad_token_id=0)


def pack_for(
    policy: Policy, sequences: Sequence[TrainSequence], budget: int, *, dp_size: int = 1
) -> tuple[TrainBatch, ...]:
    """Micro-batches in the layout that the policy computes."""
    return pack(
        sequences,
        micro_batch_tokens=budget,
        dp_size=dp_size,
        share_prompts=policy.shares_prompts,
        padded=policy.layout == "padded",
    )


def save_model_folder(path: Path, kind: str = "llama", **overrides: Any) -> Path:
    """A model folder as a user has it."""
    make_model(kind, **overrides).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def copy_task_rows(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    """Questions whose answer is one digit."""
    return [{"question": f"say {n % 10}", "answer": str(n % 10), "level": n} for n in range(start, start + count)]


def random_sequences(lengths: list[tuple[int, list[int]]], *, seed: int = 0) -> list[TrainSequence]:
    """Groups of (prompt length, completion lengths), with random tokens and advantages and the token mean's weights."""
    rng = np.random.default_rng(seed)
    total = sum(sum(completions) for _, completions in lengths)
    sequences = []
    for group, (p, completions) in enumerate(lengths):
        prompt = rng.integers(2, VOCAB_SIZE, p)
        sequences += [
            TrainSequence.single_turn(
                prompt,
                rng.integers(2, VOCAB_SIZE, c),
                index=len(sequences) + i,
                group=group,
                sampling_logprobs=-rng.random(c) * 4,
                loss_weights=1.0 / total,
                advantages=rng.normal(),
            )
            for i, c in enumerate(completions)
        ]
    return sequences


def naive_logprobs(
    model: PreTrainedModel, sequence: TrainSequence, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of the loss tokens from the model's full logits, one unpadded row: the ground truth."""
    ids, mask = torch.from_numpy(sequence.token_ids).long(), torch.from_numpy(sequence.loss_mask)
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1][mask[1:]]
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(-1, ids[mask].unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of every parameter's gradient, which is then cleared."""
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()
