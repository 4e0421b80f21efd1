"""Micro-batches through a Hugging Face model.

S tokens of the row, B sequences of a padded call, L the longest, T loss tokens, H features of the output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cohort.batch import MicroBatch
from cohort.policy.attention import KeyValues
from cohort.policy.stream import Branch


def forward(
    module: Any,
    micro_batch: MicroBatch,
    output: Callable[[Any], Tensor],
    *,
    padded: bool,
    branch: Branch | None = None,
    captured: KeyValues | None = None,
) -> Tensor:
    """What `module` puts out at the positions that predict the loss tokens, [T, H].

    Args:
        module: the model, or its body without the head.
        micro_batch: on the module's device; of whole sequences where it is to be padded.
        output: picks the tensor [rows, positions, H] from what the module returns.
        padded: compute rows of equal length with the module's own attention.
        branch: of the prompt that branches of PREFIX go on from; gradients flow into it.
        captured: takes the row's own keys and values of every layer, with their gradients.
    """
    if padded:
        assert branch is None and captured is None, "padded rows cannot share prompts"
        return _forward_padded(module, micro_batch, output)
    returned = module(
        input_ids=micro_batch.input_ids.unsqueeze(0),
        position_ids=micro_batch.position_ids.unsqueeze(0),
        # A mask of four dimensions is taken as it is. So none of S x S is made; attention has the segments.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=micro_batch.input_ids.device),
        segments=micro_batch.segments,
        prefix=None if branch is None else branch.states,
        captured=captured,
        use_cache=False,
    )
    out = output(returned).squeeze(0)
    if branch is not None:
        out = torch.cat([branch.hidden_1H, out])
    return out.index_select(0, micro_batch.logit_positions)


def _forward_padded(module: Any, micro_batch: MicroBatch, output: Callable[[Any], Tensor]) -> Tensor:
    """Whole sequences as rows. Padding is on the right and attention causal, so that no token ever sees it."""
    assert not micro_batch.segments.blocks.shared, "padded rows cannot share prompts"
    rows = _as_rows(micro_batch, micro_batch.input_ids)
    position_ids = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    out = output(module(input_ids=rows, position_ids=position_ids, use_cache=False)).flatten(0, 1)
    return out.index_select(0, _padded_positions(micro_batch).index_select(0, micro_batch.logit_positions))


def computed_counts(micro_batch: MicroBatch, *, padded: bool) -> Tensor:
    """Of how many completions each position that a model computes is an input, in its order; 0 of padding."""
    counts = micro_batch.input_counts
    return _as_rows(micro_batch, counts).flatten() if padded else counts


def _as_rows(micro_batch: MicroBatch, values: Tensor) -> Tensor:
    """Values [S] of the row's tokens as rows of whole sequences [B, L], 0 where they are padded."""
    rows = values.new_zeros(padded_shape(micro_batch))
    rows.view(-1)[_padded_positions(micro_batch)] = values
    return rows


def _padded_positions(micro_batch: MicroBatch) -> Tensor:
    """Where each token of the row is in the padded rows, one after the other, [S]."""
    column = micro_batch.position_ids
    row = (column == 0).cumsum(0) - 1  # every sequence begins at position 0
    return row * padded_shape(micro_batch)[1] + column


def padded_shape(micro_batch: MicroBatch) -> tuple[int, int]:
    """Rows and positions of a micro-batch of whole sequences when padded, (B, L).

    The segments tell it on the host, so that nothing waits for the device.
    """
    lengths = micro_batch.segments.lengths
    return len(lengths), max(lengths)
