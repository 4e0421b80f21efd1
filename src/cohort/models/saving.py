"""Save a policy as a model folder, and stream its full weights to rollout engines.

Rank 0 writes everything. Ranks writing into a shared file at once is not safe on network file systems. Only one tensor
is gathered at a time (or those that are saved as one), which is all the extra memory that saving takes.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cohort.errors import TrainingError, UserError
from cohort.models.loading.meta_device import local_weights, named_saved_tensors, quiet_transformers
from cohort.models.loading.multimodal import copy_processor_files, saved_model
from cohort.models.loading.safetensors_files import (
    SHARD,
    SINGLE,
    StoredTensor,
    TensorInfo,
    weight_conversions,
    weights_beside,
    write_index,
    write_tensors,
)
from cohort.models.policy import Policy
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of a tensor that will be streamed."""

    name: str  # in a saved model folder
    shape: tuple[int, ...]
    dtype: torch.dtype


def weight_specs(policy: Policy, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Return the specs of what `stream_weights` yields, in order, without gathering weights."""
    specs = []
    for group in _groups(policy, dtype):
        shapes = {name: torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="meta") for name, tensor in group}
        specs += [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in _as_saved(policy, shapes).items()]
    return specs


@torch.no_grad()  # not a `with` block: a consumer that fails leaves the generator suspended, and gradients off
def stream_weights(policy: Policy, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every full weight by its name in a saved model folder, tied ones once. Exhaust it on every rank.

    Sharded weights are gathered one at a time, or together if a saved tensor is made of several.

    Args:
        policy: source of the weights.
        dtype: cast floating-point weights to it before gathering; None keeps the dtype of the (master) weights.
    """
    for group in _groups(policy, dtype):
        made = _as_saved(policy, {name: _full_tensor(tensor, dtype) for name, tensor in group})
        while made:  # drop each one as soon as it has been consumed
            name = next(iter(made))
            yield name, made.pop(name)


def saved_bytes(policy: Policy) -> int:
    """Return the size of the saved weights: of the adapter if there is one, otherwise of the (master) weights."""
    if policy.adapter is not None:
        return sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
    own = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in weight_specs(policy))
    return own + sum(tensor.num_bytes for tensor in _weights_beside(policy).values())


def _weights_beside(policy: Policy) -> dict[str, StoredTensor]:
    """Return the stored weights of a multimodal model that are saved with its language model as they are.

    Raises:
        UserError: the files are not there any more, or not in the format of safetensors.
    """
    multimodal = policy.multimodal
    if multimodal is None:
        return {}
    stored = local_weights(multimodal.path)
    if not stored:
        raise UserError(
            f"model.path: {multimodal.path!r} has no *.safetensors files, from which the weights that are not of the "
            f"language model are saved"
        )
    return weights_beside(policy.model, stored)


def _groups(policy: Policy, dtype: torch.dtype | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield groups of tensors that are converted to saved tensors together.

    A group is a single tensor, unless transformers split or merged tensors when loading them.
    """
    from transformers.core_model_loading import WeightConverter

    found = reversed(weight_conversions(saved_model(policy.model, policy.multimodal)))
    converters = [c.reverse_transform() for c in found if isinstance(c, WeightConverter)]
    master_weights = policy.master_weights if dtype is None else None
    together: dict[str, list[tuple[str, Tensor]]] = {}
    for name, held in named_saved_tensors(policy.model):
        master = None if master_weights is None else master_weights.of(name)
        tensor = held if master is None else master
        if policy.multimodal is not None:
            name = policy.multimodal.name_of(name)
        together.setdefault(_stored_name(name, converters), []).append((name, tensor))
    yield from together.values()


def _stored_name(name: str, converters: list["WeightConverter"]) -> str:
    """Return the name that the first matching converter gives a weight; without a match the weight keeps its own."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return str(renamed)
    return name


def _as_saved(policy: Policy, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert names and shapes to those of `save_pretrained`."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(saved_model(policy.model, policy.multimodal), tensors)


def _full_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = tensor.detach().to(_cast(tensor, dtype))
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of saving weights."""

    max_shard_bytes: int = 5 * 10**9  # of a file; larger tensors have a file of their own
    # called on rank 0 with bytes written and total
    on_progress: Callable[[int, int], None] = lambda done, total: None


def save_policy(
    policy: Policy, tokenizer: Any, folder: Path, ranks: Ranks = SINGLE_PROCESS, save_options: SaveOptions | None = None
) -> None:
    """Save a policy and its tokenizer in the format of `AutoModelForCausalLM.from_pretrained`.

    With an adapter, save the adapter only, in the format of `PeftModel.from_pretrained`. Call on every rank; rank 0
    writes, and only its tokenizer is used.

    Raises:
        Exception: of any kind on rank 0, if writing failed.
        TrainingError: on the other ranks then.
    """
    adapter = policy.adapter
    weights = {} if adapter is None else adapter.full_weights()

    def save_configs() -> None:
        with quiet_transformers():
            if adapter is not None:
                adapter.save(folder, weights)
            else:  # everything but the weights
                model = saved_model(policy.model, policy.multimodal)
                with policy.published_config():
                    model.save_pretrained(folder, state_dict={})
                    if policy.master_weights is not None:  # save_pretrained has written the dtype of their copies
                        model.config.dtype = policy.master_weights.dtype
                        model.config.save_pretrained(folder)
                copy_processor_files(policy.multimodal, folder)
            tokenizer.save_pretrained(folder)

    _on_rank0(ranks, folder, save_configs)
    if adapter is None:
        _save_weights(policy, folder, ranks, save_options or SaveOptions())


def plan_files(tensors: Iterable[TensorInfo], max_shard_bytes: int) -> dict[str, list[TensorInfo]]:
    """Assign tensors to files, in order, up to `max_shard_bytes` each.

    Args:
        tensors: all tensors to write.
        max_shard_bytes: maximum size of a file's tensors; a larger tensor gets its own file.
    """
    files: list[list[TensorInfo]] = []
    room = 0
    for written in tensors:
        if not files or written.num_bytes > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(written)
        room -= written.num_bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {SHARD.format(n, len(files)): tensors for n, tensors in enumerate(files, start=1)}


def _save_weights(policy: Policy, folder: Path, ranks: Ranks, save_options: SaveOptions) -> None:
    """Save the weights, and an index if there are several files."""
    beside = ranks.run_on_rank0(lambda: _weights_beside(policy))
    infos = [TensorInfo.of(spec.name, spec.shape, spec.dtype) for spec in weight_specs(policy)]
    infos += [TensorInfo(name, t.stored_dtype, t.shape, t.num_bytes) for name, t in beside.items()]
    files = plan_files(infos, save_options.max_shard_bytes)
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    done = 0

    def with_progress(weights: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
        nonlocal done
        for _, tensor in weights:
            done += tensor.nbytes
            yield tensor
            del tensor  # free it before the next one is gathered
            save_options.on_progress(done, total)

    read = ((name, tensor.read_bytes()) for name, tensor in beside.items() if ranks.is_rank0)
    stream = chain(stream_weights(policy), read)
    for file, tensors in files.items():
        part = islice(stream, len(tensors))
        # all ranks gather the tensors of a file even if writing fails, then agree on whether to go on
        write = partial(write_tensors, folder / file, tensors, with_progress(part))
        _on_rank0(ranks, folder, write, meanwhile=partial(deque, part, maxlen=0))
    if len(files) > 1:
        _on_rank0(ranks, folder, partial(write_index, folder, files))


def _on_rank0(
    ranks: Ranks, folder: Path, write: Callable[[], None], *, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Call `write` on rank 0. If it fails, raise on all ranks.

    Args:
        ranks: all of them call this.
        folder: destination, for the error message.
        write: writes the files; called on rank 0.
        meanwhile: work of all ranks; on rank 0 after `write`, even if that failed.
    """
    problem: BaseException | None = None
    try:
        if ranks.is_rank0:
            write()
    except BaseException as error:
        problem = error
    meanwhile()
    succeeded = ranks.all_reduce_min(problem is None)
    if problem is not None:
        raise problem
    if not succeeded:
        raise TrainingError(f"{folder}: rank 0 failed to write it")
