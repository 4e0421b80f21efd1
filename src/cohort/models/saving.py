"""Save a policy as a model folder, and stream its full weights to rollout engines.

Only one tensor is gathered at a time (or those that are saved as one); `weight_files.py` writes them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cohort.errors import UserError
from cohort.models.loading.meta_device import local_weights, named_saved_tensors, quiet_transformers
from cohort.models.loading.multimodal import copy_processor_files, saved_model
from cohort.models.loading.safetensors_files import (
    StoredTensor,
    TensorInfo,
    weight_conversions,
    weights_beside,
)
from cohort.models.policy import Policy
from cohort.models.weight_files import MIN_SHARD_BYTES, on_rank0, plan_files, ranks_that_see, write_weights
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
    specs, as_saved = [], _as_saved(policy)
    for group in _groups(policy, dtype):
        shapes = {name: torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="meta") for name, tensor in group}
        specs += [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in as_saved(shapes).items()]
    return specs


@torch.no_grad()  # not a `with` block: a consumer that fails leaves the generator suspended, and gradients off
def stream_weights(policy: Policy, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every full weight by its name in a saved model folder, tied ones once. Exhaust it on every rank.

    Sharded weights are gathered one at a time, or together if a saved tensor is made of several.

    Args:
        policy: source of the weights.
        dtype: cast floating-point weights to it before gathering; None keeps the dtype of the (master) weights.
    """
    as_saved = _as_saved(policy)
    for group in _groups(policy, dtype):
        made = as_saved({name: _full_tensor(tensor, dtype) for name, tensor in group})
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


def _as_saved(policy: Policy) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function that converts names and shapes of tensors to those of `save_pretrained`."""
    from transformers.core_model_loading import revert_weight_conversion

    model = saved_model(policy.model, policy.multimodal)
    if getattr(model, "_weight_conversions", None) is None and not weight_conversions(model):
        return lambda tensors: tensors  # the library would look through the model for every tensor
    return partial(revert_weight_conversion, model)


def _full_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = tensor.detach().to(_cast(tensor, dtype))
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of saving weights."""

    max_shard_bytes: int = 5 * 10**9  # of a file; larger tensors have a file of their own
    min_shard_bytes: int = MIN_SHARD_BYTES  # of a rank that writes; smaller models are written by fewer ranks
    # called on rank 0 with bytes written and total
    on_progress: Callable[[int, int], None] = lambda done, total: None


def save_policy(
    policy: Policy, tokenizer: Any, folder: Path, ranks: Ranks = SINGLE_PROCESS, save_options: SaveOptions | None = None
) -> dict[Path, int]:
    """Save a policy and its tokenizer in the format of `AutoModelForCausalLM.from_pretrained`.

    With an adapter, save the adapter only, in the format of `PeftModel.from_pretrained`. Call on every rank; only
    rank 0's tokenizer is used.

    Returns:
        The rank that wrote each file of weights; rank 0 wrote all others.

    Raises:
        Exception: of any kind on a rank that failed to write.
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

    on_rank0(ranks, folder, save_configs)
    return {} if adapter is not None else _save_weights(policy, folder, ranks, save_options or SaveOptions())


def _save_weights(policy: Policy, folder: Path, ranks: Ranks, save_options: SaveOptions) -> dict[Path, int]:
    """Write the weights, and an index if there are several files; return the rank that wrote each file."""
    beside = ranks.run_on_rank0(lambda: _weights_beside(policy))
    infos = [TensorInfo.of(spec.name, spec.shape, spec.dtype) for spec in weight_specs(policy)]
    infos += [TensorInfo(name, t.stored_dtype, t.shape, t.num_bytes) for name, t in beside.items()]
    files = plan_files(
        infos,
        save_options.max_shard_bytes,
        writers=ranks_that_see(folder, ranks),
        min_shard_bytes=save_options.min_shard_bytes,
        on_rank0=beside,
    )
    read = ((name, tensor.read_bytes()) for name, tensor in beside.items() if ranks.is_rank0)
    write_weights(folder, files, chain(stream_weights(policy), read), ranks, save_options.on_progress)
    return {folder / file.name: file.rank for file in files}
