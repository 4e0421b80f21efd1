"""The demo's base model, shipped as package data, and how to rebuild it (`cohort demo --rebuild-base`)."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from cohort.demo.pretrain import build_model, habit, render_prompt, warm_start
from cohort.demo.task import Problem, demonstration, generate
from cohort.demo.tokenizer import train_tokenizer
from cohort.models import quiet_transformers

BASE_PATH = Path(__file__).parent / "base"
ANSWER_PATTERN = r"####\s*(-?\d+)\s*$"
MAX_COMPLETION_TOKENS = 48

_NUM_TOKENIZER_PROBLEMS = 3000
_SEED, _HELDOUT_SEED = 0, 1_000_000
_BATCH_SIZE = 512  # rows per sampling batch; bounds memory


def rebuild(out: Path) -> dict[str, float]:
    """Train the tokenizer and the base model and save both as a Hugging Face folder of about 1 MB.

    The folder is the same on every machine of the same kind with the same number of threads; elsewhere rounding may
    differ in the last digits.

    Returns:
        `greedy_accuracy` on 256 held-out problems, and `pass_at_1` and `pass_at_8` at temperature 1 on 128 of them.
    """
    rng = random.Random(_SEED)
    problems = generate(_SEED, _NUM_TOKENIZER_PROBLEMS)
    texts = [text for problem in problems for text in (problem.question, demonstration(problem), habit(problem, rng))]
    tokenizer = train_tokenizer(texts)
    print(f"tokenizer: {len(tokenizer)} tokens")

    model = build_model(tokenizer, seed=_SEED)
    print(f"model: {model.num_parameters():,} parameters")
    warm_start(model, tokenizer, seed=_SEED)

    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    with quiet_transformers():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    # evaluate as in training: the saved weights in float32
    results = _measure(model.float(), tokenizer)
    print(", ".join(f"{name} {value:.3f}" for name, value in results.items()))
    return results


def _measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Evaluate on held-out problems: greedy accuracy, and pass@1 and pass@8 at temperature 1."""
    problems = generate(_HELDOUT_SEED, 256, split="heldout")
    greedy = _correct(model, tokenizer, problems, num_samples=1, seed=None)
    sampled = _correct(model, tokenizer, problems[:128], num_samples=8, seed=_SEED)
    return {
        "greedy_accuracy": sum(map(sum, greedy)) / len(greedy),
        "pass_at_1": sum(map(sum, sampled)) / (8 * len(sampled)),
        "pass_at_8": sum(map(any, sampled)) / len(sampled),
    }


def _correct(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    num_samples: int,
    seed: int | None,
) -> list[list[bool]]:
    """Return per problem and sample whether the answer is right. Greedy if `seed` is None."""
    model.eval()
    decoding = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    prompts = [render_prompt(tokenizer, problem) for problem in problems for _ in range(num_samples)]
    texts: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)
        for start in range(0, len(prompts), _BATCH_SIZE):
            inputs = tokenizer(
                prompts[start : start + _BATCH_SIZE], padding=True, padding_side="left", return_tensors="pt"
            )
            sequences = model.generate(**inputs, **decoding, max_new_tokens=MAX_COMPLETION_TOKENS)
            texts += tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    matches = [re.search(ANSWER_PATTERN, text) for text in texts]
    answers = [int(match[1]) if match else None for match in matches]
    return [
        [answer == problem.answer for answer in answers[row * num_samples : (row + 1) * num_samples]]
        for row, problem in enumerate(problems)
    ]
