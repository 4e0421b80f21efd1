"""The training step of one group as other trainers compute it, each with its own way to the logprobs.

Every function adds the gradient of the same GRPO loss to the model's parameters. Rows are as TRL makes them: prompts
padded on the left, completions on the right, an attention mask of both.

G rows, P prompt tokens, C tokens of the longest completion, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.models import Operands, linear_logprobs
from cohort.records import TrainSequence
from harness import SkippedError

CLIP = 0.2
TEMPERATURE = 1.0  # divided by all the same, as trainers do: one more copy of the logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Padded rows of one group."""

    input_ids: Tensor  # [G, P + C]
    attention_mask: Tensor  # [G, P + C]
    completion_ids: Tensor  # [G, C]
    completion_mask: Tensor  # [G, C]
    advantages: Tensor  # [G]


def pad(sequences: Sequence[TrainSequence], device: torch.device) -> Rows:
    """The rows of some sequences."""
    longest_prompt = max(s.shared_prefix_tokens for s in sequences)
    longest = max(s.num_loss_tokens for s in sequences)
    ids = torch.zeros(len(sequences), longest_prompt + longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, s in enumerate(sequences):
        start = longest_prompt - s.shared_prefix_tokens
        ids[n, start : start + len(s.token_ids)] = torch.from_numpy(s.token_ids)
        mask[n, start : start + len(s.token_ids)] = 1
    ids, mask = ids.to(device), mask.to(device)
    return Rows(
        input_ids=ids,
        attention_mask=mask,
        completion_ids=ids[:, longest_prompt:],
        completion_mask=mask[:, longest_prompt:],
        advantages=torch.tensor([s.advantages[-1] for s in sequences], dtype=torch.float32, device=device),
    )


def full_logits(model: Any, sequences: Sequence[TrainSequence]) -> None:
    """The logits of all completions at once, [G, C, V], their log-softmax and entropy: the loss as it is defined."""
    _full_logits_loss(model, sequences).backward()


def row_by_row(model: Any, sequences: Sequence[TrainSequence]) -> None:
    """The same with a micro-batch per completion, [1, C, V]."""
    for sequence in sequences:
        (_full_logits_loss(model, [sequence]) / len(sequences)).backward()


def _full_logits_loss(model: Any, sequences: Sequence[TrainSequence]) -> Tensor:
    rows = pad(sequences, model.device)
    logits = _logits(model, rows)
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    with torch.no_grad():  # a metric
        -(log_p.exp() * log_p).sum(-1)
    return _grpo_loss(log_p.gather(-1, rows.completion_ids.unsqueeze(-1)).squeeze(-1), rows)


def trl_full_logits(model: Any, sequences: Sequence[TrainSequence]) -> None:
    """TRL up to 1.10: the same logits; row after row and chunk after chunk where that saves temporaries."""
    rows = pad(sequences, model.device)
    logits = _logits(model, rows) / TEMPERATURE
    chosen = logits.gather(-1, rows.completion_ids.unsqueeze(-1)).squeeze(-1)
    logprobs = chosen - torch.stack([row.logsumexp(-1) for row in logits])
    with torch.no_grad():
        for part in logits.flatten(0, 1).split(128):
            log_p = part.log_softmax(-1)
            -(log_p.exp() * log_p).sum(-1)
    loss = _grpo_loss(logprobs, rows)
    del logits, part, log_p
    loss.backward()


def _logits(model: Any, rows: Rows) -> Tensor:
    """Logits [G, C, V] that predict the completions."""
    return model(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask,
        logits_to_keep=rows.completion_ids.shape[1] + 1,
        use_cache=False,
    ).logits[:, :-1]


def trl_fused(model: Any, sequences: Sequence[TrainSequence]) -> None:
    """TRL 1.16: its own fused head, which projects in tiles, and the loss of its trainer."""
    try:
        from trl.trainer import utils
    except ImportError as error:
        raise SkippedError(f"needs trl 1.16 or newer ({error})") from error
    if not hasattr(utils, "add_fused_lm_head"):
        raise SkippedError("needs trl 1.16 or newer")
    # Without Triton it scores prompts and padding too. Here it takes the rows that it takes on a GPU.
    utils._use_triton = lambda _: True
    if not hasattr(model, "has_trl_head"):
        utils.add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
        model.has_trl_head = True
    rows = pad(sequences, model.device)
    num_completion = rows.completion_ids.shape[1]
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
    labels[:, :-num_completion] = -100
    out = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, labels=labels, fused_lm_head=True)
    _grpo_loss(out.log_probs[:, -num_completion:], rows).backward()


def liger(model: Any, sequences: Sequence[TrainSequence]) -> None:
    """Liger's fused linear GRPO loss, not compiled."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        raise SkippedError(f"needs liger-kernel ({error})") from error
    rows = pad(sequences, model.device)
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="grpo"
    )
    value, _ = loss(
        _hidden(model, rows),
        model.get_output_embeddings().weight,
        rows.completion_ids,
        rows.completion_mask,
        rows.advantages,
    )
    value.backward()


def padded_fused(model: Any, sequences: Sequence[TrainSequence]) -> None:
    """Padded rows and Cohort's head: what is left is padding and repeated prompts."""
    rows = pad(sequences, model.device)
    scored = rows.completion_mask.bool()
    operands = Operands(_hidden(model, rows)[scored], model.get_output_embeddings().weight)
    logprobs, _ = linear_logprobs(operands, rows.completion_ids[scored], entropy=True)
    filled = torch.zeros(scored.shape, dtype=logprobs.dtype, device=logprobs.device).masked_scatter(scored, logprobs)
    _grpo_loss(filled, rows).backward()


def _hidden(model: Any, rows: Rows) -> Tensor:
    """Hidden states [G, C, H] that predict the completions, in the dtype of products."""
    out = model.base_model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, use_cache=False)
    hidden = out.last_hidden_state[:, -rows.completion_ids.shape[1] - 1 : -1]
    on = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(on)) if torch.is_autocast_enabled(on) else hidden


def _grpo_loss(logprobs: Tensor, rows: Rows) -> Tensor:
    """GRPO's loss of logprobs [G, C] in their first pass: the mean over rows of the mean over tokens."""
    ratio = torch.exp(logprobs - logprobs.detach())
    advantages = rows.advantages.unsqueeze(1)
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    mask = rows.completion_mask
    return ((per_token * mask).sum(1) / mask.sum(1)).mean()


BASELINES = {
    "full-logits": full_logits,
    "trl-1.10": trl_full_logits,
    "row-by-row": row_by_row,
    "trl-1.16": trl_fused,
    "liger": liger,
    "padded-fused": padded_fused,
}
