"""The local rollout engine against transformers' `generate`, on the demo's base model and prompts.

    python bench/sampler.py [--model FOLDER] [--threads 2] [--repeats 5] [--device cpu|cuda] [--quick]
    python bench/sampler.py --prompt-tokens 2048  # 4 random prompts x 8, random model of 8 layers
    python bench/sampler.py --rows 8 --repeats 3  # Qwen2.5-0.5B's shape, random weights: 8 completions per prompt,
        # beside the products of its linear layers and head alone: no decoder is faster than these

Same prompts, generations, temperature and token limit; in turn, in one process, in float32, on the GPU where there is
one. Tokens after a completion's end count for neither. Also prints the largest difference between the engine's logprobs
and those of a plain forward pass.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen3Config

from cohort.config import ModelConfig
from cohort.data import PromptRenderer, build_prompts
from cohort.demo import word_problems
from cohort.demo.tasks import WORDS
from cohort.models import LoadRequest, Policy, end_token_ids, load_policy
from cohort.models.packed_weights import PackedWeight
from cohort.records import Prompt
from cohort.rollout import LocalEngine, RolloutCollector, Sampler, SamplingParams, StepKey

MAX_TOKENS = 64
FIRST_TOKENS = 10  # after which weights are packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(WORDS.base_path))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, help="random prompts of so many tokens for a random model")
    parser.add_argument("--rows", type=int, help="so many completions of random prompts by Qwen2.5-0.5B's shape")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    args.repeats = 1 if args.quick else args.repeats
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.rows is not None:
        policy, prompts, generations = true_shape(args.rows, args.prompt_tokens or 64, device)
    elif args.prompt_tokens is None:
        policy, prompts, generations = demo(args.model, tokenizer, device)
    else:
        policy, prompts, generations = long_prompts(args.prompt_tokens, len(tokenizer), device)
    ends = end_token_ids(policy, tokenizer) if args.rows is None else frozenset()
    sampler = Sampler(policy, end_token_ids=ends, max_num_seqs=len(prompts) * generations)
    collector = RolloutCollector(LocalEngine(sampler.sample), tokenizer)
    ways = {} if args.rows is None else products(policy, args.rows)
    speeds: dict[str, list[float]] = {"cohort": [], "transformers": []}
    busy_s: dict[str, list[float]] = {name: [] for name in (*speeds, *ways)}  # of a token of all rows
    worst = 0.0

    def sample(repeat: int, limit: int) -> dict[str, tuple[int, float, float]]:
        """Tokens, seconds and processor seconds of each way to sample up to `limit` tokens per completion."""
        nonlocal worst
        sampling = SamplingParams(
            num_generations=generations, max_completion_tokens=limit, temperature=1.0, top_p=args.top_p
        )
        step = StepKey(purpose="train", seed=0, step=repeat + 1)
        groups, *seconds = timed(lambda: collector.collect(prompts, sampling, step))
        num_tokens = sum(len(c.sampled_token_ids) for g in groups for c in g.trajectories)
        if args.top_p == 1 and limit > 1:
            worst = max(worst, largest_difference(policy, groups[0]))
        rows, *hf_seconds = timed(lambda: sample_with_transformers(policy, prompts, ends, sampling, repeat))
        return {"cohort": (num_tokens, *seconds), "transformers": (sum(length_of(x, ends) for x in rows), *hf_seconds)}

    sample(-1, min(12, args.max_tokens))  # warms up
    for repeat in range(args.repeats):
        measured = sample(repeat, args.max_tokens)
        for name, (tokens, seconds, _) in measured.items():
            speeds[name].append(tokens / seconds)
        if ways:  # without the prompt, and without packing weights, which is in the first tokens
            first = min(FIRST_TOKENS, args.max_tokens // 2)
            for name, (*_, first_s) in sample(repeat, first).items():
                busy_s[name].append((measured[name][-1] - first_s) / (args.max_tokens - first))
            for name, multiply in [*ways.items()] * 3:
                busy_s[name].append(timed(multiply)[-1])
    print(
        f"{len(prompts)} prompts x {generations} generations, at most {args.max_tokens} tokens, "
        f"{args.threads} threads, {machine_name(device)}, torch {torch.__version__}, "
        f"transformers {version('transformers')}"
    )
    for name, values in speeds.items():
        print(f"{name:14}{statistics.median(values):10,.0f} tokens/s (median of {args.repeats})")
    print(f"ratio {statistics.median(speeds['cohort']) / statistics.median(speeds['transformers']):.1f}")
    if ways:
        for name, values in busy_s.items():
            print(f"{name:30}{statistics.median(values):8.2f} processor s per token (least {min(values):.2f})")
        bound = statistics.median(busy_s["transformers"]) / min(statistics.median(busy_s[name]) for name in ways)
        print(f"products alone are {bound:.1f} times as fast as transformers, which no decoder exceeds")
    print(f"largest difference of a logprob from a plain forward pass: {worst:.1e}")


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def demo(model: str, tokenizer, device: torch.device) -> tuple[Policy, tuple[Prompt, ...], int]:
    config = ModelConfig(path=model, compute_dtype="float32")
    policy = load_policy(LoadRequest(config, device=device, tokenizer=tokenizer, trainable=False))
    rows = [{"question": problem.question} for problem in word_problems.generate(0, 16)]
    renderer = PromptRenderer(tokenizer, prompt_column="question")
    return policy, build_prompts(rows, renderer, max_prompt_tokens=128, overlong="error").prompts, 16


def long_prompts(num_tokens: int, vocab_size: int, device: torch.device) -> tuple[Policy, tuple[Prompt, ...], int]:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": vocab_size, **heads}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, max_position_embeddings=2 * num_tokens)).to(device)
    policy = Policy(model, device=device, compute_dtype=None, pad_token_id=0)
    token_ids = np.random.default_rng(0).integers(5, vocab_size, (4, num_tokens))
    return policy, tuple(Prompt(id=i, epoch=0, content="", token_ids=x, columns={}) for i, x in enumerate(token_ids)), 8


def true_shape(rows: int, num_tokens: int, device: torch.device) -> tuple[Policy, tuple[Prompt, ...], int]:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936, **heads}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=True, **ids)).to(device)
    policy = Policy(model, device=device, compute_dtype=None, pad_token_id=0)
    token_ids = np.random.default_rng(0).integers(5, 151_936, (max(1, rows // 8), num_tokens))
    prompts = tuple(Prompt(id=i, epoch=0, content="", token_ids=x, columns={}) for i, x in enumerate(token_ids))
    return policy, prompts, min(rows, 8)


def products(policy: Policy, rows: int) -> dict[str, Callable[[], None]]:
    """The products of one token of all rows by all linear layers and the head, and nothing else."""
    layers = [m for m in policy.model.modules() if isinstance(m, nn.Linear)]
    inputs = [torch.randn(rows, layer.in_features, device=policy.device) for layer in layers]
    weights: dict[str, list[Callable]] = {"products alone, own weights": layers}
    if policy.device.type == "cpu":
        weights["products alone, packed weights"] = [PackedWeight(x.weight, x.bias, torch.float32) for x in layers]

    @torch.no_grad()
    def multiply(multiplied: list[Callable]) -> None:
        for x, by in zip(inputs, multiplied, strict=True):
            by(x)
        if policy.device.type == "cuda":
            torch.cuda.synchronize()

    return {name: partial(multiply, by) for name, by in weights.items()}


def timed(work):
    """The result of some work, its seconds and its processor seconds, which other load changes less."""
    start, busy = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - start, time.process_time() - busy


def sample_with_transformers(
    policy: Policy, prompts: tuple[Prompt, ...], ends: frozenset[int], sampling: SamplingParams, repeat: int
):
    torch.manual_seed(repeat + 1)
    width = max(len(p.token_ids) for p in prompts)
    ids = np.full((len(prompts), width), policy.pad_token_id)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.token_ids) :] = prompt.token_ids
        mask[row, width - len(prompt.token_ids) :] = 1
    output = policy.model.generate(
        input_ids=torch.from_numpy(ids).to(policy.device),
        attention_mask=torch.from_numpy(mask).to(policy.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=sampling.top_p,
        num_return_sequences=sampling.num_generations,
        max_new_tokens=sampling.max_completion_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=policy.pad_token_id,
    )
    return output[:, width:].tolist()


def length_of(row: list[int], ends: frozenset[int]) -> int:
    return next((i + 1 for i, token in enumerate(row) if token in ends), len(row))


def largest_difference(policy: Policy, group) -> float:
    worst = 0.0
    for completion in group.trajectories:
        ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.sampled_token_ids])).unsqueeze(0)
        ids = ids.to(policy.device)
        with torch.no_grad():
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1]
        expected = torch.log_softmax(logits.cpu(), -1).gather(
            -1, torch.from_numpy(completion.sampled_token_ids).unsqueeze(-1)
        )
        worst = max(worst, float(np.abs(completion.sampling_logprobs - expected.squeeze(-1).numpy()).max()))
    return worst


if __name__ == "__main__":
    main()
