"""Layers with a recurrent state over packed rows: the gated delta rule, short convolutions and state spaces.

A mixer of transformers computes a batch of sequences. It reads the state that each starts from (the last inputs of its
convolution, and the recurrent state) from a cache, and writes the final states back. So the segments of a row are
computed as such batches: first those that others continue, then those that continue them, from their final states.
Backward adds up the gradients of all segments that continue a state. The mixer's own code computes everything, with the
kernels that transformers finds (flash-linear-attention, causal-conv1d, mamba-ssm), and with adapters on its layers.

A whole row in one call would be wrong: transformers' PyTorch functions have no boundaries in it.

S tokens of the row; B segments of a block, L tokens of the longest; H hidden size; R completions that are decoded.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cohort.models.attention import PackedAttention

States = tuple[Tensor, ...]  # [B, ...]: the last inputs of the convolution, and the recurrent state if there is one

# Types of layers in configs, and names of the classes of their mixers in transformers, without the architecture.
LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "moe", "mlp"})
_CLASSES = (
    *("GatedDeltaNet", "DeltaAttention", "ShortConv"),
    *("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer"),  # Mamba 2
)
MASK_ARGUMENT = "packed_mask"  # of mixers in models without attention
_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")  # names in versions of transformers
_segmented: set[type] = set()  # classes whose forward knows segments


def find_mixers(model: Any) -> list[nn.Module]:
    """Find the modules with a recurrent state that packed rows support."""
    return [m for m in model.modules() if type(m).__name__.endswith(_CLASSES) and _cache_argument(type(m)) is not None]


def support_segments(model: Any) -> None:
    """Let the mixers of a model compute packed rows. Without attention metadata they compute as before."""
    for mixer_class in {type(m) for m in find_mixers(model)} - _segmented:
        mixer_class.forward = _with_segments(mixer_class)
        _segmented.add(mixer_class)


def _cache_argument(mixer_class: type) -> str | None:
    """Name of the cache argument of a mixer whose other arguments are as expected; otherwise None."""
    parameters = inspect.signature(mixer_class.forward).parameters  # type: ignore[attr-defined]
    if not {"hidden_states", "attention_mask"} <= set(parameters):
        return None
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), None)


def _with_segments(mixer_class: Any) -> Callable[..., Tensor]:
    """The forward of a mixer, which computes a packed row if its attention mask carries metadata."""
    own, cache_argument = mixer_class.forward, _cache_argument(mixer_class)
    assert cache_argument is not None

    @wraps(own)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.pop(MASK_ARGUMENT, kwargs.get("attention_mask"))
        packed: PackedAttention | None = getattr(mask, "packed_attention", None)
        if packed is None:
            out: Tensor = own(self, hidden_states, *args, **kwargs)
            return out

        def compute(hidden_BLH: Tensor, states: States | None) -> tuple[Tensor, States]:
            cache = _StateCache(self.layer_idx, states)
            inputs = kwargs | {"hidden_states": hidden_BLH, "attention_mask": None, cache_argument: cache}
            out = own(self, *args, **inputs)
            return out, cache.states

        row, key = hidden_states.squeeze(0), state_key(self.layer_idx)
        if packed.decoding is None:
            return _mix_row(compute, row, packed, key).unsqueeze(0)
        with _limited_time_steps(self):
            return _decode(compute, row, packed, key).unsqueeze(0)

    return forward


def state_key(layer: int) -> int:
    """Key of a layer's states in a `KVCache`. A layer may have keys and values, too."""
    return -1 - layer


_Compute = Callable[[Tensor, States | None], tuple[Tensor, States]]


def _mix_row(compute: _Compute, row: Tensor, packed: PackedAttention, key: int) -> Tensor:
    """Compute a packed row [S, H]."""
    assert packed.attn_metadata is not None
    blocks = packed.attn_metadata.state_blocks(keep_all=packed.captured is not None)
    pool = [] if packed.prefix is None else [packed.prefix[key]]
    outs = []
    for block in blocks.blocks:
        segments, states = block.segments.take(row), None
        if len(block.starts):
            # indexed, because on GPUs the backward pass of `index_select` adds up in no fixed order
            states = tuple(torch.cat(parts)[block.starts] for parts in zip(*pool, strict=True))
            if segments.shape[1] == 1:  # mixers take it for decoding, which changes states in place
                segments = segments.expand(-1, 2, -1)
        out, final = compute(segments, states)
        outs.append(block.segments.unpad(out[:, : block.segments.longest]))
        if block.keeps:
            pool.append(final)
    if packed.captured is not None:
        packed.captured.setdefault(key, tuple(torch.cat(x)[blocks.kept] for x in zip(*pool, strict=True)))
    return torch.cat(outs).index_select(0, blocks.order)


def _decode(compute: _Compute, tokens: Tensor, packed: PackedAttention, key: int) -> Tensor:
    """Compute one new token of each completion, [R, H]."""
    assert packed.decoding is not None
    outs = []
    for batch, hidden in zip(packed.decoding, tokens.split([len(b) for b in packed.decoding]), strict=True):
        out, batch.states[key] = compute(hidden.unsqueeze(1), batch.states[key])
        outs.append(out.squeeze(1))
    return torch.cat(outs)


@contextmanager
def _limited_time_steps(mixer: Any) -> Iterator[None]:
    """Limit the time steps of single tokens in Mamba 2. transformers limits those of whole segments only (Nemotron-H).

    The projection's last outputs become time steps by a bias and softplus, so limits are inverted to act on them.
    """
    limits = getattr(mixer, "time_step_limit", (0.0, math.inf))
    if tuple(limits) == (0.0, math.inf):
        yield
        return
    least, most = (x if x > 30 else -math.inf if x <= 0 else math.log(math.expm1(x)) for x in limits)

    def limit(module: nn.Module, inputs: Any, projected: Tensor) -> None:
        steps = projected[..., -mixer.num_heads :]
        steps.copy_(steps.clamp(least - mixer.dt_bias, most - mixer.dt_bias))

    hook = mixer.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        hook.remove()


class _StateCache:
    """The cache of one call of a mixer. Training states are never changed in place, so backward can go through them.

    Versions of transformers differ in what they call: the cache, or its layer.
    """

    def __init__(self, layer: int, states: States | None):
        conv, recurrent = (*(states or ()), None, None)[:2]
        self._state = SimpleNamespace(conv_states={0: conv}, recurrent_states={0: recurrent}, record_past=False)
        self.layers = {layer: self._state}

    @property
    def states(self) -> States:
        """The states after the call."""
        return tuple(self._present())

    def _present(self) -> Iterator[Tensor]:
        for state in (self._state.conv_states[0], self._state.recurrent_states[0]):
            if state is not None:
                yield state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return self._state.conv_states[state_idx] is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = self._state.conv_states[state_idx]
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = self._state.recurrent_states[state_idx]
        return state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *, conv_kernel_size: int) -> Tensor:
        """Return the inputs [B, channels, L] of the convolution after those of the state, and keep the last ones."""
        before = self._state.conv_states[0]
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        missing = conv_kernel_size - inputs.shape[-1]
        if missing > 0:
            inputs = nn.functional.pad(inputs, (missing, 0))
        self._state.conv_states[0] = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int) -> Tensor:
        self._state.recurrent_states[0] = recurrent_states
        return recurrent_states
