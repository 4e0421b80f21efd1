"""What `cohort plan` says a benchmark's training step needs, to be compared with what the GPU reports."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from cohort.config import AdamwConfig, AdapterConfig, ModelConfig, SgdConfig
from cohort.models.adapters.adapter_folder import AdapterSpec, adapter_spec
from cohort.models.adapters.lora import Adapter, AdapterInit
from cohort.plan.adapter import adapter_shape
from cohort.plan.memory import plan_memory
from cohort.plan.shape import shape_from_config
from cohort.plan.workload import Workload


def predicted_bytes(
    config: PretrainedConfig,
    prompt_tokens: int,
    completion_tokens: Sequence[int],
    *,
    dtype: torch.dtype,
    compute: torch.dtype,
    checkpointing: bool,
    rank: int,
    updates: bool,
    on_gpu: bool,
    **more: Any,
) -> int:
    """The peak of one process's tensors while it trains on one group; CUDA's own memory is no tensor.

    Args:
        config: of the model.
        prompt_tokens: of the group's prompt, which is computed once.
        completion_tokens: of each completion.
        dtype: of weights.
        compute: of products.
        checkpointing: whether layers are computed again.
        rank: of LoRA on all linear layers; 0: every weight is trained.
        updates: whether AdamW's moments are there.
        on_gpu: where it runs.
        more: other fields of the plan's workload.
    """
    shape = shape_from_config(config.to_dict(), name="bench")
    workload = Workload(
        shape=shape,
        processes=1,
        weight_bytes=dtype.itemsize,
        compute_bytes=compute.itemsize,
        checkpointing=checkpointing,
        gradients_in_forward=False,
        has_reference=False,
        packed_tokens=prompt_tokens + sum(completion_tokens) - len(completion_tokens),
        loss_tokens=sum(completion_tokens),
        shared_prefix_tokens=0,
        sampled_sequences=0,
        sampled_tokens=0,
        awake_server_bytes=0,
        framework_bytes=0,
        on_gpu=on_gpu,
        shares_prompts=len(completion_tokens) > 1,
        adapter=adapter_shape(AdapterConfig(rank=rank), shape) if rank else None,
        optim=AdamwConfig() if updates else SgdConfig(),
        **{"offload": False, **more},
    )
    phases = plan_memory(workload)
    return max(phases.total("backward"), phases.total("optimizer"))


def lora_spec(model: Any, rank: int) -> AdapterSpec:
    """LoRA on all linear layers of a model that is not quantized yet."""
    return adapter_spec(ModelConfig(path="m", adapter=AdapterConfig(rank=rank)), model)


def add_adapter(model: Any, spec: AdapterSpec) -> None:
    """Add an adapter, as a run has it."""
    start = AdapterInit(spec=spec, seed=0, weights=None, reference=None)
    Adapter(model, start, trainable=True).initialize()
