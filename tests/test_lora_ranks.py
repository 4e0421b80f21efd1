"""Adapters over processes: laws 1, 4 and 6 and the survival of out of memory with 1 and 3 ranks, gloo and FSDP2."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters import KINDS, adapter_names, peft_model, save_adapter
from rank_adapter import BUDGETS, LENGTHS, PLACES, WAYS
from rank_engine import step_sequences
from ranks import run_ranks
from test_laws import dense_gradient
from test_ranks import worst
from tiny import policy_of, save_model_folder

WORLDS = (1, 3)
Results = Callable[[int], dict[str, Any]]


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
def results(tmp_path_factory, base: str, adapters) -> Results:
    folder = tmp_path_factory.mktemp("ranks")

    @cache
    def of(world_size: int) -> dict[str, Any]:
        current = adapters["lora"][1]
        jobs: dict[str, tuple[str, ...]] = {
            "gradients": ("adapter_gradients", base, *(path for pair in adapters.values() for path in pair)),
            "out_of_memory": ("adapter_out_of_memory", base, current),
            "precision": ("adapter_precision", base, current),
            "sampling": ("adapter_sampling", base, current),
            "sampling of the other": ("adapter_sampling", base, adapters["lora"][0]),
        }
        if world_size == 3:
            jobs["saved"] = ("adapter_updates", base, str(folder), "save")
        else:
            of(3)  # which leave a checkpoint
        jobs["resumed"] = ("adapter_updates", base, str(folder), "resume")
        return dict(zip(jobs, run_ranks(world_size, folder, *jobs.values()), strict=True))

    return of


@pytest.fixture(scope="module")
def dense(base: str, adapters) -> dict[str, Any]:
    """peft's own models: one unpadded forward per completion, full logits, one backward."""
    expected = {}
    for kind, starts_from_one in WAYS:
        start, current = adapters[kind]
        model = peft_model(base, current)
        names = adapter_names(model)
        policies = policy_of(model.train()), policy_of(peft_model(base, start if starts_from_one else None))
        for step, lengths in LENGTHS.items():
            loss, gradients = dense_gradient(*policies, *reversed(step_sequences("grpo_kl", *lengths)))
            assert gradients.keys() == names.keys()
            named = {names[name]: gradient for name, gradient in gradients.items()}
            expected[f"{kind}/{starts_from_one}/{step}"] = (loss, named)
    return expected


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("kind", "starts_from_one"), WAYS)
def test_the_gradient_is_that_of_peft_and_whole_logits(
    results: Results, dense, world_size: int, kind: str, starts_from_one: bool
):
    """Any budget, shared prompts and streams; the reference is the base, or the base with the first adapter."""
    for step in LENGTHS:
        expected_loss, expected = dense[f"{kind}/{starts_from_one}/{step}"]
        for budget in BUDGETS:
            loss, actual = results(world_size)["gradients"][f"{kind}/{starts_from_one}/{step}/{budget}"]
            assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-9)
            assert worst(actual, expected) < 1e-6, (step, budget)


def test_the_reference_is_what_the_run_started_from(dense):
    """The two losses differ by far more than the tolerance: another reference would be seen."""
    assert abs(dense["lora/True/uneven"][0] - dense["lora/False/uneven"][0]) > 1e-3


@pytest.mark.parametrize("world_size", WORLDS)
def test_out_of_memory_on_one_rank_changes_nothing(results: Results, world_size: int):
    done = dict(results(world_size)["out_of_memory"])
    expected = done.pop("expected")
    assert set(done) == set(PLACES)
    for place, (num_out_of_memory, actual) in done.items():
        assert num_out_of_memory >= 1, place
        assert worst(actual, expected) < 1e-6, place


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_checkpoint_of_three_ranks_goes_on_with_any_number(results: Results, world_size: int):
    saved, resumed = results(3)["saved"], results(world_size)["resumed"]
    assert worst(resumed["weights"], saved["weights"]) <= (0.0 if world_size == 3 else 1e-4)
    assert all(saved["frozen"]) and all(resumed["frozen"])
    assert worst(saved["first"], saved["weights"]) > 1e-2  # it was trained


@pytest.mark.parametrize("world_size", WORLDS)
def test_other_ways_to_compute(results: Results, world_size: int):
    done, expected = results(world_size)["precision"], results(1)["precision"]["float64"]["gradients"]
    for way in ("float64", "checkpointing", "selective", "gradients in forward", "whole"):
        for actual, right in zip(done[way]["gradients"], expected, strict=True):
            assert worst(actual, right) < 1e-6, way
    for way in ("bfloat16", "mixed"):
        for actual, right in zip(done[way]["gradients"], expected, strict=True):
            largest = max(gradient.norm() for gradient in right.values())
            for k, gradient in actual.items():
                assert (gradient - right[k]).norm() < 0.15 * max(right[k].norm(), 0.1 * largest), (way, k)


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_base_keeps_its_bits_and_the_adapter_is_wide(results: Results, world_size: int):
    done = results(world_size)["precision"]
    for way, of in done.items():
        assert all(of["frozen"]) and len(of["frozen"]) == world_size
        wide = torch.float64 if of["base"] == {torch.float64} else torch.float32
        assert of["adapter"] == of["states"] == {wide}, way
        assert of["num_states"] == 28, way  # two factors of seven layers, twice
    assert done["bfloat16"]["base"] == {torch.bfloat16}


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_sampler_has_the_adapter_on_every_rank(results: Results, world_size: int):
    sampled = results(world_size)["sampling"]["tokens"]
    assert len(sampled) == world_size
    assert all(of_rank == results(1)["sampling"]["tokens"][0] for of_rank in sampled)
    assert sampled != results(world_size)["sampling of the other"]["tokens"]


def test_every_rank_reads_its_rows_of_the_base(results: Results, base: str):
    done = results(3)["precision"]
    size = sum(t.numel() * t.element_size() for t in load_file(f"{base}/model.safetensors").values())
    assert size <= sum(done["float64"]["num_bytes"]) < 1.01 * size
    assert max(done["float64"]["num_bytes"]) < 0.4 * size
    assert done["whole"]["num_bytes"] == [0, 0, 0]  # negative control: rank 0 has read all, as the library does
