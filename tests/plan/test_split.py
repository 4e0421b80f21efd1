"""Which GPUs train and which sample: the rules, the numbers of the model behind `auto`, and what is refused."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config import Config, config_from_dict
from cohort.errors import UserError
from cohort.plan.hardware import Hardware
from cohort.plan.layout import GpuLayout
from cohort.plan.predict import predict_run
from cohort.plan.shape import PRESETS, preset_shape, similar_shape
from cohort.plan.split import GpuSplit, base_fits, memory_shortfall, split_gpus
from cohort.plan.step import plan_step
from cohort.plan.timing import StepTimes
from selection import examples

H100 = "NVIDIA H100 80GB HBM3"
AUTO = "hardware.processes=auto"


def config_with(*overrides: str) -> Config:
    raw = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}
    return config_from_dict(raw | {"rollout": {"engine": "vllm"}}, overrides)


def gpus_of(gigabytes: float, *, gpu: str = H100) -> Hardware:
    return Hardware(gpu_name=gpu, gpu_memory_bytes=round(gigabytes * 1e9), gpus_per_node=8, nodes=1)


EIGHTY = gpus_of(80)


def split(num_gpus: int, *overrides: str, model: str = "1.5b", hardware: Hardware = EIGHTY) -> GpuSplit:
    return split_gpus(config_with(*overrides), num_gpus=num_gpus, shape=preset_shape(model), hardware=hardware)


def message(num_gpus: int, *overrides: str, model: str = "1.5b", hardware: Hardware = EIGHTY) -> str:
    with pytest.raises(UserError) as caught:
        split(num_gpus, *overrides, model=model, hardware=hardware)
    return str(caught.value)


def times(model: str, *overrides: str, training: int = 1, sampling: int = 1) -> StepTimes:
    settings, shape = config_with(*overrides), preset_shape(model)
    return plan_step(settings, shape, EIGHTY, num_training=training, num_sampling=sampling).times


# The numbers of the configuration are kept


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "training", "servers", "shared"),
    [
        (4, (AUTO, "hardware.rollout_gpus=1"), (0, 1, 2), ((3,),), False),
        (8, (AUTO, "hardware.rollout_gpus=2"), (0, 1, 2, 3, 4, 5), ((6,), (7,)), False),
        (8, ("hardware.processes=6",), (0, 1, 2, 3, 4, 5), ((6,), (7,)), False),
        (8, ("hardware.processes=5", "rollout.tensor_parallel=2"), (0, 1, 2, 3, 4), ((5, 6),), False),
        (8, ("hardware.processes=4", "rollout.tensor_parallel=2"), (0, 1, 2, 3), ((4, 5), (6, 7)), False),
        (8, ("hardware.processes=4", "rollout.servers=1"), (0, 1, 2, 3), ((4,),), False),
        (8, ("hardware.processes=2", "hardware.rollout_gpus=2"), (0, 1), ((2,), (3,)), False),
        (4, ("hardware.processes=1",), (0,), ((1,), (2,), (3,)), False),
        (1, (), (0,), ((0,),), True),
        (1, (AUTO,), (0,), ((0,),), True),
        (4, ("hardware.processes=4",), (0, 1, 2, 3), ((0,), (1,), (2,), (3,)), True),
        (2, (AUTO, "hardware.rollout_gpus=shared"), (0, 1), ((0,), (1,)), True),
        (4, (AUTO, "hardware.rollout_gpus=shared", "rollout.tensor_parallel=2"), (0, 1, 2, 3), ((0, 1), (2, 3)), True),
        (2, ("rollout.tensor_parallel=2", "rollout.servers=1", "hardware.processes=2"), (0, 1), ((0, 1),), True),
        (0, (), (), ((),), False),
        (0, ("hardware.processes=3", "rollout.servers=2"), (), ((), ()), False),
    ],
)
def test_what_the_configuration_says(num_gpus, overrides, training, servers, shared):
    found = split(num_gpus, *overrides)
    assert (found.training_gpus, found.server_gpus, found.shared) == (training, servers, shared)
    said = config_with(*overrides).hardware.processes
    assert found.num_processes == (len(training) or (1 if said == "auto" else said))


def test_the_reason_says_who_does_what():
    assert split(4, AUTO, "hardware.rollout_gpus=1").reason == (
        "GPUs 0-2 train, GPU 3 samples (1 vLLM server): hardware.rollout_gpus: 1"
    )
    assert split(8, "hardware.processes=5", "rollout.tensor_parallel=2").reason == (
        "GPUs 0-4 train, GPUs 5-6 sample (1 vLLM server, 2 GPUs each), GPU 7 is not used: hardware.processes: 5"
    )
    assert split(1).reason == ("GPU 0 trains and samples in turn, vLLM sleeping during training: there is only one GPU")
    assert split(4, AUTO, "hardware.rollout_gpus=shared", "rollout.tensor_parallel=2").reason == (
        "GPUs 0-3 train and sample in turn (2 vLLM servers, 2 GPUs each), vLLM sleeping during training: "
        "hardware.rollout_gpus: shared"
    )
    assert split(0, "hardware.processes=3").reason == "3 processes and 1 vLLM server share the CPU"


# What auto compares


def test_servers_that_are_idle_do_not_help():
    """Groups stay whole: of 2 prompts, a third server gets none."""
    two, three = (times("1b", "train.prompts_per_step=2", sampling=n) for n in (2, 3))
    assert two.sampling_s == three.sampling_s


def test_auto_takes_the_shortest_step():
    found = split(8, AUTO, model="7b")
    every = {n: times("7b", training=8 - n, sampling=n) for n in range(1, 8)}
    best = min(every, key=lambda n: every[n].step_s)
    assert 1 < best == len(found.server_gpus) < 7
    near = " and ".join(f"{8 - n} + {n} would take {every[n].step_s:.3g} s" for n in (best - 1, best + 1))
    assert found.reason == (
        f"GPUs 0-{7 - best} train, GPUs {8 - best}-7 sample ({best} vLLM servers): {every[best].describe()} predicted; "
        f"{near}"
    )


def test_auto_shares_the_gpus_where_that_is_faster():
    long = (AUTO, "rollout.max_prompt_tokens=512", "rollout.max_completion_tokens=4097", "train.prompts_per_step=16")
    long = (*long, "model.gradient_checkpointing=false")
    found = split(4, *long, model="7b")
    assert found.shared and len(found.server_gpus) == 4
    assert found.reason.endswith("58.6 s predicted; 3 + 1 would take 90.7 s")
    assert not split(4, *long, "rollout.servers=1", model="7b").shared
    assert not split(4, *long, "rollout.max_staleness=1", model="3b").shared


def test_auto_shares_the_gpus_with_servers_of_several():
    """32B in bfloat16 is 66 GB: a server's share of one GPU, or of two, has no room for it."""
    keys = (AUTO, "model.dtype=bfloat16", "model.gradient_checkpointing=true")
    parallel, shape = (*keys, "rollout.tensor_parallel=4"), preset_shape("32b")
    found = split(8, *parallel, model="32b", hardware=gpus_of(110))
    assert found.shared and found.server_gpus == ((0, 1, 2, 3), (4, 5, 6, 7))
    shared, apart = (
        plan_step(
            config_with(*parallel), shape, gpus_of(110), num_training=n, num_sampling=n, shared=n == 8
        ).times.step_s
        for n in (8, 4)
    )
    assert found.reason.endswith(f"{shared:.3g} s predicted; 4 + 4 would take {apart:.3g} s") and shared < apart
    assert "with separate GPUs, training on 4 GPUs needs" in split(8, *parallel, model="32b").reason
    assert not split(8, *keys, "rollout.tensor_parallel=2", model="32b").shared
    # a half of the weights fits, too: how much faster a quarter is depends on the links between the GPUs
    assert not split(8, *parallel, model="7b", hardware=gpus_of(110)).shared
    alone = split(4, *parallel, model="32b", hardware=gpus_of(110))  # no GPU would be left to train
    assert alone.shared and alone.reason.endswith("a server needs 4 GPUs")


def test_auto_balances_phases_that_overlap():
    """Long completions of many prompts: both phases take as long as their GPUs are few."""
    overrides = ("rollout.max_completion_tokens=8192", "train.prompts_per_step=128", "rollout.max_staleness=1")
    found = split(8, AUTO, *overrides, "model.gradient_checkpointing=true", model="7b")
    every = {
        n: times("7b", *overrides, "model.gradient_checkpointing=true", training=8 - n, sampling=n) for n in range(1, 8)
    }
    best = every[len(found.server_gpus)]
    assert best.step_s == min(t.step_s for t in every.values())
    assert "overlapping" in found.reason


def test_auto_makes_room_for_what_training_takes():
    """7.6B in float32 with AdamW is 122 GB of state: 2 training GPUs of 80 GB hold it, one does not."""
    shape, hungry = preset_shape("7b"), ("train.prompts_per_step=1000", "rollout.num_generations=2")
    wanted = config_with(*hungry)
    assert memory_shortfall(wanted, shape, EIGHTY, 2) is None
    assert (memory_shortfall(wanted, shape, EIGHTY, 1) or "").endswith("GB per GPU in forward and backward, of 80 GB")
    # sampling takes the longest by far, and runs ahead, so that the GPUs are not shared
    fast = ("rollout.max_num_seqs=1", "rollout.max_staleness=1", AUTO, *hungry)
    assert split(4, *fast, model="1b").num_processes == 1
    assert split(4, *fast, model="7b").num_processes == 2


def test_a_split_and_a_plan_count_the_same_memory():
    """What the split says of 7 training GPUs is what the plan says of the same ones."""
    wanted = config_with("hardware.processes=auto", "algorithm.beta=0.1", "train.micro_batch_tokens=auto")
    layout = GpuLayout(num_training=7, num_sampling=1, shared=False, reason="")
    for gigabytes in (20, 60):
        hardware = gpus_of(gigabytes)
        plan = predict_run(wanted, preset_shape("14b"), hardware, layout=layout)
        why = memory_shortfall(wanted, preset_shape("14b"), hardware, 7)
        assert (why is None) == plan.fits
        if why is not None:
            assert f"needs {plan.memory.peak_bytes / 1e9:.3g} GB per GPU" in why


def test_auto_shares_the_gpus_where_separate_ones_do_not_fit():
    """3.1B in float32 with AdamW: 37 GB and more on one GPU of 48 GB, half of that on each of two."""
    found = split(2, AUTO, model="3b", hardware=gpus_of(48))
    assert found.shared and found.num_processes == 2
    assert found.reason.startswith(
        "GPUs 0-1 train and sample in turn, vLLM sleeping during training: with separate GPUs, training on 1 GPU needs "
    )
    assert found.reason.endswith("in forward and backward, of 48 GB")


ADAPTER = (
    *("model.adapter={rank: 16}", "model.dtype=bfloat16", "model.gradient_checkpointing=true"),
    "train.micro_batch_tokens=8192",
)


@pytest.mark.parametrize(
    ("gigabytes", "num_gpus", "model", "overrides", "kept"),
    [
        (80, 1, "7b", (), True),
        (48, 1, "7b", (), True),
        (40, 1, "7b", (), False),  # 17 GB of weights, 16 in the server, activations
        (40, 4, "7b", (), True),  # a quarter of the trainer's weights on each
        (80, 1, "7b", ("train.micro_batch_tokens=auto",), True),  # a group is enough
        (40, 1, "7b", ("train.micro_batch_tokens=auto",), False),
        (48, 1, "7b", ("train.micro_batch_tokens=65536",), False),
        (80, 1, "7b", ("rollout.vllm_args={speculative_config: {model: m}}",), False),
        (80, 1, "7b", ("model.adapter=null",), False),
        (80, 1, "qwen3-30b-a3b", (), False),
        (800, 1, "qwen3-30b-a3b", (), False),  # experts
    ],
)
def test_servers_keep_their_base_where_it_fits(
    gigabytes: float, num_gpus: int, model: str, overrides: tuple[str, ...], kept: bool
):
    told = (*ADAPTER, *overrides, "hardware.rollout_gpus=shared", AUTO)
    found = split(num_gpus, *told, model=model, hardware=gpus_of(gigabytes))
    assert found.shared and found.keeps_base == kept
    assert ("vLLM keeping its base model" in found.reason) == kept


def test_the_base_is_part_of_the_plan():
    """7,615,616,512 weights, and a rank of 32, twice the adapter's, of 90,112 rows and columns on 28 layers."""
    config, hardware = config_with(*ADAPTER, "hardware.rollout_gpus=shared"), replace(EIGHTY, gpus_per_node=1)
    plan = predict_run(config, preset_shape("7b"), hardware)
    rows = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    base = 2 * (7_615_616_512 + 32 * rows * 28)
    assert {phase["rollout server's base"] for phase in plan.memory.phases.values()} == {base}
    assert plan.layout.keeps_base and plan.as_json()["layout"]["keeps_base"]
    assert plan.layout.reason == (
        "GPU 0 trains and samples in turn, vLLM keeping its base model (15.4 GB per GPU) and freeing its KV cache "
        "during training: hardware.rollout_gpus: shared"
    )
    assert "for the workspaces of one that keeps its base" in plan.memory_origins["framework"].how
    asleep = predict_run(config, preset_shape("7b"), hardware, layout=replace(plan.layout, keeps_base=False))
    more = {phase: plan.memory.total(phase) - asleep.memory.total(phase) for phase in plan.memory.phases}
    kept = base + 10**9
    assert more == {"sampling": 0, "publish": 0, "logprobs": kept, "backward": kept, "optimizer": kept}
    auto = config_with(*ADAPTER, "hardware.rollout_gpus=shared", "train.micro_batch_tokens=auto")
    budgets = [
        predict_run(auto, preset_shape("7b"), gpus_of(42), layout=layout).micro_batches.budget_tokens
        for layout in (plan.layout, asleep.layout)
    ]
    assert budgets[0] < budgets[1]


def test_the_server_of_several_gpus_has_a_part_of_the_base_and_buffers_of_nccl():
    config, hardware, shape = config_with(*ADAPTER, "hardware.rollout_gpus=shared"), gpus_of(80), preset_shape("7b")
    one, two = (
        predict_run(changed, shape, replace(hardware, gpus_per_node=2)).memory.phases["backward"]
        for changed in (config, config_with(*ADAPTER, "hardware.rollout_gpus=shared", "rollout.tensor_parallel=2"))
    )
    assert two["framework"] - one["framework"] == 5 * 10**8
    assert two["rollout server's base"] == one["rollout server's base"] // 2


def test_a_base_that_is_moved_is_named():
    told = split(1, *ADAPTER, "hardware.rollout_gpus=shared", model="7b", hardware=gpus_of(40)).reason
    assert told.startswith(
        "GPU 0 trains and samples in turn, vLLM sleeping during training, its base model (15.4 GB per GPU) in host "
        "memory: "
    )
    unknown = split_gpus(config_with(*ADAPTER, "hardware.rollout_gpus=shared"), num_gpus=1, shape=None, hardware=None)
    assert not unknown.keeps_base and "vLLM sleeping during training: " in unknown.reason


def test_no_base_is_kept_for_sizes_that_are_guessed():
    guessed = similar_shape(PRESETS["qwen2.5-7b"], name="like it", num_parameters=7_615_616_512)
    assert guessed is not None
    assert not base_fits(config_with(*ADAPTER), guessed, EIGHTY, 1)
    assert base_fits(config_with(*ADAPTER), replace(guessed, approximate=False), EIGHTY, 1)


def test_what_does_not_fit_is_refused_with_what_does():
    refused = message(8, AUTO, "model.gradient_checkpointing=false", model="32b")
    assert refused.startswith("hardware.rollout_gpus: auto: nothing fits 8 GPUs of 80 GB: training on 7 GPUs needs ")
    assert refused.endswith(
        "GB; use model.dtype: bfloat16 with rollout.tensor_parallel: 4 or a number for rollout_gpus, which is not "
        "compared with the memory"
    )
    assert split(8, AUTO, "model.dtype=bfloat16", "rollout.tensor_parallel=4", model="32b").shared
    assert "use model.dtype: bfloat16 with rollout.tensor_parallel: 2 or" in (
        message(8, AUTO, "rollout.max_staleness=1", model="32b")
    )
    assert "use rollout.tensor_parallel: 2 or" in message(16, AUTO, model="32b")
    split(16, AUTO, "rollout.tensor_parallel=2", model="32b")
    assert "use more GPUs or" in message(4, AUTO, model="70b")
    long = "rollout.max_completion_tokens=16384"
    assert "use model.gradient_checkpointing: true or" in message(
        8, AUTO, long, "model.gradient_checkpointing=false", model="7b"
    )
    split(8, AUTO, long, model="7b")


def test_a_model_that_is_not_there_yet():
    found = split_gpus(config_with(AUTO), num_gpus=8, shape=None, hardware=EIGHTY)
    assert found == split_gpus(config_with(AUTO), num_gpus=8, shape=preset_shape("7b"), hardware=None)
    assert found.reason.endswith("(for a 1B model on H100s, since model or GPU is unknown; memory was not checked)")


# What is refused


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "expected"),
    [
        (
            4,
            ("hardware.processes=4", "hardware.rollout_gpus=1"),
            "hardware.rollout_gpus: 1 and hardware.processes: 4 need 5 GPUs, and this machine has 4; use processes: "
            "3 or auto",
        ),
        (
            4,
            ("hardware.processes=3", "hardware.rollout_gpus=2"),
            "hardware.rollout_gpus: 2 and hardware.processes: 3 need 5 GPUs, and this machine has 4; use processes: "
            "2 or auto, or rollout_gpus: 1",
        ),
        (
            4,
            (AUTO, "hardware.rollout_gpus=4"),
            "hardware.rollout_gpus: 4 of 4 GPUs leaves none to train; use at most 3, or shared",
        ),
        (1, ("hardware.rollout_gpus=1",), "hardware.rollout_gpus: 1 of 1 GPU leaves none to train; use shared"),
        (
            8,
            (AUTO, "hardware.rollout_gpus=3", "rollout.tensor_parallel=2"),
            "hardware.rollout_gpus: 3 is not a multiple of rollout.tensor_parallel: 2, the GPUs per server; use 2 or 4",
        ),
        (
            2,
            (AUTO, "hardware.rollout_gpus=1", "rollout.tensor_parallel=2"),
            "hardware.rollout_gpus: 1 is not a multiple of rollout.tensor_parallel: 2, the GPUs per server; use 1 "
            "with tensor_parallel: 1",
        ),
        (
            8,
            (AUTO, "hardware.rollout_gpus=4", "rollout.servers=3"),
            "rollout.servers: 3 of 1 GPU each (rollout.tensor_parallel) do not match hardware.rollout_gpus: 4; use "
            "servers: auto (4)",
        ),
        (
            4,
            ("hardware.processes=1", "hardware.rollout_gpus=shared"),
            "hardware.processes: 1 with shared GPUs: every GPU has one training process, and there are 4; use "
            "auto or 4, a number for hardware.rollout_gpus, or select GPUs with CUDA_VISIBLE_DEVICES",
        ),
        (
            4,
            (AUTO, "hardware.rollout_gpus=shared", "rollout.servers=2"),
            "rollout.servers: 2 with shared GPUs: every GPU has one server, and there are 4; use auto or 4",
        ),
        (
            6,
            (AUTO, "hardware.rollout_gpus=shared", "rollout.tensor_parallel=4"),
            "rollout.tensor_parallel: 4 with shared GPUs (hardware.rollout_gpus: shared): it must divide their number, "
            "which is 6; use 3 or 6, or select GPUs with CUDA_VISIBLE_DEVICES",
        ),
        (
            1,
            ("rollout.tensor_parallel=2",),
            "rollout.tensor_parallel: 2 with shared GPUs (there is only one GPU): it must divide their number, which "
            "is 1; use 1, or select GPUs with CUDA_VISIBLE_DEVICES",
        ),
        (
            4,
            (AUTO, "hardware.rollout_gpus=shared", "rollout.tensor_parallel=2", "rollout.servers=4"),
            "rollout.servers: 4 with shared GPUs: every 2 GPUs (rollout.tensor_parallel) have one server, and there "
            "are 4; use auto or 2, a number for hardware.rollout_gpus, or select GPUs with CUDA_VISIBLE_DEVICES",
        ),
        (
            8,
            ("hardware.processes=7", "rollout.tensor_parallel=2"),
            "rollout.tensor_parallel: 2: one server of 2 GPUs would need 2, and hardware.processes: 7 leaves 1 of 8; "
            "use hardware.processes: 6 or rollout.tensor_parallel: 1",
        ),
        (
            8,
            ("hardware.processes=7", "rollout.servers=2"),
            "rollout.tensor_parallel: 1: 2 servers of 1 GPU would need 2, and hardware.processes: 7 leaves 1 of 8; use "
            "hardware.processes: 6 or rollout.servers: 1",
        ),
        (
            2,
            (AUTO, "rollout.tensor_parallel=2"),
            "rollout.tensor_parallel: 2 on 2 GPUs leaves none to train; use at most 1 GPU for the servers, such as "
            "tensor_parallel: 1 with servers: auto, or hardware.rollout_gpus: shared",
        ),
        (
            64,
            (AUTO, "rollout.tensor_parallel=8"),
            "rollout.tensor_parallel: 8 must divide the 12 attention heads of qwen2.5-1.5b; use 6 or 12",
        ),
        (8, ("hardware.processes=9",), "hardware.processes: 9 exceeds the machine's 8 GPUs (one per process)"),
        (0, ("hardware.rollout_gpus=shared",), "hardware.rollout_gpus: shared has no effect on CPU"),
        (0, ("rollout.tensor_parallel=2",), "rollout.tensor_parallel: 2 requires GPUs; use 1 on CPU"),
    ],
)
def test_contradictions(num_gpus, overrides, expected):
    assert message(num_gpus, *overrides).startswith(expected)


# For any numbers

NUMBERS = st.one_of(st.just("auto"), st.integers(1, 9))


@examples(300)
@given(
    num_gpus=st.integers(0, 9),
    processes=NUMBERS,
    rollout_gpus=st.one_of(st.just("shared"), NUMBERS),
    servers=NUMBERS,
    tensor_parallel=st.integers(1, 4),
    model=st.sampled_from(["0.5b", "7b", "70b"]),
)
def test_a_split_is_whole_or_refused(num_gpus, processes, rollout_gpus, servers, tensor_parallel, model):
    overrides = (
        f"hardware.processes={processes}",
        f"hardware.rollout_gpus={rollout_gpus}",
        f"rollout.servers={servers}",
        f"rollout.tensor_parallel={tensor_parallel}",
    )
    try:
        found = split(num_gpus, *overrides, model=model)
    except UserError as error:
        assert re.match(r"(hardware|rollout)\.\w+: .*; (use|remove) ", str(error))
        return
    sampling = [gpu for gpus in found.server_gpus for gpu in gpus]
    assert found.training_gpus == tuple(range(len(found.training_gpus)))
    assert len(set(sampling)) == len(sampling) and set(sampling) <= set(range(num_gpus))
    assert {len(gpus) for gpus in found.server_gpus} == {tensor_parallel if num_gpus else 0}
    assert processes in ("auto", found.num_processes)
    assert servers in ("auto", len(found.server_gpus))
    assert rollout_gpus in ("auto", "shared" if found.shared else len(sampling))
    if found.shared:
        assert list(found.training_gpus) == sampling == list(range(num_gpus))
    elif num_gpus:
        assert len(found.training_gpus) == found.num_processes >= 1
        assert not set(sampling) & set(found.training_gpus)
        idle = num_gpus - found.num_processes - len(sampling)
        assert idle == 0 or "auto" not in (processes, rollout_gpus) or servers != "auto" or idle < tensor_parallel
