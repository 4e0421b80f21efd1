"""Load weights tensor by tensor from safetensors, or through transformers.

With a sharded model each rank reads its own rows only.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from cohort.config import ModelConfig
from cohort.errors import UserError, describe_error
from cohort.models.fsdp import Sharding
from cohort.models.loading.meta_device import (
    VALUE_HEAD,
    WeightSource,
    local_weights,
    match_weights,
    meta_model,
    named_saved_tensors,
    quiet_transformers,
    sources_digest,
)
from cohort.models.loading.multimodal import is_multimodal, load_language_model, multimodal_of
from cohort.models.loading.safetensors_files import few
from cohort.models.policy import Policy
from cohort.ranks.collectives import Ranks


def load_model_weights(model: Any, sources: Mapping[str, WeightSource], device: torch.device) -> None:
    """Load the weights of a meta-device model, one tensor at a time, in the dtype of the model.

    Args:
        model: result of `meta_model`; layers may have been removed.
        sources: source of each tensor, by name in the model; a tensor without one becomes 0.
        device: destination of weights and buffers.

    Raises:
        UserError: a file is truncated.
    """
    for parameter in model.parameters():  # tied ones once: they stay tied
        memory = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, memory)
    model.to(device)
    _read_tensors(sources, ((name, tensor, 0) for name, tensor in named_saved_tensors(model)))


def load_sharded_weights(sharding: Sharding, sources: Mapping[str, WeightSource], ranks: Ranks) -> None:
    """Load each rank's rows of a sharded model.

    Raises:
        UserError: on rank 0, if any rank failed.
        Rank0Failed: on the other ranks then.
    """
    problem = None
    try:
        _read_tensors(sources, sharding.local_tensors())
    except UserError as error:
        problem = str(error)
    problems = ranks.gather(problem)

    def raise_first() -> None:
        for rank, message in enumerate(problems or []):
            if message is not None:
                raise UserError(f"{message} (on rank {rank})")

    ranks.run_on_rank0(raise_first)


def _read_tensors(sources: Mapping[str, WeightSource], rows: Iterable[tuple[str, Tensor, int]]) -> None:
    """Read tensors from their sources; those without one become 0.

    Args:
        sources: source of each tensor, by name in the model.
        rows: for each tensor: name, destination of its rows, and the index of the first row.
    """
    for name, into, first_row in rows:
        if name in sources:
            sources[name].read_rows(into, first_row)
        else:
            into.detach().zero_()


def sources_on_all_ranks(
    config: ModelConfig, model: Any, files: str | None, ranks: Ranks
) -> dict[str, WeightSource] | None:
    """Return the weight sources if every rank sees the same files as rank 0, else None on all ranks.

    They differ if a machine lacks the files, e.g. in its hub cache. Then rank 0 reads for all ranks.
    """
    sources = None
    if files is not None:
        with suppress(UserError):  # rank 0 reports damaged files
            sources = match_weights(model, local_weights(config.path))
    same = sources is not None and sources_digest(sources) == files
    return sources if ranks.all_reduce_min(same) else None


def load_with_transformers(kind: type[Policy], config: ModelConfig, **options: Any) -> Any:
    """Load the full model with transformers, by default in host memory.

    Args:
        kind: policy, or Critic, which replaces the head.
        config: the `model` section.
        options: further arguments of `from_pretrained`.

    Raises:
        UserError: the model cannot be loaded, or weights are missing from its files.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with quiet_transformers():
            options |= {"dtype": getattr(torch, config.dtype), "trust_remote_code": config.trust_remote_code}
            own = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
            language_model = meta_model(config) if is_multimodal(own) else None
            if multimodal_of(language_model) is not None:
                model, info = load_language_model(language_model, config.path, **options)
            else:
                model, info = AutoModelForCausalLM.from_pretrained(config.path, output_loading_info=True, **options)
    except Exception as error:  # transformers raises many types of errors
        raise UserError(f"model.path: {config.path!r}: cannot load the model: {describe_error(error)}") from error
    before = set(model.state_dict())
    kind.replace_head(model)
    gone = before - set(model.state_dict())  # a saved critic has no language-model head
    missing = set(info["missing_keys"]) - gone
    if missing:
        raise UserError(
            f"model.path: {config.path!r}: {len(missing)} weights are missing from the files: {few(missing)}"
        )
    stored = local_weights(config.path)
    for name, parameter in model.named_parameters():
        if name.startswith(f"{VALUE_HEAD}.") and name in stored:  # of a saved critic
            stored[name].read_rows(parameter, 0)
    return model
