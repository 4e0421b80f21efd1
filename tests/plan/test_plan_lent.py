"""The plan of publishing to a vLLM server on the same GPU: its own memory, and the buffer of what it is lent."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.models import TensorSpec
from cohort.plan.hardware import Hardware, hardware
from cohort.plan.memory import SLEEPING_SERVER_BYTES, WORKSPACE_SERVER_BYTES
from cohort.plan.predict import predict_run
from cohort.plan.shape import PRESETS, shape_from_config
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.rollout.engines.servers import cuda_ipc
from cohort.rollout.engines.servers.cuda_ipc import IpcBuffer
from plans import config

SHARED = ("rollout.engine=vllm", "hardware.rollout_gpus=shared", "hardware.processes=1")
ONE: Hardware = hardware(gpu="h200", gpus=1, nodes=1, gpu_memory=None)
SMALL = {**PRESETS["qwen2.5-7b"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}


def planned(model: Mapping[str, Any], *overrides: str) -> dict[str, int]:
    plan = predict_run(config(*overrides), shape_from_config(dict(model), name="model"), ONE)
    return dict(plan.memory.phases["publish"])


@pytest.mark.parametrize("model", [PRESETS["qwen2.5-7b"], SMALL], ids=["7b", "small"])
def test_the_buffer_of_lent_weights_is_in_the_plan(model: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Of seven billion weights the embedding, which is larger than a portion; of a small model all of them."""
    allocated: list[int] = []

    def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
        allocated.append(num_bytes)
        return torch.empty(64, dtype=torch.uint8)

    monkeypatch.setattr(cuda_ipc, "allocate", allocate)
    monkeypatch.setattr(cuda_ipc, "ipc_handle", lambda _: {})
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda _: "GPU-0")
    values = dict(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    specs = [TensorSpec(name, tuple(x.shape), torch.bfloat16) for name, x in built.named_parameters()]
    IpcBuffer(specs, SINGLE_PROCESS, torch.device("cpu"))
    lent = planned(model, *SHARED)["weight transfer buffer"]
    assert allocated == [pytest.approx(lent, abs=256 * (1 + len(specs)))]
    assert lent == 2 * (152_064 * 3584 if model is not SMALL else sum(p.numel() for p in built.parameters()))


def test_a_server_that_wakes_on_the_same_gpu_is_in_the_plan_of_publishing():
    """Its caches come back while what was lent is still PyTorch's. Elsewhere it takes nothing, and is lent nothing."""
    shared, adapter, apart = (
        planned(PRESETS["qwen2.5-7b"], *SHARED),
        planned(PRESETS["qwen2.5-7b"], *SHARED, "model.adapter={}"),
        planned(PRESETS["qwen2.5-7b"], "rollout.engine=vllm", "rollout.urls=[http://elsewhere:8000]"),
    )
    share = int(0.45 * ONE.gpu_memory_bytes) - SLEEPING_SERVER_BYTES
    assert shared["rollout server's share"] == share
    assert (
        adapter["rollout server's share"] == share - adapter["rollout server's base"] - WORKSPACE_SERVER_BYTES
    )  # these never leave
    assert "weight transfer buffer" not in adapter and not apart.keys() & {
        "rollout server's share",
        "weight transfer buffer",
    }
