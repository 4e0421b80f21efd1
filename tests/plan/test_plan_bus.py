"""The bus between host and GPU in predicted times, where nobody measured it."""

from collections.abc import Mapping

import pytest

from cohort.plan.cost import PlannedValue
from cohort.plan.hardware import hardware
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import preset_shape
from plans import config, on_gpus

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
        plain = ("hardware.dp_replicate=1", "hardware.sync_each_micro_batch=true", *more)
        wanted = config("rollout.engine=local", "train.micro_batch_tokens=4609", "train.prompts_per_step=16", *plain)
        plan = predict_run(wanted, preset_shape("7b"), machines)
        ranks, number = 8 * nodes, plan.micro_batches.num_micro_batches
        found, training = (plan.timing[name] for name in ("gathering_s", "training_s"))
        hops_s = number * per_weight // 8 * (3 * LAYERS + 2) * (7 * nodes * 2e-6 + (nodes - 1) * 8e-6)
        assert found.value == pytest.approx(number * per_weight * N * (ranks - 1) / ranks / bytes_per_s + hops_s)
        assert training.value >= found.value
        assert ("less than the overlapped copies" in training.how) == (gpu == "l40s")
    assert "gathering_s" not in timing()


def communicating(plan: Plan) -> tuple[int, bool, float, float]:
    """Copies of the model, whether every micro-batch is reduced, and seconds of gathering and of reduction."""
    seconds = (plan.timing[name].value if name in plan.timing else 0 for name in ("gathering_s", "reducing_s"))
    return plan.workload.dp_replicate, not plan.workload.keeps_whole_gradients, *seconds


def test_what_communicates_least_is_chosen_where_communication_is_longer_than_computing() -> None:
    """1.5 billion weights on 128 nodes are bound by the latency of rings (docs/scaling.md); seven are not."""
    sizes = ("rollout.engine=local", "train.micro_batch_tokens=8192", "train.prompts_per_step=8192")
    lengths = ("rollout.max_prompt_tokens=256", "rollout.max_completion_tokens=1792", "rollout.num_generations=16")
    plain = ("hardware.dp_replicate=1", "hardware.sync_each_micro_batch=true")

    def plan(shape: str, *more: str) -> Plan:
        return predict_run(config(*sizes, *lengths, *more), preset_shape(shape), on_gpus(8, nodes=128))

    as_before, chosen, large = plan("1.5b", *plain), plan("1.5b"), plan("7b")
    assert communicating(as_before)[:2] == communicating(large)[:2] == (1, True)
    assert large.communication is None and as_before.communication is not None
    assert "bound by communication (hardware.dp_replicate: 1" in as_before.communication
    copies, syncs, gathering_s, reducing_s = communicating(chosen)
    assert (copies, syncs) == (128, False)
    assert chosen.communication is not None and "bound" not in chosen.communication
    assert gathering_s + reducing_s < communicating(as_before)[2] / 10
    weights = chosen.shape.num_parameters
    # two rings of an eighth of the gradients, over one NIC per GPU; and the hops of 28 layers and the rest
    assert reducing_s == pytest.approx(2 * 127 / 128 * 4 * weights / 8 / 50e9 + 2 * 127 * 8e-6 * 29)
    state, whole = (plan.memory.phases["backward"] for plan in (as_before, chosen))
    assert whole["weights"] == pytest.approx(128 * state["weights"], rel=1e-3)
    assert whole["gradients"] == 4 * weights
    assert communicating(plan("1.5b", "hardware.sync_each_micro_batch=true"))[:2] == (128, True)
    assert communicating(plan("1.5b", "hardware.dp_replicate=1"))[:2] == (1, False)


def test_nothing_is_chosen_that_may_not_fit() -> None:
    wanted = ("rollout.engine=local", "train.micro_batch_tokens=4609", "train.prompts_per_step=16")
    plan = predict_run(config(*wanted), preset_shape("7b"), on_gpus(8, "l40s"))
    assert plan.communication is not None and "bound by communication" in plan.communication
    assert communicating(plan)[:2] == (1, True)


def test_the_reason_of_a_split_has_the_times_of_the_plan() -> None:
    """Both count the copies between GPUs, which take longer here than the computation."""
    sizes = ("rollout.max_completion_tokens=512", "train.micro_batch_tokens=4096")
    wanted = config("rollout.engine=vllm", "hardware.sync_each_micro_batch=true", *sizes)
    plan = predict_run(wanted, preset_shape("1.5b"), hardware(gpu="l40s", gpus=4, nodes=1, gpu_memory=None))
    seconds = {phase: plan.timing[f"{phase}_s"].value for phase in ("training", "sampling", "step", "gathering")}
    assert seconds["training"] == seconds["gathering"]
    assert f"{seconds['training']:.3g} s of training and {seconds['sampling']:.3g} s of sampling" in plan.layout.reason
    assert f": {seconds['step']:.3g} s predicted" in plan.layout.reason
