"""What a plan proposes and how far a setting may go: what it says fits does fit."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config import Adamw8bitConfig
from cohort.errors import UserError
from cohort.plan.advice import advise, largest, replan
from cohort.plan.predict import predict_run
from cohort.plan.shape import preset_shape
from plans import config, on_gpus, plan_of
from selection import examples

_settings = st.builds(
    lambda name, gpu, gpus, *overrides: (name, on_gpus(gpus, gpu), overrides),
    st.sampled_from(["0.5b", "4b", "7b", "32b"]),
    st.sampled_from(["4090", "l20", "h100"]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from(["train.micro_batch_tokens=auto", "train.micro_batch_tokens=60000"]),
    st.sampled_from(["model.gradient_checkpointing=true", "model.gradient_checkpointing=false"]),
    st.sampled_from(["rollout.max_completion_tokens=512", "rollout.max_completion_tokens=16384"]),
    st.sampled_from(["rollout.num_generations=2", "rollout.num_generations=64"]),
)


@given(_settings)
@examples(60)
def test_advice_that_says_it_fits_does_fit(case: Any) -> None:
    name, machines, overrides = case
    plan = plan_of(name, *overrides, on=machines)
    for advice in advise(plan):
        other = replan(plan, advice.changes)
        assert other.fits and advice.fits
        assert advice.saved_bytes == plan.memory.peak_bytes - other.memory.peak_bytes
        if plan.fits:
            assert other.timing["step_s"].value < plan.timing["step_s"].value


def test_what_changes_nothing_comes_first_and_fewer_generations_last() -> None:
    plan = plan_of("7b", "train.micro_batch_tokens=66560")
    assert not plan.fits
    costs = [advice.costs for advice in advise(plan)]
    assert advise(plan)[0].changes == {"train.micro_batch_tokens": "auto"}
    assert costs.index("time; same gradient") < costs.index("the experiment: shorter completions")
    assert costs[-1].startswith("the experiment")


@pytest.mark.parametrize(("limit", "key"), [("length", "max_completion_tokens"), ("generations", "num_generations")])
def test_the_largest_number_fits_and_the_next_does_not(limit: Any, key: str) -> None:
    plan = plan_of("7b", "train.micro_batch_tokens=auto")
    most = largest(plan, limit)
    assert isinstance(most, int)
    assert replan(plan, {f"rollout.{key}": most}).fits
    assert not replan(plan, {f"rollout.{key}": most + 1}).fits


def test_the_largest_model() -> None:
    name = largest(plan_of("7b"), "model")
    assert isinstance(name, str)
    assert plan_of(name, "train.micro_batch_tokens=auto").fits
    tiny = on_gpus(1, "4090", "1GB")
    assert largest(plan_of("7b", on=tiny), "model") is None


def test_the_largest_length_is_at_most_what_the_model_has_positions_for() -> None:
    plenty = on_gpus(8, "b200")
    checkpointed = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true")
    assert largest(predict_run(checkpointed, preset_shape("7b"), plenty), "length") == 32_768 - 512
    beyond = plan_of("7b", "rollout.max_completion_tokens=32257", on=plenty)
    assert "= 32769 exceeds the model's 32768 positions" in beyond.notes[0]
    assert not plan_of("7b", on=plenty).notes


def test_an_adapter_is_proposed_with_what_it_costs() -> None:
    """One GPU of 24 GB and a model of 3 billion weights: their state alone is 49 GB."""
    one = on_gpus(1, "4090")
    wanted, shape = config("hardware.processes=1"), preset_shape("3b")
    plan = predict_run(wanted, shape, one)
    adapters = [a for a in advise(plan) if "model.adapter" in a.changes]
    lora, *quantized = adapters  # the least that changes comes first
    assert all("model.quantization" in a.changes for a in quantized) and "model.quantization" not in lora.changes
    assert lora.changes["model.adapter"] == {"rank": 64}
    assert "'model.adapter={rank: 64}'" in lora.as_arguments()
    assert lora.costs.startswith("the experiment: a low-rank update only")
    assert lora.saved_bytes > 40e9
    adapted = replan(plan, lora.changes)
    assert adapted.workload.adapter is not None and adapted.workload.adapter.rank == 64
    whole_command = [*lora.as_arguments().replace("'", "").split(" ", maxsplit=lora.as_arguments().count("=") - 1)]
    again = predict_run(config("hardware.processes=1", *whole_command), shape, one)  # as a person would write it
    assert again.memory.peak_bytes == adapted.memory.peak_bytes


def test_moments_in_8_bits_are_proposed_before_lora() -> None:
    """One GPU of 24 GB and 1.54 billion weights: 16 bytes each are 24.7 GB, and 10 are 15.5 GB."""
    one = on_gpus(1, "4090")
    wanted = config(
        "hardware.processes=1", "rollout.max_completion_tokens=512", "rollout.max_num_seqs=8", "optim.beta2=0.99"
    )
    plan = predict_run(wanted, preset_shape("1.5b"), one)
    assert not plan.fits
    found = advise(plan)
    (small,) = [a for a in found if "optim.name" in a.changes]
    assert small.changes["optim.name"] == "adamw_8bit"  # Adafactor has no beta2
    assert "optim.name=adamw_8bit" in small.as_arguments() and small.costs.startswith("precision: 8-bit")
    assert found.index(small) < next(i for i, a in enumerate(found) if "model.adapter" in a.changes)
    assert small.saved_bytes > (8 - 2.04) * 1_543_714_304
    changed_run = replan(plan, small.changes)
    assert changed_run.workload.optim == Adamw8bitConfig(beta2=0.99)
    assert changed_run.fits


def test_a_reference_in_host_memory_is_proposed_to_one_process_only() -> None:
    one = on_gpus(1, memory="34GB")
    wanted = config("algorithm.beta=0.1", "model.gradient_checkpointing=true", "rollout.max_num_seqs=8")
    plan = predict_run(wanted, preset_shape("1.5b"), one)
    found = advise(plan)
    assert not plan.fits
    assert next(a for a in found if a.changes == {"reference.device": "cpu"}).saved_bytes == 4 * 1_543_714_304
    assert not [a for a in found if "reference.device" in a.changes and "--gpus" in a.changes]
    for more in ("optim.name=adafactor", "reference.device=cpu"):
        alone = plan_of("1.5b", "algorithm.beta=0.1", more)
        assert (alone.layout.num_training, alone.num_idle) == (1, 7)
    with pytest.raises(UserError, match="adafactor does not support"):
        plan_of("1.5b", "optim.name=adafactor", "hardware.processes=8")


@pytest.mark.parametrize(("gpus", "proposed"), [(1, True), (2, False)])
def test_adafactor_is_proposed_to_one_process_only(gpus: int, proposed: bool) -> None:
    machines = on_gpus(gpus, memory="80GB" if gpus == 1 else "48GB")
    wanted = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true")
    plan = predict_run(wanted, preset_shape("7b"), machines)
    assert not plan.fits
    names = [a.changes.get("optim.name") for a in advise(plan)]
    assert ("adafactor" in names) is proposed
    assert "sgd" not in names
    small = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true", "optim.name=sgd")
    assert not [a for a in advise(predict_run(small, preset_shape("7b"), machines)) if "optim.name" in a.changes]


def test_more_gpus_of_the_node_are_proposed_before_more_nodes() -> None:
    two = on_gpus(2, memory="80GB")
    wanted = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true", "hardware.processes=2")
    plan = predict_run(wanted, preset_shape("14b"), two)
    assert not plan.fits
    advice = [a for a in advise(plan) if "--gpus" in a.changes]
    assert advice[0].changes == {"--gpus": 8, "hardware.processes": "auto"}
    eight, four = (replan(plan, {**advice[0].changes, "--gpus": n}) for n in (8, 4))
    assert (eight.layout.num_training, eight.fits) == (8, True)
    assert not four.fits
    assert "--nodes" not in advise(plan)[0].changes


def test_where_no_split_fits_the_plan_says_why_and_what_would() -> None:
    wanted = config("rollout={engine: vllm, max_prompt_tokens: 512, max_completion_tokens: 4097}")
    plan = predict_run(wanted, preset_shape("14b"), on_gpus(4, "l40s"))
    assert not plan.fits
    assert "hardware.rollout_gpus: auto: nothing fits 4 GPUs" in plan.notes[0]
    found = advise(plan)
    assert found and all(a.fits for a in found)
