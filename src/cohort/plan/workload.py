"""Workload of one training process: everything that determines its memory.

Symbols: W processes, b bytes per weight, a bytes per computed value, T tokens of the largest micro-batch.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from cohort.config import AdamwConfig, Config, OptimConfig, Quantization
from cohort.plan.adapter import ADAPTER_BYTES, AdapterShape, adapter_shape
from cohort.plan.defaults import (
    BUCKET_BYTES,
    BYTES,
    checkpointing,
    compute_dtype,
    replicas,
    server_memory_utilization,
    serving_dtype,
)
from cohort.plan.hardware import Hardware
from cohort.plan.schedule import MicroBatchPlan
from cohort.plan.shape import ModelShape, critic_shape
from cohort.plan.state_memory import reward_model_bytes

Checkpointing = bool | Literal["selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that determines the memory of one training process."""

    shape: ModelShape
    processes: int  # W
    dp_replicate: int = 1  # copies of the model, over which W is split
    keeps_whole_gradients: bool = False  # on every process, until the last micro-batch
    weight_bytes: int  # b
    compute_bytes: int  # a
    checkpointing: Checkpointing
    offload: bool  # of activations
    gradients_in_forward: bool
    has_reference: bool
    packed_tokens: int  # T of the largest micro-batch
    loss_tokens: int  # positions with logits, among them
    shared_prefix_tokens: int  # prompt of a split group, whose activations stay meanwhile
    sampled_sequences: int  # completions that this process decodes at a time; 0 with servers
    sampled_tokens: int  # tokens in their KV cache, prompts included
    awake_server_bytes: int  # taken by a server on the same GPU while it samples; 0 without
    weight_transfer_bytes: int = 0  # buffer for weight transfer to that server; 0 without
    server_spans_gpus: bool = False  # whether that server has more GPUs (tensor parallelism)
    kept_base_bytes: int = 0  # base model that the server keeps on the GPU during training; 0: it sleeps
    framework_bytes: int | None = None  # None: not measured
    on_gpu: bool = True
    shares_prompts: bool = True  # completions of a row share their prompt's computation
    trained_sequences: int = 0  # of the largest micro-batch, prompts included
    window_tokens: int = 0  # of the prompt, gathered for completions in a layer with a window or chunks
    adapter: AdapterShape | None = None  # None: full fine-tuning
    freezes: bool = False  # some weights are frozen, but counted as trained
    optim: OptimConfig = field(default_factory=AdamwConfig)
    reference_on_host: bool = False  # loaded to the GPU for its forward passes only
    masters_on_host: bool = False  # with the optimizer state; the GPU holds weights in the compute dtype
    parameters_on_host: bool = False  # with gradients and optimizer state
    reshard_after_forward: bool | int = True  # False: layers stay gathered; N: resharded over N ranks
    quantization: Quantization | None = None  # of the frozen weights; one process only
    reference_quantization: Quantization | None = None
    reward_model_bytes: int = 0  # weights of reward models on the same device
    critic: "Workload | None" = None  # from `critic_workload`

    @property
    def models(self) -> "tuple[Workload, ...]":
        """Workloads of all trained models: policy and, if any, critic."""
        return (self,) if self.critic is None else (self, self.critic)

    @property
    def kinds(self) -> "tuple[Workload, ...]":
        """Workloads of models of one kind of layers each, as in `ModelShape.kinds`."""
        if not self.shape.own_kinds:
            return (self,)
        adapters = self.adapter.kinds if self.adapter else (None,) * len(self.shape.own_kinds)
        kinds = zip(self.shape.own_kinds, adapters, strict=True)
        return tuple(replace(self, shape=shape, adapter=adapter) for shape, adapter in kinds)

    @property
    def resident_weight_bytes(self) -> int:
        """Bytes per weight that stay on the GPU."""
        return 0 if self.parameters_on_host else self.compute_bytes if self.masters_on_host else self.weight_bytes

    @property
    def optimizer_on_host(self) -> bool:
        """Whether the optimizer, its state and the weights that it updates are in host memory."""
        return self.masters_on_host or self.parameters_on_host

    @property
    def shards(self) -> int:
        """Number of processes that the weights are sharded over."""
        return max(1, self.processes // self.dp_replicate)

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers layers before use and frees them after."""
        return self.processes > 1 or self.parameters_on_host

    @property
    def autocasts(self) -> bool:
        """Whether autocast casts weights; gathered ones arrive in the compute dtype."""
        return not self.gathers and self.compute_bytes != self.resident_weight_bytes

    @property
    def trained_bytes(self) -> int:
        """Bytes per trained parameter and each of its optimizer moments."""
        return self.weight_bytes if self.adapter is None else max(ADAPTER_BYTES, self.weight_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient, which micro-batches add to in float32 or wider."""
        return max(4, self.trained_bytes)

    @property
    def trained(self) -> ModelShape | AdapterShape:
        """Shape of what is trained: the adapter, or the whole model."""
        return self.adapter or self.shape

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters."""
        return self.shape.num_parameters if self.adapter is None else self.adapter.num_parameters


def critic_workload(policy: Workload, shape: ModelShape) -> Workload:
    """Workload of a critic: full fine-tuning on the policy's micro-batches.

    Args:
        policy: workload of the policy.
        shape: shape of the critic, with a value head.
    """
    return replace(
        policy,
        shape=shape,
        adapter=None,
        freezes=False,
        gradients_in_forward=False,
        has_reference=False,
        reference_on_host=False,
        quantization=None,
        critic=None,
    )


def process_workload(
    config: Config,
    shape: ModelShape,
    hardware: Hardware,
    micro_batches: MicroBatchPlan,
    *,
    shared: bool,
    keeps_base: bool = False,
) -> Workload:
    """Workload of one training process of a run.

    Args:
        config: configuration of the run.
        shape: shape of its model.
        hardware: type of GPU.
        micro_batches: Micro-batches of the process in a step.
        shared: whether servers sleep on the same GPUs during training.
        keeps_base: whether these keep their base model and free their KV cache only.
    """
    rollout, model, adapter = config.rollout, config.model, config.model.adapter
    resharding = config.hardware.reshard_after_forward
    awake_server_bytes = weight_transfer_bytes = 0
    server_spans_gpus = False
    if rollout.uses_servers and shared:
        server_spans_gpus = rollout.tensor_parallel > 1
        awake_server_bytes = int(server_memory_utilization(rollout, shared=True) * hardware.gpu_memory_bytes)
        weight_transfer_bytes = _weight_transfer_bytes(config, shape) if hardware.on_gpu and adapter is None else 0
    sampled, sampled_tokens = (0, 0) if rollout.uses_servers else _decode_batch(config, micro_batches)
    workload = Workload(
        shape=shape,
        processes=micro_batches.num_training,
        dp_replicate=replicas(config),
        keeps_whole_gradients=config.hardware.sync_each_micro_batch is False and micro_batches.num_training > 1,
        weight_bytes=BYTES[model.dtype],
        compute_bytes=BYTES[compute_dtype(config.model, on_gpu=hardware.on_gpu)],
        checkpointing=checkpointing(model),
        offload=model.activation_offload,
        gradients_in_forward=config.train.gradients_in_forward,
        has_reference=config.keeps_reference and (adapter is None or adapter.path is not None),
        packed_tokens=micro_batches.packed_tokens,
        loss_tokens=micro_batches.loss_tokens,
        shared_prefix_tokens=micro_batches.shared_prefix_tokens,
        sampled_sequences=sampled,
        sampled_tokens=sampled_tokens,
        awake_server_bytes=awake_server_bytes,
        weight_transfer_bytes=weight_transfer_bytes,
        server_spans_gpus=server_spans_gpus,
        kept_base_bytes=served_base_bytes(config, shape) if keeps_base else 0,
        on_gpu=hardware.on_gpu,
        shares_prompts=micro_batches.completions_per_micro_batch > 1 or micro_batches.shared_prefix_tokens > 0,
        trained_sequences=micro_batches.completions_per_micro_batch + 1,
        window_tokens=_window_tokens(config, shape, micro_batches),
        adapter=adapter_shape(adapter, shape) if adapter else None,
        framework_bytes=hardware.resident_bytes,
        freezes=bool(model.freeze),
        optim=config.optim,
        reference_on_host=config.algorithm.beta > 0 and not config.keeps_reference,
        masters_on_host=config.optim.offload,
        parameters_on_host=model.parameter_offload,
        reshard_after_forward=True if resharding == "auto" or micro_batches.num_training == 1 else resharding,
        quantization=model.quantization,
        reference_quantization=config.reference.quantization if config.reference else None,
        reward_model_bytes=reward_model_bytes(config, on_gpu=hardware.on_gpu),
    )
    second = critic_shape(config, shape)
    return workload if second is None else replace(workload, critic=critic_workload(workload, second))


def served_base_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes per GPU of the base model of a server with an adapter, and of the space for the adapter.

    A server reserves the space on every linear layer, for a rank that it rounds up: twice the adapter's is counted.
    """
    adapter, rollout = config.model.adapter, config.rollout
    assert adapter is not None and rollout.uses_servers
    features = sum(sum(weight) * layers for weight, layers in shape.linear_weights)
    space = 2 * adapter_shape(adapter, shape).rank * features
    return BYTES[serving_dtype(config, on_gpu=True)] * (shape.num_parameters + space) // rollout.tensor_parallel


def _window_tokens(config: Config, shape: ModelShape, micro_batches: MicroBatchPlan) -> int:
    """Tokens of the prompt that the windows of a micro-batch's completions reach; 0 if no sequence exceeds a window."""
    prompt, window = config.rollout.max_prompt_tokens, shape.window
    if window is None or prompt + config.rollout.max_new_tokens <= window:
        return 0
    return micro_batches.completions_per_micro_batch * min(window - 1, prompt)


def _decode_batch(config: Config, micro_batches: MicroBatchPlan) -> tuple[int, int]:
    """Completions that a training process decodes at a time, and the tokens in their KV cache."""
    rollout = config.rollout
    sampled = min(rollout.max_num_seqs, math.ceil(micro_batches.prompts_per_rank) * rollout.num_generations)
    prompts = math.ceil(sampled / rollout.num_generations)
    if rollout.has_turns:  # from the second turn on, every trajectory has a context of its own
        prompts = sampled
    return sampled, sampled * rollout.max_new_tokens + prompts * rollout.max_prompt_tokens


def _weight_transfer_bytes(config: Config, shape: ModelShape) -> int:
    """Size of the transfer buffer: one chunk of weights, or the largest weight (the embedding)."""
    each = BYTES[serving_dtype(config, on_gpu=True)]
    return max(min(BUCKET_BYTES, each * shape.num_parameters), each * shape.embedding_parameters)
