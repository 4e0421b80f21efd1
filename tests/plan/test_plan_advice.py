"""What a plan proposes and how far a setting may go: what it says fits does fit, in the time that it says."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.cli.plan import plan_run
from cohort.config import load_config
from cohort.errors import UserError
from cohort.plan.advice import advise, largest, replan
from cohort.plan.predict import Plan, predict_run, predict_wanted
from cohort.plan.shape import preset_shape
from plans import config, on_gpus, plan_of, planned
from selection import examples, slow

_settings = st.builds(
    lambda name, gpu, gpus, *overrides: (name, on_gpus(gpus, gpu), overrides),
    st.sampled_from(["0.5b", "4b", "7b", "32b"]),
    st.sampled_from(["4090", "l20", "h100"]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from(["train.micro_batch_tokens=auto", "train.micro_batch_tokens=60000"]),
    st.sampled_from([f"model.gradient_checkpointing={kind}" for kind in ("auto", "true", "false")]),
    st.sampled_from(["rollout.max_completion_tokens=512", "rollout.max_completion_tokens=16384"]),
    st.sampled_from(["rollout.engine=auto", "rollout.engine=vllm", "rollout.engine=local"]),
)


def step_s(plan: Plan) -> float:
    return plan.timing["step_s"].value


@given(_settings)
@examples(20)
def test_what_is_proposed_fits_and_takes_the_time_of_its_line(case: Any) -> None:
    name, machines, overrides = case
    plan = predict_wanted(config(*overrides), preset_shape(name), machines)
    found = advise(plan)
    for advice in found:
        other = replan(plan, advice.changes)
        assert other.fits and advice.fits
        assert advice.saved_bytes == plan.memory.peak_bytes - other.memory.peak_bytes
        assert (advice.step_s, advice.layout) == (step_s(other), other.layout.in_words)
        assert not plan.fits or step_s(other) < step_s(plan)
    same = [advice for advice in found if advice.keeps_experiment and "on more" not in advice.costs]
    others = found[len(same) :]
    times = [advice.step_s or 0 for advice in others]
    assert len(found) <= 5 and same == found[: len(same)] and times == sorted(times)
    for advice in same:  # no time is predicted for updates on the CPU
        compared = [a for a in others if a.updates_on_host or not advice.updates_on_host]
        assert all((a.step_s or 0) < (advice.step_s or 0) for a in compared)


def test_sharing_gpus_and_tensor_parallel_rollouts_are_found() -> None:
    split = plan_of("7b", "rollout.engine=vllm", "hardware.rollout_gpus=1", on=on_gpus(4))
    assert step_s(split) == pytest.approx(90.7, abs=0.1)
    first = advise(split)[0]
    assert (first.as_arguments(), first.layout) == ("hardware.rollout_gpus=auto", "4 shared")
    assert first.step_s == pytest.approx(58.6, abs=0.1)
    alone = ("rollout.engine=vllm", "model.gradient_checkpointing=true", "hardware.processes=7")
    one_gpu = plan_of("32b", *alone, on=on_gpus(8, "h200"))
    first = advise(one_gpu)[0]
    assert one_gpu.fits and "rollout.tensor_parallel=2" in first.as_arguments() and first.layout == "8 shared"
    assert step_s(one_gpu) > 2 * (first.step_s or 0)


OTHER_RUNS = "a run that fits"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("7b", ["--gpus", "4", "hardware.rollout_gpus=1", "rollout.engine=vllm"]),
        # with checkpointing, and 1 or 2 steps ahead
        pytest.param("7b", ["--gpus", "4", "rollout.max_completion_tokens=10000"], marks=slow(OTHER_RUNS)),
        pytest.param("7b", ["--gpus", "1", "--gpu", "4090"], marks=slow(OTHER_RUNS)),
        pytest.param("32b", ["--gpus", "8", "--gpu", "h200"], marks=slow(OTHER_RUNS)),
    ],
)
def test_a_proposal_planned_again_gives_the_numbers_of_its_line(tmp_path: Path, model: str, options: list[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "{model: {path: m}, data: {path: d.csv}, rewards: [{use: math}], rollout: {max_prompt_tokens: 512}}"
    )
    command = [str(file), "--model", model, *options]
    plan = planned(*command, advised=True)
    assert plan["advice"]
    for line in plan["advice"]:
        numbers = {key[2:]: value for key, value in line["changes"].items() if key.startswith("--")}
        given = dict(zip(options[::2], options[1::2], strict=False))
        gpus, nodes = numbers.get("gpus", int(given["--gpus"])), numbers.get("nodes", 1)
        overrides = [text for text in [*options, *line["arguments"]] if "=" in text]
        machines = on_gpus(gpus, given.get("--gpu", "h100"), nodes=nodes)
        again, _ = plan_run(load_config(file, overrides), machines, tmp_path, model=model)
        assert again.fits and step_s(again) == line["step_s"]
        assert again.memory.peak_bytes == plan["memory"]["peak_bytes"] - line["saved_bytes"]


@pytest.mark.parametrize(("limit", "key"), [("length", "max_completion_tokens"), ("generations", "num_generations")])
def test_the_largest_number_fits_and_the_next_does_not(limit: Any, key: str) -> None:
    plan = plan_of("7b", "train.micro_batch_tokens=auto", "model.gradient_checkpointing=false")
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
    plan = plan_of("7b", "train.micro_batch_tokens=auto", on=on_gpus(1))
    (lora,) = [a for a in advise(plan) if "model.adapter" in a.changes]
    assert lora.as_arguments() == "'model.adapter={rank: 16}'"
    assert lora.costs.startswith("changes the experiment: trains a LoRA adapter") and lora.saved_bytes > 30e9
    adapted = replan(plan, lora.changes)
    assert adapted.workload.adapter is not None and adapted.workload.adapter.rank == 16


def test_an_optimizer_that_is_set_is_kept() -> None:
    settings = ("rollout.engine=vllm", "model.gradient_checkpointing=true", "rollout.max_staleness=1")
    settings += ("model.dtype=bfloat16",)
    (small,) = [a for a in advise(plan_of("32b", *settings)) if "optim.name" in a.changes]
    assert small.changes["optim.name"] == "adamw_8bit" and small.costs.startswith("less precise: 8-bit")
    assert not [a for a in advise(plan_of("32b", *settings, "optim.name=muon")) if "optim.name" in a.changes]


def test_a_reference_in_host_memory_takes_one_process() -> None:
    for more in ("optim.name=adafactor", "reference.device=cpu"):
        alone = plan_of("1.5b", "algorithm.beta=0.1", more)
        assert (alone.layout.num_training, alone.num_idle) == (1, 7)
    with pytest.raises(UserError, match="adafactor does not support"):
        plan_of("1.5b", "optim.name=adafactor", "hardware.processes=8")


def test_more_gpus_are_proposed_where_the_run_does_not_fit() -> None:
    wanted = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true", "hardware.processes=2")
    plan = predict_run(wanted, preset_shape("14b"), on_gpus(2, memory="80GB"))
    assert not plan.fits
    (advice,) = [a for a in advise(plan) if "on more GPUs" in a.costs]
    assert advice.changes["--gpus"] == 4 and advice.changes["hardware.processes"] == "auto"
    assert not [a for a in advise(plan_of("1.5b")) if "on more GPUs" in a.costs]


def test_where_no_split_fits_the_plan_says_why_and_what_would() -> None:
    wanted = config("rollout={engine: vllm, max_prompt_tokens: 512, max_completion_tokens: 4097}")
    plan = predict_run(wanted, preset_shape("14b"), on_gpus(4, "l40s"))
    assert not plan.fits
    assert "hardware.rollout_gpus: auto: nothing fits 4 GPUs" in plan.notes[0]
    found = advise(plan)
    assert found and all(a.fits for a in found)


def test_with_a_price_lines_are_ranked_by_the_time_of_all_gpus() -> None:
    plan = plan_of("14b", "train.micro_batch_tokens=auto", on=on_gpus(1, memory="80GB"))
    _, *others = advise(plan, by_cost=True)
    costs = [(advice.step_s or 0) * advice.num_gpus for advice in others]
    assert costs == sorted(costs) and len(costs) > 1
