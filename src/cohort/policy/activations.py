"""What a model keeps from forward to backward: all of it, some of it, or the layers' inputs; on the device or the host.

Checkpointing computes again what it does not keep. Offloading keeps, in host memory.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.policy.pinning import PinnedStack

_MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm"})  # of tokens with a weight
_MIN_BYTES = 1 << 20  # less than this is not worth a transfer
_AHEAD = 4  # storages on their way back at a time, with the one that is wanted


def check_offload(config: ModelConfig, device: torch.device) -> None:
    """Compare the `model` section with the device of the run.

    Raises:
        UserError: activations are to go to host memory, and they are there already.
    """
    if config.activation_offload and device.type == "cpu":
        raise UserError(
            "model.activation_offload: true: has no effect on a CPU, whose activations are in host memory already; "
            "remove it, or set model.gradient_checkpointing: true (or selective) to keep fewer of them"
        )


def prepare_activations(model: Any, config: ModelConfig) -> None:
    """Have the model keep for backward what the configuration says. Before it is sharded.

    Raises:
        UserError: the model does not know how.
    """
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model, selective=config.gradient_checkpointing == "selective")
    if config.activation_offload:
        enable_offload(model)


# Checkpointing


def enable_gradient_checkpointing(model: Any, *, selective: bool = False) -> None:
    """Have the model compute its layers' activations again in backward.

    Args:
        model: of the Hugging Face library.
        selective: keep attention's outputs and what goes into and comes out of it, which `_Selection` chooses.
    """
    # renamed in transformers 5.2x; the old name warns there and is all that older ones have
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False} | ({"context_fn": _selective_contexts} if selective else {}))


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one layer's forward and of its second computation."""
    return create_selective_checkpoint_contexts(_Selection())


class _Selection:
    """What one layer keeps: all that is costly up to the end of its attention, and of its MLP nothing.

    Attention is quadratic in a sequence's length, so it is kept always, whatever computes it: every operation with
    attention in its name: the library's and its custom ones. (Flex attention on CUDA is compiled and not seen: there
    all products are kept, and attention is computed twice.) Among products, each costs two operations per feature of
    its input for each number kept; the four around attention are narrow, and attention's backward wants
    three of them in any case. The MLP's are some four times as wide. The last product of a layer is in nothing that
    backward looks at, and checkpointing stops before it.
    """

    def __init__(self) -> None:
        # Of the forward pass and of the second computation, which some versions of PyTorch ask about too:
        self._attended = {False: False, True: False}  # attention is done
        self._projected = {False: False, True: False}  # and so is the product that follows it

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


def enable_offload(model: Any, *, device_type: str = "cuda", min_bytes: int = _MIN_BYTES) -> "Offload":
    """Have the model's layers keep what they save for backward in host memory.

    Args:
        model: of the Hugging Face library.
        device_type: what is on other devices stays there.
        min_bytes: what is smaller stays.

    Raises:
        UserError: the model does not say which of its modules are layers.
    """
    offload = Offload(
        {tuple(p.shape) for p in model.parameters() if p.ndim >= 2}, device_type=device_type, min_bytes=min_bytes
    )
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise UserError(
            "model.activation_offload: true: this model does not name its layers (_no_split_modules); remove it, or "
            "set model.gradient_checkpointing: true"
        )
    for layer in layers:
        layer.register_forward_pre_hook(offload.enter)
        layer.register_forward_hook(offload.leave, always_call=True)
    return offload


class Offload:
    """Moves what is saved for backward to host memory, and back before backward wants it.

    A storage is moved once, however many tensors of it are saved. On CUDA both ways have streams of their own, so that
    they run beside the computation, and what backward will want next is fetched ahead. Host memory is pinned, and used
    again in the next micro-batch. Weights stay: they are on the
    device anyway. They are known by their storage, and the copies that autocast makes of them by their shape. (Where
    the number of tokens happens to give an activation that shape, it stays too, which costs memory and nothing else.)
    With gradient checkpointing a layer saves its input and nothing else through these hooks.
    """

    def __init__(self, weight_shapes: set[tuple[int, ...]], *, device_type: str, min_bytes: int):
        shapes = weight_shapes | {shape[1:] for shape in weight_shapes if len(shape) > 2}  # one expert of several
        self._weight_shapes = shapes | {(*shape[:-2], shape[-1], shape[-2]) for shape in shapes}
        self._weights: set[int] = set()  # storages of the layer that is computing
        self._device_type = device_type
        self._min_bytes = min_bytes
        self._moved: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()
        self._last: Callable[[], _Moved | None] = lambda: None
        self._lanes: dict[torch.device, _Lanes] = {}
        self._open: list[saved_tensors_hooks] = []
        self.num_bytes_moved = 0  # to the host, so far

    def enter(self, layer: nn.Module, *_: Any) -> None:
        """A layer's forward begins. Sharded weights have been gathered."""
        self._weights = {p.untyped_storage()._cdata for p in layer.parameters() if not isinstance(p, DTensor)}
        hooks = saved_tensors_hooks(self.pack, _unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def leave(self, *_: Any) -> None:
        """It ends, or has failed; in what comes before it too, where nothing was entered."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def pack(self, tensor: Tensor) -> "Tensor | _Handle":
        """A tensor that is saved for backward: itself, or where it is kept."""
        stays = (
            tensor.device.type != self._device_type
            or type(tensor) is not Tensor
            or tensor.layout != torch.strided
            or tensor.nbytes < self._min_bytes
            or tuple(tensor.shape) in self._weight_shapes
            or tensor.untyped_storage()._cdata in self._weights
        )
        return tensor if stays else _Handle(self._move(tensor), tensor)

    def _move(self, tensor: Tensor) -> "_Moved":
        """The storage of a tensor in host memory; what is there already is not moved again."""
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor._version)
        moved = self._moved.get(key)
        if moved is None:
            if tensor.device not in self._lanes:
                self._lanes[tensor.device] = _Lanes(tensor.device)
            moved = _Moved(tensor, storage, self._lanes[tensor.device], self._last)
            self._moved[key], self._last = moved, weakref.ref(moved)
            self.num_bytes_moved += moved.num_bytes
        moved.num_waiting += 1
        return moved


class _Lanes:
    """The streams of a device on which storages leave and come back, and their memory on the host."""

    def __init__(self, device: torch.device):
        self.device = device
        self.module = torch.get_device_module(device)
        on = {} if device.type == "cpu" else {"device": device}
        self.leave, self.come_back = self.module.Stream(**on), self.module.Stream(**on)
        self.host = PinnedStack(device)


class _Moved:
    """A storage in host memory, and again on its device while backward uses it."""

    def __init__(self, tensor: Tensor, storage: StorageWeakRef, lanes: _Lanes, before: "Callable[[], _Moved | None]"):
        self.before = before  # what was moved before it: backward wants that next
        self.num_waiting = 0  # tensors of it that backward has not had yet
        self._lanes = lanes
        self._storage = storage  # the address is not another storage's while this lives
        self._back: Tensor | None = None
        self._arrived: Any = None
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._host = lanes.host.take(whole.nbytes, self)
        self.num_bytes = whole.nbytes
        lanes.leave.wait_stream(lanes.module.current_stream(lanes.device))
        lanes.leave.wait_stream(lanes.come_back)  # which may still copy what was in this host memory before
        with lanes.module.stream(lanes.leave):
            for place, part in self._pieces(whole):
                place.copy_(part, non_blocking=True)
            self._left = lanes.leave.record_event()
        _in_use_on(whole, lanes.leave)

    def fetch(self) -> None:
        """Begin to bring it back, unless that has begun."""
        if self._back is None:
            lane = self._lanes.come_back
            lane.wait_event(self._left)
            with self._lanes.module.stream(lane):
                self._back = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._lanes.device)
                for place, part in self._pieces(self._back):
                    part.copy_(place, non_blocking=True)
                self._arrived = lane.record_event()

    def take(self) -> Tensor:
        """Its bytes on the device, to be used on the current stream. The last one who waited for it keeps it."""
        self.fetch()
        back, stream = self._back, self._lanes.module.current_stream(self._lanes.device)
        assert back is not None
        stream.wait_event(self._arrived)
        _in_use_on(back, stream)
        self.num_waiting -= 1
        if self.num_waiting <= 0:
            self._back = None
        return back

    def _pieces(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces on the host, and the same bytes of the storage on the device."""
        return zip(self._host, whole.split([piece.nbytes for piece in self._host]), strict=True)


class _Handle:
    """One saved tensor: a view of what was moved."""

    def __init__(self, moved: _Moved, tensor: Tensor):
        self._moved = moved
        self._view = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        """The same numbers on the device, with the same strides."""
        dtype, offset, shape, stride = self._view
        ahead: _Moved | None = self._moved
        for _ in range(_AHEAD):
            if ahead is None:
                break
            if ahead.num_waiting > 0:
                ahead.fetch()
            ahead = ahead.before()
        whole = self._moved.take()
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), offset, shape, stride)


def _unpack(packed: Tensor | _Handle) -> Tensor:
    return packed.tensor() if isinstance(packed, _Handle) else packed


def _in_use_on(tensor: Tensor, stream: Any) -> None:
    """Its memory is not given to another tensor until the stream has done what it has to do now."""
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)
