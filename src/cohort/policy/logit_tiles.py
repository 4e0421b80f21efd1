"""What is done with one tile of logits: softmax statistics forward, the gradient in place backward.

A tile holds raw logits (hidden states times weights) of t tokens and v consecutive token ids. It is read by `fold` and
overwritten by `differentiate_`. Both have a plain form, below, and a fused one for GPUs (`triton_tiles.py`).

T tokens, V vocabulary; t and v of one tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cohort.policy.trial import numbers, warn_of, works

# The plain form goes through a tile in blocks of rows, so that its temporaries stay small and, on a CPU, in cache.
BLOCK_ELEMENTS = {"cpu": 1 << 18}
OTHER_BLOCK_ELEMENTS = 1 << 22  # elsewhere a block has to be worth its kernel launches

use_triton = True  # where there is Triton and it works, float32 tiles on CUDA go through its kernels
_TRITON, _PLAIN = "Triton's kernels for the language-model head", "PyTorch's operations are used"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """From raw logits to those of the softmax: `softcap * tanh((raw + bias) * scale / softcap) / temperature`."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @property
    def inner(self) -> float:
        """The factor of raw + bias: inside the tanh, or the only one."""
        return self.scale / (self.softcap if self.softcap is not None else self.temperature)

    @property
    def outer(self) -> float:
        """The factor of the tanh; 1 without a softcap."""
        return self.softcap / self.temperature if self.softcap is not None else 1.0

    @property
    def slope(self) -> float:
        """Derivative of a logit by its raw logit, but for the tanh's."""
        return self.scale / self.temperature

    def apply(self, raw_TV: Tensor, bias_V: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Logits, written to `out` (which may be `raw_TV`) where there is anything to do; otherwise `raw_TV` itself."""
        logits = raw_TV
        if bias_V is not None:
            logits = torch.add(logits, bias_V, out=out)
        if self.inner != 1.0:
            logits = torch.mul(logits, self.inner, out=out)
        if self.softcap is not None:
            logits = torch.tanh(logits, out=out)
            logits = torch.mul(logits, self.outer, out=out)
        return logits


class RunningSoftmax(NamedTuple):
    """Statistics of the logits z of T rows over the tiles seen so far; `fold` updates them in place."""

    maximum: Tensor  # [T]
    sum_exp: Tensor  # [T] sum of exp(z - maximum)
    sum_exp_z: Tensor | None  # [T] sum of exp(z - maximum) * (z - maximum); None where no entropy is wanted
    target: Tensor  # [T] logit of the target; NaN until it is found

    @classmethod
    def start(cls, like_T: Tensor, *, dtype: torch.dtype, entropy: bool) -> "RunningSoftmax":
        """Before any tile. The maximum is finite, since -inf times a sum of 0 would be NaN."""
        zeros = torch.zeros(like_T.shape, dtype=dtype, device=like_T.device)
        lowest, unknown = torch.full_like(zeros, torch.finfo(dtype).min / 4), torch.full_like(zeros, torch.nan)
        return cls(lowest, zeros, zeros.clone() if entropy else None, unknown)

    def rows(self, tokens: slice) -> "RunningSoftmax":
        """Views of some rows."""
        return RunningSoftmax._make(x if x is None else x[tokens] for x in self)

    def result(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logprob of the target, entropy in nats where wanted, and logsumexp, each [T]."""
        log_sum = self.sum_exp.log()
        logsumexp = self.maximum + log_sum
        entropy = None if self.sum_exp_z is None else log_sum - self.sum_exp_z / self.sum_exp
        # The maximum goes first: a sum of two large logits would lose digits of a small logprob.
        return (self.target - self.maximum) - log_sum, entropy, logsumexp


class RowGradients(NamedTuple):
    """What the gradient of T rows of logits is made of."""

    logsumexp: Tensor  # [T]
    logprob_grad: Tensor  # [T] of the loss by the target's logprob
    entropy: Tensor | None  # [T], where the entropy has a gradient
    entropy_grad: Tensor | None  # [T] of the loss by the entropy

    def rows(self, tokens: slice | Tensor) -> "RowGradients":
        """Some rows."""
        return RowGradients._make(x if x is None else x[tokens] for x in self)


def fold(
    tile_tv: Tensor, running: RunningSoftmax, columns_t: Tensor, bias_v: Tensor | None, transform: LogitTransform
) -> None:
    """Add a tile to the running statistics of its rows.

    Args:
        tile_tv: [t, v] raw logits; left as they are.
        running: of these t rows.
        columns_t: [t] int64, the tile's column of each target; not one of [0, v) where it is in another tile.
        bias_v: [v] of the head for these columns.
        transform: from raw logits to those of the softmax.
    """
    args = (tile_tv, running, columns_t, bias_v, transform)
    if not _run_fused("fold", running.sum_exp_z is not None, *args):
        _fold(*args)


def differentiate_(
    tile_tv: Tensor, rows: RowGradients, columns_t: Tensor, bias_v: Tensor | None, transform: LogitTransform
) -> None:
    """Overwrite raw logits with the gradient of the loss by them; the arguments are those of `fold`.

    With p the softmax, H its entropy, g and e the gradients by logprob and entropy, a logit's gradient is
    g (1[target] - p) - e p (log p + H).
    """
    args = (tile_tv, rows, columns_t, bias_v, transform)
    if not _run_fused("differentiate_", rows.entropy is not None and rows.entropy_grad is not None, *args):
        _differentiate_(*args)


def try_triton(device: torch.device, *, bias: bool, softcap: bool) -> None:
    """Find out before a run whether Triton works on a GPU; if it does not, a warning says so and it is not used.

    Args:
        device: where tiles will be.
        bias: whether the head has one.
        softcap: whether its logits are softcapped.
    """
    for entropy in (True, False):
        _working(device, bias, softcap, entropy)


def _run_fused(name: str, entropy: bool, *args: Any) -> bool:
    """Go through a tile with the function of that name in `triton_tiles`, or leave it as it is; whether it did."""
    tile, bias, transform = args[0], args[3], args[4]
    if not _suits_triton(tile):
        return False
    kernels = _working(tile.device, bias is not None, transform.softcap is not None, entropy)
    if kernels is None:
        return False
    try:
        getattr(kernels, name)(*args)
    except (
        kernels.TritonError
    ) as error:  # nothing has been launched: above all it needs more shared memory than is there
        _give_up()
        warn_of(_TRITON, _PLAIN, error)
        return False
    return True


def _suits_triton(tile: Tensor) -> bool:
    return tile.is_cuda and tile.dtype == torch.float32


def _working(device: torch.device, bias: bool, softcap: bool, entropy: bool) -> ModuleType | None:
    """The fused form, unless it has failed or fails here on a small tile, on which each variant is tried once."""
    if not use_triton or (kernels := _triton()) is None:
        return None
    if not _works(device, bias, softcap, entropy):
        _give_up()
        return None
    return kernels


def _give_up() -> None:
    global use_triton
    use_triton = False


@cache
def _triton() -> ModuleType | None:
    try:
        from cohort.policy import triton_tiles
    except ImportError:
        return None
    return triton_tiles


@cache
def _works(device: torch.device, bias: bool, softcap: bool, entropy: bool) -> bool:
    def compare() -> Iterator[tuple[Tensor, Tensor]]:
        tile, bias_v = numbers(2, 5008, device=device, dtype=torch.float32), None  # two blocks of columns
        if bias:
            bias_v = numbers(5008, device=device, dtype=torch.float32)
        transform = LogitTransform(temperature=0.7, softcap=2.0 if softcap else None)
        columns = torch.tensor([3, 5000], device=device)
        kernels = _triton()
        assert kernels is not None
        outcomes = []
        for fold_with, differentiate_with in ((kernels.fold, kernels.differentiate_), (_fold, _differentiate_)):
            running = RunningSoftmax.start(columns, dtype=torch.float32, entropy=entropy)
            fold_with(tile, running, columns, bias_v, transform)
            logprobs, entropies, logsumexp = running.result()
            grads = numbers(2, device=device, dtype=torch.float32) + 1.0
            rows = RowGradients(logsumexp, grads, entropies, grads if entropy else None)
            gradient = tile.clone()
            differentiate_with(gradient, rows, columns, bias_v, transform)
            outcomes.append((logprobs, logsumexp, gradient, *([] if entropies is None else [entropies])))
        yield from zip(*outcomes, strict=True)

    return works(_TRITON, _PLAIN, compare)


def _fold(
    tile: Tensor, running: RunningSoftmax, columns: Tensor, bias: Tensor | None, transform: LogitTransform
) -> None:
    inside, column = _inside(columns, tile.shape[1])
    for tokens, first, second in _blocks(tile):
        logits = transform.apply(tile[tokens], bias, out=first)
        maximum, sum_exp, sum_exp_z, target = running.rows(tokens)
        target.copy_(torch.where(inside[tokens], logits.gather(1, column[tokens]).squeeze(1), target))
        new_maximum = torch.maximum(maximum, logits.amax(dim=1))
        change = maximum - new_maximum
        kept = change.exp()
        centred = torch.sub(logits, new_maximum.unsqueeze(1), out=first)
        exp = torch.exp(centred, out=first if sum_exp_z is None else second)
        exp_sum = exp.sum(dim=1)
        if sum_exp_z is not None:
            sum_exp_z.addcmul_(sum_exp, change).mul_(kept).add_(exp.mul_(centred).sum(dim=1))
        sum_exp.mul_(kept).add_(exp_sum)
        maximum.copy_(new_maximum)


def _differentiate_(
    tile: Tensor, rows: RowGradients, columns: Tensor, bias: Tensor | None, transform: LogitTransform
) -> None:
    inside, column = _inside(columns, tile.shape[1])
    logprob_grad = rows.logprob_grad * transform.slope
    at_target = torch.where(inside, logprob_grad, 0.0).unsqueeze(1)
    for tokens, first, second in _blocks(tile):
        grad = logits = transform.apply(tile[tokens], bias, out=tile[tokens])
        if transform.softcap is not None:
            tanh = torch.mul(logits, 1 / transform.outer, out=second)
            slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1, out=second)
        log_p = grad.sub_(rows.logsumexp[tokens].unsqueeze(1))
        g = logprob_grad[tokens]
        if rows.entropy is None or rows.entropy_grad is None:
            grad = log_p.exp_().mul_(-g.unsqueeze(1))
        else:
            e = rows.entropy_grad[tokens] * transform.slope
            p = torch.exp(log_p, out=first)
            grad = log_p.mul_(-e.unsqueeze(1)).sub_((e * rows.entropy[tokens] + g).unsqueeze(1)).mul_(p)
        grad.scatter_add_(1, column[tokens], at_target[tokens])
        if transform.softcap is not None:
            grad.mul_(slope)


def _inside(columns: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Whether each target is in the tile [t], and a column of the tile [t, 1], which is the target's if it is."""
    return (columns >= 0) & (columns < num_ids), columns.clamp(0, num_ids - 1).unsqueeze(1)


def _blocks(tile: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of rows, each with scratch space of twice its size."""
    num_tokens, num_ids = tile.shape
    size = max(1, BLOCK_ELEMENTS.get(tile.device.type, OTHER_BLOCK_ELEMENTS) // num_ids)
    first, second = (tile.new_empty(min(size, num_tokens), num_ids) for _ in range(2))
    for start in range(0, num_tokens, size):
        count = min(size, num_tokens - start)
        yield slice(start, start + count), first[:count], second[:count]
