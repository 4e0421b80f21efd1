"""Activation memory: gradient checkpointing, full or selective, and offloading to host memory.

Checkpointing recomputes activations in backward. Offloading keeps them in host memory.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models.host_memory import PinnedStack
from cohort.plan.defaults import checkpointing

_MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm"})  # activations times weights
_MIN_BYTES = 1 << 20  # smaller tensors are not worth a transfer
_PREFETCH = 4  # storages fetched at a time, including the one needed now


def check_offload(config: ModelConfig, device: torch.device) -> None:
    """Check that activation offloading makes sense on this device.

    Raises:
        UserError: the device is the CPU, whose activations are in host memory anyway.
    """
    if config.activation_offload and device.type == "cpu":
        raise UserError(
            "model.activation_offload: true has no effect on CPU, where activations already are in host memory; "
            "remove it, or save memory with model.gradient_checkpointing: true (or selective)"
        )


def prepare_activations(model: Any, config: ModelConfig) -> None:
    """Apply the checkpointing and offloading settings of the `model` section. Call before sharding.

    Raises:
        UserError: the model does not support them.
    """
    kind = checkpointing(config)
    if kind:
        enable_gradient_checkpointing(model, selective=kind == "selective")
    if config.activation_offload:
        if kind and not hooks_are_outside_of_checkpoints():
            raise UserError(
                "model.activation_offload: true with model.gradient_checkpointing needs transformers 5.23 or newer, "
                f"and this is {version('transformers')}, with which it would move what backward recomputes; update it, "
                "or set model.gradient_checkpointing: false or model.activation_offload: false"
            )
        enable_offload(model)


def hooks_are_outside_of_checkpoints() -> bool:
    """Whether transformers checkpoints the `forward` of a layer, and not the hooks around it: from 5.23 on."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" not in vars(GradientCheckpointingLayer)


# Checkpointing


def enable_gradient_checkpointing(model: Any, *, selective: bool = False) -> None:
    """Recompute the activations of each layer in backward.

    Args:
        model: a transformers model.
        selective: keep the outputs of attention and of its projections, see `_SelectivePolicy`.
    """
    # renamed in transformers 5.2x, where the old name warns
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False} | ({"context_fn": _selective_contexts} if selective else {}))


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for the forward pass of a layer and for its recomputation."""
    return create_selective_checkpoint_contexts(_SelectivePolicy())


class _SelectivePolicy:
    """Checkpoint policy of one layer: save the expensive operations up to the output projection of attention.

    Attention is quadratic in the sequence length, so it is always saved, whichever backend computes it: an operation
    counts as attention if its name contains "attention" or "attn", so the name of a new attention kernel must
    contain one of them.
    The four projections around attention are narrow, and backward needs three of them anyway. Products of the MLP are
    about four times as wide and are recomputed.
    """

    def __init__(self) -> None:
        # keyed by `is_recompute`: some versions of PyTorch also consult the policy while recomputing
        self._attended = {False: False, True: False}  # attention has been seen
        self._projected = {False: False, True: False}  # and so has the projection after it

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, again = operation.name(), context.is_recompute
        if "attention" in name or "attn" in name:
            self._attended[again] = True
            return CheckpointPolicy.MUST_SAVE
        if name in _MATRIX_PRODUCTS and not self._projected[again]:
            self._projected[again] = self._attended[again]
            return CheckpointPolicy.PREFER_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


# Offloading


def enable_offload(model: Any, *, device_type: str = "cuda", min_bytes: int = _MIN_BYTES) -> "ActivationOffload":
    """Keep the activations that layers save for backward in host memory.

    Args:
        model: a transformers model.
        device_type: offload tensors of this device type only.
        min_bytes: offload tensors of at least this size only.

    Raises:
        UserError: the model does not name its layers.
    """
    offload = ActivationOffload(
        {tuple(p.shape) for p in model.parameters() if p.ndim >= 2}, device_type=device_type, min_bytes=min_bytes
    )
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise UserError(
            "model.activation_offload: true is not supported by this model, which does not name its layers "
            "(_no_split_modules); remove it, or set model.gradient_checkpointing: true"
        )
    for layer in layers:
        layer.register_forward_pre_hook(offload.enter)
        layer.register_forward_hook(offload.leave, always_call=True)
    return offload


class ActivationOffload:
    """Move saved activations to host memory, and back before backward needs them.

    A storage is moved once, however many of its views are saved. On CUDA, copies in each direction have their own
    stream and overlap with computation; storages are prefetched in backward order. Host memory is pinned and reused by
    the next micro-batch. Weights stay on the device. They are recognized by their storage, and autocast's copies of
    them by their shape. (An activation that happens to have the shape of a weight stays too, which only costs memory.)
    With gradient checkpointing, a layer saves only its input through these hooks.
    """

    def __init__(self, weight_shapes: set[tuple[int, ...]], *, device_type: str, min_bytes: int):
        shapes = weight_shapes | {shape[1:] for shape in weight_shapes if len(shape) > 2}  # a single expert
        self._weight_shapes = shapes | {(*shape[:-2], shape[-1], shape[-2]) for shape in shapes}
        self._weights: set[int] = set()  # storages of the current layer
        self._device_type = device_type
        self._min_bytes = min_bytes
        self._moved: weakref.WeakValueDictionary[tuple[int, int], _OffloadedStorage] = weakref.WeakValueDictionary()
        self._last: Callable[[], _OffloadedStorage | None] = lambda: None
        self._copy_streams: dict[torch.device, _CopyStreams] = {}
        self._open: list[saved_tensors_hooks] = []
        self.num_bytes_moved = 0  # to the host, in total

    def enter(self, layer: nn.Module, *_: Any) -> None:
        """Forward pre-hook of a layer. Sharded weights have been gathered."""
        self._weights = {p.untyped_storage()._cdata for p in layer.parameters() if not isinstance(p, DTensor)}
        hooks = saved_tensors_hooks(self.pack, _unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def leave(self, *_: Any) -> None:
        """Forward hook of a layer. Also called if it failed, possibly before `enter`."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def pack(self, tensor: Tensor) -> "Tensor | _SavedView":
        """Offload a saved tensor, unless it is to stay on the device."""
        stays = (
            tensor.device.type != self._device_type
            or type(tensor) is not Tensor
            or tensor.layout != torch.strided
            or tensor.nbytes < self._min_bytes
            or tuple(tensor.shape) in self._weight_shapes
            or tensor.untyped_storage()._cdata in self._weights
        )
        return tensor if stays else _SavedView(self._move(tensor), tensor)

    def _move(self, tensor: Tensor) -> "_OffloadedStorage":
        """Offload the storage of a tensor, unless that has been done."""
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor._version)
        moved = self._moved.get(key)
        if moved is None:
            if tensor.device not in self._copy_streams:
                self._copy_streams[tensor.device] = _CopyStreams(tensor.device)
            moved = _OffloadedStorage(tensor, storage, self._copy_streams[tensor.device], self._last)
            self._moved[key], self._last = moved, weakref.ref(moved)
            self.num_bytes_moved += moved.num_bytes
        moved.num_waiting += 1
        return moved


class _CopyStreams:
    """Copy streams of a device in each direction, and the pinned host memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self.module = torch.get_device_module(device)
        on = {} if device.type == "cpu" else {"device": device}
        self.to_host, self.to_device = self.module.Stream(**on), self.module.Stream(**on)
        self.host = PinnedStack(device)


class _OffloadedStorage:
    """A storage in host memory, copied back to its device while backward uses it."""

    def __init__(
        self,
        tensor: Tensor,
        storage: StorageWeakRef,
        streams: _CopyStreams,
        before: "Callable[[], _OffloadedStorage | None]",
    ):
        self.before = before  # storage offloaded before this one, which backward needs next
        self.num_waiting = 0  # saved views that backward has not used yet
        self._copy_streams = streams
        self._storage = storage  # keeps the address from being reused
        self._back: Tensor | None = None
        self._on_device: Any = None
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._host = streams.host.take(whole.nbytes, self)
        self.num_bytes = whole.nbytes
        streams.to_host.wait_stream(streams.module.current_stream(streams.device))
        streams.to_host.wait_stream(streams.to_device)  # may still be reading this host memory
        with streams.module.stream(streams.to_host):
            for place, part in self._chunks(whole):
                place.copy_(part, non_blocking=True)
            self._on_host = streams.to_host.record_event()
        _record_stream(whole, streams.to_host)

    def fetch(self) -> None:
        """Start copying it back, unless that has been started."""
        if self._back is None:
            stream = self._copy_streams.to_device
            stream.wait_event(self._on_host)
            with self._copy_streams.module.stream(stream):
                self._back = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._copy_streams.device)
                for place, part in self._chunks(self._back):
                    part.copy_(place, non_blocking=True)
                self._on_device = stream.record_event()

    def take(self) -> Tensor:
        """Return its bytes on the device, ready for the current stream. The last user drops them."""
        self.fetch()
        back, stream = self._back, self._copy_streams.module.current_stream(self._copy_streams.device)
        assert back is not None
        stream.wait_event(self._on_device)
        _record_stream(back, stream)
        self.num_waiting -= 1
        if self.num_waiting <= 0:
            self._back = None
        return back

    def _chunks(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the chunks on the host with the same bytes of the storage on the device."""
        return zip(self._host, whole.split([chunk.nbytes for chunk in self._host]), strict=True)


class _SavedView:
    """A saved tensor, as a view of an offloaded storage."""

    def __init__(self, moved: _OffloadedStorage, tensor: Tensor):
        self._moved = moved
        self._view = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        """Restore the tensor on the device, with its strides."""
        dtype, offset, shape, stride = self._view
        ahead: _OffloadedStorage | None = self._moved
        for _ in range(_PREFETCH):
            if ahead is None:
                break
            if ahead.num_waiting > 0:
                ahead.fetch()
            ahead = ahead.before()
        whole = self._moved.take()
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), offset, shape, stride)


def _unpack(packed: Tensor | _SavedView) -> Tensor:
    return packed.tensor() if isinstance(packed, _SavedView) else packed


def _record_stream(tensor: Tensor, stream: Any) -> None:
    """Keep the memory of a tensor from being reused before `stream` has caught up."""
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)
