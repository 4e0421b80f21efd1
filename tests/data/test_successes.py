"""Prompts whose groups are likely mixed are sampled more often, and the same ones after a resume."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.data import PromptSet, PromptStream, Successes
from cohort.records import Prompt
from selection import examples

GENERATIONS = 8


def prompt_set(num_prompts: int) -> PromptSet:
    """Rows with gaps in their numbers, as after dropping."""
    prompts = (Prompt(id=3 * n, epoch=0, content="?", token_ids=np.array([n]), columns={}) for n in range(num_prompts))
    return PromptSet(prompts=tuple(prompts), num_dropped_overlong=0)


def make_stream(num_prompts: int, *, seed: int = 0, exploration: float = 0.1, pass_rates=None) -> PromptStream:
    successes = Successes(3 * num_prompts, num_generations=GENERATIONS, exploration=exploration, pass_rates=pass_rates)
    return PromptStream(prompt_set(num_prompts), seed=seed, successes=successes)


def counts(never: float, sometimes: float, always: float, not_sampled: float) -> dict[str, float]:
    right = {"prompts/never_right": never, "prompts/sometimes_right": sometimes, "prompts/always_right": always}
    return {**right, "prompts/not_sampled": not_sampled}


def visits(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.epoch, prompt.id) for prompt in prompts]


@pytest.mark.parametrize(("right", "judged"), [(0, 8), (8, 8), (4, 8), (1, 8), (7, 8), (2, 3)])
def test_the_probability_is_that_of_a_mixed_group(right: int, judged: int):
    successes = Successes(1, num_generations=GENERATIONS, exploration=0.01)
    successes.record(0, right=right, judged=judged)
    rates = np.random.default_rng(0).beta(0.25 + right, 0.25 + judged - right, 400_000)
    mixed = 1 - rates**GENERATIONS - (1 - rates) ** GENERATIONS
    assert successes.probability(0) == pytest.approx(mixed.mean(), rel=0.02)


def test_what_is_known_decays_and_has_a_floor():
    successes = Successes(2, num_generations=GENERATIONS, exploration=0.05)
    found = [successes.probability(0)]
    for right in [8] * 20 + [4]:
        successes.record(0, right=right, judged=8)
        found.append(successes.probability(0))
    assert found[0] == 1 and found[1] == pytest.approx(1 - 2**-0.25, abs=0.01)
    assert sorted(found[1:21], reverse=True) == found[1:21] and found[20] >= 0.05
    assert found[21] > 0.8, "one mixed group is enough to come back"
    successes.record(1, right=0, judged=0)  # all of it was broken: nothing is known
    assert successes.probability(1) == 1
    assert successes.metrics(2) == counts(0, 1, 0, 1)


def test_mixed_prompts_are_sampled_more_often_and_none_is_lost():
    """40 prompts, of which one in four is mixed; the others are all right or all wrong."""
    stream, visited = make_stream(40), dict.fromkeys(range(40), 0)
    for _ in range(250):
        taken = stream.take(8)
        for prompt in taken:
            visited[prompt.id // 3] += 1
        stream.record((p.id, (0, 4, 8, 8)[p.id // 3 % 4], 8) for p in taken)
    shares = [sum(n for prompt, n in visited.items() if prompt % 4 == kind) / 2000 for kind in range(4)]
    assert shares[1] > 0.7 and min(visited.values()) >= 5
    assert stream.record([]) == counts(10, 10, 20, 0)


def test_prompts_are_counted_by_their_last_group_also_after_a_resume():
    stream = make_stream(5)
    assert stream.record([]) == counts(0, 0, 0, 5)
    assert stream.record([(0, 0, 8), (3, 8, 8), (6, 3, 8), (9, 0, 0)]) == counts(1, 1, 1, 2)  # 9: all of it broke
    assert stream.record([(0, 2, 8), (3, 8, 8), (9, 0, 2)]) == counts(1, 2, 1, 1)
    resumed = make_stream(5)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert resumed.record([(12, 5, 5)]) == counts(1, 2, 2, 0)
    assert PromptStream(prompt_set(5), seed=0).record([(0, 0, 8)]) == counts(1, 0, 0, 4)  # with uniform sampling too


def test_pass_rates_are_known_before_the_first_step():
    rates = np.full(120, np.nan)
    rates[3 * np.arange(20)] = 0.0
    first = [prompt.id // 3 for prompt in make_stream(40, pass_rates=rates).take(20)]
    assert sum(n < 20 for n in first) <= 5, "20 of 40 prompts are never right"


@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=12),
    cut=st.integers(0, 11),
    exploration=st.sampled_from([0.05, 0.5, 1.0]),
)
@examples(100)
def test_resume_anywhere_continues_the_uninterrupted_order(seed, steps, cut, exploration):
    def play(stream: PromptStream, steps: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        found = []
        for count, right in steps:
            found.append(visits(taken := stream.take(count)))
            stream.record((p.id, (right + p.id) % 9, 8) for p in taken)
        return found

    whole, stream, resumed = (make_stream(5, seed=seed, exploration=exploration) for _ in range(3))
    expected = play(whole, steps)
    assert play(stream, steps[:cut]) == expected[:cut]
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert play(resumed, steps[cut:]) == expected[cut:]
    assert resumed.state() == whole.state()
    assert resumed.record([]) == whole.record([])
    if exploration == 1:
        taken = [visit for step in expected for visit in step]
        assert taken == visits(PromptStream(prompt_set(5), seed=seed).take(len(taken)))
