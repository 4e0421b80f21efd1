"""`cohort plan`: layout, advice, limits, the command, and what a run does with its plan."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cohort.config.model import AdapterConfig
from cohort.errors import UserError
from cohort.launch.slurm import plan_rollout_nodes
from cohort.plan import schedule_run
from cohort.plan.adapter import adapter_shape
from cohort.plan.advice import replan
from cohort.plan.hardware import GPUS, find_gpu, parse_bytes
from cohort.plan.layout import plan_layout
from cohort.plan.predict import predict_run
from cohort.plan.schedule import plan_micro_batches
from cohort.plan.shape import PRESETS, critic_shape, preset_shape, shape_from_config
from plans import EIGHT, config, on_gpus, plan_of

SHORT = ("rollout.max_prompt_tokens=4", "rollout.max_completion_tokens=4")  # so that attention is next to nothing


def test_rows_of_groups_that_fit_and_of_groups_in_parts() -> None:
    """A group is 512 + 8 x 4,096 = 33,280 tokens."""
    whole = plan_micro_batches(config(), 8, 70_000)
    assert (whole.packed_tokens, whole.completions_per_micro_batch, whole.shared_prefix_tokens) == (66_560, 16, 0)
    assert (whole.num_micro_batches, whole.prompts_per_rank, whole.completions_per_rank) == (1, 2, 16)
    parts = plan_micro_batches(config(), 8, 8192)
    assert (parts.packed_tokens, parts.completions_per_micro_batch, parts.shared_prefix_tokens) == (4096, 1, 512)
    assert parts.num_micro_batches == 16
    three = plan_micro_batches(config(), 8, 512 + 3 * 4096)
    assert (three.completions_per_micro_batch, three.num_micro_batches) == (3, 6)


def test_three_training_gpus_with_eight_generations() -> None:
    """No divisibility: 16 prompts of 8 completions over 3 processes."""
    plan = plan_of("0.5b", "hardware.processes=3", num_prompts=7500)
    assert plan.layout.num_training == 3
    assert plan.micro_batches.completions_per_rank == pytest.approx(128 / 3)
    assert plan.num_steps == 469
    assert plan.steps_per_epoch == pytest.approx(468.75)


def test_nodes_and_servers() -> None:
    many = on_gpus(8, nodes=8)
    assert plan_layout(config(), preset_shape("7b"), many).num_training == 64
    served = plan_layout(config("rollout={engine: vllm}"), preset_shape("7b"), many)
    assert served.num_training + served.num_sampling == 64
    assert served.num_training % 8 == 0
    assert not served.shared
    elsewhere = plan_layout(config("rollout={engine: vllm, urls: ['http://a:1']}"), preset_shape("7b"), many)
    assert (elsewhere.num_training, elsewhere.num_sampling) == (64, 0)
    with pytest.raises(UserError, match=r"hardware\.processes: 9 exceeds the 8 GPUs"):
        plan_of("7b", "hardware.processes=9")


def test_several_nodes_are_split_as_slurm_splits_them() -> None:
    """The servers of the plan are those of `cohort launch slurm`: on some GPUs of every node, or on whole nodes."""
    many, shape = on_gpus(8, nodes=4), preset_shape("7b")
    for more, training, servers, gpus_each in (
        (("hardware.rollout_gpus=2",), 24, 8, 1),
        (("hardware.processes=6", "rollout.tensor_parallel=2"), 24, 4, 2),
        (("hardware.processes=4", "hardware.rollout_gpus=2", "rollout.tensor_parallel=2"), 16, 4, 2),
        (("rollout.tensor_parallel=4", "rollout.servers=4"), 16, 4, 4),
    ):
        wanted = config("rollout.engine=vllm", *more)
        layout = plan_layout(wanted, shape, many)
        assert (layout.num_training, layout.num_sampling, layout.shared) == (training, servers * gpus_each, False)
        nodes = many.nodes - layout.rollout_nodes
        launched = plan_rollout_nodes(wanted, nodes=nodes, rollout_nodes=layout.rollout_nodes, gpus_per_node=8)
        assert launched is not None
        assert (launched.num_servers, launched.gpus_per_server) == (servers, gpus_each)
        assert nodes * (launched.first_gpu or 8) == training
    for more, problem in (
        (("hardware.rollout_gpus=shared",), r"shared with --nodes: 4: .* use --nodes 1, hardware.rollout_gpus=1 \("),
        (
            ("rollout.tensor_parallel=3",),
            r"tensor_parallel: 3 does not divide the 8 GPUs of a rollout node.* use 2 or 4",
        ),
        (("rollout.servers=12",), r"rollout.servers: 12 .* with 8 servers each; use auto, or at most 24 in multiples"),
    ):
        with pytest.raises(UserError, match=problem):
            plan_layout(config("rollout.engine=vllm", *more), shape, many)


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
    shape = shape_from_config({**PRESETS["qwen2.5-7b"], "max_position_embeddings": 4096, **more}, name="x")
    assert shape.max_positions == positions


def test_rank_is_in_the_predicted_gain() -> None:
    plan = plan_of("7b", "model.adapter={rank: 512}")
    narrower = replan(plan, {"model.adapter.rank": 8})
    adapter_bytes = [p.memory.phases["optimizer"]["adapter"] for p in (plan, narrower)]
    assert adapter_bytes[0] == 64 * adapter_bytes[1]
    assert narrower.memory.peak_bytes < plan.memory.peak_bytes


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    short = (*SHORT, "model.gradient_checkpointing=false")
    whole, adapted = (plan_of("7b", *short, *more, on=on_gpus()) for more in ((), ("model.adapter={rank: 1}",)))
    ratio = adapted.timing["training_s"].value / whole.timing["training_s"].value
    assert ratio == pytest.approx(4 / 6, rel=1e-3)
    assert "4 FLOPs" in adapted.timing["training_s"].how
    with_reference = plan_of("7b", "model.adapter={rank: 1}", "algorithm.beta=0.1")
    assert "reference weights" not in with_reference.memory.phases["backward"]


def test_a_plan_with_a_critic() -> None:
    without, ppo = (plan_of("0.5b", "train.micro_batch_tokens=8192", *more) for more in ([], ["algorithm.name=ppo"]))
    assert ppo.workload.critic is not None and without.workload.critic is None
    assert ppo.workload.critic.shape.num_parameters == 494_032_768 + 897  # its embedding was the head too
    state = 3 * 4 * (494_032_768 + 897) // 8
    assert ppo.memory.peak_bytes - without.memory.peak_bytes == pytest.approx(state, rel=1e-3)
    without, ppo = (plan_of("0.5b", *SHORT, *more, on=on_gpus()) for more in ([], ["algorithm.name=ppo"]))
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
    one = dataclasses.replace(EIGHT, gpus_per_node=1)
    more = ("hardware.processes=1", "algorithm.beta=0.1", "train.micro_batch_tokens=8192")
    beside, parked, refreshed = (
        plan_of("0.5b", *more, *reference, on=one)
        for reference in ([], ["reference.device=cpu"], ["reference={device: cpu, refresh_every: 8}"])
    )
    assert beside.memory.peak_bytes - parked.memory.peak_bytes == 4 * 494_032_768
    for name in ("training_s", "step_s"):
        assert parked.timing[name].value == pytest.approx(beside.timing[name].value + 4 * 494_032_768 / 25e9)
    assert refreshed.memory == parked.memory  # it moves in place
    assert refreshed.timing["step_s"] == parked.timing["step_s"]


@pytest.mark.parametrize("key", ["model.adapter={dropout: 0.1}", "model.dropout=true"])
def test_dropout_computes_a_prompt_for_every_completion(key: str) -> None:
    rows = plan_micro_batches(config(key), 8, 2 * (512 + 4097))
    assert (rows.completions_per_micro_batch, rows.packed_tokens, rows.shared_prefix_tokens) == (2, 2 * (512 + 4097), 0)


def test_sizes() -> None:
    assert parse_bytes("80GB", option="x") == 80 * 10**9
    assert parse_bytes(" 79.5 GiB", option="x") == 79 * 2**30 + 2**29
    for wrong in ("", "many", "80 parsecs", "0GB", "-1GB", "80"):
        with pytest.raises(UserError, match="--gpu-memory"):
            parse_bytes(wrong, option="--gpu-memory")
    with pytest.raises(UserError, match="has no unit; write 80GB"):
        parse_bytes("80", option="--gpu-memory")
    with pytest.raises(UserError, match="--gpu: 'abacus'"):
        on_gpus(1, "abacus")


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
    assert counted.warning is None
    assert counted.num_parameters == parameters


@pytest.mark.parametrize("pattern", [".*(q_proj|v_proj)", r"model\.layers\.\d+\.self_attn\.[qv]_proj"])
def test_a_saved_pattern_is_one(tmp_path: Path, pattern: str) -> None:
    saved = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": pattern}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    shape = preset_shape("7b")
    found = adapter_shape(AdapterConfig(path=str(tmp_path)), shape)
    listed = adapter_shape(AdapterConfig(rank=4, targets=("q_proj", "v_proj")), shape)
    assert found == listed and found.warning is None


@pytest.mark.parametrize("nodes", [4, 5, 6])
def test_nodes_that_train_are_enough_for_the_state(nodes: int) -> None:
    """Of Llama-3 70B in float32 a GPU of 8 has 141 GB of state; of 16, 70.6 GB, and all else fits beside it."""
    engine = "rollout={engine: vllm, tensor_parallel: 4, max_staleness: 1}"
    more = ("train.micro_batch_tokens=auto", "model.gradient_checkpointing=true")
    wanted = config(engine, "train.prompts_per_step=16", *more)
    many = on_gpus(8, nodes=nodes)
    layout = plan_layout(wanted, preset_shape("llama3-70b"), many)
    assert layout.num_training >= 16
    assert predict_run(wanted, preset_shape("llama3-70b"), many, layout=layout).fits
    assert layout.num_training + layout.num_sampling == 8 * nodes


def test_a_critics_warm_up_and_a_part_of_the_steps() -> None:
    settings = config("algorithm.name=ppo", "critic.warmup_steps=8", "train.warmup_ratio=0.2", "train.epochs=1")
    with pytest.raises(UserError, match=r"8 plus train.warmup_ratio: 0.2 leaves none of the run's 10 .* at most 7"):
        schedule_run(settings, num_prompts=10 * settings.train.prompts_per_step)


@pytest.mark.parametrize(("waits", "warmup", "most"), [(10, 0, 9), (8, 2, 7), (9, 2, 7)])
def test_a_critics_warm_up_leaves_the_policy_some_steps(waits: int, warmup: int, most: int) -> None:
    """Where the number of steps comes from epochs, too."""
    settings = config(
        "algorithm.name=ppo", f"critic.warmup_steps={waits}", f"train.warmup_steps={warmup}", "train.epochs=1"
    )
    prompts = 10 * settings.train.prompts_per_step
    with pytest.raises(UserError, match=rf"critic.warmup_steps: {waits} .* run's 10 steps .* at most {most}"):
        schedule_run(settings, num_prompts=prompts)
    shorter = settings.model_copy(update={"critic": settings.critic.model_copy(update={"warmup_steps": most})})
    assert schedule_run(shorter, num_prompts=prompts).num_steps == 10


@pytest.mark.parametrize(
    ("names", "key"),
    [
        ("4090 rtx4090 RTX-4090 rtx_4090 4090-24gb", "4090"),
        ("a100 A100-80GB a100-80 a100-sxm4-80gb", "a100"),
        ("a100-40 a100-40gb A100-SXM4-40GB", "a100-40"),
        ("h100 h100-sxm h100-80gb-hbm3 h100_sxm5", "h100"),
        ("h200-141gb", "h200"),
        ("l4-24gb", "l4"),
        ("h100-nvl H100_NVL", "h100-nvl"),
        ("h100-pcie a100-60gb rtx a100-0gb gb - 80gb v100", None),  # other chips, or none
    ],
)
def test_gpus_as_people_name_them(names: str, key: str | None):
    assert {find_gpu(name) for name in names.split()} == {key}
    assert find_gpu("NVIDIA GeForce RTX 4090") == "4090"
    assert all(find_gpu(name) == known for known, (name, _) in GPUS.items())
