"""Memory under `model.freeze`: gradients and moments of what is trained, and of nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cohort.models import trained_weights
from cohort.plan.hardware import Hardware
from cohort.plan.predict import predict_run
from cohort.plan.shape import read_shape
from harness import write_model
from modes import SIZES, configuration, measure

SIZE = SIZES["tiny"]
HALF = ["model.embed_tokens.*", "model.layers.[01].*"]  # all but the last layer and the last norm: the head is tied


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SIZE.shape, tmp_path_factory.mktemp("frozen") / "model")


@pytest.mark.parametrize("patterns", [HALF, []])
def test_gradients_and_moments_are_of_what_is_trained(patterns: list[str], model: Path):
    """In float32 with AdamW 4 bytes of a gradient and 8 of moments, to 1% of all; `[]` is the control."""
    config = configuration({"model.freeze": patterns}, SIZE, model)
    numbers = {name: parameter.numel() for name, parameter in trained_weights(config.model).items()}
    everything = trained_weights(config.model.model_copy(update={"freeze": ()}))
    all_numbers = sum(parameter.numel() for parameter in everything.values())
    trained = sum(numbers.values())
    assert (trained < 0.6 * all_numbers) == bool(patterns)
    with torch.compiler.set_stance("force_eager"):
        counted = measure(config, replace(SIZE, num_completions=2, completion_tokens=8)).counted
    assert counted["weights"] == pytest.approx(4 * all_numbers, rel=0.01)
    assert counted["gradients"] == pytest.approx(4 * trained, rel=0.01)
    assert counted["optimizer"] == pytest.approx(8 * trained, rel=0.01)


def test_a_plan_says_that_frozen_weights_are_counted(model: Path):
    hardware = Hardware(gpu_name="any", gpu_memory_bytes=1 << 40, gpus_per_node=1, nodes=1)
    frozen, plain = (
        predict_run(configuration(keys, SIZE, model), read_shape(str(model)), hardware)
        for keys in ({"model.freeze": HALF}, {})
    )
    assert any("model.freeze: the plan counts frozen weights" in note for note in frozen.notes)
    assert not any("model.freeze" in note for note in plain.notes)
    assert frozen.memory.peak_bytes == plain.memory.peak_bytes
