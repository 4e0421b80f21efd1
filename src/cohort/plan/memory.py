"""GPU memory of one training process in closed form, by part and by phase of a step.

The parts are the tensors that the code allocates; `cohort plan --verify` compares them with a symbolic run. Memory
outside of tensors (CUDA context, NCCL buffers) is assumed or measured.

With an adapter the base weights have neither gradients nor optimizer state, and a frozen matmul saves its input only if
the adapter's gradient needs it. The reference is the base model.

A critic is a second model with its own gradients and optimizer. Both models' weights and optimizer state are always
resident; gradients and activations exist for one model at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cohort.plan.activation_memory import forward_only_bytes, offloaded_bytes
from cohort.plan.backward import backward_parts, gathered_bytes, head_bytes, largest_parts
from cohort.plan.optimizer_memory import state_bytes
from cohort.plan.quantized_memory import model_bytes
from cohort.plan.shape import WeightShape
from cohort.plan.workload import Checkpointing, Workload

Phase = Literal["sampling", "logprobs", "backward", "optimizer", "publish"]
PHASES: Mapping[Phase, str] = {  # display names
    "sampling": "sampling",
    "logprobs": "logprobs",
    "backward": "forward, backward",
    "optimizer": "optimizer",
    "publish": "publish",
}

CUDA_BYTES = 10**9  # assumed if unmeasured: context, library workspaces, fragmentation
NCCL_BYTES = 5 * 10**8  # assumed: communication buffers
ASLEEP_BYTES = 15 * 10**8  # assumed: what a sleeping vLLM keeps on a shared GPU


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
    always, models = _persistent(workload), workload.models
    gradients = [{"gradients": _gradient_bytes(model)} for model in models]
    backward = [{**own, **backward_parts(model)} for own, model in zip(gradients, models, strict=True)]
    largest = workload.shape.embedding_parameters
    return MemoryPlan(
        phases={
            "sampling": {**always, **_sampling(workload)},
            "logprobs": {**always, **largest_parts([_forward_only(model) for model in models])},
            "backward": {**always, **largest_parts(backward)},
            "optimizer": {**always, **largest_parts(gradients)},
            "publish": {
                **always,
                **_awake_server(workload),
                "gathered weights": (workload.weight_bytes + workload.compute_bytes) * largest,
                **(
                    {"weight transfer buffer": workload.weight_transfer_bytes} if workload.weight_transfer_bytes else {}
                ),
            },
        }
    )


def checkpointed_activations(workload: Workload) -> dict[Checkpointing, int]:
    """Activation bytes of the same micro-batch for each `model.gradient_checkpointing` setting."""
    found: dict[Checkpointing, int] = {}
    kinds: tuple[Checkpointing, ...] = (False, "selective", True)
    for kind in kinds:
        critic = replace(workload.critic, checkpointing=kind) if workload.critic else None
        backward = plan_memory(replace(workload, checkpointing=kind, critic=critic)).phases["backward"]
        found[kind] = backward.get("activations", 0)
    return found


def _shard(workload: Workload, parameters: int, bytes_each: int) -> int:
    """Bytes of one rank's shard, rounded up."""
    return -(-bytes_each * parameters // workload.processes)


def _gradient_bytes(workload: Workload) -> int:
    return 0 if workload.parameters_on_host else _shard(workload, workload.trained_parameters, workload.trained_bytes)


def host_bytes(workload: Workload) -> int:
    """Host memory of one process's offloaded tensors, over all models, without copies in flight.

    Each model keeps its own buffers for activations.
    """
    waiting = sum(offloaded_bytes(model) for model in workload.models)
    if workload.reference_on_host:
        waiting += workload.weight_bytes * workload.shape.num_parameters
    if workload.masters_on_host or workload.parameters_on_host:
        waiting += sum(
            _shard(model, model.trained_parameters, model.trained_bytes) + _optimizer_state_bytes(model)
            for model in workload.models
        )
    if workload.parameters_on_host:
        waiting += sum(_shard(model, model.trained_parameters, model.trained_bytes) for model in workload.models)
        waiting += _shard(workload, workload.has_reference * workload.trained_parameters, workload.weight_bytes)
    return waiting


def _optimizer_bytes(workload: Workload) -> int:
    return 0 if workload.masters_on_host or workload.parameters_on_host else _optimizer_state_bytes(workload)


def _optimizer_state_bytes(workload: Workload) -> int:
    """Optimizer state of the rank with the most, with each weight sharded by rows."""
    of = workload.adapter or workload.shape

    def kept(weight: WeightShape, *, in_layer: bool) -> int:
        own = (-(-weight[0] // workload.processes), *weight[1:])
        return state_bytes(workload.optim, own, workload.trained_bytes, by_muon=in_layer and len(weight) == 2)

    layer = sum(kept(weight, in_layer=True) for weight in of.layer_weights)
    share = 1.0 if workload.adapter is None else workload.adapter.layer_fraction
    outer = sum(kept(weight, in_layer=False) for weight in of.non_layer_weights)
    return -int(-workload.shape.layers * share * layer // 1) + outer


def _persistent(workload: Workload) -> dict[str, int]:
    held = _shard(workload, workload.shape.num_parameters, workload.resident_weight_bytes)
    if workload.quantization is not None:
        held = -(-model_bytes(workload.shape, workload.quantization, workload.weight_bytes) // workload.processes)
    parts = {"weights": held}
    if workload.adapter is not None:
        parts["adapter"] = _shard(workload, workload.trained_parameters, workload.trained_bytes)
    parts["optimizer state"] = _optimizer_bytes(workload)
    if workload.critic is not None:
        parts["critic weights"] = _shard(
            workload.critic, workload.critic.shape.num_parameters, workload.critic.resident_weight_bytes
        )
        parts["critic optimizer"] = _optimizer_bytes(workload.critic)
    if workload.has_reference:
        kept = workload.trained_parameters  # with an adapter: its initial weights
        parts["reference weights"] = _shard(
            workload, kept, workload.resident_weight_bytes if workload.adapter is None else workload.trained_bytes
        )
        if workload.reference_quantization is not None:
            parts["reference weights"] = model_bytes(
                workload.shape, workload.reference_quantization, workload.weight_bytes
            )
    if workload.on_gpu:
        context = CUDA_BYTES if workload.framework_bytes is None else workload.framework_bytes
        parts["framework"] = context + NCCL_BYTES * (workload.processes > 1) + ASLEEP_BYTES * (workload.vllm_bytes > 0)
    elif workload.framework_bytes is not None:
        parts["framework"] = workload.framework_bytes
    return parts


def _forward_only(workload: Workload) -> dict[str, int]:
    """Forward-only passes: logprobs, values, and a reference brought in from host memory."""
    visitor = workload.weight_bytes * workload.shape.num_parameters
    return {
        **({"reference weights": visitor} if workload.reference_on_host else {}),
        "gathered weights": gathered_bytes(workload, backward=False),
        "activations": forward_only_bytes(workload),
        "logprob head": head_bytes(workload, backward=False),
    }


# Sampling


def _awake_server(workload: Workload) -> dict[str, int]:
    """A server on the same GPU; it wakes up before PyTorch has freed the memory of publishing."""
    return {"vLLM's share": max(0, workload.vllm_bytes - ASLEEP_BYTES)} if workload.vllm_bytes else {}


def _sampling(workload: Workload) -> dict[str, int]:
    if workload.vllm_bytes:
        return _awake_server(workload)
    if not workload.sampled_sequences:
        return {}
    shape, a = workload.shape, workload.compute_bytes
    copied = a * shape.num_parameters * (workload.gathers or a != workload.resident_weight_bytes)
    return {
        "gathered weights": gathered_bytes(workload, backward=False) if workload.quantization else copied,
        "keys and values": shape.kv_bytes(a) * workload.sampled_tokens,
        "logits": 8 * shape.vocabulary * workload.sampled_sequences,  # with a sorted or scaled copy
    }
