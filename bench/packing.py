"""Micro-batches and ranks for a step of made-up lengths: time, and how much of the machine is used.

    python bench/packing.py [--budget 16384] [--seed 0] [--quick]

Groups of 8 completions with shared prompts; prompts of 50 to 500 tokens, completions from a lognormal with a median of
900 tokens, cut at 8,192. Of the columns, `packed` and `padded` are the share of token places that whole sequences fill:
packed by first-fit decreasing, and each padded to the longest of the step. `balance` is the mean cost of a rank over
the largest; `in step` the same if ranks wait for each other after every micro-batch; `fill` the share of places used
in the micro-batches that are not empty; `repeated` the share of computed tokens that are prompts computed again.
"""

import argparse
import time

import numpy as np

from cohort.packing.bins import ATTENTION_COST, Assignment, assign_sequences
from cohort.records import FloatArray, IntArray

NUM_GENERATIONS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    sizes, worlds = ((1_000,), (1, 8)) if args.quick else ((1_000, 10_000, 100_000), (1, 8, 64, 1024))
    print("| sequences | ranks | time | packed | padded | balance | in step | fill | repeated | micro-batches |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for num_sequences in sizes:
        prompts, completions, groups = step(num_sequences, args.seed)
        packed = packing_efficiency(prompts, completions, budget=args.budget)
        padded = padding_efficiency(prompts, completions)
        for world_size in worlds:
            start = time.perf_counter()
            assignment = assign_sequences(
                prompts,
                completions,
                groups,
                budget=args.budget,
                dp_size=world_size,
                share_prompts=True,
                padded=False,
            )
            seconds = time.perf_counter() - start
            tokens, costs = measure(assignment, prompts, completions, groups)
            least = completions.sum() + prompts[::NUM_GENERATIONS].sum()
            balance = costs.sum(axis=1).mean() / costs.sum(axis=1).max()
            in_step = costs.sum(axis=1).mean() / costs.max(axis=0).sum()
            print(
                f"| {num_sequences:,} | {world_size:,} | {seconds:.3f} s | {packed:.1%} | {padded:.1%} | {balance:.3f} "
                f"| {in_step:.3f} | {tokens.sum() / (np.count_nonzero(tokens) * args.budget):.1%} "
                f"| {1 - least / tokens.sum():.2%} | {tokens.size:,} |"
            )


def packing_efficiency(prompt_tokens: IntArray, completion_tokens: IntArray, *, budget: int) -> float:
    """Tokens per place for one, where whole sequences are packed by first-fit decreasing."""
    groups = range(len(prompt_tokens))
    assignment = assign_sequences(
        prompt_tokens, completion_tokens, groups, budget=budget, dp_size=1, share_prompts=False, padded=False
    )
    return float((prompt_tokens + completion_tokens).sum() / (len(assignment.micro_batches[0]) * budget))


def padding_efficiency(prompt_tokens: IntArray, completion_tokens: IntArray) -> float:
    """Tokens per computed position, where all rows of a step are padded to the longest. Any number of rows at a time
    gives the same.
    """
    lengths = prompt_tokens + completion_tokens
    return float(lengths.mean() / lengths.max())


def step(num_sequences: int, seed: int) -> tuple[IntArray, IntArray, list[int]]:
    """Prompt and completion tokens and group of each sequence."""
    rng = np.random.default_rng(seed)
    num_groups = num_sequences // NUM_GENERATIONS
    prompts = rng.integers(50, 501, num_groups).repeat(NUM_GENERATIONS)
    completions = rng.lognormal(np.log(900), 0.8, len(prompts)).clip(1, 8192).astype(np.int64)
    return prompts, completions, np.arange(num_groups).repeat(NUM_GENERATIONS).tolist()


def measure(
    assignment: Assignment, prompts: IntArray, completions: IntArray, groups: list[int]
) -> tuple[FloatArray, FloatArray]:
    """Computed tokens and cost, both [ranks, split groups and micro-batches], counted again from the sequences."""
    quadratic = ATTENTION_COST
    ranks = [
        [*(sum(parts, ()) for parts in split_groups), *micro_batches]
        for split_groups, micro_batches in zip(assignment.split_groups, assignment.micro_batches, strict=True)
    ]
    tokens = np.zeros((len(ranks), max(map(len, ranks))))
    costs = np.zeros_like(tokens)
    for rank, pieces in enumerate(ranks):
        for i, rows in enumerate(pieces):
            p = np.array([prompts[n] for n in {groups[n]: n for n in rows}.values()])
            c, after = completions[list(rows)], prompts[list(rows)]
            tokens[rank, i] = p.sum() + c.sum()
            costs[rank, i] = tokens[rank, i] + quadratic * ((p * p / 2).sum() + (c * (after + c / 2)).sum())
    return tokens, costs


if __name__ == "__main__":
    main()
