"""Activation memory in closed form: tensors saved for backward, and temporaries.

Symbols as in `cohort.plan.workload`.
"""

from cohort.plan.adapter_shape import AdapterShape
from cohort.plan.workload import Workload

_RESIDENT_LAYERS = 2  # with offloading, on the GPU at a time: the one computing and the one being copied


def layer_bytes_per_token(workload: Workload) -> int:
    """Bytes that one layer saves for backward per token, without checkpointing."""
    shape, a = workload.shape, workload.compute_bytes
    attention = 2 * a * (shape.query_width + shape.key_width) + 4 * shape.num_heads  # plus log-sum-exps
    mlp = shape.experts_per_token * 3 * a * shape.mlp  # gate input, gate output, gated product
    if shape.experts_per_token > 1:
        mlp += shape.experts_per_token * 2 * a * shape.hidden  # tokens dispatched to experts and combined
    if workload.adapter is None:
        trained, norm_input_bytes = _saved_inputs_full(workload), a  # the normalized input, for the weight's gradient
    else:
        trained, norm_input_bytes = _saved_inputs_adapter(workload, workload.adapter), 0
    norms = shape.norms_per_layer * (8 if workload.autocasts else 4 + norm_input_bytes) * shape.hidden
    query_norms = shape.has_query_norm * (4 + norm_input_bytes) * (shape.query_width + shape.key_width)
    return norms + query_norms + attention + mlp + trained


def _saved_inputs_full(workload: Workload) -> int:
    """Inputs saved for the gradients of a layer's trained weights, beyond those that attention saves anyway."""
    shape, a = workload.shape, workload.compute_bytes
    # under autocast norms return float32, and each matmul casts its own input
    into_products = 5 if workload.autocasts else shape.norms_per_layer
    return a * (into_products * shape.hidden + shape.experts_per_token * shape.mlp)


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
    mlp = shape.experts_per_token * 4 * a * shape.mlp
    return min(mlp, layer_bytes_per_token(workload)) + shape.norms_per_layer // 2 * 4 * shape.hidden


def attention_transient_bytes(workload: Workload) -> int:
    """Temporaries of attention backward per token: gradients of q, k and v, and their inputs."""
    shape, a = workload.shape, workload.compute_bytes
    if workload.on_gpu:  # fused kernels keep the dtype and the number of key heads; norms are float32
        width = shape.query_width + shape.key_width
        # tokens after a shared prompt attend twice: q, outputs and both gradients once more
        shared_prompts = 4 * a * shape.query_width * workload.shares_prompts
        return 2 * a * width + shared_prompts + 4 * width * shape.has_query_norm
    return (20 + 7 * a) * shape.query_width + a * shape.key_width  # float32, key heads repeated


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
    return (workload.weight_bytes if workload.autocasts else workload.compute_bytes) * workload.shape.hidden


def offloaded_bytes_per_token(workload: Workload) -> int:
    """Bytes per token and layer that go to host memory; with checkpointing only the layer's input."""
    if not workload.offload:
        return 0
    return _stream_bytes_per_token(workload) if workload.checkpointing else layer_bytes_per_token(workload)


def offloaded_bytes(workload: Workload) -> int:
    """Host memory for offloaded activations at the end of forward, in bytes."""
    return (
        offloaded_bytes_per_token(workload)
        * workload.shape.layers
        * (workload.packed_tokens + workload.shared_prefix_tokens)
    )


def activation_bytes(workload: Workload) -> int:
    """Peak activation memory in backward: saved tensors plus the layer being recomputed."""
    shape, tokens = workload.shape, workload.packed_tokens + workload.shared_prefix_tokens
    offloaded = offloaded_bytes_per_token(workload) * max(0, shape.layers - _RESIDENT_LAYERS)
    saved = (saved_bytes_per_token(workload) * shape.layers - offloaded) * tokens
    recomputed = layer_bytes_per_token(workload) * workload.packed_tokens if workload.checkpointing else 0
    return saved + recomputed + transient_bytes(workload)


def transient_bytes(workload: Workload) -> int:
    """Peak temporaries besides the saved tensors: gradients in a layer's MLP, or DoRA's norms."""
    shape = workload.shape
    gradients = (
        2 * workload.compute_bytes * (shape.experts_per_token * shape.mlp + shape.hidden) * workload.packed_tokens
    )
    return max(gradients, norm_bytes(workload))


def forward_only_bytes(workload: Workload) -> int:
    """Peak activation memory of one layer without backward: the MLP's wide tensors or a norm's float32 ones."""
    shape, a = workload.shape, workload.compute_bytes
    widest = max(3 * a * shape.experts_per_token * shape.mlp, 12 * shape.hidden)
    return (widest + 2 * a * shape.hidden) * workload.packed_tokens + norm_bytes(workload)
