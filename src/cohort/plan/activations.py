"""Bytes of what a model computes on its way, in closed form: what is kept for backward, and what passes by.

Letters as in `cohort.plan.memory`.
"""

from cohort.plan.adapter import AdapterShape
from cohort.plan.work import Work

_KEPT_LAYERS_OF_OFFLOAD = 2  # on the GPU at a time: the one that is computed, and the one on its way


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
    norms = shape.norms_per_layer * (8 if work.autocasts else 4 + kept_of_norm) * shape.hidden
    query_norms = shape.has_query_norm * (4 + kept_of_norm) * (shape.query_width + shape.key_width)
    return norms + query_norms + attention + mlp + trained


def _inputs_of_trained(work: Work) -> int:
    """Inputs of a layer's products with trained weights, beside what attention keeps in any case."""
    shape, a = work.shape, work.compute_bytes
    # norms come out in float32 under autocast, and each product casts its own input
    into_products = 5 if work.autocasts else shape.norms_per_layer
    return a * (into_products * shape.hidden + shape.experts_per_token * shape.mlp)


def _inputs_of_adapter(work: Work, adapter: AdapterShape) -> int:
    """What the gradients of an adapter's factors want: the inputs of its layers, and what lies between the factors."""
    a = work.compute_bytes
    lora = a * (adapter.kept_features + adapter.rank_features) + (a + 1) * adapter.dropout_features
    if not adapter.turned_layers:
        return lora
    # DoRA scales what comes out of the frozen product and of the factors, and keeps both for the scale's gradient
    d, turned = _adapter_compute_bytes(work), adapter.turned_layers
    widened = d * sum(into for into, _ in turned) if d > a else 0
    return lora + widened + (a + d) * sum(out for _, out in turned)


def _adapter_compute_bytes(work: Work) -> int:
    """Of DoRA's numbers: one process computes its norms in the adapter's dtype, several gather that in their own."""
    return work.compute_bytes if work.processes > 1 else work.trained_bytes


def norm_bytes(work: Work) -> int:
    """What peft has in memory at once to take the norms of one layer's weight and adapter together, at each forward.

    A unit matrix of the layer's inputs, which goes through both factors; their product, the same scaled, and the sum
    with the weight.
    """
    if work.adapter is None:
        return 0
    d, rank = _adapter_compute_bytes(work), work.adapter.rank
    return max((d * into * (into + rank + 3 * out) for into, out in work.adapter.turned_layers), default=0)


def mlp_bytes_per_token(work: Work) -> int:
    """Of `layer_bytes_per_token`, what backward is done with when it comes to a layer's attention."""
    shape, a = work.shape, work.compute_bytes
    mlp = shape.experts_per_token * 4 * a * shape.mlp
    return min(mlp, layer_bytes_per_token(work)) + shape.norms_per_layer // 2 * 4 * shape.hidden


def attention_passing(work: Work) -> int:
    """Gradients by one token's queries, keys and values, and what they are computed with, in backward of attention."""
    shape, a = work.shape, work.compute_bytes
    if work.on_gpu:  # kernels keep to the dtype and to the number of key heads; norms are float32
        width = shape.query_width + shape.key_width
        # of tokens after a shared prompt queries, outputs and both gradients once more, by their prompt
        of_prompts = 4 * a * shape.query_width * work.shares_prompts
        return 2 * a * width + of_prompts + 4 * width * shape.has_query_norm
    return (20 + 7 * a) * shape.query_width + a * shape.key_width  # float32, and key heads as many as queries


def kept_bytes_per_token(work: Work) -> int:
    """What one layer keeps of one token until backward comes to it, with the checkpointing that is set."""
    shape, a, stream = work.shape, work.compute_bytes, _stream_bytes_per_token(work)
    if work.checkpointing == "selective":
        # attention to a shared prompt and to the tokens after it puts out numbers each, on CPUs in float32
        in_parts = 2 * a if work.on_gpu else 8
        attended = (in_parts if work.shares_prompts else a) * shape.query_width + 4 * shape.num_heads
        early = work.adapter.early_features if work.adapter else 0  # products too
        return stream + attended + a * (shape.query_width + 2 * shape.key_width + shape.hidden + early)
    return stream if work.checkpointing else layer_bytes_per_token(work)


def _stream_bytes_per_token(work: Work) -> int:
    """A layer's input."""
    return (work.weight_bytes if work.autocasts else work.compute_bytes) * work.shape.hidden


def offloaded_bytes_per_token(work: Work) -> int:
    """Of what one layer keeps of one token, what goes to host memory: with any checkpointing the layer's input."""
    if not work.offload:
        return 0
    return _stream_bytes_per_token(work) if work.checkpointing else layer_bytes_per_token(work)


def offloaded_bytes(work: Work) -> int:
    """In host memory at the end of forward."""
    return offloaded_bytes_per_token(work) * work.shape.layers * (work.row_tokens + work.kept_prompt_tokens)


def activation_bytes(work: Work) -> int:
    """At the moment of backward when most is there: all that is kept, and the layer that is computed again."""
    shape, tokens = work.shape, work.row_tokens + work.kept_prompt_tokens
    away = offloaded_bytes_per_token(work) * max(0, shape.layers - _KEPT_LAYERS_OF_OFFLOAD)
    kept = (kept_bytes_per_token(work) * shape.layers - away) * tokens
    again = layer_bytes_per_token(work) * work.row_tokens if work.checkpointing else 0
    return kept + again + passing_bytes(work)


def passing_bytes(work: Work) -> int:
    """Beside what is kept: gradients on their way through a layer's MLP, or what norms of DoRA are taken with."""
    shape = work.shape
    gradients = 2 * work.compute_bytes * (shape.experts_per_token * shape.mlp + shape.hidden) * work.row_tokens
    return max(gradients, norm_bytes(work))


def forward_only_bytes(work: Work) -> int:
    """Of a layer without backward: the MLP's three wide tensors, and a norm's float32 ones."""
    shape, a = work.shape, work.compute_bytes
    widest = max(3 * a * shape.experts_per_token * shape.mlp, 12 * shape.hidden)
    return (widest + 2 * a * shape.hidden) * work.row_tokens + norm_bytes(work)
