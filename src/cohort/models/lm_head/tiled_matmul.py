"""Matrix products of the language-model head, tile by tile: raw logits, and gradients of the operands.

T tokens, H hidden size, V vocabulary, R LoRA rank; t and v of one tile.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.plan import defaults


class Operands(NamedTuple):
    """Operands of the raw logits `hidden @ weight^T + lora_hidden @ lora_b^T + bias`."""

    hidden: Tensor  # [T, H] final hidden states
    weight: Tensor  # [V, H], gathered (not a DTensor)
    bias: Tensor | None = None  # [V]
    lora_hidden: Tensor | None = None  # [T, R] hidden states times the first factor of LoRA
    lora_b: Tensor | None = None  # [V, R] its second factor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logits and sums: float32, or float64 with float64 hidden states."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def casts_weight(self) -> bool:
        """Whether the weight of a tile is cast before it is multiplied."""
        factor = self.hidden.dtype if self.hidden.is_cuda else self.dtype
        return not self.weight.dtype == self.hidden.dtype == factor

    def rows(self, tokens: Tensor) -> "Operands":
        """Copy the operands of some tokens."""
        lora_hidden = None if self.lora_hidden is None else self.lora_hidden[tokens]
        return self._replace(hidden=self.hidden[tokens], lora_hidden=lora_hidden)

    def vocab_slice(self, ids: slice) -> "Operands":
        """Operands of a vocabulary slice, with the weight cast once for all tokens."""
        part = self.tile(slice(None), ids)
        return part._replace(weight=part.weight.to(self.hidden.dtype))

    def tile(self, tokens: slice, ids: slice) -> "Operands":
        """Views of the operands of a tile. The bias, in the dtype of logits, is added by `update_softmax`."""
        return Operands(
            self.hidden[tokens],
            self.weight[ids],
            None if self.bias is None else self.bias[ids].to(self.dtype),
            _part(self.lora_hidden, tokens),
            _part(self.lora_b, ids),
        )

    def products(self, out_TV: Tensor) -> Tensor:
        """Write raw logits without bias to `out_TV`."""
        hidden, weight = self._factors()
        if hidden.dtype == self.dtype:
            torch.mm(hidden, weight.T, out=out_TV)
        else:
            torch.mm(hidden, weight.T, out_dtype=self.dtype, out=out_TV)
        return self.add_lora(out_TV)

    def add_lora(self, out_TV: Tensor) -> Tensor:
        """Add the product of LoRA's factors, if any, to raw logits."""
        if self.lora_hidden is not None and self.lora_b is not None:
            out_TV.addmm_(self.lora_hidden.to(self.dtype), self.lora_b.to(self.dtype).T)
        return out_TV

    def add_gradients(self, sums: "GradientSums", grad_TV: Tensor) -> None:
        """Backpropagate the gradient of the raw logits of a tile, and add to the gradients of the operands."""
        hidden, weight = self._factors()
        if sums.hidden is not None or sums.weight is not None:
            factor = grad_TV.to(hidden.dtype)
            if sums.hidden is not None:
                _add_product(sums.hidden, factor, weight)
            if sums.weight is not None:
                _add_product(sums.weight, factor.T, hidden)
        if sums.bias is not None:
            sums.bias.add_(grad_TV.sum(dim=0))
        if sums.lora_hidden is not None and self.lora_b is not None:
            sums.lora_hidden.addmm_(grad_TV, self.lora_b.to(self.dtype))
        if sums.lora_b is not None and self.lora_hidden is not None:
            sums.lora_b.addmm_(grad_TV.T, self.lora_hidden.to(self.dtype))

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Hidden states and weight in the dtype of the product.

        That is the dtype of the hidden states on CUDA, which accumulates in float32. Elsewhere bfloat16 products would
        be rounded to bfloat16, so the factors are cast to float32 first.
        """
        hidden, weight = self.hidden, self.weight.to(self.hidden.dtype)
        return (hidden, weight) if hidden.is_cuda else (hidden.to(self.dtype), weight.to(self.dtype))


class GradientSums(NamedTuple):
    """Gradients of the operands, summed over tiles; None if not required."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    lora_hidden: Tensor | None
    lora_b: Tensor | None

    @classmethod
    def zeros(cls, operands: Operands, wanted: tuple[bool, ...], *, by_vocabulary: bool) -> "GradientSums":
        """Make zero gradients in the dtype of logits.

        Args:
            operands: operands of the head.
            wanted: whether each operand requires a gradient, in their order.
            by_vocabulary: each vocabulary slice is summed over all tokens in `vocab_slice`, so gradients of vocabulary
                size can have the dtype of their operand.
        """
        own = (False, by_vocabulary, by_vocabulary, False, by_vocabulary)
        return cls(
            *(
                torch.zeros_like(x, dtype=x.dtype if keep else operands.dtype) if x is not None and want else None
                for x, want, keep in zip(operands, wanted, own, strict=True)
            )
        )

    def tile(self, tokens: slice, ids: slice) -> "GradientSums":
        """Views of the gradients of a tile."""
        return GradientSums(
            _part(self.hidden, tokens),
            _part(self.weight, ids),
            _part(self.bias, ids),
            _part(self.lora_hidden, tokens),
            _part(self.lora_b, ids),
        )

    def vocab_slice(self, ids: slice, dtype: torch.dtype) -> "GradientSums":
        """Gradients of a vocabulary slice in `dtype`: views if they have it, otherwise zeros for `store`."""
        part = self.tile(slice(None), ids)
        return GradientSums(*(x if x is None or x.dtype == dtype else torch.zeros_like(x, dtype=dtype) for x in part))

    def store(self, ids: slice, part: "GradientSums") -> None:
        """Store the gradients of a vocabulary slice, rounded once to the dtype of the operands."""
        for mine, theirs in zip(self.tile(slice(None), ids), part, strict=True):
            if mine is not None and theirs is not None and mine.dtype != theirs.dtype:
                mine.copy_(theirs)

    def scatter(self, tokens: Tensor, num_tokens: int) -> "GradientSums":
        """Expand the gradients of some tokens to all `num_tokens`, with 0 for the others."""
        hidden, lora_hidden = (
            None if x is None else x.new_zeros(num_tokens, *x.shape[1:]).index_copy_(0, tokens, x)
            for x in (self.hidden, self.lora_hidden)
        )
        return self._replace(hidden=hidden, lora_hidden=lora_hidden)

    def rounded(self, operands: Operands) -> "GradientSums":
        """Cast to the dtypes of the operands."""
        return GradientSums(
            *(x if x is None or y is None else x.to(y.dtype) for x, y in zip(self, operands, strict=True))
        )


def tile_shape(operands: Operands, tile_elements: int) -> tuple[int, int]:
    """Tokens and token ids of a tile.

    At most `tile_elements` logits, and at most that many weights if they are cast.
    """
    t, v = defaults.tile_shape(len(operands.hidden), len(operands.weight), tile_elements)
    return t, min(v, weight_rows(operands, tile_elements))


def weight_rows(operands: Operands, tile_elements: int) -> int:
    """Token ids whose weights may be multiplied at a time; a cast copy counts as a tile."""
    num_ids, width = operands.weight.shape
    return defaults.copied_weight_rows(num_ids, width, tile_elements) if operands.casts_weight else num_ids


def gradient_rows(operands: Operands, tile_elements: int) -> int:
    """Token ids whose gradients may be computed at a time; a copy in another dtype counts as a tile."""
    num_ids, width = operands.weight.shape
    copies = operands.casts_weight or operands.hidden.dtype != operands.dtype
    return defaults.copied_weight_rows(num_ids, width, tile_elements) if copies else num_ids


def chunk_slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `range(count)`."""
    return (slice(start, min(count, start + size)) for start in range(0, count, max(1, size)))


def _part(x: Tensor | None, span: slice) -> Tensor | None:
    return None if x is None else x[span]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))
