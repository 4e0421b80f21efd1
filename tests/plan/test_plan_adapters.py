"""Memory of DoRA, and of selective checkpointing with one completion: literal numbers and the symbolic run."""

from dataclasses import replace
from typing import Any

import pytest

import test_plan_memory
from cohort.config import AdapterConfig
from cohort.plan.adapter import adapter_shape
from cohort.plan.backward import activation_bytes, layer_bytes_per_token, norm_bytes, saved_bytes_per_token
from cohort.plan.memory import plan_memory
from cohort.plan.shape import ModelShape, preset_shape, shape_from_config
from cohort.plan.workload import Workload
from selection import slow
from symbolic_step import track_step

SMALL = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def workload(shape: ModelShape, adapter: AdapterConfig | None = None, **changes: Any) -> Workload:
    own = adapter_shape(adapter, shape) if adapter else None
    base = test_plan_memory.workload(shape, processes=4, packed_tokens=1000, loss_tokens=900, adapter=own)
    return replace(base, **changes)


def test_norms_of_the_widest_layer() -> None:
    """Of Qwen2.5-7B's last product, 18,944 features to 3,584: a unit matrix, the product of factors, its two copies."""
    shape = preset_shape("7b")
    dora = workload(shape, AdapterConfig(rank=16, dora=True))
    expected = 18_944 * (18_944 + 16 + 3 * 3584)  # numbers
    assert norm_bytes(dora) == 2 * expected
    assert norm_bytes(replace(dora, processes=1, weight_bytes=2)) == 4 * expected  # adapters are float32
    assert norm_bytes(workload(shape, AdapterConfig(rank=16))) == norm_bytes(workload(shape)) == 0
    attention = workload(shape, AdapterConfig(rank=16, dora=True, targets=("q_proj", "v_proj")))
    assert norm_bytes(attention) == 2 * 3584 * (3584 + 16 + 3 * 3584)


def test_both_parts_of_what_a_layer_puts_out_are_kept() -> None:
    """Outputs of 7B's seven products: 3,584 + 2 x 512 + 3,584 + 2 x 18,944 + 3,584."""
    shape = preset_shape("7b")
    outputs, inputs = 49_664, 5 * 3584 + 3584 + 18_944
    plain, dora = (workload(shape, AdapterConfig(rank=16, dora=d)) for d in (False, True))
    assert layer_bytes_per_token(dora) - layer_bytes_per_token(plain) == 2 * 2 * outputs
    alone = {"processes": 1, "weight_bytes": 2}  # inputs become float32 too
    plain, dora = (replace(w, **alone) for w in (plain, dora))
    assert layer_bytes_per_token(dora) - layer_bytes_per_token(plain) == (2 + 4) * outputs + 4 * inputs


def test_one_completion_keeps_what_attention_puts_out_once() -> None:
    """Where its prompt is not shared: 896 features of 2 bytes, in place of two times 4."""
    several = workload(preset_shape("0.5b"), checkpointing="selective", on_gpu=False)
    one = replace(several, shares_prompts=False)
    assert saved_bytes_per_token(several) - saved_bytes_per_token(one) == 6 * 896
    assert activation_bytes(several) - activation_bytes(one) == 6 * 896 * 24 * 1000


@slow("a symbolic step takes seconds; test_plan_memory has one")
@pytest.mark.parametrize(
    ("adapter", "checkpointing", "tokens"),
    [
        ({"rank": 16, "dora": True}, True, (50, 150)),
        ({"rank": 16, "dora": True}, False, (20, 20)),  # norms take more than activations
        ({"rank": 16}, "selective", (100, 800)),
    ],
)
def test_closed_form_agrees_with_the_symbolic_run(adapter: Any, checkpointing: Any, tokens: tuple[int, int]) -> None:
    """Measured differences are at most 7 %."""
    adapted, shape, (prompt, completion) = (
        AdapterConfig(**adapter) if adapter else None,
        shape_from_config(SMALL, name="s"),
        tokens,
    )
    tracked = track_step(
        SMALL,
        world_size=4,
        prompt_tokens=prompt,
        completion_tokens=completion,
        num_generations=1,
        gradient_checkpointing=checkpointing,
        adapter=adapted,
    )
    some = workload(
        shape,
        adapted,
        checkpointing=checkpointing,
        packed_tokens=prompt + completion - 1,
        loss_tokens=completion,
        on_gpu=False,
        shares_prompts=False,
    )
    assert plan_memory(some).total("backward") == pytest.approx(tracked.train_bytes, rel=0.1)
    without = replace(some, shares_prompts=True)
    if adapter and adapter.get("dora") and some.adapter:
        without = replace(some, adapter=replace(some.adapter, dora_layers=()))
    assert plan_memory(without).total("backward") != pytest.approx(tracked.train_bytes, rel=0.08)
