"""Shard a model with FSDP2, and recover from out-of-memory on some ranks.

For a micro-batch all ranks run the same sequence of collectives: an all-gather before each layer, a reduce-scatter
after it in backward. A rank that fails halfway owes the others the rest. So it computes an empty micro-batch in which
the collectives that it has issued already are skipped. Then all ranks discard the results and retry.
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

from cohort.errors import RankDesyncError
from cohort.models.host_memory import PinnedMemory, bytes_for
from cohort.models.loading.meta_device import named_saved_tensors

# renamed in torch 2.13, where the old names warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveCounter:
    """Count the collectives of a pass on this rank, and skip those issued before a failure.

    One counter serves all sharded models of a run: policy and reference share one sequence of collectives.
    """

    def __init__(self) -> None:
        self.models: list[Sharding] = []
        self.begin()

    def begin(self, *, skip: float = 0) -> None:
        """Start a pass.

        Args:
            skip: number of collectives to skip, which were issued before the failure.
        """
        self._issued = 0
        self._skip = skip

    def should_skip(self) -> bool:
        """Count a collective; return whether it was issued before the failure."""
        self._issued += 1
        return self._issued <= self._skip

    def skip_issued(self) -> None:
        """After a failed forward or backward, free gathered weights; the next pass skips the issued collectives."""
        issued = self._issued
        self.reset()
        self.begin(skip=issued)

    @contextmanager
    def skip_all(self) -> Iterator[None]:
        """Context in which collectives are neither issued nor counted."""
        before = self._issued, self._skip
        self.begin(skip=math.inf)
        yield
        self._issued, self._skip = before

    def reset(self) -> None:
        """Reset the models to their state between steps."""
        for model in self.models:
            model.reset()
        self.begin()


class _Comm:
    """Base of custom FSDP2 collectives."""

    def __init__(self, collectives: CollectiveCounter):
        self._collectives = collectives

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if self._collectives.should_skip():
            output_tensor.zero_()  # any finite values: the results are discarded
            return None
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if self._collectives.should_skip():
            output_tensor.zero_()
            return None
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class Sharding:
    """A model sharded with FSDP2, over all ranks or over those of each replica (hybrid sharding).

    Replicas reduce their gradients once per step. FSDP2 would do it in a backward pass on a two-dimensional mesh, but
    which micro-batch is the last is only known when all ranks have none left, and its all-reduces cannot be skipped
    after an out-of-memory error.
    """

    def __init__(
        self,
        model: Any,
        collectives: CollectiveCounter,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        compute_dtype: torch.dtype,
        on_host: bool = False,
        reshard_after_forward: bool | int = True,
        sync_each_micro_batch: bool = True,
    ):
        """Shard `model` in place. It may be on the meta device.

        Args:
            model: a transformers model. Each layer is gathered when it is computed, and freed afterwards.
            collectives: collective counter of the run.
            mesh: weights are sharded over its axis `dp_shard`, and each replica on `dp_replicate`, if any, has all.
            device: device that the model computes on.
            compute_dtype: dtype of gathered weights. Shards, gradient reduction and optimizer state keep the dtype of
                the model.
            on_host: keep shards and gradients in host memory.
            reshard_after_forward: as in `fully_shard`: True frees each layer after forward and gathers it again in
                backward; False keeps it; an int keeps it sharded over that many neighboring ranks.
            sync_each_micro_batch: reduce gradients in every backward pass. False accumulates whole gradients on each
                rank, until `reduce_gradients(True)`.
        """
        dtype, shards = next(model.parameters()).dtype, mesh["dp_shard"]
        precision = MixedPrecisionPolicy(
            param_dtype=compute_dtype if compute_dtype != dtype else None,
            reduce_dtype=torch.promote_types(dtype, torch.float32),
            cast_forward_inputs=False,  # a micro-batch has tensors that must keep their dtype
        )
        self.model = model
        self.collectives = collectives
        self.on_host = on_host
        self.sync_each_micro_batch = self._reduces = sync_each_micro_batch
        replicated = "dp_replicate" in (mesh.mesh_dim_names or ())
        self._replicas = mesh.get_group("dp_replicate") if replicated else None
        self._device, self._home = device, torch.device("cpu") if on_host else device
        # `allocate` pins the shards: FSDP2 would round each up to a power of two
        offload = CPUOffloadPolicy(pin_memory=False) if on_host else OffloadPolicy()
        layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
        for module in layers:
            fully_shard(
                module,
                mesh=shards,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard_after_forward,
            )
        # parameters outside of layers are needed throughout
        fully_shard(model, mesh=shards, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
        if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.13
            # experts without tokens on this rank still take part in the reduction
            model.set_reduce_scatter_unused_params(True)
        self._modules: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
        for module in self._modules:
            module.set_custom_all_gather(_AllGather(collectives))
            module.set_custom_reduce_scatter(_ReduceScatter(collectives))
            module.set_requires_gradient_sync(sync_each_micro_batch, recurse=False)
        collectives.models.append(self)

    def add_forward(self, name: str, compute: Callable[..., Any]) -> None:
        """Add a method to the model that FSDP2 treats like `forward`.

        Args:
            name: name of the method.
            compute: returns a tensor, or several of which the first has a gradient.
        """

        def method(*args: Any) -> Any:
            out = compute(*args)  # cloned: an in-place change would drop hooks on a view
            return out.clone() if isinstance(out, Tensor) else (out[0].clone(), *out[1:])

        setattr(self.model, name, method)
        register_fsdp_forward_method(self.model, name)

    def finalize(self) -> None:
        """Make `model` the FSDP2 root, after loading. Otherwise sampling would make a submodule the root."""
        self.model._get_fsdp_state()._lazy_init()
        for group in self._groups():
            for parameter in group.fsdp_params:
                grad_dtype = parameter.sharded_param.grad_dtype
                # keep gradients in the dtype of the reduction; newer versions of torch follow `grad_dtype` themselves
                if grad_dtype != parameter.orig_dtype and hasattr(group, "_orig_dtype"):
                    group._orig_dtype = grad_dtype

    @property
    def can_recover(self) -> bool:
        """Whether `reset` works: from torch 2.13 on."""
        return hasattr(self.model, "reset_iter_state")

    def reset(self) -> None:
        """After a failed forward or backward, free gathered weights and drop unreduced gradients.

        Raises:
            RankDesyncError: this version of torch cannot reset its state.
        """
        if not self.can_recover:
            raise RankDesyncError("out of memory; recovering with sharded models needs torch 2.13 or newer")
        self.model.reset_iter_state()
        self.drop_unreduced_gradients()

    def drop_unreduced_gradients(self) -> None:
        """Drop whole gradients that were not reduced, of passes that are left or done again."""
        for group in self._groups():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def reduce_gradients(self, reduces: bool) -> None:
        """Set whether the next backward pass reduces gradients, with those of earlier passes that did not."""
        if not self.sync_each_micro_batch and reduces != self._reduces:
            self.model.set_requires_gradient_sync(reduces)
            self._reduces = reduces

    @torch.no_grad()
    def all_reduce_gradients(self) -> None:
        """Add up the gradients of all replicas, layer by layer. Every rank calls this after a step's last pass."""
        assert self._reduces, "the last pass of a step reduces gradients"
        if self._replicas is None:
            return
        for group in self._groups():
            shards = []
            for parameter in (p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad):
                if parameter.grad is None:  # no token of this replica used it, but perhaps some of another
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                shards.append(parameter.grad.to_local())
            if not sum(shard.numel() for shard in shards):  # on every replica, as all have the same shards
                continue
            flat = torch.cat([shard.flatten() for shard in shards]).to(self._device)
            dist.all_reduce(flat, group=self._replicas)
            for shard, reduced in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
                shard.copy_(reduced.view_as(shard))

    def allocate(self) -> None:
        """Allocate the shards of a model on the meta device. Buffers keep their values."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.to_empty(device=self._home)
        if self.on_host:
            self._pin_shards()
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name].to(self._device)  # buffers are on the device even if shards are not

    def _pin_shards(self) -> None:
        """Put the uninitialized shards into pinned memory, padded for the all-gather."""
        parameters = [parameter for group in self._groups() for parameter in group.fsdp_params]
        memory = PinnedMemory(bytes_for([p._sharded_param_data for p in parameters]), self._device)
        for p in parameters:
            padded = memory.take(p.padded_sharded_param_size, p._sharded_param_data.dtype)
            p._sharded_param_data = padded.view(-1)
            own = p.sharded_param._local_tensor
            p.sharded_param._local_tensor = padded[: own.shape[0] if own.numel() else 0]

    def local_tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield name, local rows and index of the first row of each saved tensor.

        Parameters are sharded along dim 0, so some ranks may have no rows. Buffers are full on every rank.
        """
        for name, tensor in named_saved_tensors(self.model):
            yield name, *local_rows(tensor)

    def load(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Distribute rank 0's full weights and buffers. Call on every rank; other ranks' arguments are ignored."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        for buffer in self.model.buffers():
            buffer.data = torch.empty_like(buffer, device=self._home)  # torch loads to one device, saved buffers too
        set_model_state_dict(self.model, dict(weights) if dist.get_rank() == 0 else {}, options=options)
        for name, buffer in sorted(self.model.named_buffers()):
            buffer.data = buffer.data.to(self._device)
            if dist.get_rank() == 0:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, src=0)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context in which all ranks hold the full parameters, so forward passes need no collectives."""
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
        """Clean up after a forward pass without backward."""
        for module in self._modules:  # otherwise kept for backward
            module.reshard()
        self._forget_forwards()

    def _forget_forwards(self) -> None:
        """Clear the recorded order of forwards: the next backward would prefetch in it."""
        for group in self._groups():
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            state = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # torch 2.11: one group at most
                yield state._fsdp_param_group


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor and the index of the first row; the full tensor if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    assert tensor.placements == (Shard(0),)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0]
