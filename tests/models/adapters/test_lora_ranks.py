"""Adapters over processes: laws 1, 4 and 6 and the survival of out of memory with 1 and 3 ranks, gloo and FSDP2."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from adapters import KINDS, adapter_names, peft_model, save_adapter
from rank_adapter import BUDGETS, LENGTHS, PLACES, WAYS
from rank_engine import step_sequences
from ranks import RanksOnDemand
from selection import mostly_slow, slow
from test_laws import dense_gradient
from test_ranks import worst
from tiny import policy_of, save_model_folder

WORLDS = (pytest.param(1, marks=slow("test_lora has one process")), 3)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("model") / "base", tie=False))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, base: str) -> dict[str, tuple[str, str]]:
    """Of each kind, one to start from and the current one."""
    folder = tmp_path_factory.mktemp("adapters")

    def pair(kind: str) -> tuple[str, str]:
        first, second = (save_adapter(folder / f"{kind}-{n}", base, seed=n, **KINDS[kind]) for n in (0, 1))
        return first, second

    return {kind: pair(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def on(tmp_path_factory) -> RanksOnDemand:
    return RanksOnDemand(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    """Of the checkpoint of three ranks."""
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def dense(base: str, adapters) -> Callable[[str, bool, str], tuple[float, dict[str, torch.Tensor]]]:
    """peft's own models: one unpadded forward per completion, full logits, one backward."""

    @cache
    def of(kind: str, starts_from_one: bool, step: str) -> tuple[float, dict[str, torch.Tensor]]:
        start, current = adapters[kind]
        model = peft_model(base, current)
        names = adapter_names(model)
        policies = policy_of(model.train()), policy_of(peft_model(base, start if starts_from_one else None))
        loss, gradients = dense_gradient(*policies, *reversed(step_sequences("grpo_kl", *LENGTHS[step])))
        assert gradients.keys() == names.keys()
        return loss, {names[name]: gradient for name, gradient in gradients.items()}

    return of


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("kind", "starts_from_one"),
    mostly_slow(WAYS, ("lora", True), reason="test_lora has the kinds in one process"),
)
def test_the_gradient_is_that_of_peft_and_whole_logits(
    on: RanksOnDemand, base: str, adapters, dense, world_size: int, kind: str, starts_from_one: bool
):
    """Any budget, shared prompts and streams; the reference is the base, or the base with the first adapter."""
    first, current = adapters[kind]
    done = on(world_size, "adapter_gradients", base, kind, first if starts_from_one else "", current)
    for step in LENGTHS:
        expected_loss, expected = dense(kind, starts_from_one, step)
        for budget in BUDGETS:
            loss, actual = done[f"{step}/{budget}"]
            assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-9)
            assert worst(actual, expected) < 1e-6, (step, budget)


def test_the_reference_is_what_the_run_started_from(dense):
    """The two losses differ by far more than the tolerance: another reference would be seen."""
    assert abs(dense("lora", True, "uneven")[0] - dense("lora", False, "uneven")[0]) > 1e-3


@slow("test_ranks has it without an adapter")
@pytest.mark.parametrize("world_size", WORLDS)
def test_out_of_memory_on_one_rank_is_as_a_smaller_budget(on: RanksOnDemand, base: str, adapters, world_size: int):
    done = dict(on(world_size, "adapter_out_of_memory", base, adapters["lora"][1]))
    expected = done.pop("expected")
    assert set(done) == set(PLACES)
    for place, again in done.items():
        assert again.num_out_of_memory >= 1 and not again.different, place
        assert worst(again.gradient, expected) < 1e-6, place


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_checkpoint_of_three_ranks_goes_on_with_any_number(on: RanksOnDemand, base: str, root: str, world_size: int):
    saved, resumed = (
        on(number, "adapter_updates", base, root, how) for number, how in ((3, "save"), (world_size, "resume"))
    )
    assert worst(resumed["weights"], saved["weights"]) <= (0.0 if world_size == 3 else 1e-4)
    assert all(saved["frozen"]) and all(resumed["frozen"])
    assert worst(saved["first"], saved["weights"]) > 1e-2  # it was trained


@slow("test_ranks has copies of a model without an adapter")
def test_a_checkpoint_goes_on_with_copies_of_the_model(on: RanksOnDemand, base: str, root: str):
    saved = on(3, "adapter_updates", base, root, "save")
    resumed = on(2, "replicated", "2", "adapter_updates", base, root, "resume")
    assert all(resumed["result"]["frozen"])
    assert worst(resumed["result"]["weights"], saved["weights"]) <= 1e-4


@slow("test_ranks has them without an adapter, and test_lora with one in one process")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("way", ("float64", "checkpointing", "selective", "gradients in forward", "whole"))
def test_other_ways_to_compute(on: RanksOnDemand, base: str, adapters, world_size: int, way: str):
    done, one = (on(n, "adapter_way", base, adapters["lora"][1], w) for n, w in ((world_size, way), (1, "float64")))
    for actual, right in zip(done["gradients"], one["gradients"], strict=True):
        assert worst(actual, right) < 1e-6
    assert_frozen_and_wide(done, world_size, base=torch.float64)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("way", "base_dtype"),
    mostly_slow(
        [("bfloat16", torch.bfloat16), ("mixed", torch.float32)], ("mixed", torch.float32), reason="rounded likewise"
    ),
)
def test_a_base_in_16_bits(on: RanksOnDemand, base: str, adapters, world_size: int, way: str, base_dtype: torch.dtype):
    done, one = (on(n, "adapter_way", base, adapters["lora"][1], w) for n, w in ((world_size, way), (1, "float64")))
    for actual, right in zip(done["gradients"], one["gradients"], strict=True):
        largest = max(gradient.norm() for gradient in right.values())
        for k, gradient in actual.items():
            assert (gradient - right[k]).norm() < 0.15 * max(right[k].norm(), 0.1 * largest), k
    assert_frozen_and_wide(done, world_size, base=base_dtype)


def assert_frozen_and_wide(done: dict[str, Any], world_size: int, *, base: torch.dtype) -> None:
    """The base keeps its bits and its dtype; the adapter and its moments are in float32, or float64 with it."""
    assert all(done["frozen"]) and len(done["frozen"]) == world_size
    assert done["base"] == {base}
    assert done["adapter"] == done["states"] == {torch.float64 if base == torch.float64 else torch.float32}
    assert done["num_states"] == 28  # two factors of seven layers, twice


@slow("test_lora has one process, and its checkpoint over three ranks is compared")
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_sampler_has_the_adapter_on_every_rank(on: RanksOnDemand, base: str, adapters, world_size: int):
    first, current = adapters["lora"]
    sampled, one, other = (
        on(number, "adapter_sampling", base, folder)["tokens"]
        for number, folder in ((world_size, current), (1, current), (world_size, first))
    )
    assert len(sampled) == world_size
    assert all(of_rank == one[0] for of_rank in sampled)
    assert sampled != other
