"""Memory of gathered weights that stay, and of those that wait in host memory, against a symbolic run of the step."""

from functools import cache
from typing import Any

import pytest

from cohort.config import AdamwConfig
from cohort.plan.memory import Workload, host_bytes, plan_memory
from cohort.plan.shape import shape_from_config
from selection import slow
from symbolic_step import TrackedStep, track_step
from test_plan_memory import SMALL, workload

pytestmark = slow("a symbolic step takes seconds; test_plan_memory has one")
MODEL = {**SMALL, "num_hidden_layers": 4, "model_type": "qwen2", "vocab_size": 512}
PROMPT, COMPLETION, GROUP = 32, 64, 2


@cache
def tracked(reshard: bool | int = True, offload: bool = False) -> TrackedStep:
    return track_step(
        MODEL,
        world_size=4,
        prompt_tokens=PROMPT,
        completion_tokens=COMPLETION,
        num_generations=GROUP,
        gradient_checkpointing=False,
        parameter_offload=offload,
        reshard_after_forward=reshard,
    )


def planned(**changes: Any) -> Workload:
    return workload(
        shape_from_config(MODEL, name="small"),
        processes=4,
        packed_tokens=PROMPT + GROUP * (COMPLETION - 1),
        loss_tokens=GROUP * COMPLETION,
        on_gpu=False,
        checkpointing=False,
        optim=AdamwConfig(),
        **changes,
    )


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_gathered_layers_that_stay_are_tracked(reshard: bool | int) -> None:
    """The whole of backward. Negative control: a plan that does not know that all stay says too little."""
    some = planned(reshard_after_forward=reshard)
    assert plan_memory(some).total("backward") == pytest.approx(tracked(reshard).train_bytes, rel=0.05)
    if reshard is False:
        without = plan_memory(planned(reshard_after_forward=True)).total("backward")
        assert without < 0.95 * tracked(reshard).train_bytes


def test_what_waits_on_the_host_is_tracked() -> None:
    """Both memories are one in a symbolic run: what the plan has on the GPU and on the host, but for copies between."""
    some = planned(parameters_on_host=True)
    copies = some.weight_bytes * some.shape.layer_parameters // 4
    both = plan_memory(some).total("backward") + host_bytes(some) - copies
    assert both == pytest.approx(tracked(offload=True).train_bytes, rel=0.05)
    assert host_bytes(some) > 0.4 * both
