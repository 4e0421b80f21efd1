"""Micro-batches through an unmodified Hugging Face model, each prompt once.

The root rows run first and keep their keys and values, with the graph, in the model's own cache; every branch row then
takes those of its root and goes on from there. Gradients flow back through the cache into the prompt, so this is the
computation of whole sequences, less the repetitions.

B root rows, S the longest, D branch rows, C the longest, T scored tokens, H features of the output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from cohort.batch import MicroBatch


def forward_rows(module: Any, micro_batch: MicroBatch, output: Callable[[Any], Tensor]) -> Tensor:
    """What `module` puts out at the positions that predict the scored tokens, [T, H].

    Padding is on the right and attention is causal, so that no token ever sees the padding of its own row. The padding
    of a root lies before the tokens of its branches, which a mask keeps from seeing it.

    Args:
        module: the model, or its body without the head.
        micro_batch: root and branch rows.
        output: picks the tensor [rows, positions, H] from what the module returns.
    """
    if micro_batch.branch_ids.numel() == 0:
        roots = output(module(input_ids=micro_batch.root_ids, use_cache=False))
        return roots.flatten(0, 1).index_select(0, micro_batch.source)
    cache = DynamicCache(config=module.config)
    roots = output(module(input_ids=micro_batch.root_ids, past_key_values=cache, use_cache=True))
    cache.reorder_cache(micro_batch.branch_roots)
    num_before = micro_batch.root_lengths[micro_batch.branch_roots]
    width = micro_batch.root_ids.shape[1]
    steps = torch.arange(micro_batch.branch_ids.shape[1], device=num_before.device)
    in_root = torch.arange(width, device=num_before.device) < num_before.unsqueeze(-1)
    branches = output(
        module(
            input_ids=micro_batch.branch_ids,
            attention_mask=torch.cat([in_root, in_root.new_ones(micro_batch.branch_ids.shape)], dim=1),
            position_ids=num_before.unsqueeze(-1) + steps,
            past_key_values=cache,
            use_cache=True,
        )
    )
    rows = torch.cat([roots.flatten(0, 1), branches.flatten(0, 1)])
    return rows.index_select(0, micro_batch.source)


def can_share_prompts(model: Any) -> bool:
    """Whether `forward_rows` with branches equals whole sequences: plain full attention with the library's cache.

    The architecture is looked at first, and then two short sequences are computed in both ways, so that a model with a
    twist that is not known here costs time and never correctness.
    """
    checkpointing = "is_activation_checkpointing"  # renamed in transformers 5.2x, where the old name warns
    if getattr(model, checkpointing if hasattr(type(model), checkpointing) else "is_gradient_checkpointing"):
        return False  # the library keeps no cache then: the two recompute each other's states
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers):
        return False  # windows, recurrent states
    # the sequences 1 2 3 | 5 6 and 4 5 | 7 8 as whole rows, and as roots 4 5 and 1 2 3 with one branch each; 9 pads
    whole = _probe([[1, 2, 3, 5, 6], [4, 5, 7, 8, 9]], [5, 4], [], [3, 4, 7, 8], model)
    shared = _probe([[4, 5, 9], [1, 2, 3]], [2, 3], [[5, 6], [7, 8]], [6, 7, 8, 9], model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected, actual = (
                forward_rows(model.base_model, m, lambda out: out.last_hidden_state).float() for m in (whole, shared)
            )
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # a model that does not take a cache this way
    finally:
        model.train(was_training)
    tolerance = 3e-2 if next(model.parameters()).dtype == torch.bfloat16 else 1e-4
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def _probe(
    roots: list[list[int]], lengths: list[int], branches: list[list[int]], source: list[int], model: Any
) -> MicroBatch:
    """A micro-batch to compute and not to train on: root 1 has the first branch, root 0 the second."""
    device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
    nothing = torch.zeros(0, device=device)
    return MicroBatch(
        root_ids=torch.tensor(roots, device=device) % vocabulary,
        root_lengths=torch.tensor(lengths, device=device),
        branch_ids=torch.tensor(branches, dtype=torch.int64, device=device) % vocabulary,
        branch_roots=torch.tensor([1, 0], device=device)[: len(branches)],
        source=torch.tensor(source, device=device),
        targets=nothing,
        sampling_logprobs=nothing,
        advantages=nothing,
        loss_weights=nothing,
        sequence_ids=nothing,
        num_input_tokens=0,
    )
