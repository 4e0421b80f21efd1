"""What one training process needs of its GPU's memory, by part and by phase of a step, in closed form.

The parts are what the code allocates; `cohort plan --verify` compares them with a symbolic run of the step. What no
tensor holds is assumed: CUDA's context and NCCL's buffers.

b bytes of a stored weight, a of a computed one; N weights, n of one layer, r of what is in no layer; L layers, H hidden
size, F features of an MLP, Q and K features of queries and of keys; V vocabulary; T tokens of a row; W processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cohort.plan.shape import ModelShape

Checkpointing = bool | Literal["selective"]
Phase = Literal["sampling", "logprobs", "backward", "optimizer", "publish"]

CUDA_BYTES = 10**9  # assumed: context, libraries' workspaces, and gaps of the allocator
NCCL_BYTES = 5 * 10**8  # assumed: buffers between processes
ASLEEP_BYTES = 15 * 10**8  # assumed: what a sleeping vLLM keeps of a shared GPU
_TILE = 1 << 24  # logits computed at a time
_TILE_TOKENS = 2048
CPU_BLOCK = 1 << 21  # logits whose softmax is taken at a time where there is no fused kernel, in the symbolic run
_KEPT_LAYERS_OF_OFFLOAD = 2  # on the GPU at a time: the one that is computed, and the one on its way


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
    on_gpu: bool = True


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
    shape, always = work.shape, _always(work)
    gradients = {"gradients": _shard(work, work.weight_bytes)}
    largest = shape.head_parameters
    return MemoryPlan(
        phases={
            "sampling": {**always, **_sampling(work)},
            "logprobs": {
                **always,
                "gathered weights": _gathered(work, backward=False),
                "activations": _forward_only_bytes(work),
                "logprob head": head_bytes(work, backward=False),
            },
            "backward": {**always, **gradients, **_backward(work)},
            "optimizer": {**always, **gradients},
            "publish": {**always, "gathered weights": (work.weight_bytes + work.compute_bytes) * largest},
        }
    )


def _shard(work: Work, bytes_each: int) -> int:
    """Of all weights on one process."""
    return -(-bytes_each * work.shape.num_parameters // work.processes)


def _always(work: Work) -> dict[str, int]:
    parts = {
        "weights": _shard(work, work.weight_bytes),
        "optimizer state": _shard(work, 2 * work.weight_bytes),
    }
    if work.has_reference:
        parts["reference weights"] = _shard(work, work.weight_bytes)
    if work.on_gpu:
        parts["framework"] = CUDA_BYTES + NCCL_BYTES * (work.processes > 1) + ASLEEP_BYTES * (work.vllm_bytes > 0)
    return parts


# Sampling


def _sampling(work: Work) -> dict[str, int]:
    if work.vllm_bytes:
        return {"vLLM's share": max(0, work.vllm_bytes - ASLEEP_BYTES)}
    if not work.sampled_sequences:
        return {}
    shape, a = work.shape, work.compute_bytes
    copied = work.processes > 1 or a != work.weight_bytes
    return {
        "gathered weights": a * shape.num_parameters * copied,
        "keys and values": shape.kv_bytes(a) * work.sampled_tokens,
        "logits": 8 * shape.vocabulary * work.sampled_sequences,  # and a copy, sorted or scaled
    }


# Activations


def layer_bytes_per_token(work: Work) -> int:
    """What one layer keeps for backward of one token, without checkpointing."""
    shape, a = work.shape, work.compute_bytes
    if _autocasts(work):  # norms in and out are float32, and each product casts its own input
        norms = shape.norms_per_layer * 8 * shape.hidden + 5 * a * shape.hidden
    else:
        norms = shape.norms_per_layer * (4 + 2 * a) * shape.hidden
    query_norms = shape.has_query_norm * (4 + a) * (shape.query_width + shape.key_width)
    attention = 2 * a * (shape.query_width + shape.key_width) + 4 * shape.num_heads  # and log-sum-exps
    mlp = shape.experts_per_token * 4 * a * shape.mlp
    if shape.experts_per_token > 1:
        mlp += shape.experts_per_token * 2 * a * shape.hidden  # tokens as they are sent to experts, and come back
    return norms + query_norms + attention + mlp


def kept_bytes_per_token(work: Work) -> int:
    """What one layer keeps of one token until backward comes to it, with the checkpointing that is set."""
    shape, a = work.shape, work.compute_bytes
    stream = (work.weight_bytes if _autocasts(work) else a) * shape.hidden
    if work.checkpointing == "selective":
        # on CPUs attention to a prompt and to the tokens after it puts out float32 each
        attended = (a if work.on_gpu else 8) * shape.query_width + 4 * shape.num_heads
        return stream + attended + a * (shape.query_width + 2 * shape.key_width + shape.hidden)
    return stream if work.checkpointing else layer_bytes_per_token(work)


def activation_bytes(work: Work) -> int:
    """At the moment of backward when most is there: all that is kept, and the layer that is computed again."""
    shape, tokens = work.shape, work.row_tokens + work.kept_prompt_tokens
    kept_layers = min(shape.layers, _KEPT_LAYERS_OF_OFFLOAD) if work.offload else shape.layers
    kept = kept_bytes_per_token(work) * kept_layers * tokens
    again = layer_bytes_per_token(work) * work.row_tokens if work.checkpointing else 0
    passing = 2 * work.compute_bytes * (shape.experts_per_token * shape.mlp + shape.hidden) * work.row_tokens
    return kept + again + passing


def _forward_only_bytes(work: Work) -> int:
    """Of a layer without backward: the MLP's three wide tensors, and a norm's float32 ones."""
    shape, a = work.shape, work.compute_bytes
    widest = max(3 * a * shape.experts_per_token * shape.mlp, 12 * shape.hidden)
    return (widest + 2 * a * shape.hidden) * work.row_tokens


def _autocasts(work: Work) -> bool:
    return work.processes == 1 and work.compute_bytes != work.weight_bytes


# Weights that are gathered, and the gradients of them


def _gathered(work: Work, *, backward: bool) -> int:
    """Copies of weights: gathered ones of FSDP2, or what autocast casts them to."""
    shape, a = work.shape, work.compute_bytes
    if work.processes > 1:
        return a * (shape.outer_parameters + min(2, shape.layers) * shape.layer_parameters)
    if not _autocasts(work):
        return 0
    if backward and not work.checkpointing:
        return a * shape.layers * shape.layer_parameters
    return a * shape.layer_parameters


def head_bytes(work: Work, *, backward: bool) -> int:
    """What the head needs beside its weight: tiles of logits, and in backward its gradient."""
    shape, a = work.shape, work.compute_bytes
    scored, hidden = work.scored_tokens, shape.hidden
    if scored == 0:
        return 0
    tokens = scored if scored * shape.vocabulary <= _TILE else min(scored, _TILE_TOKENS)
    ids = max(1, min(shape.vocabulary, _TILE // tokens))
    if _autocasts(work) or (a < 4 and not work.on_gpu):  # a part of the weight is cast, which is as large as a tile
        ids = max(1, min(ids, _TILE // hidden))
    tile = 4 * tokens * ids
    if not backward:
        return tile + a * scored * hidden
    sums = 4 * ids * hidden + 4 * tokens * hidden + 4 * scored * hidden
    part = 4 * ids * hidden  # of the weight, or of its gradient before it is added
    rounded = tile * a // 4 if a < 4 else 0  # the tile, as it is multiplied
    passing = part + rounded if work.on_gpu else max(part, 8 * min(tokens * ids, CPU_BLOCK))
    return tile + passing + sums + 2 * a * scored * hidden


def _head_gradient(work: Work) -> int:
    """From the head's backward to the end: in the dtype in which the head's weight is there."""
    gradient = work.shape.head_parameters * (work.weight_bytes if work.processes == 1 else work.compute_bytes)
    return gradient + 4 * work.shape.head_parameters * work.gradients_in_forward


def _backward(work: Work) -> dict[str, int]:
    """The largest of: the head, a layer in its midst and at its end, the embedding, the reduction of the rest."""
    shape, a = work.shape, work.compute_bytes
    gathered, head, activations = _gathered(work, backward=True), _head_gradient(work), activation_bytes(work)
    last_norm = (4 + 2 * a) * shape.hidden * work.row_tokens
    again = layer_bytes_per_token(work) * work.row_tokens if work.checkpointing else 0
    passing = 2 * a * (shape.experts_per_token * shape.mlp + shape.hidden) * work.row_tokens
    at_head = activations - passing - again + last_norm
    outer_only = a * shape.outer_parameters * (work.processes > 1)
    candidates = [
        {
            "gathered weights": gathered if work.processes == 1 else outer_only,
            "activations": at_head,
            "logprob head": head + head_bytes(work, backward=True),
        },
        {"gathered weights": gathered, "activations": activations, "logprob head": head},
    ]
    if work.processes > 1:
        layer, on_its_way = shape.layer_parameters, 4 * shape.layer_parameters  # gradients are reduced in float32
        kept_of_one = kept_bytes_per_token(work) * (work.row_tokens if shape.layers > 1 else 0)
        in_layer = {"gathered weights": gathered, "logprob head": head}
        embedding = (1 + shape.tied) * a * shape.head_parameters  # if it is the head's too, with their sum
        candidates += [
            {
                **in_layer,
                "activations": activations - kept_of_one,
                "gradients on their way": on_its_way + a * layer // 3,
            },
            {
                **in_layer,
                "activations": max(0, activations - passing - again - kept_of_one),
                "gradients on their way": on_its_way + a * layer,
            },
            {"gathered weights": outer_only, "logprob head": head, "gradients on their way": embedding + on_its_way},
            {"logprob head": head, "gradients on their way": (4 + a) * shape.outer_parameters - head},
        ]
    return max(candidates, key=lambda parts: sum(parts.values()))
