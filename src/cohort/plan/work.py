"""What decides the memory of one training process, in the letters of `cohort.plan.memory`."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from cohort.config import AdamwConfig, Config, OptimConfig, Quantization
from cohort.plan.adapter import ADAPTER_BYTES, AdapterShape, adapter_shape
from cohort.plan.critic import critic_shape
from cohort.plan.defaults import BYTES, PORTION_BYTES, compute_dtype, memory_share, serving_dtype
from cohort.plan.hardware import Hardware
from cohort.plan.rows import Rows
from cohort.plan.shape import ModelShape

Checkpointing = bool | Literal["selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What decides the memory of one training process."""

    shape: ModelShape
    processes: int  # W
    weight_bytes: int  # b
    compute_bytes: int  # a
    checkpointing: Checkpointing
    offload: bool
    gradients_in_forward: bool
    has_reference: bool
    row_tokens: int  # T of the largest micro-batch
    scored_tokens: int  # of them
    kept_prompt_tokens: int  # of a group that is computed in parts: its prompt's activations stay meanwhile
    sampled_sequences: int  # completions that this process samples at a time; 0 where servers do
    sampled_tokens: int  # of them and their prompts, keys and values of which are kept
    vllm_bytes: int  # of a server on the same GPU while it samples; 0 without
    lent_bytes: int = 0  # of the buffer in which weights are lent to that server; 0 without
    framework_bytes: int | None = None  # measured; None: not
    on_gpu: bool = True
    shares_prompts: bool = True  # of a row's completions, each of which attends to a prompt that is computed once
    adapter: AdapterShape | None = None  # None: every weight is trained
    freezes: bool = False  # some weights, which are counted as if they were trained
    optim: OptimConfig = field(default_factory=AdamwConfig)
    reference_visits: bool = False  # from host memory, while it is computed with
    masters_on_host: bool = False  # and the optimizer's state; weights are kept as they are computed with
    parameters_on_host: bool = False  # and gradients, and the optimizer's state
    reshard_after_forward: bool | int = True  # False: gathered layers stay; a number: spread over so many
    quantization: Quantization | None = None  # of frozen weights, on one process
    reference_quantization: Quantization | None = None
    critic: "Work | None" = None  # of a second model, of `critic_work`

    @property
    def models(self) -> "tuple[Work, ...]":
        """Of each model that is trained."""
        return (self,) if self.critic is None else (self, self.critic)

    @property
    def held_bytes(self) -> int:
        """Of one weight that is always on the GPU."""
        return 0 if self.parameters_on_host else self.compute_bytes if self.masters_on_host else self.weight_bytes

    @property
    def gathers(self) -> bool:
        """Whether layers are put together when they compute, and freed."""
        return self.processes > 1 or self.parameters_on_host

    @property
    def autocasts(self) -> bool:
        """Whether weights are whole, and in another dtype than is computed in; gathered ones come in that dtype."""
        return not self.gathers and self.compute_bytes != self.held_bytes

    @property
    def trained_bytes(self) -> int:
        """Of one trained number, of its gradient and of each of its moments."""
        return self.weight_bytes if self.adapter is None else max(ADAPTER_BYTES, self.weight_bytes)

    @property
    def trained_parameters(self) -> int:
        """Of the whole model."""
        return self.shape.num_parameters if self.adapter is None else self.adapter.num_parameters(self.shape.layers)

    @property
    def trained_layer_parameters(self) -> int:
        """Of one layer."""
        return self.shape.layer_parameters if self.adapter is None else self.adapter.layer_parameters

    @property
    def trained_outer_parameters(self) -> int:
        """Of what is in no layer."""
        return self.shape.outer_parameters if self.adapter is None else self.adapter.outer_parameters

    @property
    def trained_head_parameters(self) -> int:
        """Of the head."""
        return self.shape.head_parameters if self.adapter is None else self.adapter.head_parameters


def critic_work(policy: Work, shape: ModelShape) -> Work:
    """Of a critic that is trained whole on the policy's micro-batches, whatever of the policy is trained.

    Args:
        policy: of the same run.
        shape: of the critic, with a value head.
    """
    return replace(
        policy,
        shape=shape,
        adapter=None,
        freezes=False,
        gradients_in_forward=False,
        has_reference=False,
        reference_visits=False,
        quantization=None,
        critic=None,
    )


def work_of(
    config: Config, shape: ModelShape, hardware: Hardware, rows: Rows, *, num_training: int, shared: bool
) -> Work:
    """Of one process of a run.

    Args:
        config: of the run.
        shape: of its model.
        hardware: the kind of GPU.
        rows: what the process computes in a step.
        num_training: processes.
        shared: whether servers sleep on the same GPUs meanwhile; of an engine that uses servers.
    """
    rollout, model, adapter = config.rollout, config.model, config.model.adapter
    resharding = config.hardware.reshard_after_forward
    vllm_bytes = lent_bytes = sampled = sampled_tokens = 0
    if rollout.uses_servers:
        if shared:
            vllm_bytes = int(memory_share(rollout, shared=True) * hardware.gpu_memory_bytes)
            lent_bytes = _lent_bytes(config, shape) if hardware.on_gpu and adapter is None else 0
    else:
        sampled = min(rollout.max_num_seqs, math.ceil(rows.prompts) * rollout.num_generations)
        prompts = math.ceil(sampled / rollout.num_generations)
        sampled_tokens = sampled * rollout.max_completion_tokens + prompts * rollout.max_prompt_tokens
    work = Work(
        shape=shape,
        processes=num_training,
        weight_bytes=BYTES[model.dtype],
        compute_bytes=BYTES[compute_dtype(config.model, on_gpu=hardware.on_gpu)],
        checkpointing=model.gradient_checkpointing,
        offload=model.activation_offload,
        gradients_in_forward=config.train.gradients_in_forward,
        has_reference=config.keeps_reference and (adapter is None or adapter.path is not None),
        row_tokens=rows.row_tokens,
        scored_tokens=rows.scored_tokens,
        kept_prompt_tokens=rows.kept_prompt_tokens,
        sampled_sequences=sampled,
        sampled_tokens=sampled_tokens,
        vllm_bytes=vllm_bytes,
        lent_bytes=lent_bytes,
        on_gpu=hardware.on_gpu,
        shares_prompts=rows.row_completions > 1 or rows.kept_prompt_tokens > 0,
        adapter=adapter_shape(adapter, shape) if adapter else None,
        framework_bytes=hardware.framework_bytes,
        freezes=bool(model.freeze),
        optim=config.optim,
        reference_visits=config.algorithm.beta > 0 and not config.keeps_reference,
        masters_on_host=config.optim.offload,
        parameters_on_host=model.parameter_offload,
        reshard_after_forward=True if resharding == "auto" or num_training == 1 else resharding,
        quantization=model.quantization,
        reference_quantization=config.reference.quantization if config.reference else None,
    )
    second = critic_shape(config, shape)
    return work if second is None else replace(work, critic=critic_work(work, second))


def _lent_bytes(config: Config, shape: ModelShape) -> int:
    """A portion of the weights, or the largest of them: its embedding."""
    each = BYTES[serving_dtype(config, on_gpu=True)]
    return max(min(PORTION_BYTES, each * shape.num_parameters), each * shape.embedding_parameters)
