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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cohort.config import AdamwConfig, OptimConfig, Quantization
from cohort.plan.adapter import ADAPTER_BYTES, AdapterShape
from cohort.plan.optimizer import state_bytes
from cohort.plan.quantization import dequantized_bytes, model_bytes
from cohort.plan.shape import ModelShape, WeightShape

Checkpointing = bool | Literal["selective"]
Phase = Literal["sampling", "logprobs", "backward", "optimizer", "publish"]

CUDA_BYTES = 10**9  # assumed where it was not measured: context, libraries' workspaces, and gaps of the allocator
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
    framework_bytes: int | None = None  # measured; None: not
    on_gpu: bool = True
    adapter: AdapterShape | None = None  # None: every weight is trained
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
    def trained_bytes(self) -> int:
        """Of one trained number, of its gradient and of each of its moments."""
        return self.weight_bytes if self.adapter is None else max(ADAPTER_BYTES, self.weight_bytes)

    @property
    def held_bytes(self) -> int:
        """Of one weight that is always on the GPU."""
        return 0 if self.parameters_on_host else self.compute_bytes if self.masters_on_host else self.weight_bytes

    @property
    def gathers(self) -> bool:
        """Whether layers are put together when they compute, and freed."""
        return self.processes > 1 or self.parameters_on_host

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
        gradients_in_forward=False,
        has_reference=False,
        reference_visits=False,
        quantization=None,
        critic=None,
    )


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
    backward = [{**own, **_backward(model)} for own, model in zip(gradients, models, strict=True)]
    largest = work.shape.embedding_parameters
    return MemoryPlan(
        phases={
            "sampling": {**always, **_sampling(work)},
            "logprobs": {**always, **_largest([_forward_only(model) for model in models])},
            "backward": {**always, **_largest(backward)},
            "optimizer": {**always, **_largest(gradients)},
            "publish": {**always, "gathered weights": (work.weight_bytes + work.compute_bytes) * largest},
        }
    )


def _largest(candidates: Sequence[dict[str, int]]) -> dict[str, int]:
    """Of parts that are never there together."""
    return max(candidates, key=lambda parts: sum(parts.values()))


def _shard(work: Work, parameters: int, bytes_each: int) -> int:
    """Of so many numbers, what is on one process."""
    return -(-bytes_each * parameters // work.processes)


def _gradient_bytes(work: Work) -> int:
    return 0 if work.parameters_on_host else _shard(work, work.trained_parameters, work.trained_bytes)


def host_bytes(work: Work) -> int:
    """What waits in host memory of all models of one process, but for copies on their way."""
    masters_and_moments = sum(
        _shard(model, model.trained_parameters, model.trained_bytes) + _moment_bytes(model) for model in work.models
    )
    if work.parameters_on_host:
        gradients = sum(_shard(model, model.trained_parameters, model.trained_bytes) for model in work.models)
        reference = _shard(work, work.has_reference * work.trained_parameters, work.weight_bytes)
        return masters_and_moments + gradients + reference
    return masters_and_moments if work.masters_on_host else 0


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
        "gathered weights": _gathered(work, backward=False),
        "activations": _forward_only_bytes(work),
        "logprob head": head_bytes(work, backward=False),
    }


# Sampling


def _sampling(work: Work) -> dict[str, int]:
    if work.vllm_bytes:
        return {"vLLM's share": max(0, work.vllm_bytes - ASLEEP_BYTES)}
    if not work.sampled_sequences:
        return {}
    shape, a = work.shape, work.compute_bytes
    copied = work.gathers or a != work.held_bytes
    return {
        "gathered weights": _gathered(work, backward=False) if work.quantization else a * shape.num_parameters * copied,
        "keys and values": shape.kv_bytes(a) * work.sampled_tokens,
        "logits": 8 * shape.vocabulary * work.sampled_sequences,  # and a copy, sorted or scaled
    }


# Activations


def layer_bytes_per_token(work: Work) -> int:
    """What one layer keeps for backward of one token, without checkpointing."""
    shape, a = work.shape, work.compute_bytes
    attention = 2 * a * (shape.query_width + shape.key_width) + 4 * shape.num_heads  # and log-sum-exps
    mlp = shape.experts_per_token * 3 * a * shape.mlp  # what goes into the gate, comes out of it, and is gated
    if shape.experts_per_token > 1:
        mlp += shape.experts_per_token * 2 * a * shape.hidden  # tokens as they are sent to experts, and come back
    if work.adapter is None:
        trained, kept_of_norm = _inputs_of_trained(work), a  # the normalised input, for the gradient of its weight
    else:
        trained, kept_of_norm = _inputs_of_adapter(work, work.adapter), 0
    norms = shape.norms_per_layer * (8 if _autocasts(work) else 4 + kept_of_norm) * shape.hidden
    query_norms = shape.has_query_norm * (4 + kept_of_norm) * (shape.query_width + shape.key_width)
    return norms + query_norms + attention + mlp + trained


def _inputs_of_trained(work: Work) -> int:
    """Inputs of a layer's products with trained weights, beside what attention keeps in any case."""
    shape, a = work.shape, work.compute_bytes
    # norms come out in float32 under autocast, and each product casts its own input
    into_products = 5 if _autocasts(work) else shape.norms_per_layer
    return a * (into_products * shape.hidden + shape.experts_per_token * shape.mlp)


def _inputs_of_adapter(work: Work, adapter: AdapterShape) -> int:
    """What the gradients of an adapter's factors want: the inputs of its layers, and what lies between the factors."""
    a = work.compute_bytes
    return a * (adapter.kept_features + adapter.rank_features) + (a + 1) * adapter.dropout_features


def _mlp_bytes_per_token(work: Work) -> int:
    """Of `layer_bytes_per_token`, what backward is done with when it comes to a layer's attention."""
    shape, a = work.shape, work.compute_bytes
    mlp = shape.experts_per_token * 4 * a * shape.mlp
    return min(mlp, layer_bytes_per_token(work)) + shape.norms_per_layer // 2 * 4 * shape.hidden


def _attention_passing(work: Work) -> int:
    """Gradients by one token's queries, keys and values, and what they are computed with, in backward of attention."""
    shape, a = work.shape, work.compute_bytes
    if work.on_gpu:  # kernels keep to the dtype and to the number of key heads; norms are float32
        width = shape.query_width + shape.key_width
        return 2 * a * width + 4 * width * shape.has_query_norm
    return (20 + 7 * a) * shape.query_width + a * shape.key_width  # float32, and key heads as many as queries


def kept_bytes_per_token(work: Work) -> int:
    """What one layer keeps of one token until backward comes to it, with the checkpointing that is set."""
    shape, a = work.shape, work.compute_bytes
    stream = (work.weight_bytes if _autocasts(work) else a) * shape.hidden
    if work.checkpointing == "selective":
        # on CPUs attention to a prompt and to the tokens after it puts out float32 each
        attended = (a if work.on_gpu else 8) * shape.query_width + 4 * shape.num_heads
        early = work.adapter.early_features if work.adapter else 0  # products too
        return stream + attended + a * (shape.query_width + 2 * shape.key_width + shape.hidden + early)
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
    return not work.gathers and work.compute_bytes != work.held_bytes


# Weights that are gathered, and the gradients of them


def _gathered(work: Work, *, backward: bool) -> int:
    """Copies of weights: gathered ones of FSDP2, what autocast casts them to, or one that is not quantized."""
    shape, a = work.shape, work.compute_bytes
    if work.quantization is not None:
        return dequantized_bytes(shape, work.quantization, a)
    if work.gathers:
        # before they are cast
        visiting = _shard(work, shape.layer_parameters, work.weight_bytes * work.parameters_on_host)
        return a * (shape.outer_parameters + min(2, shape.layers) * shape.layer_parameters) + visiting + _stays(work)
    if not _autocasts(work):
        return 0
    if backward and not work.checkpointing:
        return a * shape.layers * shape.layer_parameters
    return a * shape.layer_parameters


def _stays(work: Work) -> int:
    """Of layers that are not computed with at the moment, what is gathered all the same."""
    others = work.compute_bytes * max(0, work.shape.layers - 2) * work.shape.layer_parameters
    if isinstance(work.reshard_after_forward, bool):
        return 0 if work.reshard_after_forward else others
    return others // work.reshard_after_forward


def head_bytes(work: Work, *, backward: bool) -> int:
    """What the head needs beside its weight: tiles of logits, and in backward its gradient."""
    shape, a = work.shape, work.compute_bytes
    scored, hidden = work.scored_tokens, shape.hidden
    if scored == 0:
        return 0
    if shape.has_value_head:  # hidden states, wide too; in backward their gradients
        return (a + 4) * scored * hidden * (1 + backward)
    tokens = scored if scored * shape.vocabulary <= _TILE else min(scored, _TILE_TOKENS)
    ids = max(1, min(shape.vocabulary, _TILE // tokens))
    if _autocasts(work) or (a < 4 and not work.on_gpu):  # a part of the weight is cast, which is as large as a tile
        ids = max(1, min(ids, _TILE // hidden))
    tile = 4 * tokens * ids
    if not backward:
        return tile + a * scored * hidden + 4 * (ids + tokens) * hidden * (a < 4 and not work.on_gpu)  # casts
    is_trained = work.adapter is None
    sums = 4 * ids * hidden * is_trained + 4 * tokens * hidden + 4 * scored * hidden
    # of the weight, where it is cast, or of its gradient before it is added
    part = 4 * ids * hidden * (is_trained or not work.on_gpu)
    rounded = tile * a // 4 if a < 4 else 0  # the tile, as it is multiplied
    passing = part + rounded if work.on_gpu else max(part, 8 * min(tokens * ids, CPU_BLOCK))
    return tile + passing + sums + 2 * a * scored * hidden


def _head_gradient(work: Work) -> int:
    """From the head's backward to the end: in the dtype in which the head's weight is there."""
    parameters = work.trained_head_parameters
    gradient = parameters * (work.compute_bytes if work.gathers or work.masters_on_host else work.trained_bytes)
    if work.masters_on_host and not work.gathers:  # cast before it is added
        gradient += parameters * work.trained_bytes
    return gradient


def _backward(work: Work) -> dict[str, int]:
    """The largest of: the head, a layer in its midst and at its end, the embedding, the reduction of the rest."""
    shape, a = work.shape, work.compute_bytes
    gathered, head, activations = _gathered(work, backward=True), _head_gradient(work), activation_bytes(work)
    of_head = head_bytes(work, backward=True)
    if work.gradients_in_forward:  # summed in float32 from forward on, and that is the gradient or is rounded to it
        summed = max(4 * work.trained_head_parameters, head)
        of_head = summed - head + max(of_head, head if head < summed else 0)
    last_norm = (4 + 2 * a) * shape.hidden * work.row_tokens
    again = layer_bytes_per_token(work) * work.row_tokens if work.checkpointing else 0
    passing = 2 * a * (shape.experts_per_token * shape.mlp + shape.hidden) * work.row_tokens
    kept = activations - passing - again
    at_head = kept + last_norm
    outer_only = (a * shape.outer_parameters + _stays(work)) * work.gathers
    # most models have wider MLPs than attention; of the others attention's backward is the peak
    at_attention = activations - passing + (_attention_passing(work) - _mlp_bytes_per_token(work)) * work.row_tokens
    # of quantized weights none is there whole in attention, nor in the head
    activations = max(activations, at_attention - gathered * (work.quantization is not None))
    candidates = [
        {
            "gathered weights": outer_only if work.gathers else gathered * (work.quantization is None),
            "activations": at_head,
            "logprob head": head + of_head,
        },
        {"gathered weights": gathered, "activations": activations, "logprob head": head},
    ]
    if work.gathers:
        # what the outer weights were received in is freed after the first layer has come
        layer = work.trained_layer_parameters
        first = 2 * a * (shape.outer_parameters + shape.layer_parameters + layer)
        on_its_way = 4 * layer  # gradients are reduced in float32
        kept_of_one = kept_bytes_per_token(work) * (work.row_tokens if shape.layers > 1 else 0)
        in_layer = {"gathered weights": gathered, "logprob head": head}
        # if it is the head's too, with their sum
        embedding = (1 + shape.tied) * a * shape.embedding_parameters if work.adapter is None else 0
        candidates += [
            {"gathered weights": first},
            {  # the last layer's place is still there
                "gathered weights": outer_only + a * (shape.layer_parameters + layer),
                "activations": at_head,
                "logprob head": head_bytes(work, backward=False),
            },
            {
                **in_layer,
                "activations": activations - kept_of_one,
                "gradients on their way": on_its_way + (a * layer if at_attention == activations else a * layer // 3),
            },
            {
                **in_layer,
                "activations": max(0, kept - kept_of_one),
                "gradients on their way": on_its_way + a * layer,
            },
            {"gathered weights": outer_only, "logprob head": head, "gradients on their way": embedding + on_its_way},
            {"logprob head": head, "gradients on their way": (4 + a) * work.trained_outer_parameters - head},
        ]
    return _largest(candidates)
