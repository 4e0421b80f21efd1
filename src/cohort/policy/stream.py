"""A prompt that is computed once for completions that are computed in several micro-batches.

Its forward pass keeps its graph. Each micro-batch goes on from copies of its keys and values that end the graph, and
leaves its gradient on them. When all are through, one backward pass carries the sum of these gradients through the
prompt. By the chain rule that is the gradient of one micro-batch with all of them.

P tokens of the prompt, H features of the output.
"""

import torch
from torch import Tensor

from cohort.policy.attention import KeyValues


class Branch:
    """What a micro-batch goes on from."""

    def __init__(self, hidden_1H: Tensor, states: KeyValues):
        self.hidden_1H = _leaf(hidden_1H)  # after the prompt's last token
        self.states = KeyValues({layer: (_leaf(key), _leaf(value)) for layer, (key, value) in states.items()})

    def gradients(self) -> list[Tensor | None]:
        """What the micro-batch's backward pass has left."""
        return [leaf.grad for leaf in (self.hidden_1H, *_tensors(self.states))]


class OpenPrompt:
    """A prompt between its forward and its backward pass."""

    def __init__(self, hidden: Tensor, states: KeyValues):
        """After the forward pass.

        Args:
            hidden: [1, H] after the last token, with its graph; [0, H] of a rank that only keeps step.
            states: of every layer, with their graph.
        """
        self._hidden = hidden
        self._states = states
        self._gradients: list[Tensor | None] = [None] * (1 + len(_tensors(states)))

    def branch(self) -> Branch:
        """For one micro-batch."""
        return Branch(self._hidden, self._states)

    def add(self, branch: Branch) -> None:
        """Add the gradient of a micro-batch whose backward pass is through."""
        for i, gradient in enumerate(branch.gradients()):
            total = self._gradients[i]
            if total is not None and gradient is not None:
                total += gradient
            elif gradient is not None:  # sums are not rounded to 16 bits
                self._gradients[i] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def backward(self, own_loss: Tensor | None = None) -> None:
        """Carry what was added through the prompt.

        Args:
            own_loss: [], of the prompt's own forward pass, beside what went on from it.
        """
        tensors = [self._hidden, *_tensors(self._states)]
        pairs: list[tuple[Tensor, Tensor | None]] = [
            (t, g.to(t.dtype)) for t, g in zip(tensors, self._gradients, strict=True) if g is not None
        ]
        if not pairs and self._hidden.requires_grad:  # nothing went on from it: the pass is for the ranks that wait
            pairs = [(self._hidden, torch.zeros_like(self._hidden))]
        if own_loss is not None and own_loss.requires_grad:
            pairs.append((own_loss, None))
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _tensors(states: KeyValues) -> list[Tensor]:
    """Every layer's keys and values, in the order of the layers."""
    return [tensor for layer in sorted(states) for tensor in states[layer]]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
