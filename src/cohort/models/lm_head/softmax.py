"""Records of a softmax over logits: how raw logits are transformed, its running statistics, and inputs of its gradient.

T tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """Transform of raw logits before the softmax: `softcap * tanh((raw + bias) * scale / softcap) / temperature`."""

    temperature: float = 1.0
    scale: float = 1.0  # Cohere, Granite
    softcap: float | None = None  # Gemma 2

    @property
    def inner(self) -> float:
        """Factor of raw + bias, inside the tanh with a softcap."""
        return self.scale / (self.softcap if self.softcap is not None else self.temperature)

    @property
    def outer(self) -> float:
        """Factor of the tanh; 1 without a softcap."""
        return self.softcap / self.temperature if self.softcap is not None else 1.0

    @property
    def slope(self) -> float:
        """Derivative of a logit by its raw logit, without that of the tanh."""
        return self.scale / self.temperature

    def apply(self, raw_TV: Tensor, bias_V: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return logits, in `out` (may be `raw_TV`); or `raw_TV` itself if there is nothing to do."""
        logits = raw_TV
        if bias_V is not None:
            logits = torch.add(logits, bias_V, out=out)
        if self.inner != 1.0:
            logits = torch.mul(logits, self.inner, out=out)
        if self.softcap is not None:
            logits = torch.tanh(logits, out=out)
            logits = torch.mul(logits, self.outer, out=out)
        return logits


IDENTITY = LogitTransform()


class OnlineSoftmax(NamedTuple):
    """Online softmax statistics of the logits z of T rows over the tiles so far, updated in place."""

    maximum: Tensor  # [T]
    sum_exp: Tensor  # [T] sum of exp(z - maximum)
    sum_exp_z: Tensor | None  # [T] sum of exp(z - maximum) * (z - maximum); None without entropy
    target: Tensor  # [T] logit of the target; NaN until its tile

    @classmethod
    def start(cls, like_T: Tensor, *, dtype: torch.dtype, entropy: bool) -> "OnlineSoftmax":
        """Initial statistics. The maximum is finite, because -inf times a sum of 0 would be NaN."""
        zeros = torch.zeros(like_T.shape, dtype=dtype, device=like_T.device)
        lowest, unknown = torch.full_like(zeros, torch.finfo(dtype).min / 4), torch.full_like(zeros, torch.nan)
        return cls(lowest, zeros, zeros.clone() if entropy else None, unknown)

    def rows(self, tokens: slice) -> "OnlineSoftmax":
        """Return views of some rows."""
        return OnlineSoftmax._make(x if x is None else x[tokens] for x in self)

    def result(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return logprob of the target, entropy in nats (or None) and logsumexp, each [T]."""
        log_sum = self.sum_exp.log()
        logsumexp = self.maximum + log_sum
        entropy = None if self.sum_exp_z is None else log_sum - self.sum_exp_z / self.sum_exp
        # Subtract the maximum first: with large logits, a small logprob would lose digits.
        return (self.target - self.maximum) - log_sum, entropy, logsumexp


class RowGradients(NamedTuple):
    """Inputs of the gradient of T rows of logits."""

    logsumexp: Tensor  # [T]
    logprob_grad: Tensor  # [T] gradient of the target's logprob
    entropy: Tensor | None  # [T]; None if the entropy has no gradient
    entropy_grad: Tensor | None  # [T] gradient of the entropy

    def rows(self, tokens: slice | Tensor) -> "RowGradients":
        """Return some rows."""
        return RowGradients._make(x if x is None else x[tokens] for x in self)
