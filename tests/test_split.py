"""Which GPUs train and which sample: the rules, the numbers of the model behind `auto`, and what is refused."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.config import Config, VllmRolloutConfig, config_from_dict
from cohort.errors import UserError
from cohort.plan.estimate import Sizes, predict, why_it_does_not_fit
from cohort.plan.flops import memory_bandwidth
from cohort.plan.split import GpuSplit, split_gpus

H100 = "NVIDIA H100 80GB HBM3"
AUTO = "hardware.processes=auto"


def config_with(*overrides: str) -> Config:
    raw = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}
    return config_from_dict(raw | {"rollout": {"engine": "vllm"}}, overrides)


def sizes_of(billions: float, *, gpu: str = H100, gigabytes: float = 80) -> Sizes:
    number = round(billions * 1e9)
    return Sizes(gpu_name=gpu, gpu_memory_bytes=round(gigabytes * 1e9), num_parameters=number, active_parameters=number)


def split(num_gpus: int, *overrides: str, sizes: Sizes | None = None) -> GpuSplit:
    return split_gpus(config_with(*overrides), num_gpus=num_gpus, sizes=sizes or sizes_of(1.5))


def message(num_gpus: int, *overrides: str, sizes: Sizes | None = None) -> str:
    with pytest.raises(UserError) as caught:
        split(num_gpus, *overrides, sizes=sizes)
    return str(caught.value)


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
        (4, (), (0,), ((1,), (2,), (3,)), False),  # hardware.processes is 1 where nothing is said
        (1, (), (0,), ((0,),), True),
        (1, (AUTO,), (0,), ((0,),), True),
        (4, ("hardware.processes=4",), (0, 1, 2, 3), ((0,), (1,), (2,), (3,)), True),
        (2, (AUTO, "hardware.rollout_gpus=shared"), (0, 1), ((0,), (1,)), True),
        (0, (), (), ((),), False),
        (0, ("hardware.processes=3", "rollout.servers=2"), (), ((), ()), False),
    ],
)
def test_what_the_configuration_says(num_gpus, overrides, training, servers, shared):
    found = split(num_gpus, *overrides)
    assert (found.training_gpus, found.server_gpus, found.shared) == (training, servers, shared)
    assert found.num_processes == (len(training) or config_with(*overrides).hardware.processes)


def test_the_reason_says_who_does_what():
    assert split(4, AUTO, "hardware.rollout_gpus=1").reason == (
        "GPUs 0-2 train, GPU 3 samples (1 vLLM server): hardware.rollout_gpus: 1"
    )
    assert split(8, "hardware.processes=5", "rollout.tensor_parallel=2").reason == (
        "GPUs 0-4 train, GPUs 5-6 sample (1 vLLM server, 2 GPUs each), GPU 7 is not used: hardware.processes: 5"
    )
    assert split(1).reason == (
        "GPU 0 trains and samples in turn, vLLM sleeping during training: there is one GPU for both"
    )
    assert split(0, "hardware.processes=3").reason == "3 processes and 1 vLLM server share the CPU"


# What auto compares


def test_the_times_of_a_step():
    """16 prompts of 512 tokens, 8 completions of 256 each: 16 x (512 + 8 x 256) = 40,960 tokens to train on."""
    times = predict(config_with(), sizes_of(1), num_training=3, num_sampling=2)
    assert times.training_s == pytest.approx(6e9 * 40960 / (3 * 0.4 * 989.4e12))
    # a server has 8 prompts, so 64 completions in flight: reading 2 GB takes longer than computing for 64
    assert times.sampling_s == pytest.approx(256 * 2e9 / (0.6 * 3.35e12) + 2e9 * 8 * 512 / (0.4 * 989.4e12))
    assert times.step_s == times.training_s + times.sampling_s


def test_servers_of_a_float64_model_read_float32():
    """vLLM has no float64, so that reading 1 billion weights is 4 GB."""
    model, hungry = "model.dtype=float64", "rollout.max_num_seqs=1"
    times = predict(config_with(model, hungry), sizes_of(1), num_training=1, num_sampling=1)
    assert times.sampling_s == pytest.approx(16 * 8 * 256 * 4e9 / (0.6 * 3.35e12), rel=0.01)  # and prompts


def test_the_times_of_a_large_asynchronous_step():
    overrides = ("train.prompts_per_step=64", "rollout.max_staleness=1", "train.updates_per_rollout=2")
    times = predict(config_with(*overrides), sizes_of(1), num_training=1, num_sampling=1)
    assert times.training_s == pytest.approx(2 * 6e9 * 64 * 2560 / (0.4 * 989.4e12))
    # 512 completions, 256 at a time: computing for 256 takes longer than reading 2 GB
    assert times.sampling_s == pytest.approx((2 * 256 * 2e9 * 256 + 2e9 * 64 * 512) / (0.4 * 989.4e12))
    assert times.step_s == max(times.training_s, times.sampling_s)


def test_experts_are_read_and_not_all_computed_with():
    dense, experts = (
        Sizes(gpu_name=H100, gpu_memory_bytes=1, num_parameters=30_000, active_parameters=a) for a in (30_000, 3_000)
    )
    slow, fast = (predict(config_with(), s, num_training=1, num_sampling=1) for s in (dense, experts))
    assert fast.training_s == pytest.approx(slow.training_s / 10)
    assert fast.sampling_s > 0.5 * slow.sampling_s


def test_servers_that_are_idle_do_not_help():
    """Groups stay whole: of 2 prompts, a third server gets none."""
    two, three = (
        predict(config_with("train.prompts_per_step=2"), sizes_of(1), num_training=1, num_sampling=n) for n in (2, 3)
    )
    assert two.sampling_s == three.sampling_s


def test_auto_takes_the_shortest_step():
    def step_s(num_sampling: int) -> float:
        return predict(config_with(), sizes_of(7), num_training=8 - num_sampling, num_sampling=num_sampling).step_s

    found = split(8, AUTO, sizes=sizes_of(7))
    assert min(range(1, 8), key=step_s) == 2 == len(found.server_gpus)
    assert found.reason == (
        "GPUs 0-5 train, GPUs 6-7 sample (2 vLLM servers): 0.724 s of training and 1.93 s of sampling a step, in turn: "
        "2.65 s predicted; 7 + 1 would take 2.69 s and 5 + 3 would take 2.76 s"
    )


def test_auto_balances_phases_that_overlap():
    """Long completions of many prompts: both phases take as long as their GPUs are few."""
    overrides = ("rollout.max_completion_tokens=8192", "train.prompts_per_step=128", "rollout.num_generations=16")
    found = split(8, AUTO, *overrides, "rollout.max_staleness=1", sizes=sizes_of(7))
    assert (found.num_processes, len(found.server_gpus)) == (6, 2)
    assert "298 s of training and 298 s of sampling a step, at the same time: 298 s predicted" in found.reason


def test_auto_makes_room_for_the_training_state():
    """7B in float32 with AdamW is 112 GB: 2 training GPUs of 80 GB hold it in 64 GB each, one does not."""
    assert why_it_does_not_fit(config_with(), config_with().rollout, sizes_of(7), 2) is None
    assert why_it_does_not_fit(config_with(), config_with().rollout, sizes_of(7), 1) == (
        "training on 1 GPU takes 126 GB of each for weights, gradients and optimizer, and 64 GB are there for them"
    )  # 112 GB, and 14 GB that autocast keeps
    hungry = ("train.prompts_per_step=1000", "rollout.max_num_seqs=1", "rollout.num_generations=2")
    assert split(4, AUTO, *hungry, sizes=sizes_of(1)).num_processes == 1
    assert split(4, AUTO, *hungry, sizes=sizes_of(7)).num_processes == 2


def test_a_reference_takes_memory():
    """5 copies of 2.4 billion float32 weights are 48 GB; with autocast's 4.8 GB, 52.8 GB of 64."""
    with_reference = config_with("algorithm.beta=0.1")
    fits = [why_it_does_not_fit(with_reference, with_reference.rollout, sizes_of(n), 1) is None for n in (2.9, 2.95)]
    assert fits == [True, False]


def test_auto_shares_the_gpus_where_separate_ones_do_not_fit():
    """2.2B: 44 GB on one GPU of 48 GB, and 22 GB on each of two that vLLM leaves 26 GB of."""
    found = split(2, AUTO, sizes=sizes_of(2.2, gigabytes=48))
    assert found.shared and found.num_processes == 2
    assert found.reason == (
        "GPUs 0-1 train and sample in turn, vLLM sleeping during training: with separate GPUs, training on 1 GPU takes "
        "39.6 GB of each for weights, gradients and optimizer, and 38.4 GB are there for them"
    )


def test_what_does_not_fit_is_refused_with_what_does():
    assert message(8, AUTO, sizes=sizes_of(32)) == (
        "hardware.rollout_gpus: auto: nothing fits 8 GPUs of 80 GB: training on 7 GPUs takes 73.1 GB of each for "
        "weights, gradients and optimizer, and 64 GB are there for them; use model.dtype: bfloat16 with "
        "rollout.tensor_parallel: 2 or a number for rollout_gpus, which is not compared with the memory"
    )
    split(8, AUTO, "model.dtype=bfloat16", "rollout.tensor_parallel=2", sizes=sizes_of(32))
    assert "use rollout.tensor_parallel: 2 or" in message(16, AUTO, sizes=sizes_of(32))
    split(16, AUTO, "rollout.tensor_parallel=2", sizes=sizes_of(32))
    assert "use more GPUs or" in message(8, AUTO, sizes=sizes_of(400))


def test_a_model_that_is_not_there_yet():
    found = split_gpus(config_with(AUTO), num_gpus=8, sizes=None)
    assert found.num_processes == 6
    assert found.reason.endswith(
        "(for a model of 1 billion weights on H100s, since its size is not known yet; memory was not looked at)"
    )


def test_an_unknown_gpu_is_taken_for_the_usual_one():
    known, unknown = (
        predict(config_with(), sizes_of(1, gpu=gpu), num_training=1, num_sampling=1) for gpu in (H100, "AMD MI300X")
    )
    assert known == unknown


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        (H100, 3.35),
        ("NVIDIA H200", 4.8),
        ("NVIDIA A100-SXM4-80GB", 2.039),
        ("NVIDIA A100 80GB PCIe", 1.935),
        ("NVIDIA A100-SXM4-40GB", 1.555),
        ("NVIDIA L4", 0.3),
    ],
)
def test_bandwidths_of_gpus(name: str, tera: float):
    assert memory_bandwidth(name) == tera * 1e12


def test_what_has_no_known_bandwidth():
    assert memory_bandwidth("NVIDIA A10G") is None  # not an A10


# What is refused


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "expected"),
    [
        (
            4,
            ("hardware.processes=4", "hardware.rollout_gpus=1"),
            "hardware.rollout_gpus: 1 and hardware.processes: 4 are 5 GPUs, and this machine has 4; use processes: "
            "3 or auto",
        ),
        (
            4,
            ("hardware.processes=3", "hardware.rollout_gpus=2"),
            "hardware.rollout_gpus: 2 and hardware.processes: 3 are 5 GPUs, and this machine has 4; use processes: "
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
            "hardware.rollout_gpus: 3 cannot be shared out to servers of rollout.tensor_parallel: 2 GPUs each; use 2 "
            "or 4",
        ),
        (
            2,
            (AUTO, "hardware.rollout_gpus=1", "rollout.tensor_parallel=2"),
            "hardware.rollout_gpus: 1 cannot be shared out to servers of rollout.tensor_parallel: 2 GPUs each; use 1 "
            "with tensor_parallel: 1",
        ),
        (
            8,
            (AUTO, "hardware.rollout_gpus=4", "rollout.servers=3"),
            "rollout.servers: 3 of 1 GPU each (rollout.tensor_parallel) are not hardware.rollout_gpus: 4; use servers: "
            "auto, which is 4",
        ),
        (
            4,
            ("hardware.rollout_gpus=shared",),
            "hardware.processes: 1 with GPUs that are shared: every GPU has one training process, and there are 4; use "
            "auto or 4, or a number for hardware.rollout_gpus, or choose GPUs with CUDA_VISIBLE_DEVICES",
        ),
        (
            4,
            (AUTO, "hardware.rollout_gpus=shared", "rollout.servers=2"),
            "rollout.servers: 2 with GPUs that are shared: every GPU has one server, and there are 4; use auto or 4",
        ),
        (
            4,
            (AUTO, "hardware.rollout_gpus=shared", "rollout.tensor_parallel=2"),
            "rollout.tensor_parallel: 2 with GPUs that are shared (hardware.rollout_gpus: shared): each has a server "
            "of its own; use tensor_parallel: 1, or hardware.processes: auto with rollout_gpus: 2",
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
            "tensor_parallel: 1 with servers: auto",
        ),
        (8, ("hardware.processes=9",), "hardware.processes: 9 is more than this machine's 8 GPUs, and each process"),
        (0, ("hardware.rollout_gpus=shared",), "hardware.rollout_gpus: shared has no effect without GPUs: training"),
        (0, ("rollout.tensor_parallel=2",), "rollout.tensor_parallel: 2 counts GPUs, and there are none; use 1"),
    ],
)
def test_contradictions(num_gpus, overrides, expected):
    assert message(num_gpus, *overrides).startswith(expected)


# For any numbers

NUMBERS = st.one_of(st.just("auto"), st.integers(1, 9))


@settings(max_examples=300, deadline=None)
@given(
    num_gpus=st.integers(0, 9),
    processes=NUMBERS,
    rollout_gpus=st.one_of(st.just("shared"), NUMBERS),
    servers=NUMBERS,
    tensor_parallel=st.integers(1, 4),
    billions=st.sampled_from([0.5, 7, 70]),
)
def test_a_split_is_whole_or_refused(num_gpus, processes, rollout_gpus, servers, tensor_parallel, billions):
    overrides = (
        f"hardware.processes={processes}",
        f"hardware.rollout_gpus={rollout_gpus}",
        f"rollout.servers={servers}",
        f"rollout.tensor_parallel={tensor_parallel}",
    )
    try:
        found = split(num_gpus, *overrides, sizes=sizes_of(billions))
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


def test_a_critic_and_the_optimizer_are_in_the_state():
    """Literal: 4e9 weights on 1 GPU take 16 bytes each and 2 for casts; a critic 12 more, adamw_8bit 6 less each."""
    sizes = sizes_of(4, gigabytes=10)
    expected = {"": 72, "ppo": 120, "8bit": 72 - 4 * 5.97, "both": 120 - 8 * 5.97}
    told = {
        "": config_with(),
        "ppo": config_with("algorithm.name=ppo"),
        "8bit": config_with("optim.name=adamw_8bit"),
        "both": config_with("algorithm.name=ppo", "optim.name=adamw_8bit"),
    }
    for name, some in told.items():
        assert isinstance(some.rollout, VllmRolloutConfig)
        why = why_it_does_not_fit(some, some.rollout, sizes, 1) or ""
        found = re.search(r"takes ([\d.]+) GB", why)
        assert found and float(found[1]) == pytest.approx(expected[name], rel=2e-3), why
