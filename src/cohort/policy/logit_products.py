"""The matrix products of a language-model head, tile by tile: raw logits from its operands, and their gradients back.

T tokens, H hidden, V vocabulary, R rank of an adapter; t and v of one tile.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.plan import tiles


class Operands(NamedTuple):
    """What raw logits are made of: `hidden @ weight^T + features @ adapter^T + bias`."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    features: Tensor | None  # [T, R]
    adapter: Tensor | None  # [V, R]

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and of sums: float32, or float64 where the hidden states are."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def casts_weight(self) -> bool:
        """Whether the weight of a tile is copied to another dtype before it is multiplied."""
        factor = self.hidden.dtype if self.hidden.is_cuda else self.dtype
        return not self.weight.dtype == self.hidden.dtype == factor

    def rows(self, tokens: Tensor) -> "Operands":
        """The operands of some tokens, copied."""
        features = None if self.features is None else self.features[tokens]
        return self._replace(hidden=self.hidden[tokens], features=features)

    def of_ids(self, ids: slice) -> "Operands":
        """The operands of some token ids, whose weight is cast once for all tokens."""
        part = self.tile(slice(None), ids)
        return part._replace(weight=part.weight.to(self.hidden.dtype))

    def tile(self, tokens: slice, ids: slice) -> "Operands":
        """Views of the operands of one tile; the bias is the fold's to add, in the dtype of logits."""
        return Operands(
            self.hidden[tokens],
            self.weight[ids],
            None if self.bias is None else self.bias[ids].to(self.dtype),
            _part(self.features, tokens),
            _part(self.adapter, ids),
        )

    def products(self, out_TV: Tensor) -> Tensor:
        """Raw logits without the bias, written to `out_TV`."""
        hidden, weight = self._factors()
        if hidden.dtype == self.dtype:
            torch.mm(hidden, weight.T, out=out_TV)
        else:
            torch.mm(hidden, weight.T, out_dtype=self.dtype, out=out_TV)
        if self.features is not None and self.adapter is not None:
            out_TV.addmm_(self.features.to(self.dtype), self.adapter.to(self.dtype).T)
        return out_TV

    def add_gradients(self, sums: "GradientSums", grad_TV: Tensor) -> None:
        """Add what the gradient by raw logits gives each operand to the sums of the same tokens and ids."""
        hidden, weight = self._factors()
        if sums.hidden is not None or sums.weight is not None:
            factor = grad_TV.to(hidden.dtype)
            if sums.hidden is not None:
                _add_product(sums.hidden, factor, weight)
            if sums.weight is not None:
                _add_product(sums.weight, factor.T, hidden)
        if sums.bias is not None:
            sums.bias.add_(grad_TV.sum(dim=0))
        if sums.features is not None and self.adapter is not None:
            sums.features.addmm_(grad_TV, self.adapter.to(self.dtype))
        if sums.adapter is not None and self.features is not None:
            sums.adapter.addmm_(grad_TV.T, self.features.to(self.dtype))

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Hidden states and weight as they are multiplied.

        Both in the dtype of the hidden states; CUDA sums such products in float32. Elsewhere a product of bfloat16
        factors would be rounded to bfloat16, so the factors become float32 first.
        """
        hidden, weight = self.hidden, self.weight.to(self.hidden.dtype)
        return (hidden, weight) if hidden.is_cuda else (hidden.to(self.dtype), weight.to(self.dtype))


class GradientSums(NamedTuple):
    """Gradients by the operands, summed over tiles; None where none is wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    features: Tensor | None
    adapter: Tensor | None

    @classmethod
    def zeros(cls, operands: Operands, wanted: tuple[bool, ...], *, by_vocabulary: bool) -> "GradientSums":
        """Before any tile, in the dtype of logits.

        Args:
            operands: of the head.
            wanted: of which operand a gradient is wanted, in their order.
            by_vocabulary: each vocabulary tile is summed over all tokens at once, in `of_vocabulary`, so that what
                has the vocabulary's size can be in its operand's own dtype.
        """
        own = (False, by_vocabulary, by_vocabulary, False, by_vocabulary)
        return cls(
            *(
                torch.zeros_like(x, dtype=x.dtype if keep else operands.dtype) if x is not None and want else None
                for x, want, keep in zip(operands, wanted, own, strict=True)
            )
        )

    def tile(self, tokens: slice, ids: slice) -> "GradientSums":
        """Views of the sums of one tile."""
        return GradientSums(
            _part(self.hidden, tokens),
            _part(self.weight, ids),
            _part(self.bias, ids),
            _part(self.features, tokens),
            _part(self.adapter, ids),
        )

    def of_vocabulary(self, ids: slice, dtype: torch.dtype) -> "GradientSums":
        """Sums of one vocabulary tile in `dtype`: views where they have it, otherwise zeros to be stored later."""
        part = self.tile(slice(None), ids)
        return GradientSums(*(x if x is None or x.dtype == dtype else torch.zeros_like(x, dtype=dtype) for x in part))

    def store(self, ids: slice, part: "GradientSums") -> None:
        """Take the sums of a vocabulary tile, rounded once to the dtype of the operands."""
        for mine, theirs in zip(self.tile(slice(None), ids), part, strict=True):
            if mine is not None and theirs is not None and mine.dtype != theirs.dtype:
                mine.copy_(theirs)

    def scatter(self, tokens: Tensor, num_tokens: int) -> "GradientSums":
        """Of some tokens' sums, those of all tokens: the others have 0."""
        hidden, features = (
            None if x is None else x.new_zeros(num_tokens, *x.shape[1:]).index_copy_(0, tokens, x)
            for x in (self.hidden, self.features)
        )
        return self._replace(hidden=hidden, features=features)

    def rounded(self, operands: Operands) -> "GradientSums":
        """In the dtypes of the operands."""
        return GradientSums(
            *(x if x is None or y is None else x.to(y.dtype) for x, y in zip(self, operands, strict=True))
        )


def tile_shape(operands: Operands, tile_elements: int) -> tuple[int, int]:
    """Tokens and token ids of a tile: at most `tile_elements` logits, and as many weights where these are cast."""
    t, v = tiles.tile_shape(len(operands.hidden), len(operands.weight), tile_elements)
    return t, min(v, weight_rows(operands, tile_elements))


def weight_rows(operands: Operands, tile_elements: int) -> int:
    """How many token ids' weights may be multiplied at a time; a copy in another dtype counts as a tile."""
    num_ids, width = operands.weight.shape
    return tiles.copied_weight_rows(num_ids, width, tile_elements) if operands.casts_weight else num_ids


def gradient_rows(operands: Operands, tile_elements: int) -> int:
    """How many token ids' gradients may be made at a time: in another dtype than the factors' they are a copy too."""
    num_ids, width = operands.weight.shape
    copies = operands.casts_weight or operands.hidden.dtype != operands.dtype
    return tiles.copied_weight_rows(num_ids, width, tile_elements) if copies else num_ids


def spans(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count`."""
    return (slice(start, min(count, start + size)) for start in range(0, count, max(1, size)))


def _part(x: Tensor | None, span: slice) -> Tensor | None:
    return None if x is None else x[span]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed and kept in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))
