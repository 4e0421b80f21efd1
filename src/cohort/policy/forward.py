"""Micro-batches through a Hugging Face model, and which way of doing so fits a model.

S tokens of the row, B sequences of a padded call, L the longest, T scored tokens, H features of the output.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from cohort.batch import MicroBatch
from cohort.policy import attention
from cohort.segments import ROOT, lay_out

# How a model computes a micro-batch: "shared" is one row in which completions may go on from one prompt, "packed" one
# row of whole sequences, and "padded" whole sequences as rows of equal length.
Layout = Literal["shared", "packed", "padded"]


def forward(module: Any, micro_batch: MicroBatch, output: Callable[[Any], Tensor], *, padded: bool) -> Tensor:
    """What `module` puts out at the positions that predict the scored tokens, [T, H].

    Args:
        module: the model, or its body without the head.
        micro_batch: on the module's device; of whole sequences where it is to be padded.
        output: picks the tensor [rows, positions, H] from what the module returns.
        padded: compute rows of equal length with the module's own attention.
    """
    if padded:
        return _forward_padded(module, micro_batch, output)
    returned = module(
        input_ids=micro_batch.input_ids.unsqueeze(0),
        position_ids=micro_batch.position_ids.unsqueeze(0),
        # A mask of four dimensions is taken as it is. So none of S x S is made; attention has the segments.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=micro_batch.input_ids.device),
        segments=micro_batch.segments,
        use_cache=False,
    )
    return output(returned).squeeze(0).index_select(0, micro_batch.source)


def _forward_padded(module: Any, micro_batch: MicroBatch, output: Callable[[Any], Tensor]) -> Tensor:
    """Whole sequences as rows. Padding is on the right and attention causal, so that no token ever sees it."""
    assert all(block.mask is None for block in micro_batch.segments.blocks), "padded rows cannot share prompts"
    column = micro_batch.position_ids
    row = (column == 0).cumsum(0) - 1  # every sequence begins at position 0
    rows = micro_batch.input_ids.new_zeros(padded_shape(micro_batch))
    rows[row, column] = micro_batch.input_ids
    out = output(module(input_ids=rows, use_cache=False)).flatten(0, 1)
    return out.index_select(0, (row * rows.shape[1] + column).index_select(0, micro_batch.source))


def padded_shape(micro_batch: MicroBatch) -> tuple[int, int]:
    """Rows and positions of a micro-batch of whole sequences when padded, (B, L)."""
    return int((micro_batch.position_ids == 0).sum()), int(micro_batch.position_ids.max()) + 1


def choose_layout(model: Any, module: Any, output: Callable[[Any], Tensor]) -> Layout:
    """The first of "shared", "packed" and "padded" that computes what the model itself does; readies the model for it.

    The architecture is looked at first. Then short sequences are computed in both ways, so that a model with a twist
    that is not known here costs time and never correctness.

    Args:
        model: the whole model. Its attention implementation is changed unless it stays "padded".
        module: what is called in training: the model or its body.
        output: picks the tensor [rows, positions, H] from what the module returns.
    """
    own = model.config._attn_implementation
    if own not in ("sdpa", "eager", attention.NAME) or not _has_full_attention(model):
        return "padded"
    was_training = model.training
    model.eval()
    try:
        expected = _probe(model, module, output, "padded")
        if expected is None:
            return "padded"
        try:
            model.set_attn_implementation(attention.NAME)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return "padded"  # the library changes nothing then
        tolerance = 3e-2 if next(model.parameters()).dtype == torch.bfloat16 else 1e-4
        layouts: tuple[Layout, ...] = ("packed",) if _has_dropout(model) else ("shared", "packed")
        for layout in layouts:
            actual = _probe(model, module, output, layout)
            if actual is not None and (actual - expected).abs().max() <= tolerance * expected.abs().max():
                return layout
        model.set_attn_implementation(own)
        return "padded"
    finally:
        model.train(was_training)


def _has_full_attention(model: Any) -> bool:
    """Whether every layer looks at all earlier tokens, and at nothing else: no windows, no recurrent states."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
    layers = DynamicCache(config=model.config).layers  # knows of windows that layer_types does not tell
    return set(types) == {"full_attention"} and all(type(layer) is DynamicLayer for layer in layers)


def _has_dropout(model: Any) -> bool:
    """Whether training draws random numbers: completions that share a prompt would share its draws."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    config = model.config.get_text_config()
    return any((getattr(config, name, None) or 0.0) > 0 for name in ("attention_dropout", "attn_pdrop"))


def _probe(model: Any, module: Any, output: Callable[[Any], Tensor], layout: Layout) -> Tensor | None:
    """Outputs of the sequences 1 2 3 | 5 6, 4 5 | 7 8 9 and 1 2 3 | 6 5 in one layout; None where the model fails."""
    device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
    if layout == "shared":
        segments = [[1, 2, 3], [5, 6], [4, 5], [7, 8, 9], [6, 5]]
        roots, offsets, source = [ROOT, 0, ROOT, 2, 0], [0, 3, 0, 2, 3], [2, 3, 4, 6, 7, 8, 9, 2, 10, 11]
    else:
        segments = [[1, 2, 3, 5, 6], [4, 5, 7, 8, 9], [1, 2, 3, 6, 5]]
        roots, offsets, source = [ROOT] * 3, [0] * 3, [2, 3, 4, 6, 7, 8, 9, 12, 13, 14]
    nothing = torch.zeros(0, device=device)
    micro_batch = MicroBatch(
        input_ids=torch.tensor([token for s in segments for token in s], device=device) % vocabulary,
        position_ids=torch.cat([o + torch.arange(len(s)) for o, s in zip(offsets, segments, strict=True)]).to(device),
        segments=lay_out([len(s) for s in segments], roots).to(device),
        source=torch.tensor(source, device=device),
        targets=nothing,
        sampling_logprobs=nothing,
        advantages=nothing,
        loss_weights=nothing,
        sequence_ids=nothing,
    )
    try:
        with torch.no_grad():
            return forward(module, micro_batch, output, padded=layout == "padded").float()
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
