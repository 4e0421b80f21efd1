"""Laws 1, 4 and the survival of out of memory with 1, 2 and 3 processes: real gloo, real FSDP2."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rank_engine import BUDGETS, FEW_SPLITS, OPTIMIZERS, SPLITS, STEPS, places, step_sequences
from ranks import RanksOnDemand
from selection import mostly_slow, slow
from test_laws import ALGORITHMS, dense_gradient, make_engine
from tiny import DYNAMIC_ROPE, make_policy, policy_of, relative_error, save_model_folder

TWO = pytest.param(2, marks=slow("what goes wrong with two goes wrong with three, where some are idle too"))
WORLDS = (1, TWO, 3)
EXACT = ("float64", "checkpointing", "selective", "offload", "gradients in forward")
# PyTorch's Adafactor does not work on shards, and torchao's compiles for half a minute on each rank
SHARDED = [name for name in OPTIMIZERS if name not in ("adafactor", "adamw_8bit")]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return str(save_model_folder(folder / "policy")), str(save_model_folder(folder / "reference", seed=1))


class Results(RanksOnDemand):
    """What ranks made of a job with policy and reference."""

    def __init__(self, folder: Path, models: tuple[str, str]):
        super().__init__(folder)
        self.checkpoints, self.models = folder / "checkpoints", models

    def of(self, world_size: int, job: str, *more: str) -> Any:
        return self(world_size, job, *self.models, *more)


@pytest.fixture(scope="module")
def results(tmp_path_factory, models) -> Results:
    return Results(tmp_path_factory.mktemp("ranks"), models)


@pytest.fixture(scope="module")
def dense(models) -> Callable[[str, str], tuple[float, dict[str, torch.Tensor]]]:
    """The reference: one process, one unpadded forward per completion, full logits, one backward."""
    policy, reference = (
        policy_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()) for path in models
    )
    return cache(lambda name, step: dense_gradient(policy, reference, *reversed(step_sequences(name, *STEPS[step]))))


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a tensor; a gradient that is 0 has to be 0."""
    assert actual.keys() == expected.keys()
    return max(
        relative_error(actual[k], expected[k]) if expected[k].norm() > 1e-12 else actual[k].norm().item()
        for k in expected
    )


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "name",
    mostly_slow(ALGORITHMS, "grpo_all_terms", reason="test_algorithm_laws splits all, without ranks"),
)
def test_the_gradient_is_that_of_one_process_and_whole_logits(results: Results, dense, world_size: int, name: str):
    """Any budget, shuffled, uneven lengths, ranks with nothing to do; each algorithm, with and without a KL term."""
    assert_same(dense, name, results.of(world_size, "gradients", name, *SPLITS))


def assert_same(dense: Any, name: str, done: dict[str, Any]) -> None:
    """Loss and gradient of every split are those of whole logits."""
    for split, (loss, actual, _) in done.items():
        expected_loss, expected = dense(name, split.split("/")[0])
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-9), split
        assert worst(actual, expected) < 1e-6, split


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_budgets_are_different_splits(results: Results, world_size: int):
    done = results.of(world_size, "gradients", "grpo_all_terms", *SPLITS)
    counts = [done[f"uneven/{budget}"][2] for budget in BUDGETS]
    assert counts[0] > counts[1] > counts[2] == counts[3] == 1


@pytest.mark.parametrize("world_size", [TWO, 3])
def test_clipping_and_updates_are_those_of_one_process(results: Results, world_size: int):
    one, several = results.of(1, "updates"), results.of(world_size, "updates")
    assert min(one["norms"]) > 0.05  # the clipping has something to do
    assert several["norms"] == pytest.approx(one["norms"], rel=1e-6)
    assert worst(several["weights"], one["weights"]) < 1e-6


# number of ranks, and a key of the `model` section that is set true
PLACED = [(1, ""), (2, ""), (3, ""), (1, "parameter_offload"), (3, "parameter_offload")]


@pytest.mark.parametrize(
    ("world_size", "key"),
    mostly_slow(
        PLACED,
        (1, "parameter_offload"),
        reason="over three ranks: in a later pass, and on a rank with nothing to do",
    ),
)
def test_out_of_memory_on_one_rank_is_as_a_smaller_budget(results: Results, world_size: int, key: str):
    """At every place, in a rank's first micro-batch and in a later one: bit for bit the gradient and the metrics."""
    done = dict(results.of(world_size, "out_of_memory", key))
    expected = done.pop("expected")
    assert {name.split("/")[0] for name in done} == set(places(make_engine(make_policy())))
    for name, again in done.items():
        assert again.num_out_of_memory >= 1, name
        if "reference" not in name:  # which has a budget of its own
            assert again.budget < 30, name
        assert not again.different, name
        assert worst(again.gradient, expected) < 1e-6, name


@slow("test_shared_prefix has streams in one process, and the test above has other rows on a rank")
@pytest.mark.parametrize(("world_size", "key"), PLACED)
def test_out_of_memory_in_a_stream(results: Results, world_size: int, key: str):
    done = dict(results.of(world_size, "out_of_memory_in_a_stream", key))
    done.pop("expected")
    assert len(done) == 4
    for name, again in done.items():
        assert again.num_out_of_memory >= 1 and again.budget < 200, name
        assert not again.different, name


def test_out_of_memory_once_on_a_rank_with_nothing_to_do(results: Results):
    done = results.of(3, "out_of_memory_on_nothing")
    assert len(done) == 4
    for name, again in done.items():
        assert (again.num_out_of_memory, again.budget) == (1, 155), name
        assert not again.different, name


@pytest.mark.parametrize("world_size", [TWO])
def test_a_step_that_is_left_for_the_end_of_the_run_leaves_nothing_behind(results: Results, world_size: int):
    """What is saved then are the weights of before, between any two passes, and with prompts that are open."""
    done = results.of(world_size, "stop")
    assert len(done) > 4 and not any(done.values()), done


@pytest.mark.parametrize(
    "layout", mostly_slow(["shared", "padded"], "padded", reason="there old logprobs come to other ranks too")
)
def test_out_of_memory_in_a_later_pass(results: Results, tmp_path: Path, layout: str):
    """Padded sequences come to other ranks under another budget."""
    keys = {"rope_parameters": DYNAMIC_ROPE} if layout == "padded" else {}
    folders = [str(save_model_folder(tmp_path / str(seed), seed=seed, **keys)) for seed in (0, 1)]
    later = results(3, "out_of_memory_later", *folders)
    assert later["layout"] == layout
    assert later["out of memory"] >= 1 and not later["different"]


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_largest_budget_that_fits_is_found(results: Results, world_size: int):
    found = results.of(world_size, "budget")
    assert 0.9 * 300 / 1.1 <= found["limited"] <= 300
    assert found["unlimited"] == 2000
    assert found["untouched"] and found["no_gradient"]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "way",
    mostly_slow(EXACT, "gradients in forward", reason="test_laws and test_law_two have them in one process"),
)
def test_other_ways_to_compute_the_same(results: Results, world_size: int, way: str):
    actual, expected = results.of(world_size, "precision", way)[0], results.of(1, "precision", "float64")[0]
    for step, right in zip(actual, expected, strict=True):
        assert worst(step, right) < 1e-6


@pytest.mark.parametrize("world_size", WORLDS)
def test_mixed_precision(results: Results, world_size: int):
    expected, _ = results.of(1, "precision", "float64")
    mixed, dtypes = results.of(world_size, "precision", "mixed")
    assert dtypes == {torch.float32} and {g.dtype for step in mixed for g in step.values()} == {torch.float32}
    for actual, right in zip(mixed, expected, strict=True):
        largest = max(gradient.norm() for gradient in right.values())
        for k, gradient in actual.items():  # to the rounding of bfloat16; the smallest ones are mostly that
            assert (gradient - right[k]).norm() < 0.1 * max(right[k].norm(), 0.1 * largest), k


@pytest.mark.parametrize("optim", mostly_slow(SHARDED, "adamw", reason="the others' state is of the same kind"))
@pytest.mark.parametrize(("world_size", "tolerance"), [(3, 0.0), pytest.param(2, 1e-4, marks=TWO.marks), (1, 1e-4)])
def test_a_checkpoint_of_three_ranks_goes_on_with_any_number(
    results: Results, world_size: int, tolerance: float, optim: str
):
    """Weights, optimizer and a reference that changes: 3 ranks go on bit for bit, 1 and 2 to rounding in float32."""
    saved, resumed = (
        results.of(number, "checkpoint", str(results.checkpoints), how, optim)
        for number, how in ((3, "save"), (world_size, "resume"))
    )
    # Muon's iterations are in bfloat16
    assert worst(resumed["weights"], saved["weights"]) <= tolerance * (10 if optim == "muon" else 1)


# Copies of the model, and ranks that share each: hybrid sharding
FOUR = slow("2 x 1 reduces between replicas, and 1 x 2 and 1 x 3 within one; this has both at once")
MESHES = [(2, 1), pytest.param(2, 2, marks=FOUR)]


def on_mesh(results: Results, replicas: int, shards: int, job: str, *more: str) -> Any:
    """What the ranks of a mesh made of a job, bit for bit the same on all of them."""
    done = results(replicas * shards, "replicated", str(replicas), job, *results.models, *more)
    assert done["same"]
    return done["result"]


@pytest.mark.parametrize(("replicas", "shards"), MESHES)
def test_the_gradient_is_the_same_with_replicas(results: Results, dense, replicas: int, shards: int):
    name = "grpo_all_terms"
    assert_same(dense, name, on_mesh(results, replicas, shards, "gradients", name, *FEW_SPLITS))


@pytest.mark.parametrize(("replicas", "shards"), MESHES)
def test_replicas_stay_the_same_through_clipping_and_updates(results: Results, replicas: int, shards: int):
    one, several = results.of(1, "updates"), on_mesh(results, replicas, shards, "updates")
    assert several["norms"] == pytest.approx(one["norms"], rel=1e-6)
    assert worst(several["weights"], one["weights"]) < 1e-6


# Ranks, and copies of the model, that keep whole gradients until a step's last pass
KEEPING = mostly_slow([(2, 1), (3, 1), (4, 2)], (2, 1), reason="two ranks with one copy, where each pass is the same")


@pytest.mark.parametrize(("world_size", "replicas"), KEEPING)
def test_the_gradient_is_the_same_reduced_once(results: Results, dense, world_size: int, replicas: int):
    name = "grpo_all_terms"
    job = ("once per update", "gradients", *results.models, name, *FEW_SPLITS)
    done = results(world_size, *(("replicated", str(replicas), *job) if replicas > 1 else job))
    assert_same(dense, name, done["result"] if replicas > 1 else done)


def test_gradients_kept_until_the_last_pass_are_reduced_once(results: Results):
    """Of passes with a backward: those of micro-batches, and that of two long prompts, one on each rank."""
    each = results(2, "collectives", *results.models)
    once = results(2, "once per update", "collectives", *results.models)
    assert each["micro-batches"] == once["micro-batches"] > 1
    assert each["_all_gather"] == once["_all_gather"]
    passes, rest = divmod(each["_reduce_scatter"], once["_reduce_scatter"])
    assert (passes, rest) == (each["micro-batches"] + 1, 0)


@slow("out of memory with gradients that are reduced in every pass")
@pytest.mark.parametrize("key", ["", "parameter_offload"])
@pytest.mark.parametrize("job", ["out_of_memory", "out_of_memory_in_a_stream"])
def test_out_of_memory_with_whole_gradients(results: Results, job: str, key: str):
    done = dict(results(3, "once per update", job, *results.models, key))
    expected = done.pop("expected")
    assert all(again.num_out_of_memory >= 1 and not again.different for again in done.values())
    assert job.endswith("stream") or all(worst(again.gradient, expected) < 1e-6 for again in done.values())


@slow("the same with gradients that are reduced in every pass")
def test_whole_gradients_are_dropped_by_a_step_that_is_left_and_counted_by_the_budget(results: Results):
    assert not any(results(2, "once per update", "stop", *results.models).values())
    found = results(3, "once per update", "budget", *results.models)
    assert 0.9 * 300 / 1.1 <= found["limited"] <= 300 and found["untouched"] and found["no_gradient"]
    exact, _ = results(1, "precision", *results.models, "float64")
    mixed, _ = results(3, "once per update", "precision", *results.models, "mixed")
    for actual, right in zip(mixed, exact, strict=True):
        largest = max(gradient.norm() for gradient in right.values())
        assert all((actual[k] - right[k]).norm() < 0.1 * max(right[k].norm(), 0.1 * largest) for k in right)


@pytest.mark.parametrize("key", ["", "parameter_offload"])
@slow("out of memory with one copy of the model, on one and three ranks")
def test_out_of_memory_with_replicas(results: Results, key: str):
    done = dict(results(4, "replicated", "2", "out_of_memory", *results.models, key)["result"])
    expected = done.pop("expected")
    assert all(again.num_out_of_memory >= 1 and not again.different for again in done.values())
    assert all(worst(again.gradient, expected) < 1e-6 for again in done.values())


@pytest.mark.parametrize(
    ("saved_on", "resumed_on", "tolerance"),
    [
        ((2, 1), (1, 2), 1e-4),
        *(pytest.param(*case, marks=FOUR) for case in (((2, 2), (2, 2), 0.0), ((2, 2), (1, 1), 1e-4))),
        pytest.param((1, 2), (2, 2), 1e-4, marks=FOUR),
    ],
)
def test_a_checkpoint_goes_on_on_another_mesh(results: Results, saved_on, resumed_on, tolerance: float):
    """Each shard of the optimizer's state is in one file only, though all replicas have it."""
    root = str(results.checkpoints / f"mesh-{saved_on}")
    saved = on_mesh(results, *saved_on, "checkpoint", root, "save", "adamw")
    resumed = on_mesh(results, *resumed_on, "checkpoint", root, "resume", "adamw")
    assert worst(resumed["weights"], saved["weights"]) <= tolerance
    folder = Path(root) / "adamw" / "step-2"
    state = sum(file.stat().st_size for file in (folder / "optimizer").glob("*.distcp"))
    # two moments, the reference, and what small tensors cost; all of it twice would be more than 8
    assert state < 6 * (folder / "model.safetensors").stat().st_size
