"""The bus between host and GPU in predicted times, where nobody measured it."""

from collections.abc import Mapping

import pytest

from cohort.plan.cost import PlannedValue
from cohort.plan.hardware import hardware
from cohort.plan.predict import predict_run
from cohort.plan.shape import preset_shape
from plans import config

N = 7_615_616_512
BUS = 25e9  # bytes per second, assumed
LAYERS = 28


def timing(*overrides: str, gpu: str = "h200") -> Mapping[str, PlannedValue]:
    wanted = config("hardware.processes=1", "model.gradient_checkpointing=false", *overrides)
    return predict_run(wanted, preset_shape("7b"), hardware(gpu=gpu, gpus=1, nodes=1, gpu_memory=None)).timing


def test_an_update_waits_for_the_bus_and_the_plan_says_what_it_took_that_to_be() -> None:
    plain, moved = timing(), timing("optim.offload=true")
    assert moved["training_s"].value - plain["training_s"].value == pytest.approx(6 * N / BUS)
    assert moved["step_s"].value - plain["step_s"].value == pytest.approx(6 * N / BUS)
    assert "gradients to host memory and weights back" in moved["training_s"].how
    assert (moved["bus_gbytes/s"].value, moved["bus_gbytes/s"].origin) == (25, "assumed")
    assert "bus_gbytes/s" not in plain


def test_training_waits_for_weights_that_come_and_go() -> None:
    """Nothing overlaps: FSDP2 waits for every gradient that it copies to the host."""
    short = ("rollout.max_prompt_tokens=16", "rollout.max_completion_tokens=16")
    visiting, plain = timing("model.parameter_offload=true", *short)["training_s"], timing(*short)["training_s"]
    assert visiting.value - plain.value == pytest.approx(12 * N / BUS)  # one micro-batch
    assert "gradients back per micro-batch" in visiting.how


def test_copies_beside_the_computation_take_time_where_they_are_longer() -> None:
    """Activations of short rows, whose computation is short."""
    checkpointing = ("model.gradient_checkpointing=true", "model.activation_offload=true")
    found = timing(*checkpointing)
    without = timing("model.gradient_checkpointing=true")
    assert found["training_s"].value == max(found["offloading_s"].value, without["training_s"].value)
    assert found["offloading_s"].value < without["training_s"].value
    everything = timing("model.activation_offload=true")
    assert everything["training_s"].value == everything["offloading_s"].value > timing()["training_s"].value
    assert "less than the overlapped copies" in everything["training_s"].how


def test_activations_that_go_to_host_memory_cross_the_bus_twice() -> None:
    kept = 2 * 2 * 3584 * LAYERS  # a hidden state in bfloat16 for each token and layer, twice
    checkpointing = ("model.gradient_checkpointing=true", "train.micro_batch_tokens=512")
    found = timing("model.activation_offload=true", *checkpointing, "rollout.max_completion_tokens=513")
    tokens = found["offloading_s"].value * BUS / kept
    assert tokens == pytest.approx(round(tokens)) and tokens > 0


@pytest.mark.parametrize(
    ("gpu", "nodes", "bytes_per_s"), [("h200", 1, 450e9), ("h200", 2, 400e9), ("l40s", 1, BUS), ("l40s", 2, BUS)]
)
def test_ranks_exchange_weights_and_gradients_for_every_micro_batch(gpu: str, nodes: int, bytes_per_s: float) -> None:
    """Weights in bfloat16 twice and gradients in float32, over the slower of links and network (docs/scaling.md)."""
    machines = hardware(gpu=gpu, gpus=8, nodes=nodes, gpu_memory=None)
    for more, per_weight in ((), 8), (("train.updates_per_rollout=2",), 16):
        wanted = config("rollout.engine=local", "train.micro_batch_tokens=4609", "train.prompts_per_step=16", *more)
        plan = predict_run(wanted, preset_shape("7b"), machines)
        ranks, number = 8 * nodes, plan.micro_batches.num_micro_batches
        found, training = (plan.timing[name] for name in ("gathering_s", "training_s"))
        assert found.value == pytest.approx(number * per_weight * N * (ranks - 1) / ranks / bytes_per_s)
        assert training.value >= found.value
        assert ("less than the overlapped copies" in training.how) == (gpu == "l40s")
    assert "gathering_s" not in timing()


def test_the_reason_of_a_split_has_the_times_of_the_plan() -> None:
    """Both count the copies between GPUs, which take longer here than the computation."""
    wanted = config("rollout.engine=vllm", "rollout.max_completion_tokens=512", "train.micro_batch_tokens=4096")
    plan = predict_run(wanted, preset_shape("1.5b"), hardware(gpu="l40s", gpus=4, nodes=1, gpu_memory=None))
    seconds = {phase: plan.timing[f"{phase}_s"].value for phase in ("training", "sampling", "step", "gathering")}
    assert seconds["training"] == seconds["gathering"]
    assert f"{seconds['training']:.3g} s of training and {seconds['sampling']:.3g} s of sampling" in plan.layout.reason
    assert f": {seconds['step']:.3g} s predicted" in plan.layout.reason
