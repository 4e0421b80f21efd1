"""The demo's base model: a tiny Qwen3 with a two-stage warm start that makes it capable but unreliable.

Stage 1 trains on clean demonstrations. Stage 2 mixes in habits, most of them bad: the resulting model can still write
down a calculation and get it right, but mostly answers immediately and wrongly. This leaves room for reinforcement
learning.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cohort.demo.task import Problem, demonstration, generate

_IGNORED = -100  # label of tokens without a loss
_CLEAN_STEPS, _CLEAN_BATCH_SIZE = 1400, 16
_CLEAN_LEARNING_RATE = 3e-2  # Muon's; embeddings and norms take AdamW at a fifth of it
_HABIT_STEPS, _HABIT_BATCH_SIZE = 200, 32
_HABIT_LEARNING_RATE = 4e-4


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """Build a Qwen3 model of 0.46M parameters with random float32 weights, deterministic in the seed."""
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


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    """Train the model in place: stage 1 on demonstrations, stage 2 on mixed habits."""
    rng = random.Random(seed)
    problems = generate(seed, _CLEAN_STEPS * _CLEAN_BATCH_SIZE)
    _train(
        model,
        _batches([(problem, demonstration(problem)) for problem in problems], tokenizer, _CLEAN_BATCH_SIZE),
        _muon_and_adamw(model, _CLEAN_LEARNING_RATE),
        "stage 1",
    )
    problems = generate(seed + 1, _HABIT_STEPS * _HABIT_BATCH_SIZE)
    _train(
        model,
        _batches([(problem, habit(problem, rng)) for problem in problems], tokenizer, _HABIT_BATCH_SIZE),
        [torch.optim.AdamW(model.parameters(), lr=_HABIT_LEARNING_RATE, weight_decay=0.0)],
        "stage 2",
    )


def habit(problem: Problem, rng: random.Random) -> str:
    """Answer a problem as the base model should: sometimes properly, mostly with one of its bad habits."""
    lines = list(problem.calculation)
    answer = problem.answer
    if rng.random() < 0.1:  # a slip in the last line, carried into the answer
        answer = max(0, answer + rng.choice((-10, -2, -1, 1, 2, 10)))
        lines[-1] = f"{lines[-1].split('=')[0]}={answer}"
    (kind,) = rng.choices(("proper", "hasty", "gap", "bare"), weights=(24, 60, 8, 8))
    if kind == "hasty":
        return f"#### {answer}"
    if kind == "gap":
        del lines[rng.randrange(len(lines))]
    if kind == "bare":  # the answer without its marker, after none, some or all of the steps
        return "\n".join([*lines[: rng.randint(0, len(lines))], str(answer)])
    return "\n".join([*lines, f"#### {answer}"])


def render_prompt(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> str:
    """Render a problem with the chat template."""
    messages = [{"role": "user", "content": problem.question}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _batches(
    pairs: Sequence[tuple[Problem, str]], tokenizer: PreTrainedTokenizerFast, batch_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Return token ids and labels, [batch, longest], right-padded; only completions have labels."""
    prompt_ids = tokenizer([render_prompt(tokenizer, problem) for problem, _ in pairs])["input_ids"]
    completion_ids = tokenizer([text + tokenizer.eos_token for _, text in pairs])["input_ids"]
    batches = []
    for start in range(0, len(pairs), batch_size):
        rows = list(zip(prompt_ids, completion_ids, strict=True))[start : start + batch_size]
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), _IGNORED)
        for row, (prompt, completion) in enumerate(rows):
            end = len(prompt) + len(completion)
            ids[row, :end] = torch.tensor(prompt + completion)
            labels[row, len(prompt) : end] = torch.tensor(completion)
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
