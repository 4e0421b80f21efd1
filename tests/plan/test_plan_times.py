"""How long the phases of a step are predicted to take: literal numbers, and what has to grow with what."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config import Config, config_from_dict
from cohort.plan.hardware import _TABLES, Hardware
from cohort.plan.shape import ModelShape, preset_shape
from cohort.plan.timing import StepTimes, step_times, training_operations
from plans import plan_of
from selection import examples

# 1,000 weights, of which a token is multiplied with 100: 50 of the head, and 25 of each of two layers. One token has
# 2 (keys and values) x 4 features x 2 layers = 16 numbers of keys and values.
SMALL = replace(
    preset_shape("llama3-1b"),
    hidden=5,
    vocabulary=10,
    layers=2,
    query_width=8,
    key_width=4,
    layer_parameters=(1000 - 55) // 2,
    active_layer_parameters=25,
    max_positions=None,
)


def config(*overrides: str) -> Config:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}
    rollout = {"engine": "vllm", "max_prompt_tokens": 100, "max_completion_tokens": 200, "num_generations": 4}
    return config_from_dict({**raw, "rollout": rollout, "train": {"prompts_per_step": 6}}, overrides)


def machine(*, flops: float = 1e3, bandwidth: float = 1e3, memory: int = 10**12) -> Hardware:
    """One by the data sheet: 40 % of the products and 60 % of the bandwidth are reckoned with."""
    name = f"x{flops}y{bandwidth}"
    peak = {"float32": flops / 0.4 / 1e12, "bfloat16": flops / 0.4 / 1e12, "memory": bandwidth / 0.6 / 1e12}
    _TABLES["data_sheets"][name] = peak
    return Hardware(gpu_name=name, gpu_memory_bytes=memory, gpus_per_node=1, nodes=1)


def times(*overrides: str, shape: ModelShape = SMALL, training: int = 1, sampling: int = 1, **on: Any) -> StepTimes:
    return step_times(config(*overrides), shape, machine(**on), num_training=training, num_sampling=sampling)


def test_the_small_model_is_as_it_is_said_to_be() -> None:
    assert (SMALL.num_parameters, SMALL.active_parameters, SMALL.kv_bytes(1)) == (999, 100, 16)


def test_training_counts_weights_and_pairs() -> None:
    """6 groups of 100 + 4 x 200 tokens. A prompt's token sees 50 in the mean, a completion's 100 + 100."""
    seen = (100 * 50 + 800 * 200) / 900
    per_token = 6 * 100 + 3 * 4 * 8 * 2 * seen
    assert times(training=3, flops=7.0).training_s == pytest.approx(6 * 900 * per_token / (3 * 7.0))


def test_sampling_where_reading_takes_longer() -> None:
    """2 servers of 3 prompts, 12 completions in flight: weights once, and 200 tokens of keys and values of each."""
    found = times(sampling=2, flops=1e12, bandwidth=5.0)
    read = 2 * 999 + 12 * 200 * 2 * 16  # bytes of bfloat16
    assert found.sampling_s == pytest.approx(200 * read / 5.0)


def test_sampling_where_computing_takes_longer() -> None:
    found = times(sampling=2, flops=7.0, bandwidth=1e12)
    per_token = 2 * 100 + 4 * 8 * 2 * 200
    prompts = 2 * 100 * 3 * 100
    assert found.sampling_s == pytest.approx((200 * 12 * per_token + prompts) / 7.0)


def test_a_server_of_several_gpus_reads_as_fast_as_they_all() -> None:
    one, two = (times(f"rollout.tensor_parallel={n}", "rollout.servers=1", sampling=n, flops=1e12) for n in (1, 2))
    all_reduces_s = 200 * 2 * 2 * 20e-6  # tokens, layers, two each
    assert one.sampling_s == pytest.approx(2 * (two.sampling_s - all_reduces_s))


def test_a_server_has_room_for_so_many_keys_and_values() -> None:
    """90 % of 100,000 bytes less 1,998 of weights; a completion's are (200 + 100 / 4) x 32 = 7,200 bytes: 12 fit."""
    full = times(memory=100_000, flops=1e12)
    capped = times("rollout.max_num_seqs=12", flops=1e12)
    assert full.sampling_s == pytest.approx(capped.sampling_s)
    assert full.sampling_s > times(flops=1e12).sampling_s
    assert times(memory=1, flops=1e12).sampling_s == times("rollout.max_num_seqs=1", flops=1e12).sampling_s


def test_the_trainers_own_sampling_has_the_same_roofline() -> None:
    local = config_from_dict(config().model_dump() | {"rollout": {"engine": "local", "max_prompt_tokens": 100,
        "max_completion_tokens": 200, "num_generations": 4}})  # fmt: skip
    found = step_times(local, SMALL, machine(flops=1e12), num_training=2, num_sampling=2)
    assert found.sampling_s == pytest.approx(times(sampling=2, flops=1e12).sampling_s)


@given(
    length=st.integers(16, 100_000),
    model=st.sampled_from(["0.5b", "7b", "qwen3-30b-a3b"]),
    seqs=st.sampled_from([1, 32, 1024]),
)
@examples(60)
def test_long_completions_take_longer_by_the_token(length: int, model: str, seqs: int) -> None:
    shape = preset_shape(model)

    def per_token(tokens: int) -> tuple[float, float]:
        overrides = (f"rollout.max_completion_tokens={tokens}", f"rollout.max_num_seqs={seqs}")
        found = times(*overrides, shape=shape, flops=4e14, bandwidth=2e12)
        return found.sampling_s / tokens, found.training_s / (100 + 4 * tokens)

    shorter, longer = per_token(length), per_token(2 * length)
    prompts = 2 * shape.active_parameters * 6 * 100 / 4e14  # once, however long the completions
    assert longer[0] - prompts / (2 * length) > shorter[0] - prompts / length
    assert longer[1] > shorter[1]


def test_servers_of_a_float64_model_read_float32() -> None:
    """vLLM has no float64: twice the bytes of bfloat16."""
    wide, narrow = (times(f"model.dtype={d}", flops=1e12) for d in ("float64", "float32"))
    assert wide.sampling_s == pytest.approx(2 * narrow.sampling_s)


def test_phases_overlap_where_sampling_runs_ahead() -> None:
    in_turn, ahead = times(), times("rollout.max_staleness=1")
    assert in_turn.step_s == in_turn.training_s + in_turn.sampling_s + in_turn.publish_s
    assert ahead.step_s == max(ahead.training_s, ahead.sampling_s) + ahead.publish_s


def test_weights_are_published_over_the_bus() -> None:
    """999 weights of 2 bytes at 25 GB/s; servers on shared GPUs also sleep and wake up, which takes 2 s."""
    sent_s = 2 * 999 / 25e9
    assert times().publish_s == pytest.approx(sent_s)
    shared = step_times(config(), SMALL, machine(), num_training=1, num_sampling=1, shared=True)
    assert shared.publish_s == pytest.approx(2 + sent_s)


def test_experts_are_read_and_not_all_computed_with() -> None:
    dense = replace(SMALL, active_layer_parameters=SMALL.layer_parameters)
    assert times(shape=dense, flops=1e12).sampling_s == pytest.approx(times(flops=1e12).sampling_s)
    assert times(shape=dense).training_s > times().training_s


SEEN = 4 * 8 * 2 * (100 * 50 + 800 * 200) / 900  # of attention's forward pass, per token


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"6 FLOPs per weight and token": 600, "attention": 3 * SEEN}),
        (["train.updates_per_rollout=2"], {"6 FLOPs per weight and token": 1200, "attention": 6 * SEEN}),
        (
            ["model.gradient_checkpointing=true", "algorithm.beta=0.1", "train.updates_per_rollout=2"],
            {
                "6 FLOPs per weight and token": 1200,
                "recomputed layers": 400,
                "the reference": 200,
                "attention": 9 * SEEN,
            },
        ),
        (
            ["model.gradient_checkpointing=selective"],  # attention is kept
            {"6 FLOPs per weight and token": 600, "recomputed layers": 200, "attention": 3 * SEEN},
        ),
        (
            ["algorithm={beta: 0.1, kl_in: reward}"],
            {
                "6 FLOPs per weight and token": 600,
                "the reference": 200,
                "old logprobs": 200,
                "attention": 5 * SEEN,
            },
        ),
        (
            ["algorithm.top_entropy_quantile=0.2"],
            {"6 FLOPs per weight and token": 600, "old logprobs": 200, "attention": 4 * SEEN},
        ),
        (
            ["algorithm.name=ppo", "critic.updates=3"],  # values once, three times there and back
            {
                "6 FLOPs per weight and token": 600,
                "attention": 3 * SEEN,
                "the critic": 56 * (2 + 3 * 6) + SEEN * (1 + 3 * 3),  # 50 weights, and 6 of the value head
            },
        ),
    ],
)
def test_operations_of_a_step(overrides: list[str], expected: dict[str, float]) -> None:
    assert training_operations(config(*overrides), SMALL) == pytest.approx(expected)


def test_an_adapter_takes_four_operations_per_weight() -> None:
    shape = preset_shape("0.5b")
    found = training_operations(config("model.adapter={rank: 8, targets: [q_proj]}"), shape)
    own = 24 * 8 * 2 * 896
    assert found["4 FLOPs per weight and token"] == 4 * shape.active_parameters + 6 * own


def test_two_steps_ahead_are_decoded_together() -> None:
    """The completions of two steps share the weights that are read for every token."""
    ahead = [
        plan_of("7b", "rollout.engine=vllm", f"rollout.max_staleness={k}", "hardware.rollout_gpus=4") for k in (1, 2)
    ]
    one, two = (plan.timing["sampling_s"].value for plan in ahead)
    assert one / 2 < two < 0.9 * one
    alone = "rollout.max_num_seqs=1"  # no more at a time
    same = [
        plan_of("7b", "rollout.engine=vllm", f"rollout.max_staleness={k}", alone, "hardware.rollout_gpus=4")
        for k in (1, 2)
    ]
    assert same[0].timing["sampling_s"].value == same[1].timing["sampling_s"].value
