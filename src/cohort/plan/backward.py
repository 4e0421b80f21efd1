"""Bytes of forward and backward, in closed form: gathered weights, the head, and the moment at which most is there.

Letters as in `cohort.plan.memory`.
"""

from collections.abc import Sequence

from cohort.plan.activations import (
    activation_bytes,
    attention_passing,
    kept_bytes_per_token,
    layer_bytes_per_token,
    mlp_bytes_per_token,
    passing_bytes,
)
from cohort.plan.quantization import dequantized_bytes
from cohort.plan.tiles import TILE_ELEMENTS, loss_tile_elements, loss_tile_tokens, rows_of_copies, tile_shape
from cohort.plan.work import Work

CPU_BLOCK = 1 << 21  # logits whose softmax is taken at a time where there is no fused kernel, in the symbolic run


def gathered_bytes(work: Work, *, backward: bool) -> int:
    """Copies of weights: gathered ones of FSDP2, what autocast casts them to, or one that is not quantized."""
    shape, a = work.shape, work.compute_bytes
    if work.quantization is not None:
        return dequantized_bytes(shape, work.quantization, a)
    if work.gathers:
        # before they are cast
        visiting = -(-work.weight_bytes * work.parameters_on_host * shape.layer_parameters // work.processes)
        return a * (shape.outer_parameters + min(2, shape.layers) * shape.layer_parameters) + visiting + _stays(work)
    if not work.autocasts:
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
    tokens, ids = tile_shape(scored, shape.vocabulary, TILE_ELEMENTS)
    if work.autocasts or (a < 4 and not work.on_gpu):  # a part of the weight is cast, which is as large as a tile
        ids = rows_of_copies(ids, hidden, TILE_ELEMENTS)
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


def _loss_head_bytes(work: Work) -> int:
    """The same where the gradient is made in forward, beside the sum of the weight's gradients."""
    shape, a = work.shape, work.compute_bytes
    scored, hidden = work.scored_tokens, shape.hidden
    if scored == 0:
        return 0
    elements = loss_tile_elements(shape.vocabulary, on_gpu=work.on_gpu)
    tokens = loss_tile_tokens(scored, shape.vocabulary, elements)
    copies = work.autocasts or a < 4
    ids = rows_of_copies(shape.vocabulary, hidden, TILE_ELEMENTS) if copies else shape.vocabulary
    passing = (4 * ids * hidden + 4 * tokens * hidden) * copies  # casts, or products before they are added
    if work.on_gpu:
        passing += a * tokens * ids * (a < 4)  # the tile, as it is multiplied
    else:
        passing = max(passing, 8 * min(tokens * shape.vocabulary, CPU_BLOCK))
    return 4 * tokens * shape.vocabulary + passing + (4 + 2 * a) * scored * hidden


def _head_gradient(work: Work) -> int:
    """From the head's backward to the end: in the dtype in which the head's weight is there."""
    parameters = work.trained_head_parameters
    gradient = parameters * (work.compute_bytes if work.gathers or work.masters_on_host else work.trained_bytes)
    if work.masters_on_host and not work.gathers:  # cast before it is added
        gradient += parameters * work.trained_bytes
    return gradient


def backward_parts(work: Work) -> dict[str, int]:
    """The largest of: the head, a layer in its midst and at its end, the embedding, the reduction of the rest."""
    shape, a = work.shape, work.compute_bytes
    gathered, head, activations = gathered_bytes(work, backward=True), _head_gradient(work), activation_bytes(work)
    of_head = _loss_head_bytes(work) if work.gradients_in_forward else head_bytes(work, backward=True)
    if work.gradients_in_forward:  # summed in float32 from forward on, and that is the gradient or is rounded to it
        summed = max(4 * work.trained_head_parameters, head)
        of_head = summed - head + max(of_head, head if head < summed else 0)
    last_norm = (4 + 2 * a) * shape.hidden * work.row_tokens
    again = layer_bytes_per_token(work) * work.row_tokens if work.checkpointing else 0
    passing = passing_bytes(work)
    kept = activations - passing - again
    at_head = kept + last_norm
    outer_only = (a * shape.outer_parameters + _stays(work)) * work.gathers
    # most models have wider MLPs than attention; of the others attention's backward is the peak
    at_attention = activations - passing + (attention_passing(work) - mlp_bytes_per_token(work)) * work.row_tokens
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
    return largest_parts(candidates)


def largest_parts(candidates: Sequence[dict[str, int]]) -> dict[str, int]:
    """Of parts that are never there together."""
    return max(candidates, key=lambda parts: sum(parts.values()))
