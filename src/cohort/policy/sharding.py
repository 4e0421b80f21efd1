"""The parameters of a model over all ranks: FSDP2, and how a rank that runs out of memory stays in step.

Every rank runs the same sequence of collectives for a micro-batch: an all-gather before each layer, a reduce-scatter
after it in backward. A rank whose computation fails halfway owes the others the rest of that sequence. It computes an
empty micro-batch whose first collectives, those that it has issued already, are left out. Then all ranks drop what they
have, and begin again.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as torch's own checkpoints do

from cohort.errors import OutOfStepError
from cohort.policy.pinning import PinnedMemory, bytes_for
from cohort.policy.skeleton import saved_tensors

# renamed in torch 2.13, where the old names warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """The collectives of one pass on this rank: how many were issued, and what to leave out.

    One object counts for all sharded models of a run: the policy's collectives and the reference's are one sequence.
    """

    def __init__(self) -> None:
        self.models: list[Sharding] = []
        self.begin()

    def begin(self, *, skip: float = 0) -> None:
        """Begin a pass.

        Args:
            skip: leave out this many collectives: they were issued before the computation failed.
        """
        self._issued = 0
        self._skip = skip

    def next_is_left_out(self) -> bool:
        """Count one more; whether it was issued before."""
        self._issued += 1
        return self._issued <= self._skip

    def stay_in_step(self) -> None:
        """After a failed forward or backward: free what the models had gathered.

        The next pass leaves out the collectives that were issued before the failure.
        """
        issued = self._issued
        self.reset()
        self.begin(skip=issued)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Issue nothing inside, and count nothing."""
        before = self._issued, self._skip
        self.begin(skip=math.inf)
        yield
        self._issued, self._skip = before

    def reset(self) -> None:
        """Put the models into the state between two steps, whatever has been begun."""
        for model in self.models:
            model.reset()
        self.begin()


class _Comm:
    """What FSDP2 asks of a custom collective besides the call."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if self._collectives.next_is_left_out():
            output_tensor.zero_()  # any finite weights do: nothing of this computation is kept
            return None
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if self._collectives.next_is_left_out():
            output_tensor.zero_()
            return None
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class Sharding:
    """A model whose parameters are spread over all ranks, layer by layer (FSDP2)."""

    def __init__(
        self,
        model: Any,
        collectives: Collectives,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        compute_dtype: torch.dtype,
        on_host: bool = False,
        reshard_after_forward: bool | int = True,
    ):
        """Shard `model` in place; it may be on the meta device.

        Args:
            model: a Hugging Face model. Each of its layers is gathered when it computes and freed afterwards.
            collectives: of the run.
            mesh: weights are sharded over its axis `dp`.
            device: where the model computes.
            compute_dtype: dtype of the gathered weights. The shards, the gradients' reduction and the optimizer's
                state keep the model's own dtype.
            on_host: shards and their gradients are in host memory, and a layer visits the device; else they are there.
            reshard_after_forward: True frees each layer after its forward pass, and gathers it again in backward; False
                keeps all; a number keeps them spread over so many neighbouring ranks.
        """
        dtype = next(model.parameters()).dtype
        precision = MixedPrecisionPolicy(
            param_dtype=compute_dtype if compute_dtype != dtype else None,
            reduce_dtype=torch.promote_types(dtype, torch.float32),
            cast_forward_inputs=False,  # a micro-batch has numbers that must stay as they are
        )
        self.model = model
        self.collectives = collectives
        self.on_host = on_host
        self._device, self._home = device, torch.device("cpu") if on_host else device
        # `allocate` pins the shards: pinned by FSDP2, each would take the next power of two
        offload = CPUOffloadPolicy(pin_memory=False) if on_host else OffloadPolicy()
        layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
        for module in layers:
            fully_shard(
                module,
                mesh=mesh["dp"],
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard_after_forward,
            )
        # what is in no layer is needed from the first to the last moment
        fully_shard(model, mesh=mesh["dp"], mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
        if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.13
            # an expert that no token of this rank has chosen still has its place in what is reduced
            model.set_reduce_scatter_unused_params(True)
        self._modules: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
        for module in self._modules:
            module.set_custom_all_gather(_AllGather(collectives))
            module.set_custom_reduce_scatter(_ReduceScatter(collectives))
        collectives.models.append(self)

    def add_forward(self, name: str, compute: Callable[..., Any]) -> None:
        """Give the model a method that computes with its weights gathered, as its own forward does.

        Args:
            name: of the method.
            compute: what it does; a tensor, or some of which the first carries the gradient.
        """

        def method(*args: Any) -> Any:
            out = compute(*args)  # copied: hooks on a view would be lost by a change in place
            return out.clone() if isinstance(out, Tensor) else (out[0].clone(), *out[1:])

        setattr(self.model, name, method)
        register_fsdp_forward_method(self.model, name)

    def ready(self) -> None:
        """Settle that `model` is the root, once its weights are there: sampling begins with one of its parts."""
        self.model._get_fsdp_state()._lazy_init()
        for group in self._groups():
            for parameter in group.fsdp_params:
                if parameter.sharded_param.grad_dtype != parameter.orig_dtype:  # reduced wide, and kept so
                    group._orig_dtype = parameter.sharded_param.grad_dtype

    def reset(self) -> None:
        """After a failed forward or backward: free what was gathered, drop gradients that are not reduced yet.

        Raises:
            OutOfStepError: this torch cannot put its state right again.
        """
        if not hasattr(self.model, "reset_iter_state"):
            raise OutOfStepError("out of memory; sharded models survive that with torch 2.13 or newer only")
        self.model.reset_iter_state()
        for group in self._groups():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def allocate(self) -> None:
        """Give the shards their memory, in place of the meta device. The buffers keep their values."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.to_empty(device=self._home)
        if self.on_host:
            self._pin_shards()
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name].to(self._device)  # they are computed with, wherever the shards are

    def _pin_shards(self) -> None:
        """Move the shards, which hold nothing yet, to pinned memory, padded as they are gathered."""
        parameters = [parameter for group in self._groups() for parameter in group.fsdp_params]
        memory = PinnedMemory(bytes_for([p._sharded_param_data for p in parameters]), self._device)
        for p in parameters:
            padded = memory.take(p.padded_sharded_param_size, p._sharded_param_data.dtype)
            p._sharded_param_data = padded.view(-1)
            own = p.sharded_param._local_tensor
            p.sharded_param._local_tensor = padded[: own.shape[0] if own.numel() else 0]

    def own_rows(self) -> Iterator[tuple[str, Tensor, int]]:
        """What this rank has of each saved tensor: its name, rows to write into, and the number of their first row.

        Parameters are cut along their rows; some ranks may have none. Buffers are whole on every rank.
        """
        for name, tensor in saved_tensors(self.model):
            yield name, *own_part(tensor)

    def load(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Take rank 0's weights and buffers. Every rank takes part; the other ranks' arguments are not looked at."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, dict(weights) if dist.get_rank() == 0 else {}, options=options)
        for name, buffer in sorted(self.model.named_buffers()):
            if dist.get_rank() == 0:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, src=0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters whole on every rank, so that forward passes need no collectives."""
        groups = list(self._groups())
        meshes = [group.post_forward_mesh_info for group in groups]
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for group, mesh in zip(groups, meshes, strict=True):
                group.post_forward_mesh_info = mesh
            self.end_forward()

    def end_forward(self) -> None:
        """End a forward pass that no backward follows, as the backward would."""
        for module in self._modules:  # what is kept for the backward otherwise
            module.reshard()
        self._forget_forwards()

    def _forget_forwards(self) -> None:
        """Forget the order of forward passes without a backward: the next one would gather in it."""
        for group in self._groups():
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            yield from module._get_fsdp_state()._fsdp_param_groups


def own_part(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows of a parameter or buffer that this rank has, and the number of the first: all, unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    assert tensor.placements == (Shard(0),)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0]
