"""GPU memory of one training process in closed form, by part and by phase of a step.

The parts are the tensors that the code allocates; `bench/plan_verify.py` compares them with a symbolic run. Memory
outside of tensors (CUDA context, NCCL buffers) is assumed or measured.

With an adapter the base weights have neither gradients nor optimizer state, and a frozen matmul saves its input only if
the adapter's gradient needs it. The reference is the base model.

A critic is a second model with its own gradients and optimizer. Both models' weights and optimizer state are always
resident; gradients and activations exist for one model at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cohort.plan.backward import (
    backward_parts,
    forward_only_bytes,
    gathered_bytes,
    head_bytes,
    largest_parts,
    offloaded_bytes,
)
from cohort.plan.defaults import PACKED_WEIGHTS_BYTES
from cohort.plan.layer_parts import WeightShape
from cohort.plan.state_memory import model_bytes, state_bytes
from cohort.plan.workload import Checkpointing, Workload

Phase = Literal["sampling", "logprobs", "backward", "optimizer", "publish"]
PHASES: Mapping[Phase, str] = {  # display names
    "sampling": "sampling",
    "logprobs": "logprobs",
    "backward": "forward and backward",
    "optimizer": "optimizer",
    "publish": "publish",
}

CUDA_BYTES = 10**9  # assumed if unmeasured: context, library workspaces, fragmentation
CERTAIN = 0.9  # of a GPU: more may not fit, since plans are not exact
NCCL_BYTES = 5 * 10**8  # assumed: communication buffers
SLEEPING_SERVER_BYTES = 15 * 10**8  # assumed: what a sleeping rollout server keeps on a shared GPU
WORKSPACE_SERVER_BYTES = 10**9  # assumed: what it frees only with its base model: workspaces, CUDA graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one process in bytes, by phase and part."""

    phases: Mapping[Phase, Mapping[str, int]]

    def total(self, phase: Phase) -> int:
        """Sum over the parts of a phase."""
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> Phase:
        """Phase with the largest total."""
        return max(self.phases, key=self.total)

    @property
    def peak_bytes(self) -> int:
        """Total of the largest phase."""
        return self.total(self.peak_phase)


def plan_memory(workload: Workload) -> MemoryPlan:
    """Compute the memory of each phase, by part."""
    persistent, models = persistent_parts(workload), workload.models
    gradients = [{"gradients": _gradient_bytes(model)} for model in models]
    largest = workload.shape.embedding_parameters
    return MemoryPlan(
        phases={
            "sampling": {**persistent, **_sampling(workload)},
            "logprobs": {**persistent, **largest_parts([_forward_only(model) for model in models])},
            "backward": {**persistent, **_backward(workload)},
            "optimizer": {**persistent, **largest_parts(gradients)},
            "publish": {
                **persistent,
                **_awake_server(workload),
                "gathered weights": (workload.weight_bytes + workload.compute_bytes) * largest,
                **(
                    {"weight transfer buffer": workload.weight_transfer_bytes} if workload.weight_transfer_bytes else {}
                ),
            },
        }
    )


def backward_bytes(workload: Workload, persistent: Mapping[str, int] | None = None) -> int:
    """Memory of the backward phase alone, as `plan_memory` computes it.

    Args:
        workload: of one process.
        persistent: `persistent_parts` of it, if they are known.
    """
    return sum({**(persistent or persistent_parts(workload)), **_backward(workload)}.values())


def checkpointed_activations(workload: Workload) -> dict[Checkpointing, int]:
    """Activation bytes of the same micro-batch for each `model.gradient_checkpointing` setting."""
    found: dict[Checkpointing, int] = {}
    kinds: tuple[Checkpointing, ...] = (False, "selective", True)
    for kind in kinds:
        critic = replace(workload.critic, checkpointing=kind) if workload.critic else None
        found[kind] = _backward(replace(workload, checkpointing=kind, critic=critic)).get("activations", 0)
    return found


def _shard(workload: Workload, parameters: int, bytes_each: int) -> int:
    """Bytes of one rank's shard, rounded up."""
    return -(-bytes_each * parameters // workload.shards)


def _gradient_bytes(workload: Workload) -> int:
    return 0 if workload.parameters_on_host else _shard(workload, workload.trained_parameters, workload.gradient_bytes)


def _backward_gradient_bytes(workload: Workload) -> int:
    """Gradients that later micro-batches are added to: whole ones, or this rank's shards."""
    if workload.keeps_whole_gradients:
        return workload.gradient_bytes * workload.trained_parameters
    return _gradient_bytes(workload)


def host_bytes(workload: Workload) -> int:
    """Host memory of one process's offloaded tensors, over all models, without copies in flight.

    Each model keeps its own buffers for activations.
    """
    size = sum(offloaded_bytes(model) for model in workload.models)
    if workload.reference_on_host:
        size += workload.weight_bytes * workload.shape.num_parameters
    if workload.optimizer_on_host:
        for model in workload.models:
            each = model.trained_bytes + model.gradient_bytes * model.parameters_on_host
            size += _shard(model, model.trained_parameters, each) + _optimizer_state_bytes(model)
    if workload.parameters_on_host and workload.has_reference:
        size += _shard(workload, workload.trained_parameters, workload.weight_bytes)
    return size


def _optimizer_bytes(workload: Workload) -> int:
    return 0 if workload.optimizer_on_host else _optimizer_state_bytes(workload)


def _optimizer_state_bytes(workload: Workload) -> int:
    """Optimizer state of the rank that has the most; each weight is sharded by rows."""

    def weight_state_bytes(weight: WeightShape, *, in_layer: bool) -> int:
        shard = (-(-weight[0] // workload.shards), *weight[1:])
        return state_bytes(workload.optim, shard, workload.trained_bytes, by_muon=in_layer and len(weight) == 2)

    state = sum(weight_state_bytes(weight, in_layer=False) for weight in workload.trained.non_layer_weights)
    for kind in workload.kinds:
        layer = sum(weight_state_bytes(weight, in_layer=True) for weight in kind.trained.layer_weights)
        state += math.ceil(kind.shape.layers * (kind.adapter.layer_fraction if kind.adapter else 1.0) * layer)
    return state


def persistent_parts(workload: Workload) -> dict[str, int]:
    """Memory that is allocated in all phases, whatever the token budget."""
    weights = _shard(workload, workload.shape.num_parameters, workload.resident_weight_bytes)
    if workload.quantization is not None:
        weights = -(-model_bytes(workload.shape, workload.quantization, workload.weight_bytes) // workload.shards)
    parts = {"weights": weights}
    if workload.adapter is not None:
        parts["adapter"] = _shard(workload, workload.trained_parameters, workload.trained_bytes)
    parts["optimizer state"] = _optimizer_bytes(workload)
    if workload.critic is not None:
        parts["critic weights"] = _shard(
            workload.critic, workload.critic.shape.num_parameters, workload.critic.resident_weight_bytes
        )
        parts["critic optimizer"] = _optimizer_bytes(workload.critic)
    if workload.has_reference:
        # with an adapter: its initial weights
        bytes_each = workload.resident_weight_bytes if workload.adapter is None else workload.trained_bytes
        reference = _shard(workload, workload.trained_parameters, bytes_each)
        if workload.reference_quantization is not None:
            reference = model_bytes(workload.shape, workload.reference_quantization, workload.weight_bytes)
        parts["reference weights"] = reference
    if workload.reward_model_bytes:
        parts["reward model"] = workload.reward_model_bytes
    if workload.kept_base_bytes:
        parts["rollout server's base"] = workload.kept_base_bytes
    if workload.on_gpu:
        context = CUDA_BYTES if workload.framework_bytes is None else workload.framework_bytes
        parts["framework"] = context + NCCL_BYTES * (workload.processes > 1) + _server_framework_bytes(workload)
    elif workload.framework_bytes is not None:
        parts["framework"] = workload.framework_bytes
    return parts


def _backward(workload: Workload) -> dict[str, int]:
    """Parts of forward and backward of the model that needs the most."""
    return largest_parts(
        [{"gradients": _backward_gradient_bytes(model), **backward_parts(model)} for model in workload.models]
    )


def _forward_only(workload: Workload) -> dict[str, int]:
    """Parts of a forward-only pass: logprobs, values, and a reference loaded from host memory for it."""
    reference = workload.weight_bytes * workload.shape.num_parameters
    return {
        **({"reference weights": reference} if workload.reference_on_host else {}),
        "gathered weights": gathered_bytes(workload, backward=False),
        "activations": forward_only_bytes(workload),
        "logprob head": head_bytes(workload, backward=False),
    }


# Sampling


def _awake_server(workload: Workload) -> dict[str, int]:
    """Memory of a rollout server on the same GPU, which wakes up before PyTorch has freed the memory of publishing."""
    if not workload.awake_server_bytes:
        return {}
    kept_bytes = _server_framework_bytes(workload) + workload.kept_base_bytes
    return {"rollout server's share": max(0, workload.awake_server_bytes - kept_bytes)}


def _server_framework_bytes(workload: Workload) -> int:
    """Memory that a rollout server on the same GPU never frees, without its base model."""
    return (
        SLEEPING_SERVER_BYTES * (workload.awake_server_bytes > 0)
        + NCCL_BYTES * workload.server_spans_gpus
        + WORKSPACE_SERVER_BYTES * (workload.kept_base_bytes > 0)
    )


def _sampling(workload: Workload) -> dict[str, int]:
    """Memory of the local sampler, or of a rollout server on the same GPU."""
    if workload.awake_server_bytes:
        return _awake_server(workload)
    if not workload.sampled_sequences:
        return {}
    shape, a = workload.shape, workload.compute_bytes
    copied = a * shape.num_parameters * (workload.gathers or a != workload.resident_weight_bytes)
    if workload.quantization is not None:  # of all layers' weights, but not of the head
        copied = gathered_bytes(workload, backward=False) + a * shape.head_parameters * workload.autocasts
    packed = _packed_bytes(workload)
    return {
        "gathered weights": copied,
        **({"packed weights": packed} if packed else {}),
        **({"recurrent states": shape.state_bytes * workload.sampled_sequences} if shape.state_bytes else {}),
        "keys and values": shape.kv_bytes(a) * workload.sampled_tokens,
        "logits": 8 * shape.vocabulary * workload.sampled_sequences,  # float32 logits and one sorted or scaled copy
    }


def _packed_bytes(workload: Workload) -> int:
    """Packed copies of weights beside the gathered ones, which the local sampler multiplies by on CPUs.

    Those of layers replace autocast's. The head's is float32.
    """
    shape, a = workload.shape, workload.compute_bytes
    layers = sum(math.prod(weight) * layers for weight, layers in shape.linear_weights)
    small = a * (layers + shape.head_parameters) < PACKED_WEIGHTS_BYTES
    if workload.on_gpu or a > 4 or workload.quantization is not None or small:
        return 0
    return a * layers * (not workload.autocasts) + 4 * shape.head_parameters
