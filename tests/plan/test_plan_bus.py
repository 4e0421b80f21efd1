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
    wanted = config("hardware.processes=1", *overrides)
    return predict_run(wanted, preset_shape("7b"), hardware(gpu=gpu, gpus=1, nodes=1, gpu_memory=None)).timing


def test_an_update_waits_for_the_bus_and_the_plan_says_what_it_took_that_to_be() -> None:
    plain, moved = timing(), timing("optim.offload=true")
    assert moved["training_s"].value - plain["training_s"].value == pytest.approx(6 * N / BUS)
    assert moved["step_s"].value - plain["step_s"].value == pytest.approx(6 * N / BUS)
    assert (moved["bus_gbytes/s"].value, moved["bus_gbytes/s"].origin) == (25, "assumed")
    assert "bus_gbytes/s" not in plain


def test_copies_beside_the_computation_take_time_where_they_are_longer() -> None:
    """Of a group of short completions, little is computed with weights that come and go all the same."""
    budget = "train.micro_batch_tokens=32768"
    many = timing("model.parameter_offload=true", budget, gpu="l20")
    assert many["visiting_s"].value < many["training_s"].value == timing(budget, gpu="l20")["training_s"].value
    short = ("rollout.max_prompt_tokens=16", "rollout.max_completion_tokens=16")
    few = timing("model.parameter_offload=true", *short)
    assert few["visiting_s"].value == pytest.approx(12 * N / BUS)
    assert few["training_s"].value == few["visiting_s"].value > timing(*short)["training_s"].value
    assert "less than the overlapped copies" in few["training_s"].how
    assert "ends before" not in many["training_s"].how


def test_activations_that_go_to_host_memory_cross_the_bus_twice() -> None:
    kept = 2 * 2 * 3584 * LAYERS  # a hidden state in bfloat16 for each token and layer, twice
    checkpointing = ("model.gradient_checkpointing=true", "train.micro_batch_tokens=512")
    found = timing("model.activation_offload=true", *checkpointing, "rollout.max_completion_tokens=513")
    tokens = found["offloading_s"].value * BUS / kept
    assert tokens == pytest.approx(round(tokens)) and tokens > 0
