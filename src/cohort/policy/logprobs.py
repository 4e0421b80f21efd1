"""Logprobs of tokens from hidden states, without the logits of a whole batch.

T scored tokens, H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TILE_ELEMENTS = 1 << 24  # of one logits tile: 64 MiB in float32


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    tile_elements: int = TILE_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target under softmax(head(hidden) / temperature), and the entropy of that distribution.

    Never more than `tile_elements` logits exist at a time: with more, each tile is computed again in backward.
    Logits are float32 or wider whatever the inputs are, since bfloat16 logits cost 1e-2 of logprob.

    Args:
        hidden_TH: [T, H] last hidden states at the positions that predict the targets.
        weight_VH: [V, H] weight of the language-model head.
        targets_T: [T] int64 token ids.
        bias: [V] of the head.
        temperature: divides the logits, after scale and softcap.
        scale: multiplies the logits (Cohere, Granite).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        tile_elements: largest number of logits held at a time.

    Returns:
        logprobs [T], differentiable, and entropy [T] in nats, detached.
    """
    num_tokens, vocabulary = len(targets_T), weight_VH.shape[0]
    rows = max(1, tile_elements // vocabulary)
    args = (bias, temperature, scale, softcap)
    if num_tokens <= rows:
        return _tile(hidden_TH, weight_VH, targets_T, *args)
    tiles = []
    for hidden, targets in zip(hidden_TH.split(rows), targets_T.split(rows), strict=True):
        # No dropout here, so there is no random state to restore for the second computation.
        tiles.append(
            checkpoint(_tile, hidden, weight_VH, targets, *args, use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat([t[0] for t in tiles]), torch.cat([t[1] for t in tiles])


def head_logits(
    hidden_TH: Tensor, weight_VH: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Logits [T, V] of the head, in float32 or wider."""
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    with torch.autocast(hidden_TH.device.type, enabled=False):
        logits = F.linear(hidden_TH.to(dtype), weight_VH.to(dtype), None if bias is None else bias.to(dtype))
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
    return logits


def token_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each target under softmax(logits / temperature) [T], and the detached entropy [T] in nats."""
    log_p = torch.log_softmax(logits_TV if temperature == 1.0 else logits_TV / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1), entropy


def _tile(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    return token_logprobs(head_logits(hidden, weight, bias, scale, softcap), targets, temperature)
