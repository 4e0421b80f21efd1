"""The nearest values that work."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cohort_check.rules.common import GPUS, Start, nearest_starts
from cohort_check.rules.trl import TrlBatch, trl_start
from selection import examples

# --- the nearest values
COUNTS = st.integers(1, 24)


@examples(60)
@given(COUNTS, COUNTS, COUNTS, st.integers(2, 24), st.sampled_from([(0, 16), (0, 17), (0, 18), (0, 22), (1, 16)]))
def test_what_is_proposed_starts_and_is_sorted_by_distance(
    world_size: int, per_device: int, accumulation: int, generations: int, version: tuple[int, ...]
):
    def start(processes: int, knobs: Any) -> Start:
        return trl_start(TrlBatch(**knobs), processes, version)

    knobs = {"per_device": per_device, "accumulation": accumulation, "generations": generations}
    if start(world_size, knobs).starts:
        return
    proposals = nearest_starts(start, world_size, knobs)
    assert proposals
    current = {GPUS: world_size, **knobs}
    distances = [abs(math.log2(value / current[name])) for name, value in proposals]
    assert distances == sorted(distances)
    for name, value in proposals:
        changed = {**current, name: value}
        assert start(changed.pop(GPUS), changed).starts


@given(st.integers(2, 40), st.integers(1, 8), st.integers(1, 8))
def test_no_nearer_value_of_a_number_works(generations: int, world_size: int, per_device: int):
    def start(processes: int, knobs: Any) -> Start:
        return trl_start(TrlBatch(**knobs), processes, (1, 16))

    knobs = {"per_device": per_device, "generations": generations}
    if start(world_size, knobs).starts:
        return
    sizes = [value for name, value in nearest_starts(start, world_size, knobs) if name == "per_device"]
    for value in range(1, max(sizes, default=0) + 1):
        works = start(world_size, {**knobs, "per_device": value}).starts
        between = min(sizes) < value < max(sizes)
        assert not (works and between)


def test_the_nearest_of_three_gpus_with_eight_generations():
    def start(processes: int, knobs: Any) -> Start:
        return trl_start(TrlBatch(per_device=knobs["B"], generations=knobs["G"]), processes, (1, 16))

    proposals = nearest_starts(start, 3, {"B": 1, "G": 8})
    assert proposals == (("GPUs", 8), ("G", 3), ("B", 8))
