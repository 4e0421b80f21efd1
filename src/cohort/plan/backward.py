"""Memory of forward and backward in closed form: activations, gathered weights, LM head, and the peak.

Symbols as in `cohort.plan.workload`.
"""

from collections.abc import Iterator, Sequence

from cohort.plan.adapter import AdapterShape
from cohort.plan.defaults import TILE_ELEMENTS, copied_weight_rows, loss_tile_elements, loss_tile_tokens, tile_shape
from cohort.plan.state_memory import dequantized_bytes
from cohort.plan.workload import Workload

_RESIDENT_LAYERS = 2  # with offloading, on the GPU at a time: the one computing and the one being copied


def layer_bytes_per_token(workload: Workload) -> int:
    """Bytes that one layer saves for backward per token, without checkpointing."""
    shape, a = workload.shape, workload.compute_bytes
    attention = 2 * a * (shape.query_width + shape.key_width) + 4 * shape.num_heads  # plus log-sum-exps
    mlp = 3 * a * shape.mlp_features  # gate input, gate output, gated product
    if shape.experts_per_token > 1:
        mlp += shape.experts_per_token * 2 * a * shape.hidden  # tokens dispatched to experts and combined
    if workload.adapter is None:
        trained, norm_input_bytes = _saved_inputs_full(workload), a  # the normalized input, for the weight's gradient
    else:
        trained, norm_input_bytes = _saved_inputs_adapter(workload, workload.adapter), 0
    norms = shape.norms_per_layer * (8 if workload.autocasts else 4 + norm_input_bytes) * shape.hidden
    query_norms = shape.has_query_norm * (4 + norm_input_bytes) * (shape.query_width + shape.key_width)
    other = a * shape.other_features + 4 * shape.eager_features * (not workload.on_gpu)
    return norms + query_norms + attention + mlp + trained + other


def layer_state_bytes(workload: Workload) -> int:
    """Bytes that one layer saves for backward per sequence: the recurrent states that it starts from and ends with."""
    return 8 * workload.shape.layer_state


def _saved_inputs_full(workload: Workload) -> int:
    """Inputs saved for the gradients of a layer's trained weights, beyond those that attention saves anyway."""
    shape, a = workload.shape, workload.compute_bytes
    # under autocast norms return float32, and each matmul casts its own input
    into_products = 5 if workload.autocasts else shape.norms_per_layer
    return a * (into_products * shape.hidden + shape.mlp_features)


def _saved_inputs_adapter(workload: Workload, adapter: AdapterShape) -> int:
    """Tensors saved for an adapter's gradients: inputs of its layers and outputs of the first factors."""
    a = workload.compute_bytes
    lora = a * (adapter.saved_input_features + adapter.rank_features) + (a + 1) * adapter.dropout_features
    if not adapter.dora_layers:
        return lora
    # DoRA scales the outputs of the frozen weight and of the factors, and saves both for the scale's gradient
    d, dora_layers = _adapter_compute_bytes(workload), adapter.dora_layers
    widened = d * sum(fan_in for fan_in, _ in dora_layers) if d > a else 0
    return lora + widened + (a + d) * sum(fan_out for _, fan_out in dora_layers)


def _adapter_compute_bytes(workload: Workload) -> int:
    """Bytes per number in DoRA's norms: the adapter's dtype on one rank, the compute dtype on several."""
    return workload.compute_bytes if workload.processes > 1 else workload.trained_bytes


def norm_bytes(workload: Workload) -> int:
    """Peak temporaries of peft's DoRA norms, taken for one layer at a time in every forward.

    An identity matrix goes through both factors; their product, a scaled copy and the sum with the weight coexist.
    """
    if workload.adapter is None:
        return 0
    d, rank = _adapter_compute_bytes(workload), workload.adapter.rank
    return max(
        (d * fan_in * (fan_in + rank + 3 * fan_out) for fan_in, fan_out in workload.adapter.dora_layers), default=0
    )


def mlp_bytes_per_token(workload: Workload) -> int:
    """The part of `layer_bytes_per_token` that is already freed when backward reaches the layer's attention."""
    shape, a = workload.shape, workload.compute_bytes
    mlp = 4 * a * shape.mlp_features
    return min(mlp, layer_bytes_per_token(workload)) + shape.norms_per_layer // 2 * 4 * shape.hidden


def attention_transient_bytes(workload: Workload) -> int:
    """Temporaries of the backward of attention or a mixer per token: gradients of q, k and v, and their inputs."""
    shape, a = workload.shape, workload.compute_bytes
    if workload.on_gpu:  # fused kernels keep the dtype and the number of key heads; norms are float32
        width = shape.query_width + shape.key_width
        # tokens after a shared prompt attend twice: q, outputs and both gradients once more
        shared_prompts = 4 * a * shape.query_width * workload.shares_prompts
        return 2 * a * width + shared_prompts + 4 * width * shape.has_query_norm
    attention = (20 + 7 * a) * shape.query_width + a * shape.key_width  # float32, key heads repeated
    return max(attention, 4 * shape.eager_gradients)


def window_bytes(workload: Workload, *, backward: bool) -> int:
    """Temporary copies of the prompt's keys and values for each completion's window, and in backward their gradients.

    On CPUs blocks of a few completions are computed one after the other, so that copies do not add up.
    """
    each = 2 * workload.compute_bytes * (1 + backward) * workload.shape.key_width
    return each * workload.window_tokens * workload.on_gpu


def saved_bytes_per_token(workload: Workload) -> int:
    """Bytes that one layer saves per token under the configured checkpointing."""
    shape, a, stream = workload.shape, workload.compute_bytes, _stream_bytes_per_token(workload)
    if workload.checkpointing == "selective":
        # attention to the shared prompt and to later tokens has an output each, in float32 on CPU
        in_parts = 2 * a if workload.on_gpu else 8
        attended = (in_parts if workload.shares_prompts else a) * shape.query_width + 4 * shape.num_heads
        qkv_outputs = workload.adapter.qkv_output_features if workload.adapter else 0  # matmul outputs too
        return stream + attended + a * (shape.query_width + 2 * shape.key_width + shape.hidden + qkv_outputs)
    return stream if workload.checkpointing else layer_bytes_per_token(workload)


def _stream_bytes_per_token(workload: Workload) -> int:
    """Bytes of a layer's input."""
    each = workload.weight_bytes if workload.autocasts else workload.compute_bytes
    return each * workload.shape.streams * workload.shape.hidden


def _offloaded_by_layer(workload: Workload) -> int:
    """Bytes per token and layer that go to host memory; with checkpointing only the layer's input."""
    if not workload.offload:
        return 0
    return _stream_bytes_per_token(workload) if workload.checkpointing else layer_bytes_per_token(workload)


def offloaded_bytes_per_token(workload: Workload) -> int:
    """Bytes per token that go to host memory, over all layers."""
    return sum(kind.shape.layers * _offloaded_by_layer(kind) for kind in workload.kinds)


def offloaded_bytes(workload: Workload) -> int:
    """Host memory for offloaded activations at the end of forward, in bytes."""
    return offloaded_bytes_per_token(workload) * (workload.packed_tokens + workload.shared_prefix_tokens)


def activation_bytes(workload: Workload) -> int:
    """Peak activation memory in backward: saved tensors plus the layer being recomputed."""
    return _saved_bytes(workload) + max(_recomputed_bytes(kind) + transient_bytes(kind) for kind in workload.kinds)


def _recomputed_bytes(workload: Workload) -> int:
    """Bytes that a layer saves when it is recomputed."""
    if not workload.checkpointing:
        return 0
    states = layer_state_bytes(workload) * workload.trained_sequences
    return layer_bytes_per_token(workload) * workload.packed_tokens + states


def _saved_bytes(workload: Workload) -> int:
    """Bytes that all layers save on the device for backward."""
    shape, tokens = workload.shape, workload.packed_tokens + workload.shared_prefix_tokens
    resident = min(_RESIDENT_LAYERS, shape.layers)
    offloaded = offloaded_bytes_per_token(workload) - resident * max(map(_offloaded_by_layer, workload.kinds))
    saved = sum(kind.shape.layers * saved_bytes_per_token(kind) for kind in workload.kinds)
    # without checkpointing all states; with it, that of the prompt of a split group
    sequences = workload.trained_sequences if not workload.checkpointing else workload.shared_prefix_tokens > 0
    states = sum(kind.shape.layers * layer_state_bytes(kind) for kind in workload.kinds) * sequences
    if shape.streams > 1:  # these are made of the embedding, and the last ones are added up
        saved += workload.compute_bytes * (20 + 5 * shape.streams) * shape.hidden
    return (saved - max(0, offloaded)) * tokens + states


def transient_bytes(workload: Workload) -> int:
    """Peak temporaries besides the saved tensors: gradients in a layer's MLP, or DoRA's norms."""
    shape = workload.shape
    gradients = 2 * workload.compute_bytes * (shape.mlp_features + shape.hidden) * workload.packed_tokens
    return max(gradients, norm_bytes(workload))


def forward_only_bytes(workload: Workload) -> int:
    """Peak activation memory of one layer without backward: the MLP's wide tensors or a norm's float32 ones."""
    if workload.shape.own_kinds:
        return max(map(forward_only_bytes, workload.kinds))
    shape, a = workload.shape, workload.compute_bytes
    widest = max(3 * a * shape.mlp_features, 12 * shape.hidden)
    at_attention = 2 * a * (shape.query_width + shape.key_width) * workload.packed_tokens
    peak = max(widest * workload.packed_tokens, window_bytes(workload, backward=False) + at_attention)
    return peak + 2 * a * shape.hidden * workload.packed_tokens + norm_bytes(workload)


CPU_BLOCK = 1 << 21  # logits per softmax block without a fused kernel, in the symbolic run


def gathered_bytes(workload: Workload, *, backward: bool) -> int:
    """Temporary weight copies: FSDP2's gathered ones, autocast's casts, or one dequantized matrix."""
    shape, a = workload.shape, workload.compute_bytes
    if workload.quantization is not None:
        return dequantized_bytes(shape, workload.quantization, a)
    if workload.gathers:
        # a layer's shard from host memory, before it is cast
        shard = -(-workload.weight_bytes * workload.parameters_on_host * shape.layer_parameters // workload.shards)
        gathered = a * (shape.non_layer_parameters + shape.largest_pair_parameters)
        return gathered + shard + _unresharded_bytes(workload)
    if not workload.autocasts:
        return 0
    if backward and not workload.checkpointing:
        return a * shape.all_layer_parameters
    return a * shape.layer_parameters


def _unresharded_bytes(workload: Workload) -> int:
    """Layers that stay gathered while they are not in use (`reshard_after_forward`)."""
    shape = workload.shape
    others = workload.compute_bytes * (shape.all_layer_parameters - shape.largest_pair_parameters)
    if isinstance(workload.reshard_after_forward, bool):
        return 0 if workload.reshard_after_forward else others
    return others // workload.reshard_after_forward


def head_bytes(workload: Workload, *, backward: bool) -> int:
    """Memory of the LM head besides its weight: tiles of logits and, in backward, gradients."""
    shape, a = workload.shape, workload.compute_bytes
    loss_tokens, hidden = workload.loss_tokens, shape.hidden
    if loss_tokens == 0:
        return 0
    if shape.has_value_head:  # hidden states, also in float32; in backward their gradients
        return (a + 4) * loss_tokens * hidden * (1 + backward)
    tokens, ids = tile_shape(loss_tokens, shape.vocabulary, TILE_ELEMENTS)
    if workload.autocasts or (a < 4 and not workload.on_gpu):  # casts a slice of the weight as large as a tile
        ids = copied_weight_rows(ids, hidden, TILE_ELEMENTS)
    tile = 4 * tokens * ids
    if not backward:
        return tile + a * loss_tokens * hidden + 4 * (ids + tokens) * hidden * (a < 4 and not workload.on_gpu)  # casts
    is_trained = workload.adapter is None
    sums = 4 * ids * hidden * is_trained + 4 * tokens * hidden + 4 * loss_tokens * hidden
    # a cast slice of the weight, or its gradient before accumulation
    part = 4 * ids * hidden * (is_trained or not workload.on_gpu)
    rounded = tile * a // 4 if a < 4 else 0  # the tile in the compute dtype
    temporary = part + rounded if workload.on_gpu else max(part, 8 * min(tokens * ids, CPU_BLOCK))
    return tile + temporary + sums + 2 * a * loss_tokens * hidden


def _loss_head_bytes(workload: Workload) -> int:
    """`head_bytes` with `gradients_in_forward`, without the accumulated weight gradient."""
    shape, a = workload.shape, workload.compute_bytes
    loss_tokens, hidden = workload.loss_tokens, shape.hidden
    if loss_tokens == 0:
        return 0
    elements = loss_tile_elements(shape.vocabulary, on_gpu=workload.on_gpu)
    tokens = loss_tile_tokens(loss_tokens, shape.vocabulary, elements)
    copies = workload.autocasts or a < 4
    ids = copied_weight_rows(shape.vocabulary, hidden, TILE_ELEMENTS) if copies else shape.vocabulary
    temporary = (4 * ids * hidden + 4 * tokens * hidden) * copies  # casts, or products before accumulation
    if workload.on_gpu:
        temporary += a * tokens * ids * (a < 4)  # the tile in the compute dtype
    else:
        temporary = max(temporary, 8 * min(tokens * shape.vocabulary, CPU_BLOCK))
    return 4 * tokens * shape.vocabulary + temporary + (4 + 2 * a) * loss_tokens * hidden


def _head_gradient(workload: Workload) -> int:
    """The head's gradient, in the dtype of its gathered weight; it lives until backward ends."""
    parameters = workload.trained.head_parameters
    gradient = parameters * (
        workload.compute_bytes if workload.gathers or workload.masters_on_host else workload.trained_bytes
    )
    on_device = workload.compute_bytes if workload.masters_on_host else workload.trained_bytes
    if on_device != workload.gradient_bytes and not workload.gathers:  # cast before accumulation
        gradient += parameters * workload.gradient_bytes
    return gradient


def backward_parts(workload: Workload) -> dict[str, int]:
    """Memory at the peak of backward, by part.

    Candidates: the head, the middle and end of a layer, the embedding, the reduction of the rest.
    """
    shape, a = workload.shape, workload.compute_bytes
    gathered, activations = gathered_bytes(workload, backward=True), activation_bytes(workload)
    head_gradient = _head_gradient(workload)
    head_tiles = _loss_head_bytes(workload) if workload.gradients_in_forward else head_bytes(workload, backward=True)
    if workload.gradients_in_forward:  # accumulated in float32 from forward on
        accumulated = max(4 * workload.trained.head_parameters, head_gradient)
        head_tiles = accumulated - head_gradient + max(head_tiles, head_gradient if head_gradient < accumulated else 0)
    last_norm = (4 + 2 * a) * shape.hidden * workload.packed_tokens
    saved = _saved_bytes(workload)
    at_head = saved + last_norm
    outer_weights = (a * shape.non_layer_parameters + _unresharded_bytes(workload)) * workload.gathers
    # attention's backward is the peak in models whose attention is wider than the MLP
    at_attention = saved + max(
        _recomputed_bytes(kind)
        + (attention_transient_bytes(kind) - mlp_bytes_per_token(kind)) * workload.packed_tokens
        + window_bytes(kind, backward=True)
        for kind in workload.kinds
    )
    # neither attention nor the head holds a dequantized weight
    activations = max(activations, at_attention - gathered * (workload.quantization is not None))
    candidates = [
        {
            "gathered weights": outer_weights if workload.gathers else gathered * (workload.quantization is None),
            "activations": at_head,
            "logprob head": head_gradient + head_tiles,
        },
        {"gathered weights": gathered, "activations": activations, "logprob head": head_gradient},
    ]
    if workload.gathers:
        layer = a * workload.trained.layer_parameters
        gradients = layer if at_attention == activations else layer // 3  # of the layer, not yet reduced
        candidates += [
            # the all-gather buffer of the non-layer weights is freed after the first layer's
            {"gathered weights": 2 * (a * (shape.non_layer_parameters + shape.layer_parameters) + layer)},
            {  # the last layer's gathered buffer is still allocated
                "gathered weights": outer_weights + a * shape.layer_parameters + layer,
                "activations": at_head,
                "logprob head": head_bytes(workload, backward=False),
            },
            *_reduction_parts(
                workload, gathered, head_gradient, outer_weights, [(activations, gradients), (saved, layer)]
            ),
        ]
    return largest_parts(candidates)


def _reduction_parts(
    workload: Workload, gathered: int, head_gradient: int, outer_weights: int, in_layer: Sequence[tuple[int, int]]
) -> Iterator[dict[str, int]]:
    """Yield the memory while the gradients of a layer, the embedding and the other weights are reduced.

    Args:
        workload: workload of the process.
        gathered: gathered weights inside a layer.
        head_gradient: gradient of the head.
        outer_weights: gathered weights outside of layers.
        in_layer: activations and unreduced gradients, at two moments in a layer.
    """
    shape, a = workload.shape, workload.compute_bytes
    reduced = 4 * workload.trained.layer_parameters  # gradients are reduced in float32
    saved_by_one = min(map(saved_bytes_per_token, workload.kinds)) * workload.packed_tokens * (shape.layers > 1)
    for activations, gradients in in_layer:
        yield {
            "gathered weights": gathered,
            "logprob head": head_gradient,
            "activations": max(0, activations - saved_by_one),
            "gradient reduction": reduced + gradients,
        }
    # a tied embedding has the head's gradient added to it
    embedding = (1 + shape.tied) * a * shape.embedding_parameters if workload.adapter is None else 0
    yield {"gathered weights": outer_weights, "logprob head": head_gradient, "gradient reduction": embedding + reduced}
    yield {
        "logprob head": head_gradient,
        "gradient reduction": (4 + a) * workload.trained.non_layer_parameters - head_gradient,
    }


def largest_parts(candidates: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the candidate with the largest sum; candidates never coexist."""
    return max(candidates, key=lambda parts: sum(parts.values()))
