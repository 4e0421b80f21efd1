"""Shared prefixes: a prompt computed once for completions in several micro-batches.

The forward pass of the prompt keeps its graph. Each micro-batch starts from detached copies of its keys and values, and
leaves gradients on them. Then one backward pass of the prompt takes the sum of these gradients. By the chain rule, the
result is the gradient of one micro-batch with all completions.

P tokens of the prompt, H hidden size.
"""

import torch
from torch import Tensor

from cohort.models.attention import KVCache


class PrefixState:
    """Detached prefix that one micro-batch continues, and that collects its gradients."""

    def __init__(self, hidden_1H: Tensor, states: KVCache):
        self.hidden_1H = _leaf(hidden_1H)  # at the last token of the prompt
        self.states = KVCache({layer: (_leaf(key), _leaf(value)) for layer, (key, value) in states.items()})

    def gradients(self) -> list[Tensor | None]:
        """Gradients left by the backward pass of the micro-batch."""
        return [leaf.grad for leaf in (self.hidden_1H, *_tensors(self.states))]


class SharedPrefix:
    """A prompt after its forward and before its backward pass."""

    def __init__(self, hidden: Tensor, states: KVCache):
        """Start with no gradients.

        Args:
            hidden: [1, H] at the last token, with graph; [0, H] on a rank that has no prompt to compute.
            states: keys and values of every layer, with graph.
        """
        self._hidden = hidden
        self._states = states
        self._gradients: list[Tensor | None] = [None] * (1 + len(_tensors(states)))

    def detach(self) -> PrefixState:
        """Return a detached copy for one micro-batch."""
        return PrefixState(self._hidden, self._states)

    def add(self, prefix: PrefixState) -> None:
        """Add the gradients of a micro-batch after its backward pass."""
        for i, gradient in enumerate(prefix.gradients()):
            total = self._gradients[i]
            if total is not None and gradient is not None:
                total += gradient
            elif gradient is not None:  # accumulate in float32
                self._gradients[i] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def backward(self, own_loss: Tensor | None = None) -> None:
        """Backpropagate the added gradients through the prompt.

        Args:
            own_loss: [], loss of the prompt's own forward pass, such as that of routers.
        """
        tensors = [self._hidden, *_tensors(self._states)]
        pairs: list[tuple[Tensor, Tensor | None]] = [
            (t, g.to(t.dtype)) for t, g in zip(tensors, self._gradients, strict=True) if g is not None
        ]
        if not pairs and self._hidden.requires_grad:  # no completions: keeps collectives in step with other ranks
            pairs = [(self._hidden, torch.zeros_like(self._hidden))]
        if own_loss is not None and own_loss.requires_grad:
            pairs.append((own_loss, None))
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _tensors(states: KVCache) -> list[Tensor]:
    """Keys and values of all layers, in layer order."""
    return [tensor for layer in sorted(states) for tensor in states[layer]]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
