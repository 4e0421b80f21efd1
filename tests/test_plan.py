"""`cohort plan`: layout, advice, limits, the command, and what a run does with its plan."""

import dataclasses
import json
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import cohort
from cohort.cli.app import app
from cohort.config import Adamw8bitConfig, Config, config_from_dict
from cohort.config.adapter import AdapterConfig
from cohort.display import Display
from cohort.errors import UserError
from cohort.plan import plan_run
from cohort.plan.adapter import adapter_shape
from cohort.plan.advice import advise, replan
from cohort.plan.calibration import Calibration
from cohort.plan.critic import critic_shape
from cohort.plan.data import count_prompts
from cohort.plan.hardware import hardware, parse_bytes
from cohort.plan.layout import plan_layout
from cohort.plan.limits import largest
from cohort.plan.predict import predict_run
from cohort.plan.rows import plan_rows
from cohort.plan.shape import PRESETS, preset_shape, read_shape, shape_of
from cohort.trainer.foresee import compared, plan_on
from test_training import changed, make_inputs


def config(*overrides: str) -> Config:
    return config_from_dict(
        {
            "model": {"path": "somewhere"},
            "data": {"path": "data.jsonl"},
            "rewards": [{"use": "math"}],
            "rollout": {"max_prompt_tokens": 512, "max_completion_tokens": 4097},
            "hardware": {"processes": "auto"},
        },
        overrides,
    )


SHORT = ("rollout.max_prompt_tokens=4", "rollout.max_completion_tokens=4")  # so that attention is next to nothing
EIGHT = hardware(gpu="h100", gpus=8, nodes=1, gpu_memory="80GB")


def test_rows_of_groups_that_fit_and_of_groups_in_parts() -> None:
    """A group is 512 + 8 x 4,096 = 33,280 tokens."""
    whole = plan_rows(config(), 8, 70_000)
    assert (whole.row_tokens, whole.row_completions, whole.kept_prompt_tokens) == (66_560, 16, 0)
    assert (whole.num_micro_batches, whole.prompts, whole.completions) == (1, 2, 16)
    parts = plan_rows(config(), 8, 8192)
    assert (parts.row_tokens, parts.row_completions, parts.kept_prompt_tokens) == (4096, 1, 512)
    assert parts.num_micro_batches == 16
    three = plan_rows(config(), 8, 512 + 3 * 4096)
    assert (three.row_completions, three.num_micro_batches) == (3, 6)


def test_three_training_gpus_with_eight_generations() -> None:
    """No divisibility: 16 prompts of 8 completions over 3 processes."""
    plan = predict_run(config("hardware.processes=3"), preset_shape("0.5b"), EIGHT, num_prompts=7500)
    assert plan.layout.num_training == 3
    assert plan.rows.completions == pytest.approx(128 / 3)
    assert plan.num_steps == 469
    assert plan.steps_per_epoch == pytest.approx(468.75)


def test_nodes_and_servers() -> None:
    many = hardware(gpu="h100", gpus=8, nodes=8, gpu_memory=None)
    assert plan_layout(config(), preset_shape("7b"), many).num_training == 64
    served = plan_layout(config("rollout={engine: vllm}"), preset_shape("7b"), many)
    assert served.num_training + served.num_sampling == 64
    assert served.num_training % 8 == 0
    assert not served.shared
    elsewhere = plan_layout(config("rollout={engine: vllm, urls: ['http://a:1']}"), preset_shape("7b"), many)
    assert (elsewhere.num_training, elsewhere.num_sampling) == (64, 0)
    with pytest.raises(UserError, match=r"hardware\.processes: 9 is more than the 8 GPUs"):
        predict_run(config("hardware.processes=9"), preset_shape("7b"), EIGHT)


_settings = st.builds(
    lambda name, gpu, gpus, *overrides: (name, hardware(gpu=gpu, gpus=gpus, nodes=1, gpu_memory=None), overrides),
    st.sampled_from(["0.5b", "4b", "7b", "32b"]),
    st.sampled_from(["4090", "l20", "h100"]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from(["train.micro_batch_tokens=auto", "train.micro_batch_tokens=60000"]),
    st.sampled_from(["model.gradient_checkpointing=true", "model.gradient_checkpointing=false"]),
    st.sampled_from(["rollout.max_completion_tokens=512", "rollout.max_completion_tokens=16384"]),
    st.sampled_from(["rollout.num_generations=2", "rollout.num_generations=64"]),
)


@given(_settings)
@settings(max_examples=60, deadline=None)
def test_advice_that_says_it_fits_does_fit(case: Any) -> None:
    name, machines, overrides = case
    wanted, shape = config(*overrides), preset_shape(name)
    plan = predict_run(wanted, shape, machines)
    for advice in advise(wanted, plan):
        other = replan(wanted, shape, machines, advice.changes)
        assert other.fits and advice.fits
        assert advice.saved_bytes == plan.memory.peak_bytes - other.memory.peak_bytes
        if plan.fits:
            assert other.timing["step_s"].value < plan.timing["step_s"].value


def test_what_changes_nothing_comes_first_and_fewer_generations_last() -> None:
    wanted = config("train.micro_batch_tokens=66560")
    plan = predict_run(wanted, preset_shape("7b"), EIGHT)
    assert not plan.fits
    costs = [advice.costs for advice in advise(wanted, plan)]
    assert advise(wanted, plan)[0].changes == {"train.micro_batch_tokens": "auto"}
    assert costs.index("time; the gradient is the same") < costs.index(
        "the experiment: completions are cut off earlier"
    )
    assert costs[-1].startswith("the experiment")


@pytest.mark.parametrize(("limit", "key"), [("length", "max_completion_tokens"), ("generations", "num_generations")])
def test_the_largest_number_fits_and_the_next_does_not(limit: Any, key: str) -> None:
    wanted, shape = config("train.micro_batch_tokens=auto"), preset_shape("7b")
    most = largest(wanted, shape, EIGHT, limit)
    assert isinstance(most, int)
    assert replan(wanted, shape, EIGHT, {f"rollout.{key}": most}).fits
    assert not replan(wanted, shape, EIGHT, {f"rollout.{key}": most + 1}).fits


def test_the_largest_model() -> None:
    name = largest(config(), preset_shape("7b"), EIGHT, "model")
    assert isinstance(name, str)
    assert predict_run(config("train.micro_batch_tokens=auto"), preset_shape(name), EIGHT).fits
    assert (
        largest(config(), preset_shape("7b"), hardware(gpu="4090", gpus=1, nodes=1, gpu_memory="1GB"), "model") is None
    )


def test_the_largest_length_is_at_most_what_the_model_has_positions_for() -> None:
    plenty = hardware(gpu="b200", gpus=8, nodes=1, gpu_memory=None)
    checkpointed = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true")
    assert largest(checkpointed, preset_shape("7b"), plenty, "length") == 32_768 - 512
    beyond = predict_run(config("rollout.max_completion_tokens=32257"), preset_shape("7b"), plenty)
    assert "32769 tokens, and the model knows 32768 positions" in beyond.notes[0]
    assert not predict_run(config(), preset_shape("7b"), plenty).notes


@pytest.mark.parametrize(
    ("more", "positions"),
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1024}}, 1024),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_positions_of_a_config(more: dict[str, Any], positions: int | None) -> None:
    shape = shape_of({**PRESETS["qwen2.5-7b"], "max_position_embeddings": 4096, **more}, name="x")
    assert shape.max_positions == positions


def test_a_model_of_the_hub_is_known_by_its_id(tmp_path: Path) -> None:
    for model_id, name in (
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Coder-1.5B", "qwen2.5-1.5b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3-1b"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
    ):
        assert read_shape(model_id).name == name
    for model_id in ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-VL-7B-Instruct", "org/model"):
        with pytest.raises(UserError, match="--model-shape"):
            read_shape(model_id)


def test_an_adapter_is_proposed_with_what_it_costs() -> None:
    """One GPU of 24 GB and a model of 3 billion weights: their state alone is 49 GB."""
    one = hardware(gpu="4090", gpus=1, nodes=1, gpu_memory=None)
    wanted, shape = config("hardware.processes=1"), preset_shape("3b")
    plan = predict_run(wanted, shape, one)
    (lora,) = [a for a in advise(wanted, plan) if "model.adapter" in a.changes]
    assert lora.changes["model.adapter"] == {"rank": 64}
    assert "'model.adapter={rank: 64}'" in lora.told()
    assert lora.costs.startswith("the experiment: only a sum of low rank is learned")
    assert lora.saved_bytes > 40e9
    adapted = replan(wanted, shape, one, lora.changes)
    assert adapted.work.adapter is not None and adapted.work.adapter.rank == 64
    whole_command = [*lora.told().replace("'", "").split(" ", maxsplit=lora.told().count("=") - 1)]
    again = predict_run(config("hardware.processes=1", *whole_command), shape, one)  # as a person would write it
    assert again.memory.peak_bytes == adapted.memory.peak_bytes


def test_rank_is_in_the_predicted_gain() -> None:
    wanted = config("model.adapter={rank: 512}")
    plan = predict_run(wanted, preset_shape("7b"), EIGHT)
    narrower = replan(wanted, preset_shape("7b"), EIGHT, {"model.adapter.rank": 8})
    adapter_bytes = [p.memory.phases["optimizer"]["adapter"] for p in (plan, narrower)]
    assert adapter_bytes[0] == 64 * adapter_bytes[1]
    assert narrower.memory.peak_bytes < plan.memory.peak_bytes


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    whole = predict_run(config(*SHORT), preset_shape("7b"), EIGHT)
    adapted = predict_run(config(*SHORT, "model.adapter={rank: 1}"), preset_shape("7b"), EIGHT)
    ratio = adapted.timing["training_s"].value / whole.timing["training_s"].value
    assert ratio == pytest.approx(4 / 6, rel=1e-3)
    assert "4 operations" in adapted.timing["training_s"].how
    with_reference = predict_run(config("model.adapter={rank: 1}", "algorithm.beta=0.1"), preset_shape("7b"), EIGHT)
    assert "reference weights" not in with_reference.memory.phases["backward"]


def test_a_plan_with_a_critic() -> None:
    without, ppo = (
        predict_run(config("train.micro_batch_tokens=8192", *more), preset_shape("0.5b"), EIGHT)
        for more in ([], ["algorithm.name=ppo"])
    )
    assert ppo.work.critic is not None and without.work.critic is None
    assert ppo.work.critic.shape.num_parameters == 494_032_768 + 897  # its embedding was the head too
    state = 3 * 4 * (494_032_768 + 897) // 8
    assert ppo.memory.peak_bytes - without.memory.peak_bytes == pytest.approx(state, rel=1e-3)
    without, ppo = (
        predict_run(config(*SHORT, *more), preset_shape("0.5b"), EIGHT) for more in ([], ["algorithm.name=ppo"])
    )
    # a forward for the values, and one there and back, of all but the head
    body = 494_032_768 - 151_936 * 896
    ratio = ppo.timing["training_s"].value / without.timing["training_s"].value
    assert ratio == pytest.approx(1 + 8 * body / (6 * 494_032_768), rel=1e-3)
    assert "the critic" in ppo.timing["training_s"].how


def test_a_critic_of_its_own_path_has_its_own_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"]))
    shapes = [
        critic_shape(config("algorithm.name=ppo", f"critic.path={path}"), preset_shape("7b"))
        for path in (tmp_path, "somebody/elses")
    ]
    assert [shape.num_parameters for shape in shapes if shape] == [596_049_920 + 1025, 7_070_622_721]
    assert critic_shape(config(), preset_shape("7b")) is None


def test_a_reference_in_host_memory_takes_its_way_once_a_step() -> None:
    measured = Calibration(
        device=EIGHT.gpu_name,
        on_gpu=True,
        machine="x",
        date="2026-11-01",
        torch_version="2.13.0",
        flops={"float32": 5e13, "bfloat16": 6e14},
        memory_bandwidth=2.5e12,
        host_bandwidth=4 * 494_032_768.0,
        collective_bandwidth=None,
        memory_bytes=80 * 10**9,
        framework_bytes=10**9,
    )
    one = dataclasses.replace(EIGHT, gpus_per_node=1, measured=measured)
    more = ("hardware.processes=1", "algorithm.beta=0.1", "train.micro_batch_tokens=8192")
    beside, parked, refreshed = (
        predict_run(config(*more, *reference), preset_shape("0.5b"), one)
        for reference in ([], ["reference.device=cpu"], ["reference={device: cpu, refresh_every: 8}"])
    )
    assert beside.memory.peak_bytes - parked.memory.peak_bytes == 4 * 494_032_768
    for name in ("training_s", "step_s"):
        assert parked.timing[name].value == pytest.approx(beside.timing[name].value + 1)
    assert refreshed.memory == parked.memory  # it moves in place
    assert refreshed.timing["step_s"] == parked.timing["step_s"]


def test_moments_in_8_bits_are_proposed_before_lora() -> None:
    """One GPU of 24 GB and 1.54 billion weights: 16 bytes each are 24.7 GB, and 10 are 15.5 GB."""
    one = hardware(gpu="4090", gpus=1, nodes=1, gpu_memory=None)
    wanted = config(
        "hardware.processes=1", "rollout.max_completion_tokens=512", "rollout.max_num_seqs=8", "optim.beta2=0.99"
    )
    plan = predict_run(wanted, preset_shape("1.5b"), one)
    assert not plan.fits
    found = advise(wanted, plan)
    (small,) = [a for a in found if "optim.name" in a.changes]
    assert small.changes["optim.name"] == "adamw_8bit"  # Adafactor has no beta2
    assert "optim.name=adamw_8bit" in small.told() and small.costs.startswith("the optimizer's rounding")
    assert found.index(small) < next(i for i, a in enumerate(found) if "model.adapter" in a.changes)
    assert small.saved_bytes > (8 - 2.04) * 1_543_714_304
    changed_run = replan(wanted, preset_shape("1.5b"), one, small.changes)
    assert changed_run.work.optim == Adamw8bitConfig(beta2=0.99)
    assert changed_run.fits


def test_a_reference_in_host_memory_is_proposed_to_one_process_only() -> None:
    one = hardware(gpu="h100", gpus=1, nodes=1, gpu_memory="34GB")
    wanted = config("algorithm.beta=0.1", "model.gradient_checkpointing=true", "rollout.max_num_seqs=8")
    plan = predict_run(wanted, preset_shape("1.5b"), one)
    found = advise(wanted, plan)
    assert not plan.fits
    assert next(a for a in found if a.changes == {"reference.device": "cpu"}).saved_bytes == 4 * 1_543_714_304
    assert not [a for a in found if "reference.device" in a.changes and "--gpus" in a.changes]
    for more, match in (("optim.name=adafactor", "adafactor cannot move"), ("reference.device=cpu", "one process")):
        with pytest.raises(UserError, match=match):
            predict_run(config("algorithm.beta=0.1", more), preset_shape("1.5b"), EIGHT)


@pytest.mark.parametrize(("gpus", "proposed"), [(1, True), (2, False)])
def test_adafactor_is_proposed_to_one_process_only(gpus: int, proposed: bool) -> None:
    machines = hardware(gpu="h100", gpus=gpus, nodes=1, gpu_memory="80GB" if gpus == 1 else "48GB")
    wanted = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true")
    plan = predict_run(wanted, preset_shape("7b"), machines)
    assert not plan.fits
    names = [a.changes.get("optim.name") for a in advise(wanted, plan)]
    assert ("adafactor" in names) is proposed
    assert "sgd" not in names
    small = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true", "optim.name=sgd")
    assert not [a for a in advise(small, predict_run(small, preset_shape("7b"), machines)) if "optim.name" in a.changes]


def test_groups_of_one(run_file: Path) -> None:
    """A prompt of 512 tokens and 4,095 of its completion are one sequence: no prompt is kept for others."""
    one = plan_rows(config("algorithm.name=ppo", "rollout.num_generations=1"), 8, 4608)
    assert (one.row_tokens, one.row_completions, one.kept_prompt_tokens, one.num_micro_batches) == (4608, 1, 0, 2)
    long = plan_rows(config("algorithm.name=ppo", "rollout.num_generations=1"), 8, 1000)  # over the cap by itself
    assert (long.row_tokens, long.row_completions, long.kept_prompt_tokens, long.num_micro_batches) == (4608, 1, 0, 2)
    command = ["plan", str(run_file), "algorithm.name=ppo", "rollout.num_generations=1"]
    told = " ".join(CliRunner().invoke(app, command, env={"COLUMNS": "200"}).output.split())
    assert "prompts per step, of one process 2, with one completion each" in told
    assert "completions per step" not in told
    assert "critic, trained beside the policy 7.07 billion parameters" in told


def test_dropout_computes_a_prompt_for_every_completion() -> None:
    rows = plan_rows(config("model.adapter={dropout: 0.1}"), 8, 2 * (512 + 4097))
    assert (rows.row_completions, rows.row_tokens, rows.kept_prompt_tokens) == (2, 2 * (512 + 4097), 0)


def test_more_gpus_of_the_node_are_proposed_before_more_nodes() -> None:
    two = hardware(gpu="h100", gpus=2, nodes=1, gpu_memory="80GB")
    wanted = config("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true", "hardware.processes=2")
    plan = predict_run(wanted, preset_shape("14b"), two)
    assert not plan.fits
    advice = [a for a in advise(wanted, plan) if "--gpus" in a.changes]
    assert advice[0].changes == {"--gpus": 8, "hardware.processes": "auto"}
    eight, four = (replan(wanted, preset_shape("14b"), two, {**advice[0].changes, "--gpus": n}) for n in (8, 4))
    assert (eight.layout.num_training, eight.fits) == (8, True)
    assert not four.fits
    assert "--nodes" not in advise(wanted, plan)[0].changes


def test_where_no_split_fits_the_plan_says_why_and_what_would() -> None:
    wanted = config("rollout={engine: vllm, max_prompt_tokens: 512, max_completion_tokens: 4097}")
    plan = predict_run(wanted, preset_shape("14b"), hardware(gpu="l40s", gpus=4, nodes=1, gpu_memory=None))
    assert not plan.fits
    assert "hardware.rollout_gpus: auto: nothing fits 4 GPUs" in plan.notes[0]
    found = advise(wanted, plan)
    assert found and all(a.fits for a in found)


def test_sizes() -> None:
    assert parse_bytes("80GB", option="x") == 80 * 10**9
    assert parse_bytes(" 79.5 GiB", option="x") == 79 * 2**30 + 2**29
    for wrong in ("", "many", "80 parsecs", "0GB", "-1GB", "80"):
        with pytest.raises(UserError, match="--gpu-memory"):
            parse_bytes(wrong, option="--gpu-memory")
    with pytest.raises(UserError, match="has no unit; write 80GB"):
        parse_bytes("80", option="--gpu-memory")
    with pytest.raises(UserError, match="--gpu: 'abacus'"):
        hardware(gpu="abacus", gpus=1, nodes=1, gpu_memory=None)
    with pytest.raises(UserError, match="--nodes: 0"):
        hardware(gpu="h100", gpus=1, nodes=0, gpu_memory=None)


def test_prompts_are_counted_where_that_is_cheap(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert count_prompts(str(tmp_path / "a.jsonl")) == 2
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert count_prompts(str(tmp_path / "a.csv")) is None
    (tmp_path / "broken.parquet").write_text("no")
    assert count_prompts(str(tmp_path / "broken.parquet")) is None
    assert count_prompts(str(tmp_path / "missing.jsonl")) is None


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PRESETS["qwen2.5-7b"]))
    (tmp_path / "data.jsonl").write_text('{"prompt": "1"}\n' * 100)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {model}}}\ndata: {{path: {tmp_path / 'data.jsonl'}}}\nrewards: [{{use: math}}]\n"
        "rollout: {max_prompt_tokens: 512, max_completion_tokens: 4096}\nhardware: {processes: auto}\n"
    )
    return file


def test_the_command(run_file: Path) -> None:
    fits = CliRunner().invoke(app, ["plan", str(run_file), "--gpu-memory", "80GB", "--json", "--max", "length"])
    assert fits.exit_code == 0, fits.output
    plan = json.loads(fits.output)
    assert plan["model"]["parameters"] == 7_615_616_512
    assert plan["layout"]["num_steps"] == 7
    assert plan["memory"]["fits"]
    assert plan["max"]["length"] > 4096
    backward = plan["memory"]["phases"]["backward"]
    assert backward["total"] == sum(backward["parts"].values())
    assert {number["origin"] for number in plan["timing"].values()} <= {"measured", "assumed", "derived"}
    does_not = CliRunner().invoke(app, ["plan", str(run_file), "--gpu", "4090"])
    assert does_not.exit_code == 1
    assert "does not fit" in does_not.output


def test_vllm_is_not_proposed_to_a_run_that_has_it(run_file: Path) -> None:
    """On a GPU of 4 GB nothing that is known fits."""
    small = ["plan", str(run_file), "--gpu-memory", "4GB", "--gpus", "1"]
    local, served = (CliRunner().invoke(app, [*small, *more]).output for more in ([], ["rollout={engine: vllm}"]))
    assert "or rollout.engine: vllm" in local and "no change that is known here" in served
    assert "or rollout.engine: vllm" not in served


@pytest.mark.parametrize(
    ("targets", "parameters"),
    [  # rank 16 on Qwen2.5-7B, 28 layers: q_proj 3584 x 3584, v_proj 3584 x 512
        (["q_proj"], 28 * 16 * 2 * 3584),
        (["self_attn.q_proj"], 28 * 16 * 2 * 3584),
        (["model.layers.3.self_attn.q_proj"], 28 * 16 * 2 * 3584 // 28),
        (["layers.3.self_attn.q_proj", "layers.4.self_attn.v_proj"], 16 * (2 * 3584 + 3584 + 512)),
        (["model.embed_tokens"], 16 * (3584 + 152_064)),
    ],
)
def test_targets_are_those_of_any_dotted_ending(targets: list[str], parameters: int) -> None:
    shape = preset_shape("7b")
    counted = adapter_shape(AdapterConfig(targets=tuple(targets)), shape)
    assert counted.note is None
    assert 0 <= counted.num_parameters(shape.layers) - parameters < shape.layers  # the mean is rounded up


def test_targets_that_the_shape_cannot_tell_are_noted_and_not_refused(run_file: Path) -> None:
    shape = preset_shape("7b")
    unknown = adapter_shape(AdapterConfig(targets=("qkv_proj",)), shape)
    everywhere = adapter_shape(AdapterConfig(), shape)
    assert unknown.layer_parameters == everywhere.layer_parameters
    assert "qkv_proj" in str(unknown.note) and everywhere.note is None
    arguments = ["plan", str(run_file), "model.adapter={targets: [qkv_proj]}"]
    assert "qkv_proj: which layers these are" in CliRunner().invoke(app, arguments).output
    assert "qkv_proj" in json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["notes"][0]


@pytest.mark.parametrize("pattern", [".*(q_proj|v_proj)", r"model\.layers\.\d+\.self_attn\.[qv]_proj"])
def test_a_saved_pattern_is_one(tmp_path: Path, pattern: str) -> None:
    saved = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": pattern}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    shape = preset_shape("7b")
    found = adapter_shape(AdapterConfig(path=str(tmp_path)), shape)
    listed = adapter_shape(AdapterConfig(rank=4, targets=("q_proj", "v_proj")), shape)
    assert found == listed and found.note is None


@pytest.mark.parametrize("nodes", [4, 5, 6])
def test_nodes_that_train_are_enough_for_the_state(nodes: int) -> None:
    """Of Llama-3 70B in float32 a GPU of 8 has 141 GB of state; of 16, 70.6 GB, and all else fits beside it."""
    engine = "rollout={engine: vllm, tensor_parallel: 4, max_staleness: 1}"
    more = ("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true")
    wanted = config(engine, "train.prompts_per_step=16", *more)
    many = hardware(gpu="h100", gpus=8, nodes=nodes, gpu_memory=None)
    layout = plan_layout(wanted, preset_shape("llama3-70b"), many)
    assert layout.num_training >= 16
    assert predict_run(wanted, preset_shape("llama3-70b"), many, layout=layout).fits
    assert layout.num_training + layout.num_sampling == 8 * nodes


@pytest.mark.parametrize(
    "options", [["--max", "everything"], ["--gpus", "0"], ["--model-shape", "9t"], ["--price", "-3"]]
)
def test_mistakes_exit_with_2(run_file: Path, options: list[str]) -> None:
    assert CliRunner().invoke(app, ["plan", str(run_file), *options]).exit_code == 2


def test_no_torch_is_imported(run_file: Path) -> None:
    code = (
        "import sys; from cohort.cli.app import app\n"
        f"app(['plan', {str(run_file)!r}, '--json'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_run_that_cannot_fit_is_refused_unless_told_otherwise(run_file: Path) -> None:
    notes: list[str] = []
    wanted = config(f"model.path={run_file.parent / 'model'}")
    about: dict[str, Any] = {"shared": False, "longest_prompt_tokens": 100, "num_prompts": 100, "note": notes.append}
    fitting = plan_on(wanted, EIGHT, **about)
    assert fitting is not None and fitting.fits
    small = hardware(gpu="4090", gpus=1, nodes=1, gpu_memory=None)
    with pytest.raises(UserError, match=r"needs .* GB of each GPU in .* run\.ignore_plan: true"):
        plan_on(wanted, small, **about)
    assert not notes
    told = wanted.model_copy(update={"run": wanted.run.model_copy(update={"ignore_plan": True})})
    assert plan_on(told, small, **about) is not None
    assert "goes on all the same" in notes[0]
    assert compared(fitting, {}) is None
    assert "20.00 GB at most" in (compared(fitting, {1: 19e9, 2: 20e9}) or "")


def test_a_run_keeps_its_plan_and_tells_what_became_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    class Notes(Display):
        def note(self, text: str) -> None:
            notes.append(text)

    def as_on(memory: str) -> Any:
        machines = hardware(gpu="h100", gpus=1, nodes=1, gpu_memory=memory)
        return lambda config, inputs, servers, *, device, world_size, note: plan_on(
            config,
            machines,
            shared=False,
            longest_prompt_tokens=20,
            num_prompts=len(inputs.prompts.prompts),
            note=note,
        )

    settings = changed(make_inputs(tmp_path), train={"steps": 1})
    monkeypatch.setattr("cohort.trainer.run.foresee", as_on("1MB"))
    with pytest.raises(UserError, match="this run needs"):
        cohort.train(settings, display=Notes())
    assert not (tmp_path / "run" / "plan.json").exists()
    monkeypatch.setattr("cohort.trainer.run.foresee", as_on("80GB"))
    done = cohort.train(settings, display=Notes())
    plan = json.loads((done.run_dir / "plan.json").read_text())
    assert plan["layout"]["num_prompts"] == 40
    assert plan["memory"]["fits"]
    assert "memory of one process" in notes[-1]


@pytest.mark.parametrize(("waits", "warmup", "most"), [(10, 0, 9), (8, 2, 7), (9, 2, 7)])
def test_a_critics_warm_up_leaves_the_policy_some_steps(waits: int, warmup: int, most: int) -> None:
    """Where the number of steps comes from epochs, too."""
    settings = config(
        "algorithm.name=ppo", f"critic.warmup_steps={waits}", f"train.warmup_steps={warmup}", "train.epochs=1"
    )
    prompts = 10 * settings.train.prompts_per_step
    with pytest.raises(UserError, match=rf"critic.warmup_steps: {waits} .* run's 10 steps .* at most {most}"):
        plan_run(settings, num_prompts=prompts)
    shorter = settings.model_copy(update={"critic": settings.critic.model_copy(update={"warmup_steps": most})})
    assert plan_run(shorter, num_prompts=prompts).num_steps == 10
