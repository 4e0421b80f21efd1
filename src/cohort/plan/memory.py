"""What one training process needs of its GPU's memory, by part and by phase of a step, in closed form.

The parts are what the code allocates; `cohort plan --verify` compares them with a symbolic run of the step. What no
tensor holds is assumed: CUDA's context and NCCL's buffers.

b bytes of a stored weight, a of a computed one; N weights, n of one layer, r of what is in no layer; L layers, H hidden
size, F features of an MLP, Q and K features of queries and of keys; V vocabulary; T tokens of a row; W processes.

With an adapter the model's own weights have neither gradients nor optimizer state, and a product with a frozen weight
does not keep its input, unless the adapter's gradient wants it. The reference is the model without the adapter.

A critic is a second model with gradients and an optimizer of its own. Both models' state is there always; of what comes
and goes, gradients too, only one model's is there at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cohort.plan.activations import forward_only_bytes, offloaded_bytes
from cohort.plan.backward import backward_parts, gathered_bytes, head_bytes, largest_parts
from cohort.plan.optimizer import state_bytes
from cohort.plan.quantization import model_bytes
from cohort.plan.shape import WeightShape
from cohort.plan.work import Checkpointing, Work

Phase = Literal["sampling", "logprobs", "backward", "optimizer", "publish"]
PHASES: Mapping[Phase, str] = {  # for a person
    "sampling": "sampling",
    "logprobs": "logprobs",
    "backward": "forward, backward",
    "optimizer": "optimizer",
    "publish": "publish",
}

CUDA_BYTES = 10**9  # assumed where it was not measured: context, libraries' workspaces, and gaps of the allocator
NCCL_BYTES = 5 * 10**8  # assumed: buffers between processes
ASLEEP_BYTES = 15 * 10**8  # assumed: what a sleeping vLLM keeps of a shared GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one process in each phase, by part."""

    phases: Mapping[Phase, Mapping[str, int]]

    def total(self, phase: Phase) -> int:
        """All parts of a phase."""
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=self.total)

    @property
    def peak_bytes(self) -> int:
        """What the largest phase needs."""
        return self.total(self.peak_phase)


def plan_memory(work: Work) -> MemoryPlan:
    """What each phase of a step needs, by part."""
    always, models = _always(work), work.models
    gradients = [{"gradients": _gradient_bytes(model)} for model in models]
    backward = [{**own, **backward_parts(model)} for own, model in zip(gradients, models, strict=True)]
    largest = work.shape.embedding_parameters
    return MemoryPlan(
        phases={
            "sampling": {**always, **_sampling(work)},
            "logprobs": {**always, **largest_parts([_forward_only(model) for model in models])},
            "backward": {**always, **largest_parts(backward)},
            "optimizer": {**always, **largest_parts(gradients)},
            "publish": {
                **always,
                **_awake(work),
                "gathered weights": (work.weight_bytes + work.compute_bytes) * largest,
                **({"lent weights": work.lent_bytes} if work.lent_bytes else {}),
            },
        }
    )


def checkpointed_activations(work: Work) -> dict[Checkpointing, int]:
    """Bytes of the activations of the same micro-batch in backward, by `model.gradient_checkpointing`."""
    found: dict[Checkpointing, int] = {}
    kinds: tuple[Checkpointing, ...] = (False, "selective", True)
    for kind in kinds:
        critic = replace(work.critic, checkpointing=kind) if work.critic else None
        backward = plan_memory(replace(work, checkpointing=kind, critic=critic)).phases["backward"]
        found[kind] = backward.get("activations", 0)
    return found


def _shard(work: Work, parameters: int, bytes_each: int) -> int:
    """Of so many numbers, what is on one process."""
    return -(-bytes_each * parameters // work.processes)


def _gradient_bytes(work: Work) -> int:
    return 0 if work.parameters_on_host else _shard(work, work.trained_parameters, work.trained_bytes)


def host_bytes(work: Work) -> int:
    """What waits in host memory of all models of one process, but for copies on their way.

    Of activations each model has memory of its own, which stays.
    """
    waiting = sum(offloaded_bytes(model) for model in work.models)
    if work.reference_visits:
        waiting += work.weight_bytes * work.shape.num_parameters
    if work.masters_on_host or work.parameters_on_host:
        waiting += sum(
            _shard(model, model.trained_parameters, model.trained_bytes) + _moment_bytes(model) for model in work.models
        )
    if work.parameters_on_host:
        waiting += sum(_shard(model, model.trained_parameters, model.trained_bytes) for model in work.models)
        waiting += _shard(work, work.has_reference * work.trained_parameters, work.weight_bytes)
    return waiting


def _optimizer_bytes(work: Work) -> int:
    return 0 if work.masters_on_host or work.parameters_on_host else _moment_bytes(work)


def _moment_bytes(work: Work) -> int:
    """Of the process with the most: rows of each weight are spread over them."""
    of = work.adapter or work.shape

    def kept(weight: WeightShape, *, in_layer: bool) -> int:
        own = (-(-weight[0] // work.processes), *weight[1:])
        return state_bytes(work.optim, own, work.trained_bytes, by_muon=in_layer and len(weight) == 2)

    layer = sum(kept(weight, in_layer=True) for weight in of.layer_weights)
    share = 1.0 if work.adapter is None else work.adapter.share_of_layers
    outer = sum(kept(weight, in_layer=False) for weight in of.outer_weights)
    return -int(-work.shape.layers * share * layer // 1) + outer


def _always(work: Work) -> dict[str, int]:
    held = _shard(work, work.shape.num_parameters, work.held_bytes)
    if work.quantization is not None:
        held = -(-model_bytes(work.shape, work.quantization, work.weight_bytes) // work.processes)
    parts = {"weights": held}
    if work.adapter is not None:
        parts["adapter"] = _shard(work, work.trained_parameters, work.trained_bytes)
    parts["optimizer state"] = _optimizer_bytes(work)
    if work.critic is not None:
        parts["critic weights"] = _shard(work.critic, work.critic.shape.num_parameters, work.critic.held_bytes)
        parts["critic optimizer"] = _optimizer_bytes(work.critic)
    if work.has_reference:
        kept = work.trained_parameters  # of an adapter, what it was at the start
        parts["reference weights"] = _shard(work, kept, work.held_bytes if work.adapter is None else work.trained_bytes)
        if work.reference_quantization is not None:
            parts["reference weights"] = model_bytes(work.shape, work.reference_quantization, work.weight_bytes)
    if work.on_gpu:
        context = CUDA_BYTES if work.framework_bytes is None else work.framework_bytes
        parts["framework"] = context + NCCL_BYTES * (work.processes > 1) + ASLEEP_BYTES * (work.vllm_bytes > 0)
    elif work.framework_bytes is not None:
        parts["framework"] = work.framework_bytes
    return parts


def _forward_only(work: Work) -> dict[str, int]:
    """Logprobs, values, and those of a reference that lies in host memory otherwise."""
    visitor = work.weight_bytes * work.shape.num_parameters
    return {
        **({"reference weights": visitor} if work.reference_visits else {}),
        "gathered weights": gathered_bytes(work, backward=False),
        "activations": forward_only_bytes(work),
        "logprob head": head_bytes(work, backward=False),
    }


# Sampling


def _awake(work: Work) -> dict[str, int]:
    """A server that shares the GPU. Its caches come back before PyTorch has given back what publishing took."""
    return {"vLLM's share": max(0, work.vllm_bytes - ASLEEP_BYTES)} if work.vllm_bytes else {}


def _sampling(work: Work) -> dict[str, int]:
    if work.vllm_bytes:
        return _awake(work)
    if not work.sampled_sequences:
        return {}
    shape, a = work.shape, work.compute_bytes
    copied = a * shape.num_parameters * (work.gathers or a != work.held_bytes)
    return {
        "gathered weights": gathered_bytes(work, backward=False) if work.quantization else copied,
        "keys and values": shape.kv_bytes(a) * work.sampled_tokens,
        "logits": 8 * shape.vocabulary * work.sampled_sequences,  # and a copy, sorted or scaled
    }
