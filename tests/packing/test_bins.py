"""Bin packing: the budget is a cap, every sequence is computed once, and ranks have equal work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.packing.bins import ATTENTION_COST, Assignment, assign_sequences
from selection import examples

GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=8)), min_size=0, max_size=12
)
WAYS = st.sampled_from([(True, False), (False, False), (False, True)])  # share_prompts, padded
BUDGET = 16384


def arrays(groups: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Prompt tokens, completion tokens and group of each sequence, from (prompt, completions) of each group."""
    prompts = [prompt for prompt, completions in groups for _ in completions]
    completions = [c for _, completions in groups for c in completions]
    numbers = [g for g, (_, completions) in enumerate(groups) for _ in completions]
    return np.array(prompts, dtype=np.int64), np.array(completions, dtype=np.int64), numbers


def fill(groups, budget: int, dp_size: int, *, share_prompts: bool = True, padded: bool = False) -> Assignment:
    return assign_sequences(*arrays(groups), budget=budget, dp_size=dp_size, share_prompts=share_prompts, padded=padded)


def size(groups, rows, *, share_prompts: bool = True, padded: bool = False) -> int:
    """Tokens of a micro-batch, by definition."""
    prompts, completions, numbers = arrays(groups)
    if padded:
        return max((int(prompts[n] + completions[n]) * len(rows) for n in rows), default=0)
    shared = {numbers[n]: prompts[n] for n in rows}.values() if share_prompts else [prompts[n] for n in rows]
    return int(sum(shared) + sum(completions[n] for n in rows))


def rank_costs(groups, assignment: Assignment) -> np.ndarray:
    """Cost of each rank, by definition, prompts shared."""
    prompts, completions, numbers = arrays(groups)
    quadratic = ATTENTION_COST

    def cost(rows) -> float:
        p = np.array(list({numbers[n]: prompts[n] for n in rows}.values()), dtype=np.int64)
        c, after = completions[list(rows)], prompts[list(rows)]
        return float(p.sum() + c.sum() + quadratic * ((p * p / 2).sum() + (c * (after + c / 2)).sum()))

    def whole(parts) -> tuple[int, ...]:
        return tuple(n for rows in parts for n in rows)

    return np.array(
        [
            sum(map(cost, micro_batches)) + sum(cost(whole(parts)) for parts in split_groups)
            for micro_batches, split_groups in zip(assignment.micro_batches, assignment.split_groups, strict=True)
        ]
    )


def assert_laws(groups, assignment: Assignment, budget: int, dp_size: int, **way: bool) -> None:
    prompts, completions, numbers = arrays(groups)
    assert len(assignment.micro_batches) == len(assignment.split_groups) == dp_size
    (num_micro_batches,) = {len(micro_batches) for micro_batches in assignment.micro_batches}
    split_groups = [group for of_rank in assignment.split_groups for group in of_rank]
    assert bool(num_micro_batches or split_groups) == bool(len(prompts))
    all_rows = [rows for micro_batches in assignment.micro_batches for rows in micro_batches]
    all_rows += [rows for group in split_groups for rows in group]
    assert sorted(n for rows in all_rows for n in rows) == list(range(len(prompts)))
    assert all(size(groups, rows, **way) <= budget or len(rows) == 1 for rows in all_rows)
    assert assignment.num_over_budget == sum(prompts + completions > budget)
    for group in split_groups:  # larger than the budget
        assert way.get("share_prompts", True) and len({numbers[n] for rows in group for n in rows}) == 1
        assert len(group) > 1 and all(group)
        assert size(groups, [n for rows in group for n in rows]) > budget


@examples(100)
@given(groups=GROUPS, budget=st.integers(1, 400), dp_size=st.integers(1, 9), way=WAYS, seed=st.integers(0, 99))
def test_laws(groups, budget: int, dp_size: int, way, seed: int):
    flags = {"share_prompts": way[0], "padded": way[1]}
    assignment = fill(groups, budget, dp_size, **flags)
    assert_laws(groups, assignment, budget, dp_size, **flags)
    assert assignment == fill(groups, budget, dp_size, **flags)
    rng = np.random.default_rng(seed)  # other order and other group numbers: bins of the same sizes
    prompts, completions, numbers = arrays(groups)
    order = rng.permutation(len(prompts))
    new_numbers = rng.permutation(len(groups))
    other = assign_sequences(
        prompts[order],
        completions[order],
        [int(new_numbers[numbers[n]]) for n in order],
        budget=budget,
        dp_size=dp_size,
        **flags,
    )
    in_old_numbers = [[tuple(order[list(rows)]) if rows else () for rows in rank] for rank in other.micro_batches]

    def lengths(per_rank):
        both = [(prompts[n], completions[n]) if way[0] else prompts[n] + completions[n] for n in range(len(prompts))]
        return [[sorted(both[n] for n in rows) for rows in rank] for rank in per_rank]

    assert lengths(in_old_numbers) == lengths(assignment.micro_batches)


@pytest.mark.parametrize("dp_size", [1, 2, 7, 13])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(
    ("prompt", "completions", "num_groups"),
    [
        (10, [90] * 8, 11),
        (1, [500] * 8, 5),  # half the budget + 1
        (1, [2**i for i in range(10)], 3),
        (5, [20_000, 3, 3, 3], 1),
        (1, [0] * 7, 13),
        (100, [300] * 64, 1),  # one group of twenty budgets
        (999, [10, 20, 1, 0], 3),
        (2000, [1, 2, 3], 2),  # prompts over the budget
    ],
)
def test_adversarial_lengths(prompt: int, completions: list[int], num_groups: int, share_prompts: bool, dp_size):
    groups = [(prompt, completions)] * num_groups
    assignment = fill(groups, 1000, dp_size, share_prompts=share_prompts)
    assert_laws(groups, assignment, 1000, dp_size, share_prompts=share_prompts)


def test_whole_sequences_by_hand():
    # lengths 60, 50, 40, 30, 20 into bins of 100: {60, 40}, {50, 30, 20}
    groups = [(10, [20]), (10, [50]), (10, [10]), (10, [40]), (10, [30])]
    (micro_batches,) = fill(groups, 100, 1, share_prompts=False).micro_batches
    assert {frozenset(rows) for rows in micro_batches} == {frozenset({1, 4}), frozenset({3, 0, 2})}
    # a padded micro-batch is as wide as its longest row: 60, 50 + 40, 30 + 20
    (micro_batches,) = fill(groups, 100, 1, share_prompts=False, padded=True).micro_batches
    assert {frozenset(rows) for rows in micro_batches} == {frozenset({1}), frozenset({3, 4}), frozenset({0, 2})}


def test_nothing_and_more_ranks_than_sequences():
    assert fill([], 10, 3).micro_batches == ((), (), ())
    assert fill([], 10, 3, share_prompts=False, padded=True).micro_batches == ((), (), ())
    assert sorted(fill([(1, [1]), (1, [2])], 10, 4).micro_batches) == [((),), ((),), ((0,),), ((1,),)]


def test_a_sequence_over_the_budget_is_alone():
    assignment = fill([(10, [200, 5, 5]), (10, [5])], 100, 1)
    assert assignment.num_over_budget == 1
    assert assignment.micro_batches == (((0,), (1, 2, 3)),)


def test_most_expensive_micro_batch_first():
    groups = [(10, [30]), (10, [80]), (10, [50])]
    assert fill(groups, 95, 1).micro_batches == (((1,), (2,), (0,)),)


def test_shared_prompts_are_computed_once_where_they_fit():
    groups = [(1000, [100] * 8), (1000, [90] * 8)]
    (micro_batches,) = fill(groups, 2000, 1).micro_batches
    assert [sorted(rows) for rows in micro_batches] == [list(range(8)), list(range(8, 16))]
    assert [size(groups, rows) for rows in micro_batches] == [1800, 1720]
    ((rows,),) = fill(groups, 4000, 1).micro_batches
    assert size(groups, rows) == 3520


def test_one_prompt_over_three_ranks():
    groups = [(50, [100] * 8)]
    assignment = fill(groups, 10_000, 3)
    assert sorted(len(rows) for (rows,) in assignment.micro_batches) == [2, 3, 3]


def test_padded_rows_of_like_length_share_a_micro_batch():
    groups = [(10, [9000, 1000] * 4)]
    assignment = fill(groups, 40_000, 2, share_prompts=False, padded=True)
    assert assignment.micro_batches == (((0,), (4,), (1, 3)), ((2,), (6,), (5, 7)))


def realistic(kind: str, num_groups: int, generations: int = 8, seed: int = 0) -> list[tuple[int, list[int]]]:
    rng = np.random.default_rng(seed)
    shape = (num_groups, generations)
    completions = {
        "lognormal": rng.lognormal(np.log(900), 0.8, shape).clip(1, 8192),
        "uniform": rng.integers(1, 4097, shape),
        "bimodal": np.where(rng.random(shape) < 0.7, rng.normal(500, 100, shape), rng.normal(7000, 800, shape)).clip(1),
    }[kind]
    return list(zip(rng.integers(50, 501, num_groups).tolist(), completions.astype(int).tolist(), strict=True))


@pytest.mark.parametrize("num_groups", [64, 256, 500])
@pytest.mark.parametrize("kind", ["lognormal", "uniform", "bimodal"])
def test_packing_wastes_little(kind: str, num_groups: int):
    """Of the places of micro-batches of whole sequences at least 97 % have a token, without regard to groups."""
    prompts, completions, _ = arrays(realistic(kind, num_groups))
    lengths = prompts + completions
    assignment = fill([(0, [length]) for length in lengths.tolist()], BUDGET, 1, share_prompts=False)
    assert lengths.sum() / (len(assignment.micro_batches[0]) * BUDGET) >= 0.97


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "bimodal"])
@pytest.mark.parametrize("seed", range(5))
def test_first_fit_decreasing_keeps_its_bound(kind: str, seed: int):
    prompts, completions, groups = arrays(realistic(kind, 40, seed=seed))
    assignment = assign_sequences(
        prompts, completions, groups, budget=BUDGET, dp_size=1, share_prompts=False, padded=False
    )
    least = -(-int((prompts + completions).sum()) // BUDGET)
    assert len(assignment.micro_batches[0]) <= 11 / 9 * least + 1


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "bimodal"])
@pytest.mark.parametrize("dp_size", [2, 3, 7, 8])
def test_ranks_have_equal_work_and_few_repeated_prompts(kind: str, dp_size: int):
    for seed in range(3):
        groups = realistic(kind, 64, seed=seed)
        assignment = fill(groups, BUDGET, dp_size)
        assert_laws(groups, assignment, BUDGET, dp_size)
        costs = rank_costs(groups, assignment)
        assert costs.mean() / costs.max() >= 0.97
        split_groups = [[n for rows in parts for n in rows] for rank in assignment.split_groups for parts in rank]
        computed = sum(size(groups, rows) for rank in (*assignment.micro_batches, split_groups) for rows in rank)
        least = sum(prompt + sum(completions) for prompt, completions in groups)
        assert computed <= 1.03 * least
        assert len(assignment.micro_batches[0]) * dp_size <= 11 / 9 * least / BUDGET + 2 * dp_size


def test_a_giant_sequence_does_not_divide_other_groups():
    groups = [(10, [50_000])] + [(10, [100] * 8)] * 6
    assignment = fill(groups, 2000, 2)
    assert sorted(sum(map(len, rank)) for rank in assignment.micro_batches) == [1, 48]


def test_split_groups_by_hand():
    # the prompt of 900 and parts of at most 100: {60, 40}, {50, 30, 20}, {90}
    (group,) = fill([(900, [60, 50, 40, 30, 20, 90])], 1000, 1).split_groups[0]
    assert {frozenset(rows) for rows in group} == {frozenset({5}), frozenset({0, 2}), frozenset({1, 3, 4})}
    # one part less, and one prompt less than 512 tokens again: dividing costs no more than splitting
    short = fill([(400, [60, 50, 40, 30])], 500, 1)
    assert short.split_groups == ((),) and len(short.micro_batches[0]) == 2
    # a group that fits is none, nor is a single sequence, nor what does not share prompts
    assert fill([(900, [60, 40])], 1000, 1).split_groups == ((),)
    assert fill([(5000, [60])], 1000, 1).split_groups == ((),)
    assert fill([(900, [60, 50, 40, 30, 20, 90])], 1000, 1, share_prompts=False).split_groups == ((),)


def test_split_groups_come_most_expensive_first_and_leave_the_rest_to_micro_batches():
    groups = [(600, [100] * 9), (20, [30] * 4), (800, [150] * 20), (600, [300] * 5)]
    assignment = fill(groups, 1000, 1)
    numbers = arrays(groups)[2]
    assert [numbers[group[0][0]] for group in assignment.split_groups[0]] == [2, 3, 0]
    assert [sorted(rows) for rows in assignment.micro_batches[0]] == [[9, 10, 11, 12]]
    assert_laws(groups, assignment, 1000, 1)
